"""Pictures as plain values, which need no matplotlib; ``figures`` draws them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Series:
    """One line of a panel (or one bar per row): medians, with quartiles if there are several trials."""

    label: str
    x: Sequence[float | str]  # positions, or the names of bars and columns
    median: Sequence[float]  # for a bar, infinity means never and NaN means unknown
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    method: str = ""  # decides the colour
    egop: bool = False  # in EGOP coordinates; drawn dashed
    chosen: float | None = None  # an x value to mark with a star, such as a chosen learning rate
    faint: bool = False  # thin, in the background and without a label


@dataclass(frozen=True)
class Mark:
    """A point with a name."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Span:
    """A labelled arrow along the x axis, for what is saved between two positions."""

    label: str
    start: float
    end: float
    height: float
    method: str = ""  # decides the colour


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    xscale: Literal["linear", "log"] = "linear"
    yscale: Literal["linear", "log"] = "log"
    kind: Literal["line", "points", "bar"] = "line"  # points: no lines between them
    horizontal: Mapping[str, float] = field(default_factory=dict)  # labelled reference lines
    aspect: Literal["auto", "equal"] = "auto"  # equal: the same scale on both axes
    marks: Sequence[Mark] = ()
    spans: Sequence[Span] = ()


@dataclass(frozen=True)
class Picture:
    """A figure: panels side by side."""

    name: str
    caption: str
    panels: Sequence[Panel]
