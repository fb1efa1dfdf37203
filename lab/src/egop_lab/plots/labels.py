"""Names of lines: at their ends, or in one legend below if panels share them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from egop_lab.plots.colors import DASHES, MUTED, assign_colors
from egop_lab.plots.picture import Panel, Series

# The most lines of a panel that are labelled at their ends.
_MAX_LABELLED = 10


def get_look(series: Series) -> tuple[str, bool]:
    """Return what decides how a line looks: its method, and whether it is dashed."""
    return series.method or series.label, series.egop


def _get_visible(panel: Panel) -> list[Series]:
    return [series for series in panel.series if not series.faint]


def uses_shared_legend(panel: Panel, panels: Sequence[Panel]) -> bool:
    """Return True if the figure's legend names the lines: other panels share them, or they have no free ends."""
    if panel.kind != "line":
        return panel.kind == "points"
    visible = _get_visible(panel)
    others = {
        get_look(series)
        for other in panels
        if other is not panel and other.kind == "line"
        for series in _get_visible(other)
    }
    is_shared = len(visible) > 2 and bool(others & {get_look(series) for series in visible})
    return is_shared or len(visible) > _MAX_LABELLED or panel.aspect == "equal" or not all(map(_goes_right, visible))


def _goes_right(series: Series) -> bool:
    """Return True if the last point of a line is its rightmost."""
    return all(float(one) <= float(other) for one, other in pairwise(series.x))


def build_legend(panels: Sequence[Panel]) -> list[Line2D]:
    """Return a handle per method, and two for the coordinates if every method appears in both."""
    series: dict[tuple[str, bool], Series] = {}
    for panel in panels:
        for one in _get_visible(panel):
            series.setdefault(get_look(one), one)
    colors = assign_colors(method for method, _ in series)
    plain = {method: one for (method, egop), one in series.items() if not egop}
    rotated = {method for method, egop in series if egop}
    if rotated and rotated <= set(plain):
        dashes = [
            Line2D([], [], color=MUTED, linewidth=2.3, alpha=0.75, label="original coordinates"),
            Line2D([], [], color=MUTED, linewidth=1.7, linestyle=DASHES, label="EGOP coordinates"),
        ]
        return [
            Line2D([], [], color=colors[method], linewidth=3.5, label=plain[method].label) for method in plain
        ] + dashes
    return [
        Line2D(
            [],
            [],
            color=colors[method],
            linestyle=DASHES if egop else "solid",
            linewidth=1.7 if egop else 2.3,
            label=one.label,
        )
        for (method, egop), one in series.items()
    ]


def label_line_ends(axes: Axes, panel: Panel) -> list[Annotation]:
    """Name the lines to the right of their last points; :func:`separate_labels` moves the names apart."""
    colors = assign_colors(series.method or series.label for series in panel.series)
    labels = []
    for series in _get_visible(panel):
        lowest = axes.get_ylim()[0] if panel.yscale == "log" else -math.inf
        end = _find_end(axes, series, lowest)
        if end is None:
            continue
        color = colors[series.method or series.label]
        leader = {
            "arrowstyle": "-",
            "color": color,
            "linewidth": 0.7,
            "alpha": 0.6,
            "shrinkA": 0,
            "shrinkB": 1,
            "relpos": (0, 0.5),
        }
        labels.append(
            axes.annotate(
                series.label,
                end,
                (1.03, 0.5),
                xycoords="data",
                textcoords="axes fraction",
                color=color,
                va="center",
                fontsize=8.5,
                arrowprops=leader,
                annotation_clip=False,
            )
        )
    return labels


def _find_end(axes: Axes, series: Series, lowest: float) -> tuple[float, float] | None:
    """Return the last visible point of a line, or where it leaves the plot below; None if it is never visible."""
    points = [(float(x), y) for x, y in zip(series.x, series.median, strict=True) if y < math.inf]
    above = [index for index, (_, y) in enumerate(points) if y >= lowest]
    if not above:
        return (points[-1][0], lowest) if any(y > 0 for _, y in points) else None
    last, below = points[above[-1]], points[above[-1] + 1 : above[-1] + 2]
    if not below or below[0][1] <= 0:
        return last
    (x, y), (right, under) = axes.transData.transform([last, below[0]])
    floor = axes.transData.transform((last[0], lowest))[1]
    x += (right - x) * (y - floor) / (y - under)
    return float(axes.transData.inverted().transform((x, floor))[0]), lowest


def separate_labels(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Move labels vertically, as little as possible, until each is a line of text away from the next."""
    if not labels:
        return
    step = 11.0 / (axes.bbox.height / axes.figure.dpi * 72)  # 11 points, relative to the axes
    wanted = []
    for label in labels:
        _, y = axes.transAxes.inverted().transform(axes.transData.transform(label.xy))
        wanted.append((min(1.0, max(0.0, float(y))), label))
    wanted.sort(key=lambda pair: pair[0])
    heights = [height for height, _ in wanted]
    for _ in range(100):
        for k in range(len(heights) - 1):
            overlap = step - (heights[k + 1] - heights[k])
            if overlap > 1e-6:
                heights[k] -= overlap / 2
                heights[k + 1] += overlap / 2
        shift = max(0.0, -heights[0]) - max(0.0, heights[-1] - 1.0)
        heights = [height + shift for height in heights]
    for height, (_, label) in zip(heights, wanted, strict=True):
        label.set_position((1.03, height))
