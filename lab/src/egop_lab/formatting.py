"""Counts, sizes and tables as people read them, in plain text."""

from collections.abc import Sequence


def pluralize(number: int, noun: str) -> str:
    """Format a count of things: "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Format ``24586240000`` as ``"22.9 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_count(count: float) -> str:
    """Format ``16777216`` as ``"16.8 M"``."""
    for unit in ("", " k", " M", " G", " T"):
        if round(count, 1) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} P"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def format_line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([format_line(header), "  ".join("-" * width for width in widths), *map(format_line, rows)])
