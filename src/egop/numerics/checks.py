"""Checks of hyper-parameters, with the same messages everywhere."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def check_number(name: str, value: Any) -> None:
    """Raise TypeError for what is not a number, such as text, which is how YAML reads ``1e-3``."""
    if isinstance(value, str):
        raise TypeError(
            f"{name} must be a number, got str {value!r}. Write float({value!r}), or 1.0e-3 instead of 1e-3 in YAML."
        )
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise TypeError(f"{name} must be a number, got a tensor of shape {tuple(value.shape)}.")
    elif not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {'None' if value is None else type(value).__name__}.")


def check_positive_int(name: str, value: Any) -> None:
    """Raise ValueError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Invalid {name} value: {value!r}. Must be a whole number of at least 1.")


def check_fraction(name: str, value: Any) -> None:
    """Raise ValueError unless 0 <= value < 1."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"Invalid {name} value: {value}. Must be at least 0 and below 1.")


def check_nonnegative(name: str, value: Any) -> None:
    """Raise ValueError unless 0 <= value < infinity."""
    check_number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"Invalid {name} value: {value}. Must be zero or a positive number.")
