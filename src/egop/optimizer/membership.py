"""Which parameters blocks are bound to, and what has become of them since."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from egop.basis import DDP_PREFIX, Basis, Role, Structure, strip_compile_prefix
from egop.optimizer.binding import BoundBlock

Groups = Sequence[dict[str, Any]]


@dataclass
class Bound:
    """Parameters as they were bound."""

    names: list[str] = field(default_factory=list)
    members: list[Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Groups) -> Self:
        """Those that the groups have now."""
        members = _members(groups)
        names = [strip_compile_prefix(name) for group in groups for name in group["param_names"]]
        return cls(names, members, [tensor.dtype for tensor in members], [tensor.device for tensor in members])

    def are(self, groups: Groups) -> bool:
        """Whether the groups still have these, in their precision and where they were."""
        members = _members(groups)
        return (
            len(members) == len(self.members)
            and all(map(operator.is_, members, self.members))
            and all(len(group["params"]) == len(group.get("param_names", ())) for group in groups)
            and [tensor.dtype for tensor in members] == self.dtypes
            and [tensor.device for tensor in members] == self.devices
        )

    def names_in(self, groups: Groups) -> list[str]:
        """The names of the parameters that the groups have now: of one that was bound its own, else its place's."""
        members = _members(groups)
        if len(members) != len(self.members):
            raise ValueError("Their number is another one: add parameters by optimizer.add_param_group.")
        if len({id(tensor) for tensor in members}) < len(members):
            raise ValueError("One of them is there twice.")
        known = {id(tensor): name for tensor, name in zip(self.members, self.names, strict=True)}
        taken = {known[id(tensor)] for tensor in members if id(tensor) in known}
        names = [known.get(id(tensor), place) for tensor, place in zip(members, self.names, strict=True)]
        for tensor, name in zip(members, names, strict=True):
            if id(tensor) not in known and name in taken:
                raise ValueError(f"One is new where '{name}' was, which is still there: nobody knows what it is.")
            if not tensor.is_leaf:
                raise ValueError(f"'{name}' is not a leaf: it was computed from others.")
        return names

    def replaced_in(self, groups: Groups) -> dict[Tensor, Tensor]:
        """The parameters of the groups that stand where others were bound, by these."""
        members = _members(groups)
        if len(members) != len(self.members):
            return {}
        known = {id(tensor) for tensor in self.members}
        pairs = zip(self.members, members, strict=True)
        return {old: new for old, new in pairs if old is not new and id(new) not in known}


def _members(groups: Groups) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def bind(
    basis: Basis | None,
    groups: Sequence[Mapping[str, Any]],
    first_group: int = 0,
    *,
    whole_matrices: bool = False,
) -> list[BoundBlock]:
    """Bind each block of a basis to the parameters of its names, which must all be in one group."""
    if basis is not None and not isinstance(basis, Basis):
        raise TypeError(f"basis must be an egop.Basis, got {_named(basis)}")
    given = {
        strip_compile_prefix(name): (index, parameter)
        for index, group in enumerate(groups, first_group)
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    blocks = []
    for name, change in (basis or {}).items():
        members = [given.get(key) or _with_or_without_module(key, given) for key in change.block.parameters]
        for key, shape, member in zip(change.block.parameters, change.block.shapes, members, strict=True):
            if member is None:
                raise ValueError(
                    f"Block '{name}' of the basis is for the parameter '{key}', which the optimizer was not given. "
                    f"{_nearest(key, list(given))}"
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
        if len({member[0] for member in members if member}) > 1:
            places = zip(change.block.parameters, members, strict=True)
            where = ", ".join(f"'{key}' in group {member[0]}" for key, member in places if member)
            raise ValueError(
                f"Block '{name}' crosses parameter groups ({where}). Put its parameters into one group, or estimate "
                "the basis with a finer partition."
            )
        originals = [member[1] for member in members if member]
        blocks.append(BoundBlock(change, originals, whole_matrices=whole_matrices))
        blocks[-1].spectrum = basis.spectrum.get(name) if basis is not None else None
    return blocks


def check_padding(
    blocks: Sequence[BoundBlock], groups: Sequence[Mapping[str, Any]], layers: Mapping[str, Role]
) -> None:
    """Raise ValueError if a block mixes the padding row of an embedding with others, which would move it."""
    padded = {
        id(parameter)
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if strip_compile_prefix(name) in layers and layers[strip_compile_prefix(name)].has_padding_row
    }
    for block in blocks:
        if not block.change.is_rowwise and any(id(original) in padded for original in block.originals):
            raise ValueError(
                f"Block '{block.name}' ({block.change.kind}) mixes the rows of an embedding with padding_idx, so "
                "training would move its padding row. Use egop.Shared() for the embedding, which keeps rows apart, or "
                "leave it out of the basis."
            )


def _nearest(name: str, names: Sequence[str]) -> str:
    """What the optimizer has instead of a parameter of some name, and what that tells."""
    near = [candidate for candidate in names if candidate.endswith(f".{name}") or name.endswith(f".{candidate}")]
    if near:
        return f"It has '{near[0]}': was the basis estimated for a part of the model, or for something it is a part of?"
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"It has: {listed}. Was the basis estimated for another model?"


def _named(basis: object) -> str:
    """What was given in the place of a basis, and what to do with it where it belongs elsewhere."""
    kind = basis if isinstance(basis, type) else type(basis)
    if issubclass(kind, Structure):
        return (
            f"{kind.__name__}, which says how one is built. Estimate it: "
            f"basis = egop.estimate(objective, structure=egop.{kind.__name__}(...))."
        )
    return f"{kind.__name__}."


def _with_or_without_module(name: str, given: Mapping[str, Any]) -> Any:
    return given.get(f"{DDP_PREFIX}{name}") or given.get(name.removeprefix(DDP_PREFIX))
