"""Nested values taken apart into tensors by name and plain values that JSON can hold, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def apart(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """What JSON can hold of a nested value; its tensors are added to a dictionary.

    Tuples, dictionaries (whose keys may be numbers) and tensors become dictionaries of one entry that says what it is.

    Args:
        value: numbers, strings, None, tensors, and lists, tuples and dictionaries of them.
        tensors: where the tensors go, by their paths.
        path: of the value.
    """
    if isinstance(value, Tensor):
        while path in tensors:  # 1 and "1" are two keys
            path += "'"
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(f"{path} has the key {key!r}; in a checkpoint keys are strings or whole numbers.")
        return {"dict": [[key, apart(item, tensors, f"{path}/{key}")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [apart(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}; a checkpoint holds numbers, strings, None, tensors, and lists, tuples "
        "and dictionaries of them."
    )


def together(plain: Any, tensor: Callable[[str], Any]) -> Any:
    """The reverse of :func:`apart`.

    Args:
        plain: what it returned.
        tensor: the tensor of a path.

    Raises:
        LookupError: for what it would not have returned.
    """
    if isinstance(plain, list):
        return [together(item, tensor) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind, inside = next(iter(plain.items()), (None, None))
    if len(plain) == 1:
        if kind == "tensor" and isinstance(inside, str):
            return tensor(inside)
        if kind == "tuple" and isinstance(inside, list):
            return tuple(together(item, tensor) for item in inside)
        if kind == "dict" and isinstance(inside, list) and all(_is_entry(entry) for entry in inside):
            return {key: together(item, tensor) for key, item in inside}
    raise LookupError(f"a value is neither a tensor nor a tuple nor a dictionary, but has the name {str(kind)[:40]!r}")


def _is_entry(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int))
