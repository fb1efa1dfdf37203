"""Pictures of records, in one style: a colour a method, dashed for EGOP coordinates, lines labelled at their ends.

Where several panels have the same lines, or many, the figure has one legend below them. Figures are made without
``pyplot``, so nothing global changes and no display is needed. The same records give the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Mapping, Sequence, Set
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
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullFormatter

from egop.runs.bars import draw_bars, draw_cells, judged
from egop.runs.colors import BACK, DASHES, EDGE, GRID, INK, MUTED, PAGE_COLORS, PAGE_METHODS, colors_of, dark_style
from egop.runs.naming import end_labels, is_named_below, key, legend, spread
from egop.runs.pictures import Panel, Picture, Series
from egop.runs.records import replacing

__all__ = ["STYLE", "draw", "inline", "inline_picture", "save"]

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": EDGE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.facecolor": BACK,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same everywhere
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.2,
    "legend.labelcolor": INK,
    "svg.hashsalt": "egop",  # element ids do not change from run to run
    "text.color": INK,
    "xtick.color": EDGE,
    "xtick.labelcolor": INK,
    "ytick.color": EDGE,
    "ytick.labelcolor": INK,
}
# What is lower than this part of where a line begins is solved, or rounding: drawn, it would squeeze everything else.
_LOWEST = 1e-16
# Of a panel, in inches: a picture of three of them is as wide as a column of text, and its words as large.
_NARROW, _WIDE, _ALONE, _HEIGHT = 3.1, 4.6, 6.4, 2.9


def draw(picture: Picture) -> Figure:
    """A picture of an experiment: its panels in rows of two or three."""
    return _drawn(picture, _ALONE)


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]  # a plain dict of settings
def _drawn(picture: Picture, alone: float) -> Figure:
    """The same with the width that a panel has which is the only one."""
    panels = picture.panels
    below = [panel for panel in panels if is_named_below(panel, panels)]
    count = len(panels)
    narrow = below or all(panel.kind == "bar" for panel in panels)
    columns = 1 if count == 1 else 3 if narrow and count not in (2, 4) else 2
    width = 9.2 if any(panel.kind == "cells" for panel in panels) else alone if count == 1 else _WIDE * 2 / columns
    heights = [max(map(_height, panels[first : first + columns])) for first in range(0, count, columns)]
    handles = legend(below)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    across = max(1, int(width * columns / (0.075 * longest + 0.55)))
    lines = -(-len(handles) // across)
    size = (width * columns, sum(heights) + 0.2 * lines + 0.1)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat)
    named = {key(series) for panel in below for series in panel.series}
    labels: list[tuple[Axes, list[Annotation]]] = []
    for place, (panel, here) in enumerate(zip(panels, axes, strict=False)):
        before = panels[place - 1] if place % columns else None
        _draw_panel(here, panel, before, named)
        if panel.kind == "line" and panel not in below:
            labels.append((here, end_labels(here, panel)))
            if place == count - 1 and count % columns:  # they have the empty place beside them
                for label in labels[-1][1]:
                    label.set_in_layout(False)
    for here in axes[count:]:
        here.remove()
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // lines))
    figure.draw_without_rendering()  # so that it is known how high the panels are
    for here, texts in labels:
        spread(here, texts)
    return figure


def _height(panel: Panel) -> float:
    """Of a panel, in inches: bars need room."""
    bars = len(panel.series) * len(panel.series[0].x) if panel.kind == "bar" else 0
    return max(_HEIGHT, 0.9 + min(0.19 * bars, 0.12 * bars + 1))


def _draw_panel(axes: Axes, panel: Panel, before: Panel | None, named: Set[tuple[str, bool]]) -> None:
    """Draw one panel; ``before`` is the one to its left, ``named`` are the lines that stand in the legend."""
    if panel.kind == "cells":
        draw_cells(axes, panel)
    elif panel.kind == "bar":
        rows = [str(x) for x in panel.series[0].x]
        is_named = before is None or before.kind != "bar" or rows != [str(x) for x in before.series[0].x]
        draw_bars(axes, panel, is_named=is_named, has_legend=not {key(series) for series in panel.series} <= named)
    else:
        _draw_lines(axes, panel)
    axes.set_title(panel.title)
    for axis in (axes.xaxis, axes.yaxis):
        _few_ticks(axis)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    axes.set(xlabel=panel.xlabel, ylabel=judged(panel.ylabel, longest=34), xscale=panel.xscale)
    axes.set_yscale(panel.yscale)
    colors = colors_of(series.method or series.label for series in panel.series)
    band = min(0.13, 0.35 / len(panel.series))  # many on top of each other stay pale
    for series in panel.series:
        color = colors[series.method or series.label]
        if panel.kind == "points":
            axes.plot(series.x, series.median, marker="o", markersize=6, linestyle="none", color=color, alpha=0.8)
        else:
            _draw_line(axes, series, color, band=band)
    for label, height in panel.horizontal.items():
        axes.axhline(height, color="#aa3333", linewidth=1, linestyle=":", zorder=2.5)
        axes.annotate(
            label,
            (0, height),
            (3, 2),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color="#aa3333",
            fontsize=8,
            va="bottom",
            bbox={"facecolor": BACK, "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            zorder=4,
        )
    for mark in panel.marks:
        axes.plot([mark.x], [mark.y], marker="o", markersize=5, color=INK, zorder=5)
        axes.annotate(mark.label, (mark.x, mark.y), (5, 5), textcoords="offset points", zorder=5)
    for place, span in enumerate(panel.spans):
        color = colors.get(span.method, INK)
        arrow = {"arrowstyle": "<->", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (span.end, span.height), (span.start, span.height), arrowprops=arrow, zorder=4)
        # Curves that fall leave the upper right free.
        axes.annotate(
            span.words,
            ((span.start + span.end) / 2, span.height),
            (0.98, 0.97 - 0.09 * place),
            textcoords="axes fraction",
            ha="right",
            va="top",
            color=color,
            fontsize=8.5,
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "alpha": 0.6, "relpos": (0.5, 0)},
            zorder=5,
        )
    axes.set_aspect(panel.aspect, adjustable="datalim")
    axes.margins(x=0.01 if panel.aspect == "auto" else 0.05)
    if panel.yscale == "log":
        _clip(axes, panel)


def _draw_line(axes: Axes, series: Series, color: str, *, band: float) -> None:
    if series.faint:
        axes.plot(series.x, series.median, color=EDGE, linewidth=0.8, alpha=0.7, zorder=1)
        return
    dashes = DASHES if series.egop else "solid"
    # A solid line is wider and paler, so that a dashed one on top of it still shows both.
    width, alpha, order = (1.7, 1.0, 3) if series.egop else (2.3, 0.75, 2)
    axes.plot(series.x, series.median, color=color, linestyle=dashes, linewidth=width, alpha=alpha, zorder=order)
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=color, alpha=band, linewidth=0, zorder=1)
    if series.chosen is not None and series.chosen in series.x:
        place = list(series.x).index(series.chosen)
        axes.plot([series.chosen], [series.median[place]], marker="*", markersize=10, color=color, zorder=4)


def _clip(axes: Axes, panel: Panel) -> None:
    """End a logarithmic axis far below where its lines begin, and say so."""
    positive = [[value for value in series.median if 0 < value < math.inf] for series in panel.series]
    floor = _LOWEST * max((values[0] for values in positive if values), default=1.0)
    if any(values and min(values) < floor for values in positive):
        axes.set_ylim(bottom=floor)
        axes.annotate(
            "cut at 1e-16 of the start",
            (1, 0),
            (-2, 2),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=MUTED,
        )


def _few_ticks(axis: Axis) -> None:
    """A logarithmic axis of less than two decades has its numbers written out: powers of ten would be too few."""
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or not 0 < low < high < 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


# --- what the lines are called ---


# --- files and pages ---


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def save(figure: Figure, path: str | Path) -> None:
    """Write a figure, whole or not at all; the ending of the name says how (``.svg``, ``.png``, ``.pdf``).

    An SVG is dark where the reader wants that, by a style sheet of its own.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".")
    # A date would make every file different; only these two formats write one.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as beside:
        figure.savefig(beside, format=kind, metadata=metadata, dpi=150)
        if kind == "svg":
            svg = beside.read_text(encoding="utf-8")
            beside.write_text(svg.replace("<defs>", f"{dark_style()}<defs>", 1), encoding="utf-8")


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
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
        dashes = DASHES if series.egop else "solid"
        alpha, width = (0.35, 1.0) if place < faint else (1.0, 2.2)
        axes.plot(series.x, series.median, color=color, linestyle=dashes, alpha=alpha, linewidth=width)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale=panel.xscale, yscale=panel.yscale)
    return _embedded(figure, name, panel.title, PAGE_COLORS)  # the lines have the colours that the page has chosen


def inline_picture(picture: Picture) -> str:
    """A picture's panels with their names as SVGs to be put into a page, in its colours; the page places them."""
    panels = [Picture(picture.name, picture.caption, [panel]) for panel in picture.panels]
    colors = PAGE_COLORS | PAGE_METHODS
    return "".join(
        _embedded(_drawn(one, _WIDE), f"{picture.name}-{place}", one.panels[0].title or picture.caption, colors)
        for place, one in enumerate(panels, start=1)
    )


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def _embedded(figure: Figure, name: str, label: str, colors: Mapping[str, str]) -> str:
    """The figure without outside names and background, its identifiers told apart by a name, in a page's colours."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=nothing, transparent=True)
    svg = written.getvalue()
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :]).replace("xlink:href", "href")
    svg = re.sub(r' (id|href)="(#?)', rf' \1="\2{name}-', svg).replace("url(#", f"url(#{name}-")
    for color, of_page in colors.items():
        svg = svg.replace(color, of_page)
    role = f'role="img" aria-label="{html.escape(label, quote=True)}"'
    return re.sub(r'(<svg) width="[^"]*" height="[^"]*"', lambda match: f"{match[1]} {role}", svg)
