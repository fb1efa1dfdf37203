"""Tables of the benchmark's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from egop_lab.formatting import format_bytes, format_table

Row = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]  # heading, key, formatter


def format_duration(seconds: float) -> str:
    """Format ``0.00123`` as ``"1.23 ms"``."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _format_ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _as_text(*keys: str) -> list[Column]:
    return [(key, key, str) for key in keys]


# Title and columns of each part of the benchmark.
COLUMNS: dict[str, tuple[str, list[Column]]] = {
    "bases": (
        "Time and memory to a basis",
        [
            *_as_text("network", "structure", "samples"),
            ("time", "seconds", format_duration),
            ("basis", "basis bytes", format_bytes),
            ("peak", "peak bytes", format_bytes),
        ],
    ),
    "steps": (
        "Optimizer step and whole training step",
        [
            *_as_text("network", "method"),
            ("step", "step", format_duration),
            ("/ AdamW", "step over AdamW", _format_ratio),
            ("longest", "longest", format_duration),
            ("whole", "whole", format_duration),
            ("/ AdamW", "whole over AdamW", _format_ratio),
        ],
    ),
    "host": (
        "Host time of a step on seven small linear layers, one CPU thread",
        [
            *_as_text("method"),
            ("step", "step", format_duration),
            ("/ AdamW", "step over AdamW", _format_ratio),
            ("over the rounds", "range", str),
            ("target", "target", str),
            ("own calls", "calls", str),
            ("files", "files", str),
            ("frames", "frames", str),
        ],
    ),
}


def format_rows(part: str, rows: Sequence[Row]) -> str:
    """Format the rows of one part, with failures below."""
    title, columns = COLUMNS[part]
    cells = [
        ["" if row.get(key) is None else write(row[key]) for _, key, write in columns]
        for row in rows
        if "failed" not in row
    ]
    lines = [title, "", format_table([heading for heading, _, _ in columns], cells)] if cells else [title]
    for row in rows:
        if "failed" in row:
            names = [str(row[key]) for key in ("network", "structure", "method") if key in row]
            lines.append(f"failed: {', '.join([*names, row['failed']])}")
    return "\n".join(lines)
