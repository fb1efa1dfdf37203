"""The algorithm of ``egop.EGOP`` on one page: plain, slow, one process.

Read it to learn what EGOP does, and train with ``egop.EGOP``. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import eigenbasis, orthonormalize

__all__ = ["ReferenceEGOP"]

_GRAM_DECAY = 0.95  # decay of the running mean of Gram matrices
_UPDATE_RMS = 0.2  # root mean square of an update before the learning rate
_QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values to between 0.7 and 1.2 in five steps


class ReferenceEGOP(Optimizer):
    """PolarAdam in the eigenbasis of the gradients for weight matrices, AdamW for everything else.

    Args:
        weights: tensors to rotate, seen as matrices with one row per output.
        others: all other parameters.
        lr: learning rate.
        betas: decay of the running means of the gradients and of their squares.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay.
        every: number of steps between refreshes of a basis.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        every: int = 20,
    ) -> None:
        groups = [{"params": list(weights), "rotate": True}, {"params": list(others), "rotate": False}]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "every": every})

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
    """Step one weight with PolarAdam in the eigenbasis Q of the Gram matrix P of its gradients."""
    (beta1, beta2), matrix = group["betas"], gradient.flatten(1)
    wide = matrix.shape[0] < matrix.shape[1]
    G = matrix if wide else matrix.mT  # m × n, m ≤ n: rotate the smaller side

    # P ← 0.95 P + 0.05 G Gᵀ; the first gradient gives the first P, whose eigenvectors are the first Q.
    if "P" in state:
        state["P"].lerp_(G @ G.mT, 1 - _GRAM_DECAY)
    elif G.any():
        P = G @ G.mT
        state |= {"P": P, "Q": eigenbasis(P)[1].to(P), "M": torch.zeros_like(G), "V": torch.zeros_like(G)}
    else:
        return  # no gradient yet to build a basis from
    P, Q, M, V = (state[name] for name in "PQMV")

    # Adam's direction in the basis, with Nesterov momentum and without bias correction.
    G = Q.mT @ G
    M.lerp_(G, 1 - beta1)  # M ← β₁ M + (1 − β₁) QᵀG
    V.lerp_(G.square(), 1 - beta2)  # V ← β₂ V + (1 − β₂) (QᵀG)²
    D = (beta1 * M + (1 - beta1) * G) / (V.sqrt() + group["eps"])

    # W ← W − lr · 0.2 · Q U / rms(U), where U is close to the polar factor of D.
    U = orthogonalize(D)
    update = _UPDATE_RMS * Q @ U / U.square().mean().sqrt()
    weight.sub_(group["lr"] * (update if wide else update.mT).reshape(weight.shape))

    # Refresh Q and rotate both moments into the new basis: R maps old coordinates to new ones.
    if state["step"] % group["every"] == 0:
        state["Q"] = iterate_basis(P, Q)
        R = state["Q"].mT @ Q
        state["M"], state["V"] = R @ M, R.square() @ V


def orthogonalize(D: Tensor) -> Tensor:
    """Bring the singular values of a matrix to about one: X ← a X + b (XXᵀ) X + c (XXᵀ)² X, five times."""
    a, b, c = _QUINTIC
    X: Tensor = D / D.norm()
    for _ in range(5):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def iterate_basis(P: Tensor, Q: Tensor) -> Tensor:
    """Take one step of orthogonal iteration, Q ← qr((P + 10⁻⁶ tr(P)/m) Q), columns ordered by qᵀPq, largest first."""
    image = P @ Q
    order = (Q * image).sum(0).argsort(descending=True, stable=True)
    return orthonormalize((image + 1e-6 * P.diagonal().mean() * Q)[:, order])


def step_adam(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step any other parameter with Adam: W ← W − lr · m̂ / (√v̂ + ε)."""
    (beta1, beta2), step = group["betas"], state["step"]
    M, V = (state.setdefault(name, torch.zeros_like(parameter)) for name in "MV")
    M.lerp_(gradient, 1 - beta1)
    V.lerp_(gradient.square(), 1 - beta2)
    corrected = (V / (1 - beta2**step)).sqrt() + group["eps"]
    parameter.sub_(group["lr"] * M / (1 - beta1**step) / corrected)
