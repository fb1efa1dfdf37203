"""A self-contained HTML page: no scripts, nothing loaded from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources


def format_page(title: str, body: Iterable[str]) -> str:
    """Return a complete page from the parts of its body."""
    style = (resources.files("egop_lab.report") / "style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # keeps browsers from requesting one
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
