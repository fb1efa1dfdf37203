"""What a step does entry by entry: take gradients in, scale matrices, and take updates off the weights.

On a GPU each is one pass over memory, by the kernels of :mod:`egop.optim.kernels`. Elsewhere, and where these cannot be
used, they are torch's own operations, eighteen in all, each of which is a pass.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

_logger = logging.getLogger("egop")

_ALIGNED = 16  # bytes: at multiples of these a kernel's tensors begin
_KEPT = 256  # so many lists of addresses; those of a network's steps are few, and the same again and again


class Entries:
    """Takes in gradients and takes off updates, for weights of one shape as a stack of matrices.

    Args:
        any_order: whether what is done to a matrix is the same in whatever order its columns are. Kernels of
            convolutions are then taken as they lie in memory, and GPU kernels are used.
    """

    def __init__(self, *, any_order: bool) -> None:
        self._any_order = any_order
        self._addresses: dict[tuple[int, ...], Tensor] = {}  # recordings have them in them, so they stay

    def take_in(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor] | None = None,
        *,
        last: bool,
        momentum: float,
        nesterov: bool,
        second: float = 0.0,
        eps: float = 0.0,
    ) -> Tensor:
        """The running means of gradients, these taken in; with squares Adam's direction without its corrections.

        Args:
            weights: of one shape and layout.
            gradients: theirs.
            means: of these, so far.
            squares: running means of the gradients' squares, if wanted.
            last: whether a weight is a stack of matrices, its last two dimensions, and not one with a row an output.
            momentum: decay of the means.
            nesterov: look a step ahead.
            second: decay of the squares.
            eps: added to their root.

        Returns:
            A stack of what each weight has: a matrix, or a stack of matrices.
        """
        order = self._order(weights[0], last)
        read = [*gradients, *means, *(squares or ())]
        kernels = self._kernels(weights[0], order, read)
        if kernels is not None:
            out = weights[0].new_empty(len(weights), *_shape(weights[0], order, last))
            decays = (momentum, None if squares is None else second)
            kernels.take_in(self._at(kernels, read), out, *decays, nesterov=nesterov, eps=eps)
            return out
        gradients, means = list(gradients), list(means)
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        found = torch._foreach_lerp(gradients, means, momentum) if nesterov else means
        if squares is not None:
            squares = list(squares)
            torch._foreach_mul_(squares, second)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
            roots = torch._foreach_sqrt(squares)
            torch._foreach_add_(roots, eps)
            found = torch._foreach_div(found, roots)
        stacked = torch.stack([each.permute(order) for each in found])
        return stacked.reshape(len(stacked), *_shape(weights[0], order, last))

    def take_off(
        self, weights: Sequence[Tensor], updates: Tensor, scales: Tensor, kept: float | Tensor, *, last: bool
    ) -> None:
        """Take updates off weights, after these have decayed.

        Args:
            weights: of one shape and layout.
            updates: as :meth:`take_in` stacks what they come from.
            scales: what each matrix of them is multiplied by, with two dimensions of 1 for those of the matrix.
            kept: what weight decay leaves of a weight.
            last: as there.
        """
        weights = list(weights)
        order = self._order(weights[0], last)
        kernels = self._kernels(weights[0], order, weights)
        if kernels is not None:
            left = kept.to(weights[0]) if isinstance(kept, Tensor) else weights[0].new_full((), kept)
            kernels.take_off(self._at(kernels, weights), updates.contiguous(), scales.contiguous(), left)
            torch.autograd.graph.increment_version(weights)  # which autograd does not see
            return
        views = [weight.permute(order) for weight in weights]
        if isinstance(kept, Tensor) or kept != 1:
            torch._foreach_mul_(views, kept)
        steps = (updates * scales).reshape(len(views), *views[0].shape).to(weights[0].dtype)
        torch._foreach_sub_(views, list(steps.unbind()))

    def _order(self, weight: Tensor, last: bool) -> tuple[int, ...]:
        """That of dimensions in which a weight is seen as matrices."""
        usual = tuple(range(weight.dim()))
        in_memory = (0, *sorted(usual[1:], key=weight.stride, reverse=True))
        free = self._any_order and not last and weight.permute(in_memory).is_contiguous()
        return in_memory if free else usual

    def _kernels(self, weight: Tensor, order: tuple[int, ...], tensors: Sequence[Tensor]) -> ModuleType | None:
        """Those that can work on tensors as they lie in memory; None if there are none."""
        dense = weight.permute(order).is_contiguous() and weight.numel() < 2**31
        if not (self._any_order and dense and all(map(_is_plain, tensors))):
            return None
        kind = (weight.stride(), torch.float32, weight.device)
        fit = all((each.stride(), each.dtype, each.device) == kind for each in tensors)
        return _working(weight.device) if fit and all(each.data_ptr() % _ALIGNED == 0 for each in tensors) else None

    def _at(self, kernels: ModuleType, tensors: Sequence[Tensor]) -> Tensor:
        """Where tensors are, for a kernel."""
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key not in self._addresses:
            found: Tensor = kernels.addresses(tensors)
            if len(self._addresses) == _KEPT:
                return found
            self._addresses[key] = found
        return self._addresses[key]


def scaled(matrices: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Each of some matrices multiplied by a number, in a precision that may be another one.

    Args:
        matrices: a stack.
        scales: with two dimensions of 1 for those of the matrices.
        dtype: of what is returned.
    """
    out = torch.empty_like(matrices, dtype=dtype)
    ours = {matrices.dtype, dtype} <= {torch.float32, torch.bfloat16} and matrices.is_contiguous() and matrices.numel()
    kernels = _working(matrices.device) if ours and _is_plain(matrices) else None
    if kernels is None:
        return torch.mul(matrices, scales, out=out)
    kernels.scale(matrices, scales.float().contiguous(), out)
    return out


def _shape(weight: Tensor, order: Sequence[int], last: bool) -> tuple[int, ...]:
    """That of a weight as a matrix, or as a stack of them."""
    shape = tuple(weight.shape[dim] for dim in order)
    return shape if last else (shape[0], math.prod(shape[1:]))


def _is_plain(tensor: Tensor) -> bool:
    """Whether there is nothing to a tensor but memory on a GPU."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cuda"
    return plain and not torch.compiler.is_compiling()


@functools.cache
def _working(device: torch.device) -> ModuleType | None:
    """The kernels, if they work on a device."""
    try:
        from egop.optim import kernels

        kernels.check(device)
    except Exception as error:  # of many kinds: no Triton, no compiler, an old GPU
        _logger.info("The steps of egop.optim take longer on %s: Triton does not work here (%s).", device, error)
        return None
    return kernels
