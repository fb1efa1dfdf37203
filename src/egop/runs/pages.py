"""A self-contained HTML page: no scripts, nothing loaded from anywhere, readable on a phone, light and dark."""

from __future__ import annotations

import html
from collections.abc import Iterable
from importlib import resources

__all__ = ["document", "text"]


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


def _style() -> str:
    return (resources.files("egop.runs") / "pages.css").read_text(encoding="utf-8")
