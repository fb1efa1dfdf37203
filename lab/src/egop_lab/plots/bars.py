"""Panels of labelled bars."""

import math

from matplotlib.axes import Axes

from egop_lab.plots.colors import INK, MUTED, assign_colors, get_family_color
from egop_lab.plots.picture import Panel

_LOWER = ("loss", "seconds", "steps", "epochs", "milliseconds", "gradient norm", "share of")
_HIGHER = ("accuracy", "saved")


def add_direction(label: str, longest: int = 60) -> str:
    """Add "(lower is better)" or "(higher is better)" to an axis label whose words say which; break long ones."""
    direction = "higher" if any(word in label.lower() for word in _HIGHER) else ""
    direction = direction or ("lower" if any(word in label.lower() for word in _LOWER) else "")
    if not direction:
        return label
    addition = f"({direction} is better)"
    return f"{label} {addition}" if len(label) + len(addition) < longest else f"{label}\n{addition}"


def draw_bars(axes: Axes, panel: Panel, *, is_named: bool = True, has_legend: bool = True) -> None:
    """Draw a row per method: bars with their numbers in the colour of the family, "never" for infinity.

    Rows are not named if the panel to the left does, nor the bars of a row if the figure has a legend.
    """
    names = [str(x) for x in panel.series[0].x]
    known_rows = [series for series in panel.series if not all(map(math.isnan, series.median))]
    several = len(known_rows) > 1
    colors = assign_colors(series.method or series.label for series in known_rows)
    width = 0.8 / max(1, len(known_rows))
    numbers = [value for s in known_rows for row in (s.median, s.high or ()) for value in row if math.isfinite(value)]
    longest = max(numbers, default=1.0)
    for index, series in enumerate(known_rows):
        heights = [number + width * (index - (len(known_rows) - 1) / 2) for number in range(len(names))]
        known = [value if math.isfinite(value) else 0.0 for value in series.median]
        shades = [colors[series.method or series.label] if several else get_family_color(name) for name in names]
        hatch = "///" if series.egop and several else None
        axes.barh(heights, known, width * 0.92, color=shades, alpha=0.8, hatch=hatch, label=series.label)
        highs = series.high if series.high is not None else series.median
        lows = series.low if series.low is not None else series.median
        for height, value, low, high in zip(heights, series.median, lows, highs, strict=True):
            end = max((number for number in (value, high) if math.isfinite(number)), default=0.0)
            if math.isfinite(low) and math.isfinite(high) and low < high:
                axes.plot([low, high], [height, height], color=INK, linewidth=1.1)
            text = "never" if value == math.inf else "" if math.isnan(value) else f"{value:.3g}"
            axes.annotate(
                text,
                (end, height),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=MUTED if value == math.inf else INK,
                fontstyle="italic" if value == math.inf else "normal",
            )
    axes.set_yticks(range(len(names)), names if is_named else [])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.18 * longest)  # leave space for the numbers
    axes.set(xlabel=add_direction(panel.ylabel), ylabel=panel.xlabel)
    if several and has_legend:
        widest = max(len(series.label) for series in known_rows)
        columns = max(1, int(3.2 / (0.075 * widest + 0.55)))  # in inches
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(columns, len(known_rows)))
