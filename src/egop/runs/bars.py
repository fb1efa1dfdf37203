"""Panels that are not lines: bars with their numbers, and tables of coloured cells."""

import math

from matplotlib.axes import Axes

from egop.runs.colors import BACK, INK, MUTED, colors_of, family_color
from egop.runs.pictures import Panel

__all__ = ["draw_bars", "draw_cells", "judged"]

_LOWER = ("loss", "seconds", "steps", "epochs", "milliseconds", "gradient norm", "share of")
_HIGHER = ("accuracy", "saved")


def judged(words: str, longest: int = 60) -> str:
    """What an axis says, with the direction that is the good one where its words tell; in two lines if it is long."""
    direction = "higher" if any(word in words.lower() for word in _HIGHER) else ""
    direction = direction or ("lower" if any(word in words.lower() for word in _LOWER) else "")
    if not direction:
        return words
    said = f"({direction} is better)"
    return f"{words} {said}" if len(words) + len(said) < longest else f"{words}\n{said}"


def draw_bars(axes: Axes, panel: Panel, *, is_named: bool = True, has_legend: bool = True) -> None:
    """A row a method, its bars in the colour of its family, with their numbers; "never" where there is no end.

    Args:
        axes: where.
        panel: what; ``ylabel`` is what the bars measure.
        is_named: whether the rows have their names, or the panel to the left has them.
        has_legend: whether the bars of a row have their names, or the figure has them.
    """
    names = [str(x) for x in panel.series[0].x]
    known_rows = [series for series in panel.series if not all(map(math.isnan, series.median))]
    several = len(known_rows) > 1
    colors = colors_of(series.method or series.label for series in known_rows)
    width = 0.8 / max(1, len(known_rows))
    numbers = [value for s in known_rows for row in (s.median, s.high or ()) for value in row if math.isfinite(value)]
    longest = max(numbers, default=1.0)
    for index, series in enumerate(known_rows):
        places = [number + width * (index - (len(known_rows) - 1) / 2) for number in range(len(names))]
        known = [value if math.isfinite(value) else 0.0 for value in series.median]
        shades = [colors[series.method or series.label] if several else family_color(name) for name in names]
        hatch = "///" if series.egop and several else None
        axes.barh(places, known, width * 0.92, color=shades, alpha=0.8, hatch=hatch, label=series.label)
        highs = series.high if series.high is not None else series.median
        lows = series.low if series.low is not None else series.median
        for place, value, low, high in zip(places, series.median, lows, highs, strict=True):
            end = max((number for number in (value, high) if math.isfinite(number)), default=0.0)
            if math.isfinite(low) and math.isfinite(high) and low < high:
                axes.plot([low, high], [place, place], color=INK, linewidth=1.1)
            words = "never" if value == math.inf else "" if math.isnan(value) else f"{value:.3g}"
            axes.annotate(
                words,
                (end, place),
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
    axes.set_xlim(0, 1.18 * longest)  # room for the numbers
    axes.set(xlabel=judged(panel.ylabel), ylabel=panel.xlabel)
    if several and has_legend:
        widest = max(len(series.label) for series in known_rows)
        columns = max(1, int(3.2 / (0.075 * widest + 0.55)))  # in inches
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(columns, len(known_rows)))


def draw_cells(axes: Axes, panel: Panel) -> None:
    """A row a series and a column an x: the colour shows which numbers are small, whatever the largest are."""
    rows = [[value if math.isfinite(value) else math.nan for value in series.median] for series in panel.series]
    known = sorted(value for row in rows for value in row if value == value)
    low, middle = (known[0], known[len(known) // 2]) if known else (0.0, 1.0)
    high = max(2 * middle - low, low + 1e-12)
    axes.grid(False)
    axes.pcolormesh(rows, cmap="YlOrBr", vmin=low, vmax=high, edgecolors=BACK, linewidth=2)
    for place, row in enumerate(rows):
        for index, value in enumerate(row):
            shade = min(1.0, (value - low) / (high - low)) if value == value else -1.0
            words = f"{value:.3f}" if value == value else "–"
            # On colours that are the same in light and dark; a missing number has no colour behind it.
            color = MUTED if shade < 0 else "#ffffff" if shade > 0.65 else "#000001"
            weight = "bold" if known and value == known[0] else "normal"
            axes.text(index + 0.5, place + 0.5, words, ha="center", va="center", color=color, fontweight=weight)
    names = [str(x) for x in panel.series[0].x]
    axes.set_xticks([index + 0.5 for index in range(len(names))], names, rotation=20, ha="right")
    axes.set_yticks([index + 0.5 for index in range(len(rows))], [series.label for series in panel.series])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
