"""Which parameters an optimizer was bound to, and what has become of them since."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from egop.basis import plain_name

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
        names = [plain_name(name) for group in groups for name in group["param_names"]]
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
