"""PolarAdam: Adam's direction, made orthogonal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.numerics import check_fraction, check_positive, near_one
from egop.optim.matrices import MatrixOptimizer

# Of the quintic that takes all singular values into 0.7 to 1.2 in five steps (Keller Jordan's, in Muon).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class PolarAdam(MatrixOptimizer):
    """Adam's direction with all singular values made one, nearly: Muon on Adam's update instead of the momentum.

    The polar factor itself does not depend on the coordinates; Adam's direction does, so good ones make it better.

    Args:
        params: weights of two dimensions or more, or groups of them.
        lr: learning rate; four to eight times AdamW's best one was best.
        betas: decays of the running means of the gradients and of their squares.
        eps: added to the root of the latter.
        nesterov: look a step ahead.
        iterations: steps of the Newton-Schulz iteration.
        weight_decay: decoupled, as AdamW's.
        update_rms: the root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.PolarAdam(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        nesterov: bool = True,
        iterations: int = 5,
        weight_decay: float = 0.0,
        update_rms: float = 0.2,
    ) -> None:
        for place, beta in enumerate(betas):
            check_fraction(f"betas[{place}]", beta)
        check_positive("iterations", iterations)
        settings = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, settings | {"weight_decay": weight_decay, "update_rms": update_rms})

    recordable = True

    def directions(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Adam's; without its corrections of the first steps, which scale a whole matrix and so change nothing."""
        first, second = group["betas"]
        momenta = self.momenta({"momentum": first, "nesterov": group["nesterov"]}, weights, gradients)
        squares = [self._state(weight, "exp_avg_sq") for weight in weights]
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        return list(torch._foreach_div(momenta, roots))

    # Its map is of more than the momentum.
    lookahead = None  # type: ignore[assignment]

    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Their polar factors."""
        return polar(matrices, group["iterations"])


@torch.no_grad()
def polar(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal factors of matrices, by Newton-Schulz steps; in bfloat16 for float32 on a GPU.

    Args:
        matrices: with any leading dimensions.
        iterations: how many steps.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = near_one(matrices.mT if tall else matrices)
    lengths = torch.linalg.matrix_norm(x, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    half = x.dtype is torch.float32 and x.device.type == "cuda"
    x = torch.div(x, lengths, out=torch.empty_like(x, dtype=torch.bfloat16 if half else x.dtype))
    leading, x = x.shape[:-2], x.reshape(-1, *x.shape[-2:])
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(*leading, *x.shape[-2:]).to(matrices.dtype)
    return x.mT if tall else x
