"""The elementwise parts of a step: update moments, scale matrices, apply updates to weights.

On a GPU each is one pass over memory, by the kernels of :mod:`egop.optim.kernels`. Where the kernels cannot be used,
torch's own operations do the same in eighteen passes.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from egop.numerics import copy_all

_logger = logging.getLogger("egop")

_ALIGNMENT = 16  # bytes; kernels need tensors whose addresses are multiples of this
_MAX_ADDRESSES = 256  # lists of addresses to keep; the steps of a network reuse a few


class _Layout(NamedTuple):
    """The view of a weight as a matrix, or as a stack of matrices."""

    order: tuple[int, ...] | None  # permutation of its dimensions; None to leave them as they are
    shape: tuple[int, ...]
    dense: bool  # whether that is the order of its entries in memory


class ElementwiseOps:
    """Elementwise operations on weights of one shape, viewed as a stack of matrices.

    Args:
        any_column_order: whether permuting the columns of a matrix merely permutes those of its update. Convolutions
            are then read in the order of their entries in memory, and GPU kernels are used.
    """

    def __init__(self, *, any_column_order: bool) -> None:
        self._any_column_order = any_column_order
        self._layouts: dict[tuple[torch.Size, tuple[int, ...], bool], _Layout] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}  # kept alive: CUDA graphs read them

    def stack(
        self, weights: Sequence[Tensor], tensors: Sequence[Tensor], *, last: bool, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Stack tensors of the weights' shape as matrices, in the order in which updates are applied.

        Args:
            weights: weights of one shape and layout.
            tensors: their gradients or state.
            last: as in :meth:`update_moments`.
            dtype: dtype of the stack; by default that of the tensors.
        """
        layout = self._layout(weights[0], last)
        out = tensors[0].new_empty(len(tensors), *layout.shape, dtype=dtype)
        kernels = self._kernels(weights[0], layout, tensors)
        if kernels is not None and out.dtype in (torch.float32, torch.bfloat16):
            kernels.stack(self._address(kernels, tensors), out)
            return out
        views = _permute(tensors, layout)
        copy_all([matrix.view(views[0].shape) for matrix in out.unbind()], views)
        return out

    def unstack(self, weights: Sequence[Tensor], matrices: Tensor, tensors: Sequence[Tensor], *, last: bool) -> None:
        """Write a stack of matrices back to the tensors that :meth:`stack` read."""
        views = _permute(tensors, self._layout(weights[0], last))
        copy_all(views, [matrix.reshape(views[0].shape) for matrix in matrices.unbind()])

    def update_moments(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor] | Tensor,
        means: Sequence[Tensor],
        squares: Sequence[Tensor] | None = None,
        *,
        last: bool,
        momentum: float,
        nesterov: bool,
        second: float = 0.0,
        eps: float = 0.0,
    ) -> Tensor:
        """Update the running means of gradients and return them; with squares, return Adam's uncorrected direction.

        Args:
            weights: weights of one shape and layout.
            gradients: their gradients, or a stack of matrices made by :meth:`stack`.
            means: running means of the gradients, updated in place.
            squares: running means of the squared gradients, updated in place.
            last: whether the last two dimensions of a weight are a matrix; otherwise it has one row per output.
            momentum: decay of the means.
            nesterov: return the means one step ahead.
            second: decay of the squares.
            eps: added to the root of the squares.

        Returns:
            A stack with one matrix, or one stack of matrices, per weight.
        """
        layout = self._layout(weights[0], last)
        stacked, apart = (gradients, ()) if isinstance(gradients, Tensor) else (None, gradients)
        read = [*means, *(squares or ()), *apart]
        kernels = self._kernels(weights[0], layout, read)
        if kernels is not None:
            # Adam's directions are bounded, and what follows computes in bfloat16 anyway.
            dtype = torch.float32 if squares is None else torch.bfloat16
            out = weights[0].new_empty(len(weights), *layout.shape, dtype=dtype)
            decays = (momentum, None if squares is None else second)
            kernels.update_moments(self._address(kernels, read), stacked, out, *decays, nesterov=nesterov, eps=eps)
            return out
        means = _permute(means, layout)
        fresh = _permute(apart, layout)
        if stacked is not None:
            fresh = [matrix.reshape(means[0].shape) for matrix in stacked.to(means[0].dtype).unbind()]
        torch._foreach_lerp_(means, fresh, 1 - momentum)
        found = torch._foreach_lerp(fresh, means, momentum) if nesterov else means
        if squares is not None:
            squares = _permute(squares, layout)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, fresh, fresh, 1 - second)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_add_(roots, eps)
            found = torch._foreach_div(found, roots)
        return torch.stack(found).reshape(len(weights), *layout.shape)

    def apply_updates(
        self, weights: Sequence[Tensor], updates: Tensor, scales: Tensor, kept: float | Tensor, *, last: bool
    ) -> None:
        """Apply weight decay, then subtract updates from weights.

        Args:
            weights: weights of one shape and layout.
            updates: stacked as :meth:`update_moments` stacks directions.
            scales: factor for each matrix of updates, with two trailing dimensions of size 1.
            kept: fraction of a weight that weight decay leaves.
            last: as in :meth:`update_moments`.
        """
        weights = list(weights)
        layout = self._layout(weights[0], last)
        kernels = self._kernels(weights[0], layout, weights)
        if kernels is not None:
            left = kept.to(weights[0]) if isinstance(kept, Tensor) else weights[0].new_full((), kept)
            addresses = self._address(kernels, weights)
            kernels.apply_updates(addresses, updates.contiguous(), scales.contiguous(), left)
            torch.autograd.graph.increment_version(weights)  # autograd does not see what a kernel writes
            return
        views = _permute(weights, layout)
        if isinstance(kept, Tensor) or kept != 1:
            torch._foreach_mul_(views, kept)
        steps = (updates * scales).reshape(len(views), *views[0].shape).to(weights[0].dtype)
        torch._foreach_sub_(views, list(steps.unbind()))

    def _layout(self, weight: Tensor, last: bool) -> _Layout:
        """Return how to view a weight as a matrix, computed once for each shape and strides."""
        key = weight.shape, weight.stride(), last
        if key not in self._layouts:
            usual = tuple(range(weight.dim()))
            in_memory = (0, *sorted(usual[1:], key=weight.stride, reverse=True))
            # A rotation of the smaller side must not depend on the memory layout, so that side keeps its order.
            wide = weight.shape[0] ** 2 <= weight.numel()
            free = self._any_column_order and wide and not last and weight.permute(in_memory).is_contiguous()
            order = in_memory if free else usual
            shape = tuple(weight.shape[dim] for dim in order)
            shape = shape if last else (shape[0], math.prod(shape[1:]))
            dense = weight.permute(order).is_contiguous()
            self._layouts[key] = _Layout(None if order == usual else order, shape, dense)
        return self._layouts[key]

    def _kernels(self, weight: Tensor, layout: _Layout, tensors: Sequence[Tensor]) -> ModuleType | None:
        """Return the kernels if they support these tensors and their memory layout, else None."""
        if weight.device.type != "cuda" or not (self._any_column_order and layout.dense and weight.numel() < 2**31):
            return None
        kind = (weight.stride(), torch.float32, weight.device)
        fit = all(map(_is_plain, tensors)) and all((each.stride(), each.dtype, each.device) == kind for each in tensors)
        aligned = fit and all(each.data_ptr() % _ALIGNMENT == 0 for each in tensors)
        return _load_kernels(weight.device) if aligned else None

    def _address(self, kernels: ModuleType, tensors: Sequence[Tensor]) -> Tensor:
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key not in self._addresses:
            found: Tensor = kernels.addresses(tensors)
            if len(self._addresses) == _MAX_ADDRESSES:
                return found
            self._addresses[key] = found
        return self._addresses[key]


