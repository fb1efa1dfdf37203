"""Tables of the benchmark's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from egop_lab.formatting import format_bytes, format_table

Row = Mapping[str, Any]
Format = Callable[[Any], str]


def format_duration(seconds: float) -> str:
    """Format ``0.00123`` as ``"1.23 ms"``."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _rate(value: float) -> str:
    return f"{value:.0f}/s" if value >= 10 else f"{value:.2g}/s"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _words(*keys: str) -> list[tuple[str, str, Format]]:
    return [(key, key, str) for key in keys]


# Title and columns (heading, key, formatter) of each part of the benchmark.
COLUMNS: dict[str, tuple[str, list[tuple[str, str, Format]]]] = {
    "sampling": (
        "Gradient samples a second",
        [
            *_words("network", "rho"),
            ("loop", "loop", _rate),
            ("vmapped", "vmap", _rate),
            ("ratio", "vmap over loop", _ratio),
        ],
    ),
    "bases": (
        "Time and memory to a basis",
        [
            *_words("network", "structure", "samples"),
            ("time", "seconds", format_duration),
            ("sampling", "sampling", _share),
            ("accumulation", "accumulation", _share),
            ("decomposition", "decomposition", _share),
            ("basis", "basis bytes", format_bytes),
            ("peak", "peak bytes", format_bytes),
        ],
    ),
    "steps": (
        "Optimizer step and whole training step",
        [
            *_words("network", "method"),
            ("step", "step", format_duration),
            ("/ AdamW", "step over AdamW", _ratio),
            ("longest", "longest step", format_duration),
            ("floor", "floor", format_duration),
            ("/ floor", "step over floor", _ratio),
            ("SOAP /", "SOAP over step", _ratio),
            ("whole", "whole", format_duration),
            ("/ AdamW", "whole over AdamW", _ratio),
        ],
    ),
    "host": (
        "Host time of a step on seven small linear layers, one CPU thread",
        [
            *_words("method"),
            ("step", "step", format_duration),
            ("/ AdamW", "step over AdamW", _ratio),
            ("over the rounds", "range", str),
            ("own calls", "calls", str),
            ("files", "files", str),
            ("frames", "frames", str),
        ],
    ),
    "epoch": (
        "A whole epoch",
        [
            *_words("network", "form", "method"),
            ("epoch", "epoch", format_duration),
            ("/ AdamW", "epoch over AdamW", _ratio),
        ],
    ),
    "growth": (
        "How cost grows",
        [
            ("twice the", "what", str),
            *_words("of", "size"),
            ("time", "seconds", format_duration),
            ("growth", "growth", _ratio),
        ],
    ),
    "sweep": (
        "The digits sweep: seconds a run and epoch",
        [
            *_words("coordinates", "runs"),
            ("together", "together", format_duration),
            ("one at a time", "one at a time", format_duration),
            ("(batched code)", "one at a time, in the batched programme", format_duration),
            ("speed-up", "speed-up", _ratio),
        ],
    ),
}


def format_rows(part: str, rows: Sequence[Row]) -> str:
    """Format the rows of one part, with failures and omissions below."""
    title, columns = COLUMNS[part]
    shown = [row for row in rows if "note" not in row]
    cells = [
        ["" if row.get(key) is None else write(row[key]) for _, key, write in columns]
        for row in shown
        if "failed" not in row or any(write is not str and row.get(key) is not None for _, key, write in columns)
    ]
    names = [key for _, key, write in columns if write is str]
    lines = [title, "", format_table([heading for heading, _, _ in columns], cells)] if cells else [title]
    for row in shown:
        if "failed" in row:
            lines.append(f"failed: {', '.join(str(row[name]) for name in names if name in row)}: {row['failed']}")
    return "\n".join([*lines, *dict.fromkeys(row["note"] for row in rows if "note" in row)])


def format_targets(judged: Sequence[Row]) -> str:
    """Format the targets: wanted and measured."""
    lines = ["Targets", ""]
    for row in judged:
        measured = "" if row["measured"] is None else f"measured {row['measured']:.3g}, "
        lines.append(f"{row['words']}, {row['target']}: {measured}{row['verdict']}")
    return "\n".join(lines)
