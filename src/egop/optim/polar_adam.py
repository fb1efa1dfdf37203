"""PolarAdam: the polar factor of Adam's direction."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.optim.elementwise import MatrixStack
from egop.optim.matrix_optimizer import MatrixOptimizer

# Keller Jordan's quintic (Muon), which brings all singular values to between 0.7 and 1.2 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_FADED = 0.01  # Adam's direction is said to fade where all of its entries are below this
_SMALL = 256  # width of matrices for which making an identity matrix takes longer than a product


class PolarAdam(MatrixOptimizer):
    """Adam's direction with all singular values close to one: Muon applied to Adam's update instead of the momentum.

    The running mean of the gradients (with Nesterov momentum) is divided by the root of the running mean of their
    squares, without bias correction. Five Newton-Schulz steps then bring the singular values to between 0.7 and 1.2;
    those below about a five-hundredth of the matrix's norm stay smaller. The update has a root mean square of
    ``update_rms``, but less if all entries of Adam's direction are below 0.01, because gradients have vanished or are
    far below ``eps``.

    The polar factor does not depend on the coordinates. Adam's direction does, so a good basis improves it.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate; about twice AdamW's best rate works in networks with normalization layers.
        betas: decay rates of the running means of the gradients and of their squares.
        eps: added to the denominator.
        nesterov: use Nesterov momentum.
        iterations: number of Newton-Schulz steps.
        weight_decay: decoupled weight decay, as in AdamW.
        update_rms: root mean square of an update before the learning rate.
        adam_sized: scale updates to ``update_rms`` times the root mean square of Adam's direction (with bias
            correction), which is about 0.25 where gradients are mostly noise.

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
        adam_sized: bool = False,
    ) -> None:
        rates = {"lr": lr, "betas": betas, "eps": eps, "nesterov": nesterov, "iterations": iterations}
        sizes = {"update_rms": update_rms, "adam_sized": adam_sized}
        super().__init__(params, rates | {"weight_decay": weight_decay} | sizes)

    def compute_directions(self, stack: MatrixStack) -> Tensor:
        """Return Adam's directions, without bias correction, which would only scale whole matrices."""
        gradients: list[Tensor] | Tensor = stack.gradients
        if stack.bases is not None:
            gradients = rotate(stack.stack(stack.gradients, stack.bases.dtype), stack.bases)
        moments = stack.get_state("exp_avg"), stack.get_state("exp_avg_sq")
        (momentum, second), nesterov, eps = stack.group["betas"], stack.group["nesterov"], stack.group["eps"]
        return stack.update_moments(gradients, *moments, momentum=momentum, second=second, nesterov=nesterov, eps=eps)

    def compute_updates(self, stack: MatrixStack, matrices: Tensor) -> Tensor:
        """Return the polar factors, rotated back if there are bases."""
        return orthogonalize(matrices, stack.group["iterations"], stack.bases)

    def compute_scales(self, updates: Tensor, directions: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the factors that give updates their size, which depends on that of Adam's direction."""
        is_relative = group.get("adam_sized", False)
        dtype = torch.promote_types(directions.dtype, torch.float32)
        sizes = torch.linalg.vector_norm(
            directions, 2 if is_relative else torch.inf, (-2, -1), keepdim=True, dtype=dtype
        )
        if is_relative:
            sizes.div_(math.sqrt(math.prod(directions.shape[-2:])))
        else:
            sizes.div_(_FADED).clamp_max_(1)
        return super().compute_scales(updates, directions, group).mul_(sizes)

    def compute_rates(self, stack: MatrixStack) -> tuple[Any, Any]:
        """Return the learning rate, with Adam's bias correction if updates are of its size, and what decay leaves."""
        lr, kept = super().compute_rates(stack)
        if not stack.group.get("adam_sized", False):
            return lr, kept
        steps = [int(state["step"]) + 1 for state in stack.states]
        betas, nesterov = stack.group["betas"], stack.group["nesterov"]
        factors = [correct_bias(step, betas, nesterov=nesterov) for step in steps]
        if len(set(steps)) == 1:
            return lr * factors[0], kept
        dtype = torch.promote_types(stack.weights[0].dtype, torch.float32)
        column = torch.tensor(factors, dtype=dtype, device="cpu").view(-1, *(1,) * len(stack.shape))
        return lr * column.to(stack.weights[0].device, non_blocking=True), kept

    def _step_stacks(self, stacks: Sequence[MatrixStack]) -> None:
        """Step, and count the steps of each weight."""
        states = [state for stack in stacks for state in stack.states]
        one = torch.ones((), dtype=torch.float32, device="cpu")  # much faster to add than a number
        for state in states:
            if "step" not in state:
                state["step"] = torch.zeros_like(one)
        super()._step_stacks(stacks)
        for state in states:
            state["step"].add_(one)

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the polar factors."""
        return orthogonalize(matrices, group["iterations"])


def correct_bias(step: int, betas: tuple[float, float], *, nesterov: bool) -> float:
    """Return the factor of Adam's bias correction, by which a direction after some steps is to be multiplied."""
    return math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** (step + nesterov))


