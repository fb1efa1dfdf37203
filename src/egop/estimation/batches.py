"""Batches as nested containers of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to each leaf of nested containers; return the same object if no leaf changes.

    Containers are those that ``torch.utils._pytree`` knows, other mutable mappings (such as a tokenizer's encodings)
    and dataclasses.
    """
    leaves, spec = pytree.tree_flatten(structure, is_leaf=_can_move)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return structure
    return pytree.tree_unflatten(mapped, spec)


def move_batches(batches: Iterable[Any], device: torch.device | None, dtype: torch.dtype | None) -> list[Any]:
    """Move batches to a device, and their floating-point tensors to a dtype. Move a repeated batch only once.

    Args:
        batches: nested containers of tensors and other objects that have a ``to`` method.
        device: the target device; None leaves everything in place.
        dtype: the dtype of floating-point tensors; None leaves them as they are.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)
        if device is None or device.type == "cpu" or not _can_move(leaf):
            return leaf
        return copy.copy(leaf).to(device)  # a copy, because some objects move in place

    batches = list(batches)
    moved: dict[int, Any] = {}
    for batch in batches:
        if id(batch) not in moved:
            moved[id(batch)] = map_leaves(move, batch)
    return [moved[id(batch)] for batch in batches]


def _can_move(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, Mapping)


def _map_leaf(function: Callable[[Any], Any], leaf: Any) -> Any:
    mapped = function(leaf)
    if mapped is not leaf:
        return mapped
    if isinstance(leaf, MutableMapping):
        parts = dict(leaf)
    elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    else:
        return leaf
    mapped_parts = map_leaves(function, parts)
    if mapped_parts is parts:
        return leaf
    result = copy.copy(leaf)
    if isinstance(result, MutableMapping):
        result.update(mapped_parts)
    else:
        for name, value in mapped_parts.items():
            object.__setattr__(result, name, value)  # even if the dataclass is frozen
    return result
