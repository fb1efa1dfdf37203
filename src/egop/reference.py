"""The algorithm of ``egop.EGOP`` on one page: plain, slow, one process.

Read it to learn what EGOP does, and train with ``egop.EGOP``. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import power_iteration

__all__ = ["ReferenceEGOP"]

_QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values to between 0.7 and 1.2 in five steps


class ReferenceEGOP(Optimizer):
    """PolarAdam in an eigenbasis of the momentum for weight matrices, AdamW for everything else.

    Args:
        weights: tensors to rotate, seen as matrices with one row per output.
        others: all other parameters.
        lr: learning rate.
        betas: decay of the running means of the gradients and of their squares.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay.
        every: number of steps between renewals of a basis.
        update_rms: root mean square of the update of a square matrix before the learning rate.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 200,
        update_rms: float = 0.4,
    ) -> None:
        groups = [{"params": list(weights), "rotate": True}, {"params": list(others), "rotate": False}]
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, settings | {"every": every, "update_rms": update_rms})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step along the gradients of all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                (step_rotated if group["rotate"] else step_adam)(parameter, parameter.grad, state, group)


def step_rotated(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step one weight with PolarAdam in the basis Q, which follows the eigenvectors of the momentum M."""
    (beta1, beta2), matrix = group["betas"], gradient.flatten(1)
    wide = matrix.shape[0] < matrix.shape[1]
    G = matrix if wide else matrix.mT  # m × n, m ≤ n: rotate the smaller side
    if "Q" not in state:
        ones = torch.eye(len(G), dtype=G.dtype, device=G.device)
        state |= {"Q": ones, "M": torch.zeros_like(G), "V": torch.zeros_like(G)}
    elif is_due(state["step"] - 1, group["every"]):
        renew(state)
    Q, M, V = (state[name] for name in "QMV")

    # Adam's direction in the basis, with Nesterov momentum and without bias correction.
    G = Q.mT @ G
    M.lerp_(G, 1 - beta1)  # M ← β₁ M + (1 − β₁) QᵀG
    V.lerp_(G.square(), 1 - beta2)  # V ← β₂ V + (1 − β₂) (QᵀG)²
    D = (beta1 * M + (1 - beta1) * G) / (V.sqrt() + group["eps"])

    # W ← W − lr · s · Q U / rms(U), where U is close to the polar factor of D.
    U, s = orthogonalize(D), group["update_rms"] * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
    update = s * Q @ U / U.square().mean().sqrt().clamp_min(1e-300)
    weight.sub_(group["lr"] * (update if wide else update.mT).reshape(weight.shape))


def is_due(step: int, every: int) -> bool:
    """Return True after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... below ``every``, and after every ``every`` steps."""
    return step % every == 0 or (step < every and step % 2 ** max(0, step.bit_length() - 2) == 0)


def renew(state: dict[str, Any]) -> None:
    """Take one step of orthogonal iteration on M Mᵀ and rotate the moments into the new basis."""
    Q, M, V = (state[name] for name in "QMV")
    R = power_iteration(M @ M.mT)  # the new basis in the coordinates of the old one
    state |= {"Q": Q @ R, "M": R.mT @ M, "V": R.mT.square() @ V}


def orthogonalize(D: Tensor) -> Tensor:
    """Bring the singular values of a matrix to about one: X ← a X + b (XXᵀ) X + c (XXᵀ)² X, five times."""
    a, b, c = _QUINTIC
    X: Tensor = D / D.norm().clamp_min(1e-300)
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def step_adam(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step any other parameter with Adam: W ← W − lr · m̂ / (√v̂ + ε)."""
    (beta1, beta2), step = group["betas"], state["step"]
    M, V = (state.setdefault(name, torch.zeros_like(parameter)) for name in "MV")
    M.lerp_(gradient, 1 - beta1)
    V.lerp_(gradient.square(), 1 - beta2)
    corrected = (V / (1 - beta2**step)).sqrt() + group["eps"]
    parameter.sub_(group["lr"] * M / (1 - beta1**step) / corrected)
