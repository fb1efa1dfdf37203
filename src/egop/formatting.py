"""Formatting of numbers, names and tables as plain text.

Every package may use this module; it imports nothing from egop.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}


def parse_bytes(size: int | str) -> int:
    """Convert ``"2GiB"``, ``"500 MB"`` or a plain number to bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", size.upper())
        if match and match[2] in _FACTORS:
            return int(float(match[1]) * _FACTORS[match[2]])
    raise ValueError(
        f"Invalid memory value: {size!r}. Must be a whole number of bytes or a text such as '2GiB' or '500MB'."
    )


def format_bytes(size: float) -> str:
    """Format ``24586240000`` as ``"22.9 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def progress_interval() -> float:
    """Return the least seconds between updates of a progress bar: few where they would fill a log file."""
    return 0.1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 10.0


def pluralize(number: int, noun: str) -> str:
    """Format a count of things: "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def list_first(items: Sequence[str], limit: int = 8) -> str:
    """Join the first items with commas and count the rest: "a, b and 3 more"; "none" if there are none."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "") or "none"


def mask_layer_numbers(name: str) -> str:
    """Replace the numbers in a parameter's name: ``layers.3.weight`` becomes ``layers.*.weight``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a plain-text table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def format_line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]).rstrip()

    return "\n".join([format_line(header), "  ".join("-" * width for width in widths), *map(format_line, rows)])
