"""HTML: a self-contained page, and pieces for a notebook. No scripts, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources

__all__ = ["document", "html_table", "sparkline", "text"]

# In a notebook there is no style sheet of ours: colours are those of the text around, whether it is light or dark.
_CELL = "padding:.2em .7em;border-bottom:1px solid rgba(128,128,128,.35);vertical-align:middle;"
# Smaller values, relative to the first, are rounding; a small picture has room for three decades and more.
_FLOOR = 1e-10


def document(title: str, body: Iterable[str]) -> str:
    """A whole page from its parts; empty ones are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Browsers ask for an icon of their own accord; an empty one keeps them from it.
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def text(words: object) -> str:
    """Words as they stand, whatever characters they have."""
    return html.escape(str(words), quote=True)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, raw: Sequence[int] = ()) -> str:
    """A table for a notebook: the first column to the left, the others to the right.

    Args:
        header: the names of the columns.
        rows: cells, which are escaped.
        raw: the places of the columns that are HTML already.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        parts = [
            f'<{tag} style="{_CELL}text-align:{"right" if place else "left"}">'
            f"{cell if place in raw and tag == 'td' else text(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f"<thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table></div>"
    )


def sparkline(values: Sequence[float], label: str) -> str:
    """A line of falling positive values over their index, both axes logarithmic, as small as a word."""
    known = [value / values[0] for value in values if value > _FLOOR * values[0]] if values and values[0] > 0 else []
    if len(known) < 2:
        return ""
    places = sorted({round(len(known) ** (step / 39)) for step in range(40)})
    depth = max(3.0, -math.log10(known[-1]))
    points = " ".join(
        f"{1 + 78 * math.log(k) / math.log(len(known)):.1f},{1 - 20 * math.log10(known[k - 1]) / depth:.1f}"
        for k in places
    )
    return (
        f'<svg role="img" aria-label="{text(label)}" viewBox="0 0 80 22" width="80" height="22">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def _style() -> str:
    return (resources.files("egop.runs") / "pages.css").read_text(encoding="utf-8")
