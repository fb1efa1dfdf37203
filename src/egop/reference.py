"""The algorithm of ``egop.EGOP`` on one page: plain, slow, one process.

Read it to learn what EGOP does, and train with ``egop.EGOP``. Tests compare the two.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import power_iteration

__all__ = ["ReferenceEGOP"]

_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "every": 200,
    "update_rms": 0.4,
}
_QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values to between 0.7 and 1.2 in five steps


class ReferenceEGOP(Optimizer):
    """PolarAdam in an eigenbasis of the momentum for some weights, AdamW for all others; settings as in EGOP."""

    def __init__(
        self, weights: Iterable[Tensor], others: Iterable[Tensor], outside_lr: float = 1.0, **settings: Any
    ) -> None:
        settings = _DEFAULTS | settings
        outside = {"params": list(others), "rotate": False, "lr": settings["lr"] * outside_lr}
        super().__init__([{"params": list(weights), "rotate": True}, outside], settings)

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
    (beta1, beta2), matrix = group["betas"], gradient.flatten(1)  # one row per output
    wide = matrix.shape[0] < matrix.shape[1]
    G = matrix if wide else matrix.mT  # m × n, m ≤ n: rotate the smaller side
    if "Q" not in state:
        identity = torch.eye(len(G), dtype=G.dtype, device=G.device)
        state |= {"Q": identity, "M": torch.zeros_like(G), "V": torch.zeros_like(G)}
    elif is_due(state["step"] - 1, group["every"]):
        # One step of orthogonal iteration on M Mᵀ gives the new basis in the coordinates of the old one.
        R = power_iteration(state["M"] @ state["M"].mT)
        state |= {"Q": state["Q"] @ R, "M": R.mT @ state["M"], "V": R.mT.square() @ state["V"]}
    Q, M, V = (state[name] for name in "QMV")

    # Adam's direction in the basis, with Nesterov momentum and without bias correction.
    G = Q.mT @ G
    M.lerp_(G, 1 - beta1)  # M ← β₁ M + (1 − β₁) QᵀG
    V.lerp_(G.square(), 1 - beta2)  # V ← β₂ V + (1 − β₂) (QᵀG)²
    D = (beta1 * M + (1 - beta1) * G) / (V.sqrt() + group["eps"])

    # Bring the singular values to about one: U ← a U + b (UUᵀ) U + c (UUᵀ)² U, five times.
    a, b, c = _QUINTIC
    U = D / D.norm().clamp_min(1e-300)
    for _ in range(5):
        A = U @ U.mT
        U = a * U + (b * A + c * A @ A) @ U

    # W ← W − lr · s · Q U / rms(U), where s depends on the size of Adam's direction
    s = max(1, (matrix.shape[0] / matrix.shape[1]) ** 0.5)
    if group["update_rms"] == "adam":
        step = state["step"]  # for Adam's bias correction
        s *= 1.6 * D.square().mean().sqrt() * (1 - beta2**step) ** 0.5 / (1 - beta1 ** (step + 1))
    else:  # the last factor shrinks the update where D fades
        is_kernel = weight.shape[2:].numel() > 1  # of a convolution, whose windows are assumed to overlap
        s = group["update_rms"] * max(s, 3 * is_kernel) * min(1, D.abs().max() / 0.01)
    update = s * Q @ U / U.square().mean().sqrt().clamp_min(1e-300)
    weight.sub_(group["lr"] * (update if wide else update.mT).reshape(weight.shape))


def is_due(step: int, every: int) -> bool:
    """Return True after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... below ``every``, and after every ``every`` steps."""
    return step % every == 0 or (step < every and step % 2 ** max(0, step.bit_length() - 2) == 0)


def step_adam(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step any other parameter with Adam: W ← W − lr · m̂ / (√v̂ + ε)."""
    (beta1, beta2), step = group["betas"], state["step"]
    M, V = (state.setdefault(name, torch.zeros_like(parameter)) for name in "MV")
    M.lerp_(gradient, 1 - beta1)
    V.lerp_(gradient.square(), 1 - beta2)
    corrected = (V / (1 - beta2**step)).sqrt() + group["eps"]
    parameter.sub_(group["lr"] * M / (1 - beta1**step) / corrected)
