"""Plots with matplotlib, which is imported only when a plot is drawn.

``pyplot`` is not imported, so nothing global changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more spectra than this there is no legend.
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


def plot_spectra(spectra: Mapping[str, Tensor]) -> Figure:
    """Plot each spectrum relative to its largest eigenvalue, down to rounding errors.

    Raises:
        ValueError: if no spectrum has a positive eigenvalue.
    """
    relative = {name: (values / values[0]).tolist() for name, values in spectra.items() if values[0] > 0}
    if not relative:
        raise ValueError("There is no spectrum to plot: no block has one with a positive eigenvalue.")
    figure, axes = create_axes(title="Eigenvalues", xlabel="k", ylabel="λₖ / λ₁", xscale="log", yscale="log")
    for name, values in relative.items():
        shown = [value for value in values if value > _ROUNDING]
        axes.plot(range(1, len(shown) + 1), shown, label=f"{name} ({len(values)})")
    if len(relative) <= _MANY:
        figure.legend(loc="outside right upper")
    return figure
