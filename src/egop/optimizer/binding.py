"""Blocks bound to live parameters, their coordinates, and how the two are kept in sync."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import DDP_PREFIX, Basis, ChangeOfBasis, ModuleIndex, Role, Spectrum, strip_compile_prefix
from egop.distributed import (
    is_sharded,
    is_sharded_by_rows,
    shard_like,
    sharding_layout,
    take_shard,
    to_full,
    to_local,
    write_shard,
)
from egop.numerics import exact_products
from egop.optimizer.groups import named_parameters

Groups = Sequence[Mapping[str, Any]]

_PRODUCT_ERROR = 64  # of decoding, as a multiple of the precision of the largest entry


class BoundBlock:
    """One block of an optimizer: its parameters, and the coordinates that the inner optimizer steps.

    Where parameters are sharded (FSDP2), a structure that rotates each row separately works on the local rows. For
    other structures, and for inner optimizers that need whole matrices, every step gathers the tensors.
    """

    def __init__(self, change: ChangeOfBasis, originals: Sequence[Tensor], *, needs_matrices: bool = False) -> None:
        self.originals = list(originals)
        self.spectrum: Spectrum | None = None  # of the current basis, if known
        self.sharded = any(is_sharded(original) for original in originals)
        rowwise = change.is_rowwise and change.block.has_outputs_first and not needs_matrices
        # Whether this process works on its own rows only.
        self.by_rows = rowwise and all(is_sharded(each) and is_sharded_by_rows(each) for each in originals)
        self.parameters = [to_local(original) if self.by_rows else to_full(original) for original in originals]
        # The current dtype of the parameters: the model may have been cast since the basis was estimated.
        dtype = functools.reduce(torch.promote_types, [original.dtype for original in originals], torch.float32)
        shapes = tuple(parameter.shape for parameter in self.parameters)
        block = dataclasses.replace(change.block, dtype=dtype, shapes=shapes)
        # Use the memory layout that loading produces, so that a resumed run rounds the same way.
        tensors = change.to(self.parameters[0].device, dtype).tensors.items()
        self.change = type(change)(block, {key: tensor.contiguous() for key, tensor in tensors}, change.settings)
        self.coordinates = [
            torch.empty(shape, dtype=dtype, device=self.parameters[0].device)
            for shape in self.change.coordinate_shapes()
        ]
        # The part of the parameters outside an incomplete basis, if the optimizer keeps it.
        self.rest: list[Tensor] | None = None
        self.encode(self.parameters)
        for coordinate in self.coordinates:
            coordinate.requires_grad_()

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.change.block.name

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.parameters[0].device

    @property
    def is_trained(self) -> bool:
        """True if any parameter is trained. A frozen block keeps its basis."""
        return any(original.requires_grad or original.grad is not None for original in self.originals)

    @property
    def has_gradient(self) -> bool:
        """True if any parameter has a gradient. Without one there is no step."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties that blocks must share to be stacked; equal in all processes, even if shard sizes differ."""
        return self.change.signature, tuple(
            (original.shape, original.device, sharding_layout(original)) for original in self.originals
        )

    def whole_change(self, tensors: Mapping[str, Tensor] | None = None) -> ChangeOfBasis:
        """Return the change of basis for the whole parameters, even if this process holds only some rows."""
        block = dataclasses.replace(self.change.block, shapes=tuple(original.shape for original in self.originals))
        return type(self.change)(block, self.change.tensors if tensors is None else tensors, self.change.settings)

    def as_sharded(self, place: int, tensor: Tensor) -> Tensor:
        """Return a tensor like one of the coordinates, sharded as its parameter is, for a state dict."""
        return shard_like(tensor, self.originals[place]) if self.by_rows and tensor.dim() > 0 else tensor

    def gather(self) -> None:
        """Read sharded parameters and their gradients."""
        view = to_local if self.by_rows else to_full
        for index, original in enumerate(self.originals):
            self.parameters[index] = view(original)
            self.parameters[index].requires_grad_(original.requires_grad)
            self.parameters[index].grad = None if original.grad is None else view(original.grad)

    def release(self) -> None:
        """Drop the gradients that :meth:`gather` has read."""
        for original, parameter in zip(self.originals, self.parameters, strict=True):
            if parameter is not original:
                parameter.grad = None

    def scatter(self) -> None:
        """Write gathered parameters back to the sharded ones."""
        for original, parameter in zip(self.originals, self.parameters, strict=True):
            if is_sharded(original) and not self.by_rows:
                write_shard(original, parameter)

    def read_gradients(self) -> list[Tensor]:
        """Return the gradients in the basis's dtype, with zeros for parameters that have none."""
        gradients = []
        for name, parameter in zip(self.change.block.parameters, self.parameters, strict=True):
            if parameter.grad is None and not parameter.requires_grad:
                raise ValueError(
                    f"Parameter '{name}' is frozen (requires_grad=False), but a step of its block "
                    f"'{self.change.block.name}' would move it. Estimate the basis with the parameter frozen, or with "
                    "a partition that has it in a block of its own."
                )
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"Parameter '{name}' has a sparse gradient, which cannot be rotated. Use sparse=False in the "
                    "embedding, or estimate the basis with a partition that leaves it out."
                )
            gradients.append(gradient.to(self.change.block.dtype))
        return gradients

    # --- conversion between parameters and coordinates ---

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor]) -> None:
        """Set the coordinates, and the rest if there is one, from these tensors."""
        exact = [tensor.to(self.change.block.dtype) for tensor in tensors]
        with exact_products():
            for coordinate, new in zip(self.coordinates, self.change.encode(exact), strict=True):
                coordinate.copy_(new)
        self.keep_rest(exact)

    def keep_rest(self, tensors: Sequence[Tensor]) -> None:
        """Store the part of these tensors outside an incomplete basis, just after they have been encoded."""
        if not self.change.is_complete and self.change.settings["keep_rest"]:
            with exact_products():
                inside = self.change.decode([coordinate.detach() for coordinate in self.coordinates])
            self.rest = [whole - part for whole, part in zip(tensors, inside, strict=True)]

    def add_rest(self, decoded: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return decoded tensors plus the part outside the basis."""
        if self.rest is None:
            return decoded
        return [part + rest for part, rest in zip(decoded, self.rest, strict=True)]

    def drop_rest(self) -> None:
        """Project the parameters onto an incomplete basis, unless the rest is to be kept."""
        if not self.change.is_complete and self.rest is None:
            self.write(self.change.decode([coordinate.detach() for coordinate in self.coordinates]))

    @torch.no_grad()
    def write(self, decoded: Sequence[Tensor]) -> None:
        """Write decoded tensors to the parameters."""
        for parameter, tensor in zip(self.parameters, self.add_rest(decoded), strict=True):
            parameter.copy_(tensor)
        if self.sharded:
            self.scatter()

    def follow_parameters(self, decoded: Sequence[Tensor], *, exactly: bool) -> None:
        """Encode the parameters again if the coordinates no longer represent them.

        A write may have left the values unchanged. The coordinates hold more than the parameters (rounding, and the
        bits below half precision), so they are kept as long as they still decode to the parameters.

        Args:
            decoded: the decoded coordinates, computed as in a step.
            exactly: whether they must be equal; otherwise decoding may have rounded differently when they were written.
        """
        for value, parameter in zip(self.add_rest(decoded), self.parameters, strict=True):
            if not (torch.equal(value.to(parameter.dtype), parameter) if exactly else _rounds_to(value, parameter)):
                self.encode(self.parameters)
                break

    def restore(self, coordinates: Sequence[Tensor], rest: Sequence[Tensor]) -> None:
        """Take saved coordinates (and rest). If they belong to other weights, the next step encodes those."""
        for place, (coordinate, saved) in enumerate(zip(self.coordinates, coordinates, strict=True)):
            here = take_shard(saved, self.originals[place]) if self.by_rows else to_full(saved)
            self._check_shape("coordinates", here, coordinate)
            with torch.no_grad():
                coordinate.copy_(here)
        if self.rest is not None:
            for tensor, saved in zip(self.rest, rest, strict=True):
                self._check_shape("a rest", saved, tensor)
            self.rest = [saved.to(tensor, copy=True) for tensor, saved in zip(self.rest, rest, strict=True)]

    def _check_shape(self, what: str, saved: Tensor, here: Tensor) -> None:
        if saved.shape != here.shape:
            raise ValueError(
                f"Block '{self.name}' has {what} of shape {tuple(saved.shape)}, but {tuple(here.shape)} here."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: bases without the stack they are views of."""
        copies = {name: tensor.clone() for name, tensor in self.change.tensors.items()}
        return self.__dict__ | {"change": self.change.with_tensors(copies)}


def map_to_blocks(blocks: Iterable[BoundBlock]) -> dict[int, BoundBlock]:
    """Map each parameter that is in a block, by its ``id``, to the block."""
    return {id(original): block for block in blocks for original in block.originals}


def _rounds_to(value: Tensor, parameter: Tensor) -> bool:
    """Return True if a parameter is the decoded value, up to the rounding of the product, in its own precision."""
    error = _PRODUCT_ERROR * torch.finfo(value.dtype).eps * value.abs().amax() if value.numel() else 0.0
    low, high = (value - error).to(parameter.dtype), (value + error).to(parameter.dtype)
    return bool(((low <= parameter) & (parameter <= high)).all())


class BoundParameters:
    """The parameters of all groups as they were bound."""

    def __init__(self, groups: Groups = ()) -> None:
        self.names = [strip_compile_prefix(name) for group in groups for name in group["param_names"]]
        self.tensors = _list_parameters(groups)
        self.sizes = [len(group["params"]) for group in groups]
        self.kinds = list(map(_get_kind, self.tensors))
        self._idle: list[str] = []  # without a gradient in the last step

    def matches(self, groups: Groups) -> bool:
        """Return True if the groups still hold the same tensors, with the same dtype and device."""
        tensors: list[Tensor] = []
        for group in groups:
            if len(group.get("param_names", ())) != len(group["params"]):
                return False
            tensors += group["params"]
        if [len(group["params"]) for group in groups] != self.sizes:
            return False
        is_same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return is_same and list(map(_get_kind, tensors)) == self.kinds

    def find_untrained(self, index: ModuleIndex) -> list[str]:
        """Return the names of parameters without a gradient under which the model trains other tensors.

        They are found once: when the parameters without a gradient are no longer those of the last call.
        """
        pairs = zip(self.names, self.tensors, strict=True)
        idle = [name for name, tensor in pairs if tensor.grad is None and tensor.requires_grad]
        if idle == self._idle:
            return []
        self._idle = idle
        known = set(map(id, self.tensors))
        current = {name: index.find_current(name) for name in idle}
        trained = {name: tensor for name, tensor in current.items() if tensor is not None and tensor.grad is not None}
        return [name for name, tensor in trained.items() if id(tensor) not in known]

    def find_names(self, groups: Groups) -> list[str]:
        """Return the names of the groups' current parameters. A new one takes the name that belongs to its position."""
        tensors = _list_parameters(groups)
        if len(tensors) != len(self.tensors):
            raise ValueError("Their number has changed: add parameters with optimizer.add_param_group.")
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            raise ValueError("One of them appears twice.")
        known = {id(tensor): name for tensor, name in zip(self.tensors, self.names, strict=True)}
        taken = {known[id(tensor)] for tensor in tensors if id(tensor) in known}
        names = [known.get(id(tensor), place) for tensor, place in zip(tensors, self.names, strict=True)]
        for tensor, name in zip(tensors, names, strict=True):
            if id(tensor) not in known and name in taken:
                raise ValueError(f"A new one is in the place of '{name}', which is still in use elsewhere.")
            if not tensor.is_leaf:
                raise ValueError(f"'{name}' is not a leaf: it was computed from other tensors.")
        return names

    def find_replaced(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Map each bound parameter to the one that now takes its place in the groups."""
        tensors = _list_parameters(groups)
        if len(tensors) != len(self.tensors):
            return {}
        known = {id(tensor) for tensor in self.tensors}
        pairs = zip(self.tensors, tensors, strict=True)
        return {old: new for old, new in pairs if old is not new and id(new) not in known}


_get_kind = operator.attrgetter("dtype", "device", "shape")


def _list_parameters(groups: Groups) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def bind_blocks(
    basis: Basis | None, groups: Groups, first_group: int = 0, *, needs_matrices: bool = False
) -> list[BoundBlock]:
    """Bind each block of a basis to the parameters with its names, which must all be in one group."""
    if basis is None:
        return []
    if not isinstance(basis, Basis):
        name = getattr(basis, "__name__", type(basis).__name__)
        raise TypeError(f"basis must be an egop.Basis, as egop.estimate(objective) returns, got {name}.")
    given = {
        strip_compile_prefix(name): (index, parameter)
        for index, group in enumerate(groups, first_group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    blocks = []
    for name, change in basis.items():
        members: list[tuple[int, Tensor]] = []
        for key, shape in zip(change.block.parameters, change.block.shapes, strict=True):
            member = given.get(key) or given.get(f"{DDP_PREFIX}{key}") or given.get(key.removeprefix(DDP_PREFIX))
            if member is None:
                raise ValueError(
                    f"Block '{name}' of the basis is for the parameter '{key}', which the optimizer was not given. "
                    f"{_suggest_names(key, list(given))}"
                )
            if member[1].shape != shape:
                raise ValueError(
                    f"Block '{name}' of the basis is for a parameter '{key}' of shape {tuple(shape)}, "
                    f"but the optimizer's has {tuple(member[1].shape)}."
                )
            if member[1].is_complex():
                raise TypeError(
                    f"Block '{name}' of the basis is for the parameter '{key}', which is complex ({member[1].dtype}). "
                    "Only real parameters can be rotated: leave it out of the basis."
                )
            members.append(member)
        if len({index for index, _ in members}) > 1:
            places = zip(change.block.parameters, members, strict=True)
            where = ", ".join(f"'{key}' in group {index}" for key, (index, _) in places)
            raise ValueError(
                f"Block '{name}' crosses parameter groups ({where}). Put its parameters into one group, or estimate "
                "the basis with a finer partition."
            )
        blocks.append(BoundBlock(change, [parameter for _, parameter in members], needs_matrices=needs_matrices))
        blocks[-1].spectrum = basis.spectrum.get(name)
    pairs = ((block.change.block.parameters, block.originals) for block in blocks)
    check_separate_memory({name: each for names, own in pairs for name, each in zip(names, own, strict=True)})
    return blocks


def check_padding(blocks: Sequence[BoundBlock], groups: Groups, layers: Mapping[str, Role]) -> None:
    """Raise ValueError if a block mixes the padding row of an embedding with others, which would move it."""
    named = named_parameters(groups)
    padded = {id(named[name]) for name, role in layers.items() if role.has_padding_row and name in named}
    for block in blocks:
        if not block.change.is_rowwise and any(id(original) in padded for original in block.originals):
            raise ValueError(
                f"Block '{block.name}' ({block.change.kind}) mixes the rows of an embedding with padding_idx, so "
                "training would move its padding row. Use egop.Shared() for the embedding, which keeps rows apart, or "
                "leave it out of the basis."
            )


def check_separate_memory(named: Mapping[str, Tensor]) -> None:
    """Raise ValueError if two parameters share memory: a step reads many weights before it writes them."""
    names: dict[int, str] = {}
    for name, parameter in named.items():
        local = to_local(parameter)
        has_memory = type(local) in (Tensor, torch.nn.Parameter) and local.numel() and not local.is_meta
        other = names.setdefault(local.data_ptr(), name) if has_memory else name
        if other != name:
            raise ValueError(
                f"Parameters '{other}' and '{name}' share memory, so one would overwrite the step of the other. Tie "
                "the parameters themselves (a.weight = b.weight) before you create the optimizer."
            )


def _suggest_names(name: str, names: Sequence[str]) -> str:
    near = [candidate for candidate in names if candidate.endswith(f".{name}") or name.endswith(f".{candidate}")]
    if near:
        return f"It has '{near[0]}': was the basis estimated for a part of the model, or for something it is a part of?"
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"It has: {listed}. Was the basis estimated for another model?"
