"""Plots with matplotlib, which is imported only when a plot is drawn.

``pyplot`` is not imported, so nothing global changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from egop.formatting import mask_layer_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more spectra than this, those of the same weight in several layers share a line.
_MANY = 12
# Eigenvalues below this fraction of the largest are rounding errors.
_ROUNDING = 1e-10


def create_axes(**labels: Any) -> tuple[Figure, Axes]:
    """Create a figure with one pair of axes with these labels and scales."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed. Run: pip install 'egop[plot]'"
        ) from error
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(**labels)
    return figure, axes


def plot_spectra(spectra: Mapping[str, Iterable[float]], title: str = "Eigenvalues") -> Figure:
    """Plot each spectrum relative to its largest eigenvalue.

    Many spectra are grouped by layer: a line for the median of a group, and a band from its lowest to its highest.

    Raises:
        ValueError: if no spectrum has a positive eigenvalue.
    """
    lists = {name: list(values) for name, values in spectra.items()}
    relative = {name: [v / values[0] for v in values] for name, values in lists.items() if values and values[0] > 0}
    if not relative:
        raise ValueError("There is no spectrum to plot: no block has one with a positive eigenvalue.")
    groups: dict[tuple[str, int], list[list[float]]] = {}
    for name, values in relative.items():
        label = mask_layer_numbers(name) if len(relative) > _MANY else name
        groups.setdefault((label, len(values)), []).append(values)
    figure, axes = create_axes(title=title, xlabel="k", ylabel="λₖ / λ₁", xscale="log", yscale="log")
    for (label, size), group in groups.items():
        columns = [sorted(column) for column in zip(*group, strict=True)]
        median = [column[len(column) // 2] for column in columns]
        last = max(1, sum(value > _ROUNDING for value in median))
        several = f"{len(group)} layers, " if len(group) > 1 else ""
        axes.plot(range(1, last + 1), median[:last], label=f"{label} ({several}{size})")
        if several:
            low, high = ([max(column[end], _ROUNDING) for column in columns[:last]] for end in (0, -1))
            axes.fill_between(range(1, last + 1), low, high, alpha=0.15)
    figure.legend(loc="outside right upper")
    return figure
