"""Numbers and tables as people read them."""

__all__ = ["counted", "format_bytes", "format_table"]


def counted(number: int, noun: str) -> str:
    """A number of things: "1 run", "2 runs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: float) -> str:
    """``24586240000`` as ``"22.9 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_table(header: list[str], rows: list[list[str]]) -> str:
    """A plain-text table, first column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1])] + [cell.rjust(width) for cell, width in others]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
