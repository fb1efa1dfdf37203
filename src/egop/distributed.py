"""Parameters that are sharded over processes: read this process's part, and write it back.

``fully_shard`` (FSDP2) turns every parameter into a ``DTensor`` that is sharded along its first dimension. A structure
that rotates each row separately needs only the local rows. Other structures gather the full tensor and write back
their part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class LocalShards:
    """Local parts of the sharded parameters outside every block, which the inner optimizer steps.

    They are plain tensors because torch does not accept a mix of plain tensors and ``DTensor`` in one call.
    """

    def __init__(self) -> None:
        self._originals: dict[Tensor, Tensor] = {}  # by local part

    def get(self, parameter: Tensor) -> Tensor:
        """Return the local part of a parameter, or the parameter itself if it is not sharded."""
        if not is_sharded(parameter):
            return parameter
        for shard, original in self._originals.items():
            if original is parameter:
                return shard
        shard = to_local(parameter).requires_grad_(parameter.requires_grad)
        self._originals[shard] = parameter
        return shard

    def sync(self) -> None:
        """Update all local parts and their gradients from the parameters."""
        for shard, original in self._originals.items():
            now = to_local(original)
            if now.data_ptr() != shard.data_ptr():  # replaced, as by loading with assign=True
                shard.data = now
            shard.grad = None if original.grad is None else to_local(original.grad)

    def clear_gradients(self) -> None:
        """Drop the gradients of all local parts."""
        for shard in self._originals:
            shard.grad = None

    def as_sharded(self, shard: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that turns state of a local part into a ``DTensor``; the identity if not sharded."""
        original = self._originals.get(shard)
        return lambda tensor: tensor if original is None or tensor.dim() == 0 else shard_like(tensor, original)


def is_sharded(tensor: Any) -> bool:
    """Return True for a ``DTensor``, without importing its module, which takes time."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Any) -> Tensor:
    """Return this process's part of a tensor: the same memory, detached if the tensor is sharded."""
    part: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return part


def to_local_parts(tensors: Sequence[Any]) -> list[Tensor]:
    """Return this process's part of each tensor, see :func:`to_local`."""
    return [tensor if type(tensor) in _PLAIN else to_local(tensor) for tensor in tensors]


def to_full(tensor: Any) -> Tensor:
    """Gather the full tensor from all processes."""
    values: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor
    return values


def sharding_layout(tensor: Any) -> tuple[Any, ...]:
    """Return the device mesh and the placements of a tensor; an empty tuple if it is not sharded."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else ()


def is_sharded_by_rows(tensor: Any) -> bool:
    """Return True if a ``DTensor`` is sharded along its first dimension at most once, so that local parts are rows."""
    return sum(not place.is_replicate() for place in tensor.placements) <= 1 and all(
        place.is_replicate() or place.is_shard(0) for place in tensor.placements
    )


def write_shard(tensor: Any, values: Tensor) -> None:
    """Write this process's part of the full values, which every process has, into a sharded tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    replicated = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    to_local(tensor).copy_(replicated.redistribute(mesh, tensor.placements).to_local())


def take_shard(values: Any, tensor: Any) -> Tensor:
    """Return the part of full or sharded values that belongs to this process's part of a tensor."""
    if not is_sharded(tensor):
        return to_full(values)
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(values):
        if values.shape[0] != tensor.shape[0] and values.shape == to_local(tensor).shape:
            rows: Tensor = values  # this process's rows already
            return rows
        replicated = [Replicate()] * tensor.device_mesh.ndim
        values = DTensor.from_local(values.to(tensor.device), tensor.device_mesh, replicated, run_check=False)
    part: Tensor = values.detach().redistribute(tensor.device_mesh, tensor.placements).to_local()
    return part


def shard_like(part: Tensor, tensor: Any) -> Tensor:
    """Turn a local part into a ``DTensor`` that is sharded like another one, whose rows may have another shape."""
    from torch.distributed.tensor import DTensor

    same = part.shape == to_local(tensor).shape
    shape = tensor.shape if same else torch.Size([tensor.shape[0], *part.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.detach(), tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def sum_over_shards(tensor: Tensor, sharded: Any) -> Tensor:
    """Sum a tensor over the processes that share a sharded tensor."""
    import torch.distributed as dist

    total = tensor.clone(memory_format=torch.contiguous_format)
    for dimension, place in enumerate(sharded.placements):
        if not place.is_replicate():
            dist.all_reduce(total, group=sharded.device_mesh.get_group(dimension))
    return total


def has_first_shard(sharded: Any) -> bool:
    """Return True if this process has the first part of a sharded tensor."""
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return all(index == 0 for index, place in places if not place.is_replicate())
