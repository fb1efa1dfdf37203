"""Check that the inner optimizers can use a loaded state, and copy it for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from egop.optimizer.checks import is_own_or_torch
from egop.optimizer.inner import InnerOptimizers
from egop.optimizer.moments import is_known_name

_COUNT = "step"  # by convention the number of steps, in torch and elsewhere


class StateCheck:
    """A comparison of loaded states with those that fresh inner optimizers keep for small tensors of the same kind.

    The small tensors have at most two entries along each dimension, so this takes little time and memory. Only classes
    of torch and egop are compared: others may create state when they first need it.

    Args:
        inner: the optimizers, with the loaded hyper-parameters.
        cast: whether parameters have been cast since the state was saved; their state is then cast too.
    """

    def __init__(self, inner: InnerOptimizers, *, cast: bool) -> None:
        self._inner, self._cast = inner, cast
        self._groups = inner.map_to_groups()
        self._templates: dict[Any, Mapping[str, Any]] = {}

    def adapt(self, state: Mapping[Any, Any], tensor: Tensor, label: str) -> dict[Any, Any]:
        """Return a copy of the state of one tensor, in the precision, layout and place that its optimizer expects.

        Args:
            state: what was loaded; empty before the first step.
            tensor: the tensor that the inner optimizer steps.
            label: the block or parameter, for error messages.

        Raises:
            ValueError: if the state does not fit the tensor.
        """
        optimizer_class = type(self._groups[id(tensor)][0])
        if not state or not is_own_or_torch(optimizer_class):
            return {
                key: tree_map_only(Tensor, functools.partial(self._copy, tensor=tensor, key=key), value)
                for key, value in state.items()
            }
        template, name = self._find_template(tensor), optimizer_class.__name__
        for key in template.keys() - state.keys():
            raise ValueError(f"It has no '{key}' of {label}, which {name} keeps.")
        for key in state.keys() - template.keys():
            if not is_known_name(key):  # others may have been used before a setting was changed
                raise ValueError(f"It has '{key}' of {label}, which {name} does not keep.")
        return {
            key: self._adapt_value(value, template.get(key), tensor, f"'{key}' of {label}", is_count=key == _COUNT)
            for key, value in state.items()
        }

    def _find_template(self, tensor: Tensor) -> Mapping[str, Any]:
        """Return the state of a small tensor after two steps with the loaded hyper-parameters."""
        optimizer, group = self._groups[id(tensor)]
        small = tensor.new_zeros(_shrink(tensor.shape))
        key = id(group), small.shape, small.dtype, small.device
        if key not in self._templates:
            try:
                (self._templates[key],) = self._inner.make_fresh_states([small], optimizer, group, steps=2)
            except Exception as error:
                raise ValueError(
                    f"{type(optimizer).__name__} cannot step with the hyper-parameters of a group: {error}"
                ) from error
        return self._templates[key]

    def _adapt_value(self, value: Any, wanted: Tensor | None, tensor: Tensor, label: str, *, is_count: bool) -> Tensor:
        like = tensor if wanted is None or wanted.shape == _shrink(tensor.shape) else wanted  # a single number
        shape, dtype = like.shape, tensor.dtype if wanted is None else wanted.dtype
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.shape != shape:
            given = f"{value!r:.80}"
            if isinstance(value, Tensor):
                given = f"a {str(value.layout).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
            raise ValueError(f"{label} is {given}. Must be a tensor of shape {tuple(shape)}.")
        if value.dtype != dtype and not (self._cast and value.is_floating_point()):
            raise ValueError(f"{label} has dtype {value.dtype}. Must be {dtype}.")
        if is_count and not 0 <= float(value) < math.inf:
            raise ValueError(f"{label} is {float(value)}. Must be a count.")
        return self._copy(value, tensor, "") if like is tensor else value.to(like, copy=True)

    def _copy(self, value: Tensor, tensor: Tensor, key: Any) -> Tensor:
        if value.shape == tensor.shape:
            # In the memory layout of the parameter, which fused kernels expect.
            dtype = tensor.dtype if self._cast and value.is_floating_point() else value.dtype
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False).copy_(value)
        return value.clone() if key == _COUNT else value.to(tensor.device, copy=True)


def _shrink(shape: torch.Size) -> torch.Size:
    return torch.Size(min(size, 2) for size in shape)
