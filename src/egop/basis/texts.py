"""JSON from files that may be damaged, or made by someone who means harm: whatever is wrong is a ``ValueError``."""

from __future__ import annotations

import json
from typing import Any

# What walks through such values calls itself for each level: nothing that is saved comes near this.
DEEPEST = 100
_LARGEST = 2**60  # more entries than any tensor has, and far from where torch's own numbers overflow


def write_json(value: Any) -> str:
    """The text of a value; one that :func:`read_json` would refuse is refused here."""
    _check_depth(value)
    return json.dumps(value)


def read_json(text: str | bytes) -> Any:
    """The value of a text: every name in it once, and not nested too deeply."""
    try:
        value = json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError(f"its text is nested more than {DEEPEST} levels deep") from None
    _check_depth(value)
    return value


def record(value: Any, what: str, *wanted: str) -> dict[str, Any]:
    """A dictionary that has at least these names."""
    if not isinstance(value, dict) or any(name not in value for name in wanted):
        raise ValueError(f"{what} is not a record of {', '.join(wanted)}: {_shown(value)}")
    return value


def strings(value: Any, what: str) -> list[str]:
    """A list of strings."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} is not a list of strings: {_shown(value)}")
    return value


def whole_numbers(value: Any, what: str) -> list[int]:
    """A list of whole numbers, such as a shape: none is negative, and their product is one that a tensor can have."""
    fine = isinstance(value, list) and all(type(number) is int and 0 <= number < _LARGEST for number in value)
    if fine:
        product = 1
        for number in value:
            product *= max(1, number)
            fine = fine and product < _LARGEST
    if not fine:
        raise ValueError(f"{what} is not a list of whole numbers of a tensor's size: {_shown(value)}")
    numbers: list[int] = value
    return numbers


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its text has one name twice in one place")
    return entries


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list, tuple))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"its text is nested more than {DEEPEST} levels deep")


def _shown(value: Any) -> str:
    """The beginning of a value's text, which may be of any length and depth."""
    return str(json.dumps(value)[:80]) if not isinstance(value, str) else repr(value[:80])
