"""PolarAdam: the polar factor of Adam's direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.distributed import shard_like, take_shard, to_full, to_local
from egop.optim.elementwise import ElementwiseOps, scale_matrices
from egop.optim.matrix_optimizer import MatrixOptimizer

# Keller Jordan's quintic (Muon), which brings all singular values to between 0.7 and 1.2 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class PolarAdam(MatrixOptimizer):
    """Adam's direction with all singular values close to one: Muon applied to Adam's update instead of the momentum.

    The running mean of the gradients (with Nesterov momentum) is divided by the root of the running mean of their
    squares, without bias correction. Five Newton-Schulz steps then bring the singular values to between 0.7 and 1.2;
    those below about a five-hundredth of the matrix's norm stay smaller.

    The polar factor does not depend on the coordinates. Adam's direction does, so a good basis improves it.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate; about twice AdamW's best rate works in networks with normalization layers.
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
        bases = self.find_bases(weights)
        if bases is None:
            return self._update_moments(group, weights, gradients)
        matrices = self._elementwise.stack(weights, gradients, last=group["matrices_last"], dtype=bases.dtype)
        return self._update_moments(group, weights, rotate(matrices, bases))

    def compute_updates(self, group: Mapping[str, Any], weights: list[Tensor], matrices: Tensor) -> Tensor:
        """Return the polar factors, rotated back if there are bases."""
        return orthogonalize(matrices, group["iterations"], self.find_bases(weights))

    def find_bases(self, weights: list[Tensor]) -> Tensor | None:
        """Return the stacked bases of weights of one shape, or None if they are stepped in their own coordinates."""
        return None

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the polar factors."""
        return orthogonalize(matrices, group["iterations"])

    def step_sharded(self, group: Mapping[str, Any], weight: Tensor, gradient: Tensor) -> None:
        """Step a weight that is sharded over processes. Its moments stay sharded; its directions are gathered."""
        bases, shape = self.find_bases([weight]), weight.shape
        matrix_shape = shape if group["matrices_last"] else (shape[0], math.prod(shape[1:]))
        if bases is not None:
            whole = to_full(gradient).reshape(1, *matrix_shape)
            gradient = rotate(whole, bases).reshape(shape)
        local, operations = to_local(weight), ElementwiseOps(any_column_order=False)
        states = [[to_local(state)] for name in _MOMENTS for state in self._states([weight], name)]
        options = _moment_options(group) | {"last": group["matrices_last"]}
        directions = operations.update_moments([local], [take_shard(gradient, weight)], *states, **options)
        matrices = to_full(shard_like(directions.reshape(local.shape), weight)).reshape(1, *matrix_shape)
        updates = orthogonalize(matrices, group["iterations"], bases)
        scales = self.compute_scales(updates, group) * group["lr"]
        part = take_shard(updates.reshape(shape), weight).reshape(directions.shape)
        kept = 1 - group["lr"] * group["weight_decay"]
        operations.apply_updates([local], part, scales, kept, last=group["matrices_last"])

    def _update_moments(
        self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor] | Tensor
    ) -> Tensor:
        states = [self._states(weights, name) for name in _MOMENTS]
        options = _moment_options(group) | {"last": group["matrices_last"]}
        return self._elementwise.update_moments(weights, gradients, *states, **options)


def _moment_options(group: Mapping[str, Any]) -> dict[str, Any]:
    momentum, second = group["betas"]
    return {"momentum": momentum, "second": second, "nesterov": group["nesterov"], "eps": group["eps"]}


def rotate(matrices: Tensor, bases: Tensor) -> Tensor:
    """Return coordinates of matrices, rotated on their smaller side (for square matrices, on the columns)."""
    return matrices @ bases if is_tall(matrices) else bases.mT @ matrices


def is_tall(matrices: Tensor) -> bool:
    """Return True if the columns are the smaller side of matrices, or both sides are equal."""
    return matrices.shape[-2] >= matrices.shape[-1]


@torch.no_grad()
def polar(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return approximate polar factors by Newton-Schulz steps; in bfloat16 for float32 matrices on a GPU.

    Args:
        matrices: matrices with any leading dimensions, of any scale.
        iterations: number of steps.
    """
    largest = torch.linalg.vector_norm(matrices, torch.inf, (-2, -1), keepdim=True)
    scales = 1 / largest.clamp_min(torch.finfo(matrices.dtype).tiny)
    return orthogonalize(scale_matrices(matrices, scales, _product_dtype(matrices)), iterations)


def orthogonalize(matrices: Tensor, iterations: int, bases: Tensor | None = None) -> Tensor:
    """Return approximate polar factors of matrices whose squared entries neither overflow nor vanish.

    Args:
        matrices: matrices with any leading dimensions.
        iterations: number of Newton-Schulz steps.
        bases: if given, orthogonal matrices of the smaller side (for square matrices, of the columns) that multiply the
            polar factors on that side. The product is part of the last step, where it costs little.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(_product_dtype(matrices)).reshape(-1, *matrices.shape[-2:])
    tall = is_tall(x)
    constant = a * torch.eye(min(x.shape[-2:]), dtype=x.dtype, device=x.device)
    for step in range(iterations):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # of the smaller side
        if step == 0:  # divide by the Frobenius norm: the trace is its square
            square = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            inverse = 1 / square.clamp_min(torch.finfo(square.dtype).tiny)[:, None, None]
            gram = gram * inverse.to(x.dtype)
        factor = torch.add(constant, gram, alpha=b).baddbmm_(gram, gram, alpha=c)
        if step == 0:
            factor = factor * inverse.sqrt().to(x.dtype)
        if bases is not None and step == iterations - 1:
            basis = bases.to(x.dtype).reshape(-1, *bases.shape[-2:])
            factor = torch.bmm(factor, basis.mT) if tall else torch.bmm(basis, factor)
        x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
    return x.reshape(matrices.shape)


def _product_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype of Newton-Schulz steps."""
    on_gpu = matrices.dtype is torch.float32 and matrices.device.type == "cuda"
    return torch.bfloat16 if on_gpu else matrices.dtype
