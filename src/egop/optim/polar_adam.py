"""PolarAdam: the polar factor of Adam's direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.optim.elementwise import scale_matrices
from egop.optim.matrix_optimizer import MatrixOptimizer

# Keller Jordan's quintic (Muon), which brings all singular values to between 0.7 and 1.2 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class PolarAdam(MatrixOptimizer):
    """Adam's direction with all singular values close to one: Muon applied to Adam's update instead of the momentum.

    The running mean of the gradients (with Nesterov momentum) is divided by the root of the running mean of their
    squares, without bias correction. Five Newton-Schulz steps then bring the singular values to between 0.7 and 1.2;
    those below about a five-hundredth of the matrix's norm stay smaller.

    The polar factor does not depend on the coordinates. Adam's direction does, so a good basis improves it.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate; four to eight times AdamW's best rate worked best.
        betas: decay of the running means of the gradients and of their squares.
        eps: added to the root of the mean square.
        nesterov: use Nesterov momentum.
        iterations: number of Newton-Schulz steps.
        weight_decay: decoupled weight decay, as in AdamW.
        update_rms: root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.PolarAdam(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

    recordable = True
    # The update depends on more than the momentum.
    lookahead = None  # type: ignore[assignment]

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
        rates = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "iterations": iterations}
        super().__init__(params, rates | {"weight_decay": weight_decay, "update_rms": update_rms})

    def compute_directions(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Return Adam's directions. There is no bias correction: it would only scale whole matrices."""
        states = self._states(weights, "exp_avg"), self._states(weights, "exp_avg_sq")
        (first, second), last = group["betas"], group["matrices_last"]
        options = {"nesterov": group["nesterov"], "eps": group["eps"]}
        return self._elementwise.update_moments(
            weights, gradients, *states, momentum=first, second=second, last=last, **options
        )

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the polar factors."""
        return polar(matrices, group["iterations"])


@torch.no_grad()
def polar(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return approximate polar factors by Newton-Schulz steps; in bfloat16 for float32 matrices on a GPU.

    Args:
        matrices: matrices with any leading dimensions.
        iterations: number of steps.
    """
    a, b, c = _COEFFICIENTS
    dims, tiny = (-2, -1), torch.finfo(matrices.dtype).tiny
    on_gpu = matrices.dtype is torch.float32 and matrices.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else matrices.dtype
    # In two steps, because squares of the entries may overflow or vanish.
    largest = torch.linalg.vector_norm(matrices, torch.inf, dims, keepdim=True)
    x = scale_matrices(matrices, 1 / largest.clamp_min(tiny), dtype)
    lengths = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=matrices.dtype)
    x = scale_matrices(x, 1 / lengths.clamp_min(tiny), dtype)
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    tall = shape[-2] > shape[-1]
    constant = a * torch.eye(min(shape[-2:]), dtype=dtype, device=x.device)
    for _ in range(iterations):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # of the smaller side
        factor = torch.add(constant, gram, alpha=b).baddbmm_(gram, gram, alpha=c)
        x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
    return x.reshape(shape)
