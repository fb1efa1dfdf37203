"""Draw and save pictures in one style: a colour per method, dashed for EGOP coordinates, lines labelled at their ends.

Panels that share lines, or have many, get one legend below the figure, at the left, where a phone shows it. Figures are
made without ``pyplot``, so nothing global changes and no display is needed. The same picture always gives the same
bytes.
"""

import math
import re
from collections.abc import Set
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullFormatter

from egop_lab.files import replace_atomically
from egop_lab.plots.bars import add_direction, draw_bars
from egop_lab.plots.colors import (
    BACK,
    DASHES,
    EDGE,
    GRID,
    INK,
    MUTED,
    assign_colors,
    build_dark_style,
)
from egop_lab.plots.labels import build_legend, get_look, label_line_ends, separate_labels, uses_shared_legend
from egop_lab.plots.picture import Panel, Picture, Series

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
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same everywhere
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.2,
    "legend.labelcolor": INK,
    "svg.hashsalt": "egop",  # reproducible element ids
    "text.color": INK,
    "xtick.color": EDGE,
    "xtick.labelcolor": INK,
    "ytick.color": EDGE,
    "ytick.labelcolor": INK,
}
# Cut logarithmic axes at this fraction of the starting value: below it everything is rounding.
_LOWEST = 1e-16
# Sizes of a panel in inches: three narrow ones are as wide as a column of text.
_WIDE, _ALONE, _HEIGHT = 4.6, 6.4, 2.9


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]  # a plain dict of settings
def draw_picture(picture: Picture) -> Figure:
    """Draw a picture, with its panels in rows of two or three."""
    panels = picture.panels
    below = [panel for panel in panels if uses_shared_legend(panel, panels)]
    count = len(panels)
    narrow = below or all(panel.kind == "bar" for panel in panels)
    columns = 1 if count == 1 else 3 if narrow and count not in (2, 4) else 2
    width = _ALONE if count == 1 else _WIDE * 2 / columns
    heights = [max(map(_compute_height, panels[first : first + columns])) for first in range(0, count, columns)]
    handles = build_legend(below)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    across = max(1, int(width * columns / (0.075 * longest + 0.55)))
    lines = -(-len(handles) // across)
    size = (width * columns, sum(heights) + 0.2 * lines + 0.1)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat)
    named = {get_look(series) for panel in below for series in panel.series}
    labels: list[tuple[Axes, list[Annotation]]] = []
    for index, (panel, here) in enumerate(zip(panels, axes, strict=False)):
        left = panels[index - 1] if index % columns else None
        _draw_panel(here, panel, left, named)
        if panel.kind == "line" and panel not in below:
            labels.append((here, label_line_ends(here, panel)))
            if index == count - 1 and count % columns:  # the empty cell beside it has space for the labels
                for label in labels[-1][1]:
                    label.set_in_layout(False)
    for here in axes[count:]:
        here.remove()
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=-(-len(handles) // lines))
    figure.draw_without_rendering()  # computes the heights of the panels
    for here, texts in labels:
        separate_labels(here, texts)
    return figure


def _compute_height(panel: Panel) -> float:
    """Return the height of a panel in inches, which grows with its bars."""
    bars = len(panel.series) * len(panel.series[0].x) if panel.kind == "bar" else 0
    return max(_HEIGHT, 0.9 + min(0.19 * bars, 0.12 * bars + 1))


def _draw_panel(axes: Axes, panel: Panel, left: Panel | None, named: Set[tuple[str, bool]]) -> None:
    """Draw one panel; ``left`` is the panel to its left, ``named`` are the lines in the figure's legend."""
    if panel.kind == "bar":
        rows = [str(x) for x in panel.series[0].x]
        is_named = left is None or left.kind != "bar" or rows != [str(x) for x in left.series[0].x]
        draw_bars(axes, panel, is_named=is_named, has_legend=not {get_look(series) for series in panel.series} <= named)
    else:
        _draw_lines(axes, panel)
    axes.set_title(panel.title)
    for axis in (axes.xaxis, axes.yaxis):
        _write_out_ticks(axis)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    axes.set(xlabel=panel.xlabel, ylabel=add_direction(panel.ylabel, longest=34), xscale=panel.xscale)
    axes.set_yscale(panel.yscale)
    colors = assign_colors(series.method or series.label for series in panel.series)
    band = min(0.13, 0.35 / len(panel.series))  # overlapping bands stay pale
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
    for index, span in enumerate(panel.spans):
        color = colors.get(span.method, INK)
        arrow = {"arrowstyle": "<->", "color": color, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (span.end, span.height), (span.start, span.height), arrowprops=arrow, zorder=4)
        # Falling curves leave the upper right free.
        axes.annotate(
            span.label,
            ((span.start + span.end) / 2, span.height),
            (0.98, 0.97 - 0.09 * index),
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
    # A solid line is wider and paler, so that both show where a dashed line is on top of it.
    width, alpha, order = (1.7, 1.0, 3) if series.egop else (2.3, 0.75, 2)
    axes.plot(series.x, series.median, color=color, linestyle=dashes, linewidth=width, alpha=alpha, zorder=order)
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=color, alpha=band, linewidth=0, zorder=1)
    if series.chosen is not None and series.chosen in series.x:
        index = list(series.x).index(series.chosen)
        axes.plot([series.chosen], [series.median[index]], marker="*", markersize=10, color=color, zorder=4)


def _clip(axes: Axes, panel: Panel) -> None:
    """Cut a logarithmic axis far below the start of its lines, and say so."""
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


def _write_out_ticks(axis: Axis) -> None:
    """Write out the ticks of a logarithmic axis of less than two decades: powers of ten would be too few."""
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or not 0 < low < high < 100 * low:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


@matplotlib.rc_context(STYLE)  # type: ignore[arg-type]
def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, with a style sheet that makes it dark for readers who prefer that."""
    with replace_atomically(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})  # a date would make every file different
        svg = _shorten_paths(temporary.read_text(encoding="utf-8"))
        temporary.write_text(svg.replace("<defs>", f"{build_dark_style()}<defs>", 1), encoding="utf-8")


def _shorten_paths(svg: str) -> str:
    """Round the coordinates of paths to a hundredth of a point; matplotlib writes six digits."""

    def shorten(match: re.Match[str]) -> str:
        return re.sub(r"(\d\.\d\d)\d+", r"\1", match[0].replace("\n", ""))

    return re.sub(r' d="[^"]*"', shorten, svg)
