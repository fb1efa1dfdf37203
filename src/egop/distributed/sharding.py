"""Parameters that are sharded over processes: the part that this process has, and the way back.

``fully_shard`` (FSDP2) makes every parameter a ``DTensor``, cut along its first dimension. A structure that rotates
each row by itself needs nothing but the local rows; the others get the whole tensor, and write their part back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Pieces:
    """Sharded parameters outside every block: the inner optimizer steps what is here of them.

    As plain tensors, since torch does not take a mixture of these and ``DTensor`` in one call.
    """

    def __init__(self) -> None:
        self._originals: dict[Tensor, Tensor] = {}  # by what is here of them

    def of(self, parameter: Tensor) -> Tensor:
        """What stands for a parameter; one that is not sharded is stepped itself."""
        if not is_sharded(parameter):
            return parameter
        for piece, original in self._originals.items():
            if original is parameter:
                return piece
        piece = local(parameter).requires_grad_(parameter.requires_grad)
        self._originals[piece] = parameter
        return piece

    def pull(self) -> None:
        """Look at the parameters and their gradients as they are now."""
        for piece, original in self._originals.items():
            now = local(original)
            if now.data_ptr() != piece.data_ptr():  # replaced, as by loading with assign=True
                piece.data = now
            piece.grad = None if original.grad is None else local(original.grad)

    def drop_gradients(self) -> None:
        """Forget the gradients of this step."""
        for piece in self._originals:
            piece.grad = None

    def as_sharded(self, piece: Tensor) -> Callable[[Tensor], Tensor]:
        """What makes a tensor of the processes' pieces of it; nothing to do for one that is not sharded."""
        original = self._originals.get(piece)
        return lambda tensor: tensor if original is None or tensor.dim() == 0 else like(tensor, original)


def is_sharded(tensor: Any) -> bool:
    """Whether this is a ``DTensor``; without its module imported there can be none, and importing it takes time."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Tensor:
    """What this process has of a tensor: the same memory, without the history that autograd keeps."""
    part: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """All of a tensor, gathered from all processes."""
    values: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor
    return values


def layout(tensor: Any) -> tuple[Any, ...]:
    """How a tensor is sharded: over which processes, and along which dimensions."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else ()


def is_cut_by_rows(tensor: Any) -> bool:
    """Whether its pieces are whole rows: cut along the first dimension once, or not at all."""
    return sum(not place.is_replicate() for place in tensor.placements) <= 1 and all(
        place.is_replicate() or place.is_shard(0) for place in tensor.placements
    )


def write(tensor: Any, values: Tensor) -> None:
    """Write this process's part of whole values, which every process has, into a sharded tensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    everywhere = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local(tensor).copy_(everywhere.redistribute(mesh, tensor.placements).to_local())


def part_of(values: Any, tensor: Any) -> Tensor:
    """Of values, whole or sharded in any way, what this process has of a tensor with such rows: all, or its rows."""
    if not is_sharded(tensor):
        return whole(values)
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(values):
        if values.shape[0] != tensor.shape[0] and values.shape == local(tensor).shape:
            rows: Tensor = values  # this process's rows already
            return rows
        everywhere = [Replicate()] * tensor.device_mesh.ndim
        values = DTensor.from_local(values.to(tensor.device), tensor.device_mesh, everywhere, run_check=False)
    part: Tensor = values.detach().redistribute(tensor.device_mesh, tensor.placements).to_local()
    return part


def like(piece: Tensor, tensor: Any) -> Tensor:
    """A local piece, of a sharded tensor's shape or with such rows, as a ``DTensor`` that is sharded alike."""
    from torch.distributed.tensor import DTensor

    same = piece.shape == local(tensor).shape
    shape = tensor.shape if same else torch.Size([tensor.shape[0], *piece.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        piece.detach(), tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )


def sum_over_shards(tensor: Tensor, sharded: Any) -> Tensor:
    """The sum of what each process has for its piece of a sharded tensor, the same everywhere."""
    import torch.distributed as dist

    total = tensor.clone(memory_format=torch.contiguous_format)
    for dimension, place in enumerate(sharded.placements):
        if not place.is_replicate():
            dist.all_reduce(total, group=sharded.device_mesh.get_group(dimension))
    return total


def is_first_shard(sharded: Any) -> bool:
    """Whether this process has the first piece of a sharded tensor."""
    places = zip(sharded.device_mesh.get_coordinate(), sharded.placements, strict=True)
    return all(index == 0 for index, place in places if not place.is_replicate())