def scale_matrices(matrices: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply each matrix of a stack by a number and return the result in a given dtype.

    Args:
        matrices: the stack.
        scales: factors, with two trailing dimensions of size 1.
        dtype: dtype of the result.
    """
    out = torch.empty_like(matrices, dtype=dtype)
    fit = {matrices.dtype, dtype} <= {torch.float32, torch.bfloat16} and matrices.is_contiguous() and matrices.numel()
    kernels = _load_kernels(matrices.device) if fit and _is_plain(matrices) else None
    if kernels is None:
        return torch.mul(matrices, scales, out=out)
    kernels.scale(matrices, scales.float().contiguous(), out)
    return out


def _permute(tensors: Sequence[Tensor], layout: _Layout) -> list[Tensor]:
    return list(tensors) if layout.order is None else [tensor.permute(layout.order) for tensor in tensors]


def _is_plain(tensor: Tensor) -> bool:
    """Return True for an ordinary tensor on a GPU, outside ``torch.compile``."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cuda"
    return plain and not torch.compiler.is_compiling()


@functools.cache
def _load_kernels(device: torch.device) -> ModuleType | None:
    """Import the kernels; return None if they do not work on the device."""
    try:
        from egop.optim import kernels

        kernels.check(device)
    except Exception as error:  # any error: no Triton, no compiler, an old GPU
        _logger.info("Steps of egop.optim are slower on %s because Triton does not work here (%s).", device, error)
        return None
    return kernels
