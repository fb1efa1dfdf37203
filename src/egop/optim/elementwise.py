"""The elementwise parts of a step: update moments, apply updates to weights.

On a GPU each is one pass over memory, by the kernels of :mod:`egop.optim.kernels`. Where the kernels cannot be used,
torch's own operations do the same in many.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger("egop")

_PLAIN = (Tensor, torch.nn.Parameter)
_ALIGNMENT = 16  # bytes; kernels need tensors whose addresses are multiples of this
_MAX_ADDRESSES = 256  # lists of addresses to keep; the steps of a network reuse a few


class MatrixStack:
    """Weights of one shape and memory layout, viewed as a stack of matrices that are stepped together.

    Args:
        weights: the weights.
        group: their settings. If ``matrices_last``, the last two dimensions of a weight are a matrix; otherwise it is a
            matrix with one row per output.
        any_column_order: whether permuting the columns of a matrix merely permutes those of its update. Convolutions
            are then read in the order of their entries in memory, and GPU kernels are used.

    Attributes:
        gradients: the gradients of the weights in this step.
        states: their states.
        shape: shape of a weight as a matrix, or as a stack of matrices.
        bases: in a step in rotated coordinates, stacked bases of the smaller sides of the matrices.
        bases_layout: layout of the bases, by which they are stacked.
    """

    def __init__(self, weights: Sequence[Tensor], group: Mapping[str, Any], *, any_column_order: bool) -> None:
        self.weights, self.group = list(weights), group
        self.gradients: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []
        self.bases: Tensor | None = None
        self.bases_layout: MatrixStack | None = None
        weight, last = weights[0], group["matrices_last"]
        usual = tuple(range(weight.dim()))
        in_memory = (0, *sorted(usual[1:], key=weight.stride, reverse=True))
        # A rotation of the smaller side must not depend on the memory layout, so that side keeps its order.
        wide = weight.shape[0] ** 2 < weight.numel()
        free = any_column_order and wide and not last and weight.permute(in_memory).is_contiguous()
        order = in_memory if free else usual
        shape = tuple(weight.shape[dim] for dim in order)
        self.shape = shape if last else (shape[0], math.prod(shape[1:]))
        self._order = None if order == usual else order
        self._tensor_shape = None if shape == self.shape else shape  # of a weight in that order
        dense = weight.permute(order).is_contiguous()
        self._fits_kernels = any_column_order and weight.is_cuda and dense and weight.numel() < 2**31
        self._addresses: dict[tuple[int, ...], Tensor] = {}  # kept alive: CUDA graphs read them

    def get_state(self, name: str) -> list[Tensor]:
        """Return the state tensors with this name, initialized to zero."""
        for weight, state in zip(self.weights, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [state[name] for state in self.states]

    def stack(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Stack gradients or state of weights as matrices, by default in their own dtype."""
        kernels = self._fits_kernels and self._find_kernels(tensors)
        if kernels and dtype in (None, torch.float32, torch.bfloat16):
            out = tensors[0].new_empty(len(tensors), *self.shape, dtype=dtype)
            kernels.stack(self._address(kernels, tensors), out)
            return out
        matrices = torch.cat(self._permute(tensors)).reshape(len(tensors), *self.shape)
        return matrices if dtype is None else matrices.to(dtype)

    def unstack(self, matrices: Tensor, tensors: list[Tensor]) -> None:
        """Write a stack of matrices back to the tensors that :meth:`stack` read."""
        if self._tensor_shape is not None:
            matrices = matrices.reshape(len(tensors), *self._tensor_shape)
        if matrices.is_cuda:
            torch._foreach_copy_(self._permute(tensors), matrices.unbind())
        else:  # this is faster for small matrices
            torch.unbind_copy(matrices, out=self._permute(tensors))

    def update_moments(
        self,
        gradients: list[Tensor] | Tensor,
        means: list[Tensor],
        squares: list[Tensor] | None = None,
        *,
        momentum: float,
        nesterov: bool,
        second: float = 0.0,
        eps: float = 0.0,
    ) -> Tensor:
        """Update the running means of gradients and return them; with squares, return Adam's uncorrected direction.

        Args:
            gradients: the gradients, or a stack of matrices made by :meth:`stack`.
            means: running means of the gradients, updated in place.
            squares: running means of the squared gradients, updated in place.
            momentum: decay of the means.
            nesterov: return the means one step ahead.
            second: decay of the squares.
            eps: added to the root of the squares.

        Returns:
            A stack with one matrix, or one stack of matrices, per weight.
        """
        stacked, apart = (gradients, []) if isinstance(gradients, Tensor) else (None, gradients)
        moments = [*means, *(squares or ())]
        kernels = self._fits_kernels and self._find_kernels([*moments, *apart])
        if kernels:
            # Adam's directions are bounded, and what follows computes in bfloat16 anyway.
            dtype = torch.float32 if squares is None else torch.bfloat16
            out = means[0].new_empty(len(means), *self.shape, dtype=dtype)
            addresses = self._address(kernels, [*moments, *apart])
            decays = (momentum, None if squares is None else second)
            kernels.update_moments(addresses, stacked, out, *decays, nesterov=nesterov, eps=eps)
            return out
        fresh = self.stack(apart) if stacked is None else stacked.to(means[0].dtype)
        updated = self.stack(moments)
        mean = updated[: len(means)].lerp_(fresh, 1 - momentum)
        found = torch.lerp(fresh, mean, momentum) if nesterov else mean.clone()
        if squares is not None:
            square = updated[len(means) :].mul_(second).addcmul_(fresh, fresh, value=1 - second)
            found.div_(square.sqrt().add_(eps))
        self.unstack(updated, moments)
        return found

    def apply_updates(self, updates: Tensor, scales: Tensor, kept: float | Tensor) -> None:
        """Multiply the weights by ``kept``, then subtract the stacked updates, each matrix times its scale."""
        weights = self.weights
        kernels = self._fits_kernels and self._find_kernels(weights)
        if kernels:
            left = kept.to(weights[0]) if isinstance(kept, Tensor) else weights[0].new_full((), kept)
            kernels.apply_updates(self._address(kernels, weights), updates.contiguous(), scales.contiguous(), left)
            torch.autograd.graph.increment_version(weights)  # autograd does not see what a kernel writes
            return
        matrices = self.stack(weights)
        if isinstance(kept, Tensor) or kept != 1:
            matrices.mul_(kept)
        self.unstack(matrices.sub_((updates * scales).to(matrices.dtype)), weights)

    def _permute(self, tensors: list[Tensor]) -> list[Tensor]:
        order = self._order
        return tensors if order is None else [tensor.permute(order) for tensor in tensors]

    def _find_kernels(self, tensors: Sequence[Tensor]) -> ModuleType | None:
        """Return the kernels if they support these tensors, else None."""
        weight = self.weights[0]
        kind = (weight.stride(), torch.float32, weight.device)
        fit = not torch.compiler.is_compiling() and all(
            type(each) in _PLAIN and (each.stride(), each.dtype, each.device) == kind for each in tensors
        )
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
