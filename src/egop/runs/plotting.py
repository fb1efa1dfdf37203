"""Pictures of records, in one style: logarithmic axes, one colour an optimizer, dashed for EGOP coordinates.

Figures are made without ``pyplot``, so nothing global changes and no display is needed. The same records give the same
bytes.
"""

import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

try:
    import matplotlib
except ModuleNotFoundError as error:
    if error.name != "matplotlib":
        raise
    raise ModuleNotFoundError(
        "Pictures need matplotlib, which is not installed. Run: pip install 'egop[plot]'", name="matplotlib"
    ) from None
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from egop.runs.pictures import Panel, Picture
from egop.runs.records import Run, replacing

__all__ = [
    "COLORS",
    "STYLE",
    "draw",
    "inline",
    "inline_picture",
    "loss_and_spectra",
    "plot_losses",
    "plot_spectra",
    "save",
]

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same everywhere
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.4,
    "svg.hashsalt": "egop",  # element ids do not change from run to run
}

# Okabe and Ito's palette, told apart by colour-blind readers too.
COLORS = {
    "Adam": "#0072b2",
    "Adagrad": "#d55e00",
    "SGD": "#7f7f7f",
    "SGD+momentum": "#b0a000",
    "AdamW": "#009e73",
    "SOAP": "#cc79a7",
    "Shampoo": "#56b4e9",
    "Muon": "#000000",
}
_MORE_COLORS = ("#e69f00", "#4b2991", "#8c564b", "#2ca02c", "#c0369d", "#17becf")
# Smaller eigenvalues, relative to the largest, are rounding; drawn, they would squeeze everything else.
_ROUNDING = 1e-10
_BLOCK_COLORS = ("#4b2991", "#c0369d", "#fa7876", "#edd9a3")


def plot_losses(axes: Axes, runs: Sequence[Run], *, title: str = "Training loss") -> None:
    """Loss by epoch: a colour for each optimizer, dashed in EGOP coordinates."""
    colors = _colors(run.optimizer for run in runs)
    for run in runs:
        transformed = run.coordinates == "EGOP"
        axes.plot(
            run.curve.loss,
            color=colors[run.optimizer],
            # The solid line is wide and pale, so that a dashed one on top of it still shows both.
            linestyle=(0, (3, 1.2)) if transformed else "solid",
            linewidth=1.6 if transformed else 2.6,
            alpha=1.0 if transformed else 0.5,
            zorder=3 if transformed else 2,
        )
    axes.set_yscale("log")
    axes.set(title=title, xlabel="epoch", ylabel="loss")
    axes.margins(x=0.01)
    axes.legend(handles=_loss_legend(runs, colors), ncols=2, loc="best")


