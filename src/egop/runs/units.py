"""Sizes as people write and read them."""

from __future__ import annotations

import re

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", start=1)}


def parse_bytes(size: int | str) -> int:
    """``"2GiB"``, ``"500 MB"`` or a plain number, in bytes."""
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
    """``24586240000`` as ``"22.9 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(count: float) -> str:
    """``16777216`` as ``"16.8 M"``, to be followed by what is counted; ``900`` as ``"900 "``."""
    for unit in ("", "k", "M", "G", "T"):
        if round(count, 1) < 1000:
            return f"{count:.0f} " if unit == "" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} P"


def format_percent(fraction: float) -> str:
    """``0.0123`` as ``"1.2 %"``, ``1.5`` as ``"150 %"``; what is less than a tenth of a percent as that."""
    percent = 100 * fraction
    return "< 0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %" if round(percent, 1) < 10 else f"{percent:.0f} %"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """A plain-text table, first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
