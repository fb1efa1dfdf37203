"""Check that the inner optimizers can use the state and settings in a state dict."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.optimizer.checks import complete_hyperparameters, is_own_or_torch
from egop.optimizer.inner import BaseOptimizer, Group, InnerOptimizers
from egop.optimizer.moments import is_known_name

_COUNT = "step"  # by convention the number of steps, in torch and elsewhere


def check_settings(
    base: BaseOptimizer, groups: Sequence[Group], current: Sequence[Group], inner: InnerOptimizers
) -> None:
    """Raise ValueError for hyper-parameters that the inner optimizers could not work with.

    Args:
        base: the classes of the inner optimizers.
        groups: the parameter groups with the loaded hyper-parameters.
        current: the parameter groups of the optimizer, with hyper-parameters that work.
        inner: the optimizers built from ``groups``.
    """
    for index, (group, target) in enumerate(zip(groups, current, strict=True)):
        for key in group.keys() & target.keys() - {"params", "param_names"}:
            optimizer_class, name = base.find_setting(key)
            if not is_own_or_torch(optimizer_class) and name not in inspect.signature(optimizer_class).parameters:
                continue  # a value that the optimizer tracks there, not a hyper-parameter
            if expected := _describe_mismatch(group[key], target[key]):
                raise ValueError(
                    f"Parameter group {index} of the state dict has {key}={group[key]!r:.80}. Must be {expected}."
                )
    for index in range(len(groups)):
        inside, outside = inner.find_groups(index)
        for target in inside:
            _check_accepted(base.optimizer_class, base.hyperparameters, target, index)
        if outside is not None and base.outside_class is not None:
            _check_accepted(base.outside_class, base.outside_options, outside, index)


def _check_accepted(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], group: Mapping[str, Any], index: int
) -> None:
    if not is_own_or_torch(optimizer_class):
        return  # others may reject a value that is valid later in training, such as a learning rate of 0
    known = inspect.signature(optimizer_class).parameters
    settings = {key: value for key, value in group.items() if key in known and key != "params"}
    try:
        complete_hyperparameters(optimizer_class, {}, {**options, **settings})
    except Exception as error:
        raise ValueError(
            f"Parameter group {index} of the state dict has hyper-parameters that {optimizer_class.__name__} "
            f"refuses: {error}"
        ) from error


class StateCheck:
    """A comparison of loaded states with those that fresh inner optimizers keep for small tensors of the same kind.

    The small tensors have at most two entries along each dimension, so this takes little time and memory.

    Args:
        inner: the optimizers, with the loaded hyper-parameters.
        cast: whether the parameters' dtype has changed since the state was saved; torch then casts the state too.
    """

    def __init__(self, inner: InnerOptimizers, *, cast: bool) -> None:
        self._inner, self._cast = inner, cast
        self._groups = inner.map_to_groups()
        self._templates: dict[Any, tuple[Mapping[str, Any], torch.Size] | None] = {}

    def adapt(self, state: Mapping[Any, Any] | None, tensor: Tensor, label: str) -> dict[Any, Any]:
        """Check the loaded state of one tensor and return it with step counts in the optimizer's form.

        Args:
            state: what was loaded; None before the first step.
            tensor: the tensor that the inner optimizer steps.
            label: the block or parameter, for error messages.

        Raises:
            ValueError: if the state does not fit the tensor.
        """
        optimizer, group = self._groups[id(tensor)]
        strict, name = is_own_or_torch(type(optimizer)), type(optimizer).__name__
        template = self._find_template(optimizer, group, tensor, label)
        if state is None or template is None:
            return dict(state or {})
        expected, shape = template
        adapted = dict(state)
        for key, wanted in expected.items():
            if key not in state:
                raise ValueError(f"The state of {label} in the state dict has no '{key}', which {name} keeps.")
            where = f"'{key}' of {label}"
            if isinstance(wanted, Tensor) and wanted.shape == shape and shape.numel() != 1:
                self._check_tensor(state[key], wanted, tensor, where, strict=strict)
            elif is_number(wanted) and (strict or is_number(state[key])):
                adapted[key] = _adapt_number(state[key], wanted, where, is_count=key == _COUNT)
            elif wanted is not None and _kind(state[key]) != _kind(wanted):
                raise ValueError(f"{where} is {_show(state[key])} in the state dict. Must be {_show(wanted)}.")
        for key in state.keys() - expected.keys() if strict else ():
            # Kept under other settings, such as amsgrad=True or a momentum, and no longer used.
            if not is_known_name(key) or not isinstance(state[key], Tensor) or state[key].shape != tensor.shape:
                raise ValueError(f"The state of {label} in the state dict has a '{key}', which {name} does not keep.")
        return adapted

    def _find_template(
        self, optimizer: Optimizer, group: Group, tensor: Tensor, label: str
    ) -> tuple[Mapping[str, Any], torch.Size] | None:
        """Return the state of a small tensor after a step, and its shape; None if the optimizer cannot be tried."""
        shape = torch.Size(min(size, 2) for size in tensor.shape)
        key = id(group), shape, tensor.dtype, tensor.device
        if key not in self._templates:
            try:
                (state,) = self._inner.make_fresh_states([tensor.new_zeros(shape)], optimizer, group, stepped=True)
            except Exception as error:
                if is_own_or_torch(type(optimizer)):
                    raise ValueError(
                        f"{type(optimizer).__name__} cannot step {label} with the hyper-parameters of the state dict: "
                        f"{error}"
                    ) from error
                self._templates[key] = None
            else:
                self._templates[key] = state, shape
        return self._templates[key]

    def _check_tensor(self, value: Any, wanted: Tensor, tensor: Tensor, where: str, *, strict: bool) -> None:
        """Raise ValueError unless the value is a tensor like the stepped one."""
        wanted_text = f"a tensor of shape {tuple(tensor.shape)} and {wanted.dtype}"
        if not isinstance(value, Tensor) or value.layout != wanted.layout:
            raise ValueError(f"{where} is {_show(value)} in the state dict. Must be {wanted_text}.")
        if not strict and value.numel() == 1:
            return  # some classes keep a single zero as long as all entries are zero
        if value.shape != tensor.shape:
            raise ValueError(
                f"{where} has shape {tuple(value.shape)} in the state dict, but {tuple(tensor.shape)} here."
            )
        same = value.is_floating_point() == wanted.is_floating_point() if self._cast else value.dtype == wanted.dtype
        if strict and not same:
            raise ValueError(f"{where} has {value.dtype} in the state dict, but {wanted.dtype} here.")


def is_number(value: Any) -> bool:
    """Return True for a real number or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _adapt_number(value: Any, wanted: Any, where: str, *, is_count: bool) -> Any:
    """Return a number in the wanted form, since older states have counts as plain numbers."""
    if not is_number(value):
        raise ValueError(f"{where} is {_show(value)} in the state dict. Must be a number.")
    if is_count and not 0 <= float(value) < math.inf:
        raise ValueError(f"{where} is {float(value)} in the state dict. Must be zero or a positive number.")
    if not isinstance(wanted, Tensor):
        return value
    if isinstance(value, Tensor):
        return value.detach().to(wanted.dtype).reshape(wanted.shape)
    return torch.full_like(wanted, value)


def _describe_mismatch(value: Any, current: Any) -> str:
    """Say what a hyper-parameter must be if it is of another kind than the current value; return "" if it fits."""
    if isinstance(current, bool):
        return "" if value is None or isinstance(value, bool) else "True or False"
    if is_number(current):
        fits = is_number(value) and (math.isfinite(float(value)) or not math.isfinite(float(current)))
        return "" if fits else "a finite number"
    if isinstance(current, tuple | list) and current and all(map(is_number, current)):
        fits = isinstance(value, tuple | list) and len(value) == len(current)
        if not fits or any(_describe_mismatch(*pair) for pair in zip(value, current, strict=True)):
            return f"{len(current)} finite numbers"
    return ""


def _kind(value: Any) -> str:
    return next((name for name, kind in _KINDS if isinstance(value, kind)), type(value).__name__)


_KINDS = (("tensor", Tensor), ("text", str), ("mapping", Mapping), ("sequence", Sequence))


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.layout).removeprefix('torch.')} tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r:.80}"
