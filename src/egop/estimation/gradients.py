"""The gradients of given points: one after the other, or all at once with ``torch.func``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egop.estimation.nested import mapped
from egop.estimation.objective import Objective
from egop.numerics import seed_everything

Gradients = tuple[Tensor, list[Tensor]]  # the losses of the points, and for each name the stacked gradients


@dataclass(frozen=True)
class Points:
    """Points of the parameter space, each with the seed of its loss and a batch."""

    seeds: list[int]
    values: dict[str, Tensor]  # stacked along a new first dimension
    batches: list[Any]

    def __len__(self) -> int:
        return len(self.seeds)

    def some(self, places: Sequence[int]) -> Points:
        """The points at these places."""
        index = torch.tensor(places, device=next(iter(self.values.values())).device)
        values = {name: value[index] for name, value in self.values.items()}
        return Points([self.seeds[i] for i in places], values, [self.batches[i] for i in places])


def looped(objective: Objective, names: Sequence[str], points: Points) -> Gradients:
    """One point after the other, by plain reverse mode: works for every model."""
    losses, gradients = [], []
    for index, (seed, batch) in enumerate(zip(points.seeds, points.batches, strict=True)):
        seed_everything(seed)  # dropout and the like
        values = {name: value[index] for name, value in points.values.items()}
        loss, tensors = objective.gradients(values, batch, names)
        losses.append(loss)
        gradients.append(tensors)
    return torch.stack(losses), [torch.stack(stack) for stack in zip(*gradients, strict=True)]


def vmapped(objective: Objective, names: Sequence[str], points: Points) -> Gradients:
    """The same as the loop; all points with batches of one shape go through one vmapped call."""
    groups = _alike(points.batches)
    if len(groups) == 1:
        return _vmapped_alike(objective, names, points, groups[0])
    parts = [_vmapped_alike(objective, names, points.some(group.places), group) for group in groups]
    losses, gradients = zip(*parts, strict=True)
    order = [torch.tensor(group.places, device=losses[0].device) for group in groups]
    return _merged(losses, order), [_merged(pieces, order) for pieces in zip(*gradients, strict=True)]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch, in nested lists, tuples, mappings and dataclasses."""
    leaves: list[Tensor] = []
    _skeleton(batch, leaves)
    return leaves


class _Group(NamedTuple):
    """Points whose batches differ in the values of their tensors only."""

    skeleton: Any
    places: list[int]
    leaves: list[list[Tensor]]  # of each point


class _Slot(NamedTuple):
    """The place of one tensor in a batch."""

    place: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _vmapped_alike(objective: Objective, names: Sequence[str], points: Points, group: _Group) -> Gradients:
    def loss(moving: dict[str, Tensor], still: dict[str, Tensor], leaves: list[Tensor]) -> Tensor:
        return objective.loss(moving | still, mapped(group.skeleton, _is_slot, lambda slot: leaves[slot.place]))

    still = dict(points.values)
    moving = {name: still.pop(name) for name in names}
    first = group.leaves[0]
    one_batch = all(leaves is first for leaves in group.leaves)
    leaves = first if one_batch else [torch.stack(tensors) for tensors in zip(*group.leaves, strict=True)]
    seed_everything(points.seeds[0])
    in_dims = (0, 0, None if one_batch else 0)
    function = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=in_dims, randomness="different")
    with warnings.catch_warnings():
        # For some operations, such as attention, torch has no batching rule and says that it could be faster.
        warnings.filterwarnings("ignore", "There is a performance drop")
        gradients, losses = function(moving, still, leaves)
    return losses.detach(), [gradients[name].detach() for name in names]


def _merged(parts: Sequence[Tensor], order: Sequence[Tensor]) -> Tensor:
    """The parts in the order of the points."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for part, places in zip(parts, order, strict=True):
        whole[places] = part
    return whole


def _alike(batches: Sequence[Any]) -> list[_Group]:
    groups: list[_Group] = []
    seen: dict[int, tuple[_Group, list[Tensor]]] = {}  # a list of batches comes around again and again
    for place, batch in enumerate(batches):
        if id(batch) not in seen:
            leaves: list[Tensor] = []
            skeleton = _skeleton(batch, leaves)
            group = next((group for group in groups if _equal(group.skeleton, skeleton)), None)
            if group is None:
                group = _Group(skeleton, [], [])
                groups.append(group)
            seen[id(batch)] = group, leaves
        group, leaves = seen[id(batch)]
        group.places.append(place)
        group.leaves.append(leaves)
    return groups


def _skeleton(batch: Any, leaves: list[Tensor]) -> Any:
    """The batch with its tensors replaced by slots; the tensors are appended to ``leaves``."""

    def take(tensor: Tensor) -> _Slot:
        leaves.append(tensor)
        return _Slot(len(leaves) - 1, tensor.shape, tensor.dtype, tensor.device)

    return mapped(batch, _is_tensor, take)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_slot(value: Any) -> bool:
    return isinstance(value, _Slot)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays and the like have no single answer
        return False
