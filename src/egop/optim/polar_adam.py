"""PolarAdam: Adam's direction, made orthogonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.numerics import check_fraction, check_nonnegative, check_positive_int
from egop.optim.entries import scaled
from egop.optim.matrices import MatrixOptimizer

# Of the quintic that takes all singular values into 0.7 to 1.2 in five steps (Keller Jordan's, in Muon).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class PolarAdam(MatrixOptimizer):
    """Adam's direction with all singular values made one, nearly: Muon on Adam's update instead of the momentum.

    The running mean of the gradients, a step ahead with Nesterov, is divided by the root of that of their squares,
    without bias correction. Then five Newton-Schulz steps bring the singular values to between 0.7 and 1.2; those below
    about a five-hundredth of the matrix's norm stay smaller.

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
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}.")
        for place, beta in enumerate(betas):
            check_fraction(f"betas[{place}]", beta)
        check_nonnegative("eps", eps)
        check_positive_int("iterations", iterations)
        settings = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, settings | {"weight_decay": weight_decay, "update_rms": update_rms})

    recordable = True

    def directions(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Adam's; without its corrections of the first steps, which scale a whole matrix and so change nothing."""
        states = self._states(weights, "exp_avg"), self._states(weights, "exp_avg_sq")
        (first, second), last = group["betas"], group["matrices_last"]
        options = {"nesterov": group["nesterov"], "eps": group["eps"]}
        return self._entries.take_in(weights, gradients, *states, momentum=first, second=second, last=last, **options)

    # Its map is of more than the momentum.
    lookahead = None  # type: ignore[assignment]

    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Their polar factors."""
        return polar(matrices, group["iterations"])


@torch.no_grad()
def polar(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal factors of matrices, by Newton-Schulz steps; float32 on a GPU becomes bfloat16.

    Args:
        matrices: with any leading dimensions.
        iterations: how many steps.
    """
    a, b, c = _COEFFICIENTS
    dims, tiny = (-2, -1), torch.finfo(matrices.dtype).tiny
    on_gpu = matrices.dtype is torch.float32 and matrices.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else matrices.dtype
    # In two steps, as squares of their entries may overflow or vanish.
    x = scaled(matrices, 1 / torch.linalg.vector_norm(matrices, torch.inf, dims, keepdim=True).clamp_min(tiny), dtype)
    lengths = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=matrices.dtype)
    x = scaled(x, 1 / lengths.clamp_min(tiny), dtype)
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    tall = shape[-2] > shape[-1]
    constant = a * torch.eye(min(shape[-2:]), dtype=dtype, device=x.device)
    for _ in range(iterations):
        gram = x.mT @ x if tall else x @ x.mT  # of the smaller side
        factor = torch.add(constant, gram, alpha=b).baddbmm_(gram, gram, alpha=c)
        x = x @ factor if tall else factor @ x
    return x.reshape(shape)
