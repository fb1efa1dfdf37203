"""Settings that are out of their range, said in one way."""

from __future__ import annotations

import math
from typing import Any


def check_positive(name: str, value: Any) -> None:
    """Raise an error for what is not a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"Invalid {name} value: {value!r}. Must be a whole number of at least 1.")


def check_not_text(name: str, value: Any) -> None:
    """Raise an error for text in the place of a number, which YAML makes of 1e-3."""
    if isinstance(value, str):
        raise TypeError(
            f"{name} must be a number, got str {value!r}. Write float({value!r}), or 1.0e-3 instead of 1e-3 in YAML."
        )


def check_fraction(name: str, value: Any) -> None:
    """Raise an error for what is not at least 0 and below 1, such as the decay of a running mean."""
    check_not_text(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"Invalid {name} value: {value}. Must be at least 0 and below 1.")


def check_not_negative(name: str, value: Any) -> None:
    """Raise an error for what is negative, or not a finite number."""
    check_not_text(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"Invalid {name} value: {value}. Must be zero or a positive number.")
