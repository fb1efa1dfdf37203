"""What lies in nested lists, tuples, mappings and dataclasses, as batches do."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def mapped(structure: Any, found: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """A structure with a function applied to what is found in it; where nothing changes it stays the same object.

    Args:
        structure: lists, tuples, mappings and dataclasses, one in another.
        found: whether the function is to be applied to something; what lies inside that is not looked at.
        function: gives what takes its place.
    """
    if found(structure):
        return function(structure)
    parts = _parts(structure)
    changed = {key: mapped(value, found, function) for key, value in parts.items()}
    if all(changed[key] is value for key, value in parts.items()):
        return structure
    return _with(structure, changed)


def moved(batches: Iterable[Any], device: torch.device | None, dtype: torch.dtype | None) -> list[Any]:
    """Batches with their tensors on a device, floating ones in a precision; what comes twice is moved once.

    Args:
        batches: tensors, and whatever else has a method ``to``, in nested structures.
        device: where to; None leaves them where they are.
        dtype: of floating tensors; None leaves them as they are.
    """

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        # A copy, because some change themselves.
        return copy.copy(value).to(device) if device is not None and device.type != "cpu" else value

    batches = list(batches)
    results: dict[int, Any] = {}
    for batch in batches:
        if id(batch) not in results:
            results[id(batch)] = mapped(batch, _is_movable, move)
    return [results[id(batch)] for batch in batches]


def _is_movable(value: Any) -> bool:
    return isinstance(value, Tensor) or (callable(getattr(value, "to", None)) and not isinstance(value, Mapping))


def _parts(structure: Any) -> dict[Any, Any]:
    if isinstance(structure, Mapping):
        return dict(structure)
    if isinstance(structure, (list, tuple)):
        return dict(enumerate(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        return {field.name: getattr(structure, field.name) for field in dataclasses.fields(structure)}
    return {}


def _with(structure: Any, parts: dict[Any, Any]) -> Any:
    """A structure of the same kind with these parts."""
    if isinstance(structure, MutableMapping):
        result: Any = copy.copy(structure)  # with whatever else it has: a default, the encodings of a tokenizer
        for key, value in parts.items():
            result[key] = value
        return result
    if isinstance(structure, Mapping):
        return type(structure)(parts)  # type: ignore[call-arg]
    if isinstance(structure, (list, tuple)):
        kind: Any = type(structure)
        return kind(*parts.values()) if hasattr(structure, "_fields") else kind(parts.values())
    result = copy.copy(structure)
    for name, value in parts.items():
        object.__setattr__(result, name, value)  # also where it is frozen
    return result