def rotate(matrices: Tensor, bases: Tensor) -> Tensor:
    """Return coordinates of matrices, rotated on their smaller side (for square matrices, on the columns)."""
    product = torch.bmm if matrices.dim() == 3 else torch.matmul
    return product(matrices, bases) if is_tall(matrices) else product(bases.mT, matrices)


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
    scaled = torch.empty_like(matrices, dtype=_product_dtype(matrices))
    return orthogonalize(torch.mul(matrices, scales, out=scaled), iterations)


def orthogonalize(matrices: Tensor, iterations: int, bases: Tensor | None = None) -> Tensor:
    """Return approximate polar factors of matrices whose squared entries neither overflow nor vanish.

    Args:
        matrices: matrices with any leading dimensions.
        iterations: number of Newton-Schulz steps.
        bases: if given, orthogonal matrices of the smaller side (for square matrices, of the columns) that multiply the
            polar factors on that side. The product is part of the last step, where it costs little.
    """
    _, b, c = _COEFFICIENTS
    x = matrices.to(_product_dtype(matrices))
    x = x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])
    tall = is_tall(x)
    size = min(x.shape[-2:])
    is_kept = size <= _SMALL and x.device.type == "cpu" and type(x) is Tensor  # no fake tensor
    make_constant = _keep_scaled_identity if is_kept else _scale_identity
    constant = make_constant(size, x.dtype, x.device)
    for step in range(iterations):
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # of the smaller side
        if step == 0:  # divide by the Frobenius norm: the trace is its square
            square = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.promote_types(x.dtype, torch.float32))
            inverse = square.clamp_min_(torch.finfo(square.dtype).tiny).reciprocal_().view(-1, 1, 1)
            gram.mul_(inverse.to(x.dtype))
        factor = torch.add(constant, gram, alpha=b).baddbmm_(gram, gram, alpha=c)
        if step == 0:
            factor.mul_(inverse.sqrt_().to(x.dtype))
        if bases is not None and step == iterations - 1:
            basis = bases if bases.dim() == 3 else bases.reshape(-1, *bases.shape[-2:])
            basis = basis.to(x.dtype)
            factor = torch.bmm(factor, basis.mT) if tall else torch.bmm(basis, factor)
        x = torch.bmm(x, factor) if tall else torch.bmm(factor, x)
    return x if matrices.dim() == 3 else x.reshape(matrices.shape)


def _scale_identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _COEFFICIENTS[0] * torch.eye(size, dtype=dtype, device=device)


_keep_scaled_identity = functools.lru_cache(maxsize=16)(_scale_identity)


def _product_dtype(matrices: Tensor) -> torch.dtype:
    """Return the dtype of Newton-Schulz steps."""
    on_gpu = matrices.dtype is torch.float32 and matrices.device.type == "cuda"
    return torch.bfloat16 if on_gpu else matrices.dtype
