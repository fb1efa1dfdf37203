"""Variants of EGOP's step for weight matrices, to see whether one of them is better."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import egop
from egop_lab.race.times import is_due

_SHIFT = 1e-3  # of the mean eigenvalue, so that weak directions stay close to the old ones


class VariantPolarAdam(Optimizer):
    """PolarAdam in bases that follow the momentum, renewed as often as EGOP's, for groups of weights of one shape.

    Args:
        groups: parameter groups with an ``update_rms``, each with weights of one shape, which always have a gradient.
        lr: learning rate.
        betas: decay of the running means.
        weight_decay: decoupled.
        of_momentum: take the running mean of the momentum's squares instead of the gradient's.
        both_sides: rotate both sides of a weight instead of the smaller one.
        every: largest number of steps between renewals.
    """

    def __init__(
        self,
        groups: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        of_momentum: bool = False,
        both_sides: bool = False,
        every: int = 200,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "every": every}
        super().__init__(groups, settings | {"of_momentum": of_momentum, "both_sides": both_sides})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            _step(group, self.state[group["params"][0]])


def _step(group: dict[str, Any], state: dict[str, Any]) -> None:
    """Step the weights of one shape as one stack; the first of them holds the state of all."""
    weights, (beta1, beta2) = group["params"], group["betas"]
    gradients = torch.stack([weight.grad.flatten(1) for weight in weights])
    is_wide = gradients.shape[-2] < gradients.shape[-1]
    gradients = gradients if is_wide else gradients.mT  # the smaller side is that of the rows
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(gradients), "square": torch.zeros_like(gradients)}
        state["left"] = _make_identities(gradients)
        if group["both_sides"]:
            state["right"] = _make_identities(gradients.mT)
    elif is_due(state["step"], group["every"]):
        _renew(state)
    state["step"] += 1
    left, right, mean, square = state["left"], state.get("right"), state["mean"], state["square"]

    rotated = left.mT @ gradients if right is None else left.mT @ gradients @ right
    mean.lerp_(rotated, 1 - beta1)
    square.lerp_((mean if group["of_momentum"] else rotated).square(), 1 - beta2)
    directions = (beta1 * mean + (1 - beta1) * rotated) / (square.sqrt() + 1e-8)
    updates = left @ egop.optim.polar(directions).to(left.dtype)
    updates = updates if right is None else updates @ right.mT
    updates *= egop.optim.rms_scales(updates, group["update_rms"])

    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    back = [
        each.reshape(weight.shape) for each, weight in zip(updates if is_wide else updates.mT, weights, strict=True)
    ]
    torch._foreach_add_(weights, back, alpha=-group["lr"])


def _renew(state: dict[str, Any]) -> None:
    """Take one step of orthogonal iteration on each side that is rotated, and rotate the running means."""
    mean, square = state["mean"], state["square"]
    turn = _iterate(mean @ mean.mT)
    new_mean, new_square = turn.mT @ mean, turn.mT.square() @ square
    state["left"] = state["left"] @ turn
    if "right" in state:
        turn = _iterate(mean.mT @ mean)
        new_mean, new_square = new_mean @ turn, new_square @ turn.square()
        state["right"] = state["right"] @ turn
    state |= {"mean": new_mean, "square": new_square}


def _iterate(grams: Tensor) -> Tensor:
    """Return the orthonormal factor of Gram matrices, strongest directions first, by Cholesky-QR in float64."""
    columns, diagonals = grams.double(), grams.double().diagonal(dim1=-2, dim2=-1)
    columns = columns + _SHIFT * diagonals.mean(-1)[..., None, None].clamp_min(1e-300) * _make_identities(columns)
    order = diagonals.argsort(dim=-1, descending=True, stable=True)
    columns = columns.gather(-1, order[..., None, :].expand_as(columns))
    for _ in range(2):  # the second time for the error of the first
        columns = columns / columns.norm(dim=-2, keepdim=True)
        factors = torch.linalg.cholesky(columns.mT @ columns)
        columns = torch.linalg.solve_triangular(factors.mT, columns, upper=True, left=False)
    return columns.to(grams.dtype)


def _make_identities(matrices: Tensor) -> Tensor:
    size = matrices.shape[-2]
    return torch.eye(size, dtype=matrices.dtype, device=matrices.device).expand(len(matrices), size, size)
