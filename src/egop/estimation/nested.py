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

    def move(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.to(device=device, dtype=dtype if each.is_floating_point() else None)
        # A copy, because some change themselves.
        return copy.copy(each).to(device) if device is not None and device.type != "cpu" else each

    batches = list(batches)
    found: dict[int, Any] = {}
    for batch in batches:
        if id(batch) not in found:
            found[id(batch)] = mapped(batch, _is_movable, move)
    return [found[id(batch)] for batch in batches]


def _is_movable(each: Any) -> bool:
    return isinstance(each, Tensor) or (callable(getattr(each, "to", None)) and not isinstance(each, Mapping))


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
        own: Any = copy.copy(structure)  # with whatever else it has: a default, the encodings of a tokenizer
        for key, value in parts.items():
            own[key] = value
        return own
    if isinstance(structure, Mapping):
        return type(structure)(parts)  # type: ignore[call-arg]
    if isinstance(structure, (list, tuple)):
        kind: Any = type(structure)
        return kind(*parts.values()) if hasattr(structure, "_fields") else kind(parts.values())
    own = copy.copy(structure)
    for name, value in parts.items():
        object.__setattr__(own, name, value)  # also where it is frozen
    return own
