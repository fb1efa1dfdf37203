"""How the lines of a picture get their names: at their ends, or once below where panels share them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from egop.runs.colors import DASHES, MUTED, colors_of
from egop.runs.pictures import Panel, Series

__all__ = ["end_labels", "is_named_below", "key", "legend", "spread"]

# More lines than this in a panel are not labelled at their ends.
_LABELLED = 10


def key(series: Series) -> tuple[str, bool]:
    """What a line looks like: its colour, and whether it is dashed."""
    return series.method or series.label, series.egop


def _shown(panel: Panel) -> list[Series]:
    return [series for series in panel.series if not series.faint]


def is_named_below(panel: Panel, panels: Sequence[Panel]) -> bool:
    """Whether the names of a panel's lines stand below the figure: others have them too, or they have no free ends."""
    if panel.kind != "line":
        return panel.kind == "points"
    shown = _shown(panel)
    others = {
        key(series) for other in panels if other is not panel and other.kind == "line" for series in _shown(other)
    }
    is_shared = len(shown) > 2 and bool(others & {key(series) for series in shown})
    return is_shared or len(shown) > _LABELLED or panel.aspect == "equal" or not all(map(_goes_right, shown))


def _goes_right(series: Series) -> bool:
    """Whether a line has its end on the right."""
    return all(float(one) <= float(other) for one, other in pairwise(series.x))


def legend(panels: Sequence[Panel]) -> list[Line2D]:
    """A line for each method, and two for the coordinates where each method is there in both."""
    series: dict[tuple[str, bool], Series] = {}
    for panel in panels:
        for one in _shown(panel):
            series.setdefault(key(one), one)
    colors = colors_of(method for method, _ in series)
    plain = {method: one for (method, egop), one in series.items() if not egop}
    turned = {method for method, egop in series if egop}
    if turned and turned <= set(plain):
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


def end_labels(axes: Axes, panel: Panel) -> list[Annotation]:
    """The names of the lines to the right of their last points; :func:`spread` keeps them apart."""
    colors = colors_of(series.method or series.label for series in panel.series)
    labels = []
    for series in _shown(panel):
        lowest = axes.get_ylim()[0] if panel.yscale == "log" else -math.inf
        end = _end(axes, series, lowest)
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


def _end(axes: Axes, series: Series, lowest: float) -> tuple[float, float] | None:
    """The last point of a line that is shown, or where it leaves the picture below; None if nothing of it is there."""
    points = [(float(x), y) for x, y in zip(series.x, series.median, strict=True) if y < math.inf]
    above = [place for place, (_, y) in enumerate(points) if y >= lowest]
    if not above:
        return (points[-1][0], lowest) if any(y > 0 for _, y in points) else None
    last, below = points[above[-1]], points[above[-1] + 1 : above[-1] + 2]
    if not below or below[0][1] <= 0:
        return last
    (x, y), (right, under) = axes.transData.transform([last, below[0]])
    floor = axes.transData.transform((last[0], lowest))[1]
    x += (right - x) * (y - floor) / (y - under)
    return float(axes.transData.inverted().transform((x, floor))[0]), lowest


def spread(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Move names as little as keeps each a line away from the next."""
    if not labels:
        return
    height = axes.bbox.height / axes.figure.dpi * 72  # in points
    step = 11.0 / height
    wanted = []
    for label in labels:
        _, y = axes.transAxes.inverted().transform(axes.transData.transform(label.xy))
        wanted.append((min(1.0, max(0.0, float(y))), label))
    wanted.sort(key=lambda pair: pair[0])
    places = [place for place, _ in wanted]
    for _ in range(100):
        for k in range(len(places) - 1):
            overlap = step - (places[k + 1] - places[k])
            if overlap > 1e-6:
                places[k] -= overlap / 2
                places[k + 1] += overlap / 2
        shift = max(0.0, -places[0]) - max(0.0, places[-1] - 1.0)
        places = [place + shift for place in places]
    for place, (_, label) in zip(places, wanted, strict=True):
        label.set_position((1.03, place))