def plot_spectra(axes: Axes, spectra: Mapping[str, Sequence[float]], *, title: str = "EGOP eigenvalues") -> None:
    """Eigenvalues of each block relative to the largest one, by index; a block's line ends at its numerical rank."""
    for index, (name, eigenvalues) in enumerate(spectra.items()):
        relative = [value / eigenvalues[0] for value in eigenvalues if value > _ROUNDING * eigenvalues[0]]
        label = f"{name} ({len(eigenvalues)})"
        axes.plot(
            range(1, len(relative) + 1),
            relative,
            color=_BLOCK_COLORS[index % len(_BLOCK_COLORS)],
            linewidth=1.8,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(title=title, xlabel="k", ylabel="λₖ / λ₁")
    axes.legend(title="block (size)", loc="lower left", alignment="left")


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]  # a plain dict of settings
def loss_and_spectra(runs: Sequence[Run], spectra: Mapping[str, Sequence[float]]) -> Figure:
    """Two panels: loss by epoch on the left, the spectrum of every block on the right."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1.0))
    plot_losses(left, runs)
    plot_spectra(right, spectra)
    return figure


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def draw(picture: Picture) -> Figure:
    """A picture of an experiment: its panels in rows of three."""
    return _drawn(picture)


def _drawn(picture: Picture) -> Figure:
    """In whatever style is set."""
    columns = min(3, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    wide = any(panel.kind == "cells" for panel in picture.panels)
    figure = Figure(figsize=((9.2 if wide else 4.4) * columns + 0.4, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, place in zip(picture.panels, axes, strict=False):
        {"bar": _draw_bars, "line": _draw_lines, "cells": _draw_cells}[panel.kind](place, panel)
        place.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        if panel.kind != "cells":  # whose rows have names, which a scale would take away
            place.set_yscale(panel.yscale)
        place.set_aspect(panel.aspect)
        for axis in (place.xaxis, place.yaxis):
            _few_ticks(axis)
    for place in axes[len(picture.panels) :]:
        place.remove()
    return figure


def _few_ticks(axis: Axis) -> None:
    """A logarithmic axis of less than two decades has its numbers written out: powers of ten would be too few."""
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or not 0 < low < high < 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_lines(axes: Axes, panel: Panel) -> None:
    colors = _colors(series.method or series.label for series in panel.series)
    for series in panel.series:
        color = colors[series.method or series.label]
        dashes = (0, (3, 1.2)) if series.egop else "solid"
        width = 1.5 if series.egop else 2.2
        axes.plot(series.x, series.median, color=color, linestyle=dashes, linewidth=width, label=series.label)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
        if series.chosen is not None and series.chosen in series.x:
            place = list(series.x).index(series.chosen)
            axes.plot([series.chosen], [series.median[place]], marker="*", markersize=11, color=color)
    for label, height in panel.horizontal.items():
        axes.axhline(height, color="#aa0000", linewidth=1, linestyle=":", label=label)
    axes.set_xscale(panel.xscale)
    axes.legend(loc="best", fontsize=7, ncols=2 if len(panel.series) > 5 else 1)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    colors = _colors(series.method or series.label for series in panel.series)
    width = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        places = [number + width * (index - (len(panel.series) - 1) / 2) for number in range(len(series.x))]
        color = colors[series.method or series.label]
        hatch = "///" if series.egop else None
        axes.bar(places, series.median, width, color=color, alpha=0.75, hatch=hatch, label=series.label)
        if series.low is not None and series.high is not None:
            middles = zip(places, series.low, series.high, strict=True)
            for place, low, high in middles:
                axes.plot([place, place], [low, high], color="#333333", linewidth=1.2)
    names = [str(x) for x in panel.series[0].x]
    axes.set_xticks(range(len(names)), names, rotation=20 if max(map(len, names)) > 8 else 0, ha="right")
    if len(panel.series) > 1:
        axes.legend(loc="best", fontsize=7)


def _draw_cells(axes: Axes, panel: Panel) -> None:
    """A row a series and a column an x: the colour shows which numbers are small, whatever the largest are."""
    rows = [[value if math.isfinite(value) else math.nan for value in series.median] for series in panel.series]
    known = sorted(value for row in rows for value in row if value == value)
    low, middle = (known[0], known[len(known) // 2]) if known else (0.0, 1.0)
    high = max(2 * middle - low, low + 1e-12)
    axes.grid(False)
    axes.pcolormesh(rows, cmap="YlOrBr", vmin=low, vmax=high, edgecolors="white", linewidth=2)
    for place, row in enumerate(rows):
        for index, value in enumerate(row):
            dark = value == value and (value - low) / (high - low) > 0.65
            words = f"{value:.3f}" if value == value else "–"
            color = "white" if dark else "black"
            axes.text(index + 0.5, place + 0.5, words, ha="center", va="center", color=color)
    names = [str(x) for x in panel.series[0].x]
    axes.set_xticks([index + 0.5 for index in range(len(names))], names, rotation=20, ha="right")
    axes.set_yticks([index + 0.5 for index in range(len(rows))], [series.label for series in panel.series])
    axes.invert_yaxis()
    axes.tick_params(length=0)


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def save(figure: Figure, path: str | Path) -> None:
    """Write a figure, whole or not at all; the ending of the name says how (``.svg``, ``.png``, ``.pdf``)."""
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    # A date would make every file different; only these two formats write one.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as beside:
        figure.savefig(beside, format=kind, metadata=metadata, dpi=150, facecolor="white")


# Colours that a page replaces by its own, so that one picture suits light and dark.
_PAGE_TEXT, _PAGE_GRID = "#010203", "#030201"


@matplotlib.rc_context(STYLE | {"grid.color": _PAGE_GRID})  # type: ignore[arg-type]
def inline(panel: Panel, colors: Sequence[str], name: str, *, faint: int = 0) -> str:
    """One panel of lines as SVG to be put into a page: no outside names, no background, small enough for a phone.

    Args:
        panel: what to draw; the legend is the page's.
        colors: of the series.
        name: of the picture, unique in the page: it goes before every identifier.
        faint: how many of the first series stay in the background.
    """
    figure = Figure(figsize=(4.2, 3.1), layout="constrained")
    axes = figure.subplots()
    for place, (series, color) in enumerate(zip(panel.series, colors, strict=True)):
        dashes = (0, (3, 1.2)) if series.egop else "solid"
        alpha, width = (0.35, 1.0) if place < faint else (1.0, 2.2)
        axes.plot(series.x, series.median, color=color, linestyle=dashes, alpha=alpha, linewidth=width)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale=panel.xscale, yscale=panel.yscale)
    axes.tick_params(which="both", color=_PAGE_TEXT, labelcolor=_PAGE_TEXT)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(_PAGE_TEXT)
    for spine in axes.spines.values():
        spine.set_color(_PAGE_TEXT)
    svg = _embedded(figure, name, panel.title, transparent=True)
    return svg.replace(_PAGE_TEXT, "currentColor").replace(_PAGE_GRID, "var(--grid)")


# Black lines (Muon's), dark whiskers and dark violet would vanish on a dark page.
_PAGE_COLORS = {
    _PAGE_TEXT: "currentColor",
    _PAGE_GRID: "var(--grid)",
    "#000000": "currentColor",
    "#333333": "currentColor",
    "#4b2991": "var(--violet)",
}
_PAGE_STYLE = {
    "axes.edgecolor": _PAGE_TEXT,
    "axes.labelcolor": _PAGE_TEXT,
    "axes.titlecolor": _PAGE_TEXT,
    "grid.color": _PAGE_GRID,
    "legend.labelcolor": _PAGE_TEXT,
    "text.color": _PAGE_TEXT,
    "xtick.color": _PAGE_TEXT,
    "ytick.color": _PAGE_TEXT,
}


def inline_picture(picture: Picture) -> str:
    """A picture's panels with their legends as SVGs to be put into a page, in its colours; the page places them."""
    panels = []
    for place, panel in enumerate(picture.panels, start=1):
        with matplotlib.rc_context(STYLE | _PAGE_STYLE):  # type: ignore[arg-type]
            figure = _drawn(Picture(picture.name, picture.caption, [panel]))
            svg = _embedded(figure, f"{picture.name}-{place}", panel.title or picture.caption, transparent=True)
        for color, of_page in _PAGE_COLORS.items():
            svg = svg.replace(color, of_page)
        panels.append(svg)
    return "".join(panels)


