"""Check that the inner optimizers can use the state and settings in a state dict, and copy the state for them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from egop.optimizer.checks import complete_hyperparameters, is_own_or_torch
from egop.optimizer.inner import BaseOptimizer, Group, InnerOptimizers
from egop.optimizer.moments import is_known_name

_COUNT = "step"  # by convention the number of steps, in torch and elsewhere


def check_settings(base: BaseOptimizer, inner: InnerOptimizers) -> None:
    """Raise ValueError for loaded hyper-parameters that the inner optimizers' classes refuse.

    Classes of other packages are not asked: they may refuse a value that is valid later in training, such as a learning
    rate of 0.
    """
    for optimizer in filter(_is_known, inner.optimizers):
        optimizer_class = type(optimizer)
        known = inspect.signature(optimizer_class).parameters
        options = base.outside_options if optimizer is inner.outside else base.hyperparameters
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key in known and key != "params"}
            for key in settings.keys() & optimizer.defaults.keys():
                if _is_number(optimizer.defaults[key]) and not _is_number(settings[key]):
                    raise ValueError(f"Its parameter group {index} has {key}={settings[key]!r:.80}. Must be a number.")
            try:
                complete_hyperparameters(optimizer_class, {}, {**options, **settings})
            except Exception as error:
                raise ValueError(
                    f"Its parameter group {index} has hyper-parameters that {optimizer_class.__name__} refuses: {error}"
                ) from error


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
        optimizer, group = self._groups[id(tensor)]
        if not state or not _is_known(optimizer):
            return {
                key: tree_map_only(Tensor, functools.partial(self._copy, tensor=tensor, key=key), value)
                for key, value in state.items()
            }
        shape = torch.Size(min(size, 2) for size in tensor.shape)
        template, name = self._find_template(optimizer, group, tensor, shape), type(optimizer).__name__
        for key in template.keys() - state.keys():
            raise ValueError(f"It has no '{key}' of {label}, which {name} keeps.")
        adapted = {}
        for key, value in state.items():
            where, wanted = f"'{key}' of {label}", template.get(key)
            if _is_number(wanted):
                adapted[key] = _adapt_number(value, wanted, where, is_count=key == _COUNT)
            elif isinstance(wanted, Tensor) or (key not in template and is_known_name(key)):  # or no longer used
                adapted[key] = self._adapt_tensor(value, tensor, wanted, where)
            elif key not in template:
                raise ValueError(f"It has {where}, which {name} does not keep.")
            else:
                adapted[key] = value
        return adapted

    def _find_template(
        self, optimizer: Optimizer, group: Group, tensor: Tensor, shape: torch.Size
    ) -> Mapping[str, Any]:
        """Return the state of a small tensor after a step."""
        key = id(group), shape, tensor.dtype, tensor.device
        if key not in self._templates:
            fresh = self._inner.make_fresh_states([tensor.new_zeros(shape)], optimizer, group, stepped=True)
            self._templates[key] = fresh[0]
        return self._templates[key]

    def _adapt_tensor(self, value: Any, tensor: Tensor, wanted: Tensor | None, where: str) -> Tensor:
        dtype = tensor.dtype if wanted is None else wanted.dtype
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.shape != tensor.shape:
            raise ValueError(f"{where} is {_show(value)}. Must be a tensor of shape {tuple(tensor.shape)}.")
        if value.dtype != dtype and not (self._cast and value.is_floating_point()):
            raise ValueError(f"{where} is {_show(value)}. Must be of {dtype}.")
        return self._copy(value, tensor, "")

    def _copy(self, value: Tensor, tensor: Tensor, key: Any) -> Tensor:
        if value.shape == tensor.shape:
            # In the memory layout of the parameter, which fused kernels expect.
            dtype = tensor.dtype if self._cast and value.is_floating_point() else value.dtype
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False).copy_(value)
        return value.clone() if key == _COUNT else value.to(tensor.device, copy=True)


def _is_known(optimizer: Optimizer) -> bool:
    return is_own_or_torch(type(optimizer))


def _is_number(value: Any) -> bool:
    """Return True for a real number or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _adapt_number(value: Any, wanted: Any, where: str, *, is_count: bool) -> Any:
    """Return a number in the wanted form, since older states have counts as plain numbers."""
    if not _is_number(value) or (is_count and not 0 <= float(value) < math.inf):
        raise ValueError(f"{where} is {_show(value)}. Must be {'a count' if is_count else 'a number'}.")
    if not isinstance(wanted, Tensor):
        return value
    if isinstance(value, Tensor):
        return value.detach().to(wanted, copy=True).reshape(wanted.shape)
    return torch.full_like(wanted, value)


def _show(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a {str(value.layout).removeprefix('torch.')} tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r:.80}"
