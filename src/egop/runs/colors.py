"""The colours of pictures: those of methods, and those of everything else in light and in dark; and the dashes."""

from collections.abc import Iterable

# Each is found by its digits in an SVG, so no two of them are alike, nor like a colour of a method.
INK, EDGE, MUTED, GRID, BACK = "#1a1b1c", "#66676a", "#5b6169", "#e4e5e6", "#fefefe"
_DARK = {INK: "#e6e7e9", EDGE: "#9a9fa6", MUTED: "#a3a9b1", GRID: "#33373d", BACK: "#15171a"}

DASHES = (0, (3, 1.2))  # of EGOP coordinates

# Okabe and Ito's palette, told apart by colour-blind readers too.
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
# Black and dark violet would vanish on a dark page, and blue be hard to see.
_DARK |= {COLORS["Muon"]: "#e6e7e9", COLORS["EGOP"]: "#a58be0", COLORS["Adam"]: "#3d9bd8"}

# What stands for them in a page of ours, which has these names.
PAGE_COLORS = {
    INK: "currentColor",
    EDGE: "currentColor",
    MUTED: "currentColor",
    GRID: "var(--grid)",
    BACK: "var(--back)",
}
PAGE_METHODS = {
    COLORS["Muon"]: "currentColor",
    COLORS["EGOP"]: "var(--violet)",
    COLORS["Adam"]: "var(--blue)",
}


def colors_of(methods: Iterable[str]) -> dict[str, str]:
    """A colour for each method: its own where it has one, so that it is the same in all pictures."""
    unknown = [name for name in dict.fromkeys(methods) if name not in COLORS]
    return COLORS | {name: _MORE_COLORS[index % len(_MORE_COLORS)] for index, name in enumerate(unknown)}


def family_color(name: str) -> str:
    """The colour of a method's family, which its name tells: all forms of EGOP are alike, Muon and NorMuon too."""
    if "EGOP" in name or "online" in name:
        return COLORS["EGOP"]
    return next((COLORS[family] for family in sorted(COLORS, key=len, reverse=True) if family in name), _OTHERS)


def dark_style() -> str:
    """A style sheet for an SVG that makes it dark where that is preferred; other readers see it as it is."""
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    return f'<style type="text/css">@media (prefers-color-scheme: dark){{{rules}}}</style>'
