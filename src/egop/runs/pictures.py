"""Pictures as values: what is drawn where. ``plotting`` draws them, and what makes them needs no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Mark", "Panel", "Picture", "Series", "Span"]


@dataclass(frozen=True)
class Series:
    """One line (or row of bars) of a panel: medians, with quartiles where there are trials.

    Attributes:
        label: in the legend.
        x: where.
        median: the values; of a bar infinite for what never happens, and not a number for what is not known.
        low: first quartiles.
        high: third quartiles.
        method: gives the colour: the optimizer's name.
        egop: drawn dashed: EGOP coordinates.
        chosen: the x value to mark with a star (a chosen learning rate, say).
        faint: in the background, thin and without a label.
    """

    label: str
    x: Sequence[float | str]
    median: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    method: str = ""
    egop: bool = False
    chosen: float | None = None
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """A point with a name."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Span:
    """An arrow along the x axis, with words on it: what is saved between two places."""

    words: str
    start: float
    end: float
    height: float
    method: str = ""  # gives the colour


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    xscale: Literal["linear", "log"] = "linear"
    yscale: Literal["linear", "log"] = "log"
    # cells: a row a series, numbers on colours, pale is small; points: not joined by a line
    kind: Literal["line", "points", "bar", "cells"] = "line"
    horizontal: Mapping[str, float] = field(default_factory=dict)  # labelled reference lines
    aspect: Literal["auto", "equal"] = "auto"  # equal: one unit is as long on both axes
    marks: Sequence[Mark] = ()
    spans: Sequence[Span] = ()


@dataclass(frozen=True)
class Picture:
    """A figure: panels side by side."""

    name: str
    caption: str
    panels: Sequence[Panel]
