"""Gradients at given points: one point at a time, or many at once with ``torch.func``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egop.estimation.batches import map_leaves
from egop.estimation.objective import Objective
from egop.numerics import seed_everything

Gradients = tuple[Tensor, list[Tensor]]  # the losses of the points, and the stacked gradients of each parameter


@dataclass(frozen=True)
class Points:
    """Points in parameter space, each with a batch and a seed for the loss."""

    seeds: list[int]
    values: dict[str, Tensor]  # stacked along a new first dimension
    batches: list[Any]

    def __len__(self) -> int:
        return len(self.seeds)

    def select(self, indices: Sequence[int]) -> Points:
        """Return the points at these indices."""
        index = torch.tensor(indices, device=next(iter(self.values.values())).device)
        values = {name: value[index] for name, value in self.values.items()}
        return Points([self.seeds[i] for i in indices], values, [self.batches[i] for i in indices])


def loop_gradients(objective: Objective, names: Sequence[str], points: Points) -> Gradients:
    """Compute the gradients at one point after another by plain reverse mode, which works for every model."""
    losses, gradients = [], []
    for index, (seed, batch) in enumerate(zip(points.seeds, points.batches, strict=True)):
        seed_everything(seed)  # for dropout and the like
        values = {name: value[index] for name, value in points.values.items()}
        loss, tensors = objective.gradients(values, batch, names)
        losses.append(loss)
        gradients.append(tensors)
    return torch.stack(losses), [torch.stack(stack) for stack in zip(*gradients, strict=True)]


def vmap_gradients(objective: Objective, names: Sequence[str], points: Points) -> Gradients:
    """Compute gradients for all points with equally shaped batches in one vmapped call."""
    groups = _group_batches(points.batches)
    if len(groups) == 1:
        return _vmap_group(objective, names, points, groups[0])
    parts = [_vmap_group(objective, names, points.select(group.indices), group) for group in groups]
    losses, gradients = zip(*parts, strict=True)
    indices = torch.tensor([index for group in groups for index in group.indices], device=losses[0].device)
    order = indices.argsort()  # back to the order of the points
    return torch.cat(losses)[order], [torch.cat(pieces)[order] for pieces in zip(*gradients, strict=True)]


def matches_loop(objective: Objective, names: Sequence[str], point: Points) -> bool:
    """Return True if vmap gives the same gradients as the loop at a point."""
    looped = loop_gradients(objective, names, point)
    # Under vmap, a loss that reads parameters other than through its argument sees the model's own values. With zeros
    # there, the results differ.
    objective.write({name: torch.zeros_like(value[0]) for name, value in point.values.items()})
    twice = point.select([0, 0])
    vmapped = vmap_gradients(objective, names, twice)
    if _are_close(looped, vmapped):
        return True
    if _are_close(looped, loop_gradients(objective, names, replace(point, seeds=[point.seeds[0] + 1]))):
        return False
    # The model draws random numbers. Loop and vmap draw different ones, but two vmapped runs with one seed agree. In
    # this second run the model holds the point's own values, which the loop has just written.
    return _are_close(vmapped, vmap_gradients(objective, names, twice))


def check_finite(names: Sequence[str], losses: Tensor, gradients: Sequence[Tensor], first_draw: int) -> None:
    """Raise FloatingPointError that names the first draw with a loss or gradient that is not finite."""
    # One synchronization with the device. Finite values whose sum overflows are sorted out below.
    sums = [each.sum(dtype=torch.promote_types(each.dtype, torch.float32)).double() for each in (losses, *gradients)]
    if torch.isfinite(torch.stack(sums)).all():
        return
    checks = [("The loss", losses)] + [
        (f"The gradient of '{name}'", gradient) for name, gradient in zip(names, gradients, strict=True)
    ]
    for what, values in checks:
        finite = torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else torch.isfinite(values)
        if not finite.all():
            draw = first_draw + int(finite.logical_not().nonzero()[0])
            raise FloatingPointError(
                f"{what} is not finite at draw {draw}. The points may be too far out: use a smaller scale in rho, or "
                "check the loss for overflow, log(0) and division by zero."
            )


def get_tensors(batch: Any) -> list[Tensor]:
    """Return all tensors in a batch."""
    return _split_tensors(batch)[1]


@dataclass(frozen=True)
class _Slot:
    """A placeholder for one tensor of a batch."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Group(NamedTuple):
    """Points whose batches differ only in the values of their tensors."""

    skeleton: Any
    indices: list[int]
    tensors: list[list[Tensor]]  # of each point


def _vmap_group(objective: Objective, names: Sequence[str], points: Points, group: _Group) -> Gradients:
    def loss(wanted: dict[str, Tensor], others: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
        batch = map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf, group.skeleton)
        return objective.loss(wanted | others, batch)

    others = dict(points.values)
    wanted = {name: others.pop(name) for name in names}
    first = group.tensors[0]
    is_shared = all(tensors is first for tensors in group.tensors)
    tensors = first if is_shared else [torch.stack(stack) for stack in zip(*group.tensors, strict=True)]
    seed_everything(points.seeds[0])
    in_dims = (0, 0, None if is_shared else 0)
    function = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=in_dims, randomness="different")
    with warnings.catch_warnings():
        # torch has no batching rule for some operations, such as attention, and warns that they could be faster.
        warnings.filterwarnings("ignore", "There is a performance drop")
        gradients, losses = function(wanted, others, tensors)
    return losses.detach(), [gradients[name].detach() for name in names]


def _group_batches(batches: Sequence[Any]) -> list[_Group]:
    groups: list[_Group] = []
    known: dict[int, tuple[_Group, list[Tensor]]] = {}  # a list of batches is repeated many times
    for index, batch in enumerate(batches):
        if id(batch) not in known:
            skeleton, tensors = _split_tensors(batch)
            group = next((group for group in groups if _is_equal(group.skeleton, skeleton)), None)
            if group is None:
                group = _Group(skeleton, [], [])
                groups.append(group)
            known[id(batch)] = group, tensors
        group, tensors = known[id(batch)]
        group.indices.append(index)
        group.tensors.append(tensors)
    return groups


def _split_tensors(batch: Any) -> tuple[Any, list[Tensor]]:
    """Replace the tensors of a batch with slots; return the result and the tensors."""
    tensors: list[Tensor] = []

    def replace_tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1, leaf.shape, leaf.dtype, leaf.device)

    return map_leaves(replace_tensor, batch), tensors


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays, for example, have no single truth value
        return False


def _are_close(one: Gradients, other: Gradients) -> bool:
    """Return True if the first point's loss and gradients agree up to rounding."""
    pairs = [(a[0], b[0]) for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True)]
    norms = [torch.linalg.vector_norm(a).item() for a, _ in pairs]
    return all(
        # Rounding is relative to the whole: a gradient that should be zero is pure rounding error.
        torch.linalg.vector_norm(a - b).item() <= epsilon**0.5 * norm + 100 * epsilon * max(norms)
        for (a, b), norm, epsilon in zip(pairs, norms, [torch.finfo(a.dtype).eps for a, _ in pairs], strict=True)
    )
