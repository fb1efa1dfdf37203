"""Colours of methods, and of everything else in light and dark."""

from collections.abc import Iterable

# An SVG is recoloured by searching for these values, so all colours here must be distinct.
INK, EDGE, MUTED, GRID, BACK = "#1a1b1c", "#66676a", "#5b6169", "#e4e5e6", "#fefefe"
_DARK = {INK: "#e6e7e9", EDGE: "#9a9fa6", MUTED: "#a3a9b1", GRID: "#33373d", BACK: "#15171a"}

DASHES = (0, (3, 1.2))  # for EGOP coordinates

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = {
    "Adam": "#0072b2",
    "Adagrad": "#d55e00",
    "SGD": "#7f7f7f",
    "SGD+momentum": "#b0a000",
    "AdamW": "#009e73",
    "EGOP": "#4b2991",
    "SOAP": "#cc79a7",
    "Shampoo": "#56b4e9",
    "Muon": "#101112",
}
_MORE_COLORS = ("#e69f00", "#8c6bb1", "#8c564b", "#2ca02c", "#c0369d", "#17becf")
_OTHERS = "#8a8a8a"
# Black and dark violet would vanish on a dark page, and blue would be hard to see.
_DARK |= {COLORS["Muon"]: "#e6e7e9", COLORS["EGOP"]: "#a58be0", COLORS["Adam"]: "#3d9bd8"}


def assign_colors(methods: Iterable[str]) -> dict[str, str]:
    """Map methods to colours; known methods have the same colour in all pictures."""
    unknown = [name for name in dict.fromkeys(methods) if name not in COLORS]
    return COLORS | {name: _MORE_COLORS[index % len(_MORE_COLORS)] for index, name in enumerate(unknown)}


def get_family_color(name: str) -> str:
    """Return the colour of a method's family: one for all variants of EGOP, one for Muon and NorMuon, and so on."""
    if "EGOP" in name or "online" in name:
        return COLORS["EGOP"]
    return next((COLORS[family] for family in sorted(COLORS, key=len, reverse=True) if family in name), _OTHERS)


def build_dark_style() -> str:
    """Return a style sheet that recolours an SVG for readers who prefer dark pages."""
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    return f'<style type="text/css">@media (prefers-color-scheme: dark){{{rules}}}</style>'