def _embedded(figure: Figure, name: str, label: str, *, transparent: bool) -> str:
    """The figure without outside names, its identifiers told apart by a name, as wide as the page lets it."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=nothing, transparent=transparent)
    svg = written.getvalue()
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :]).replace("xlink:href", "href")
    svg = re.sub(r' (id|href)="(#?)', rf' \1="\2{name}-', svg).replace("url(#", f"url(#{name}-")
    role = f'role="img" aria-label="{html.escape(label, quote=True)}"'
    return re.sub(r'(<svg) width="[^"]*" height="[^"]*"', lambda match: f"{match[1]} {role}", svg)


def _colors(methods: Iterable[str]) -> dict[str, str]:
    """A colour for each method: its own where it has one, so that it is the same in all pictures."""
    unknown = [name for name in dict.fromkeys(methods) if name not in COLORS]
    return COLORS | {name: _MORE_COLORS[index % len(_MORE_COLORS)] for index, name in enumerate(unknown)}


def _loss_legend(runs: Sequence[Run], colors: Mapping[str, str]) -> list[Line2D]:
    optimizers = dict.fromkeys(run.optimizer for run in runs)
    coordinates = dict.fromkeys(run.coordinates for run in runs)
    by_color = [Line2D([], [], color=colors[name], linewidth=4, label=name) for name in optimizers]
    by_dash = [
        Line2D(
            [],
            [],
            color="#444444",
            linestyle=(0, (3, 1.2)) if name == "EGOP" else "solid",
            linewidth=1.6 if name == "EGOP" else 2.6,
            alpha=1.0 if name == "EGOP" else 0.5,
            label=f"{name} coordinates",
        )
        for name in coordinates
    ]
    return by_color + by_dash
