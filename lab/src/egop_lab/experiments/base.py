"""One experiment = settings, runs, claims, pictures. All of them are values; drawing and reporting happen elsewhere."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from egop.runs import Picture
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store

Verdict = Literal["holds", "does not hold", "cannot be judged"]
Kind = Literal["claim", "target", "check"]


@dataclass(frozen=True)
class Judged:
    """A claim of the paper and what was found.

    Attributes:
        id: of the claim, ``experiment/short-name``; one that is judged more than once has it every time.
        words: the paper's claim in short.
        verdict: what the records say; "cannot be judged" where this preset is too small for it.
        found: the measured numbers on both sides, in a sentence made from the records.
        kind: a claim of the paper, a target of this project, or a check that the code is right: one that fails is an
            error, so there are only checks that hold.
    """

    id: str
    words: str
    verdict: Verdict
    found: str
    kind: Kind = "claim"


@dataclass(frozen=True)
class Table:
    """Numbers in words, for reading.

    Attributes:
        title: what they are.
        header: of the columns.
        rows: as wide as the header.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Experiment(abc.ABC):
    """A figure or table of the paper. A subclass is one file; an instance has no state."""

    id: ClassVar[str]
    title: ClassVar[str]
    figures: ClassVar[str]  # which ones of the paper
    version: ClassVar[int] = 1  # goes into every configuration; raised when the code changes what a run does

    @abc.abstractmethod
    def settings(self, preset: Preset) -> dict[str, Any]:
        """Sizes, trials, grids: plain values, shown in the report."""

    @abc.abstractmethod
    def run(self, store: Store, context: Context) -> None:
        """Do the runs that the store does not have yet, adding each as it is finished."""

    @abc.abstractmethod
    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        """Each claim with its verdict, from the records alone."""

    @abc.abstractmethod
    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        """The figures, from the records alone."""

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        """What is better read than seen, from the records alone; none by default."""
        return []

    def config(self, preset: Preset, **entries: Any) -> dict[str, Any]:
        """The configuration of one run: what is common to all, and its own settings."""
        return {"experiment": self.id, "version": self.version, "preset": preset, **entries}

    def records(self, store: Store, preset: Preset, **wanted: Any) -> list[Record]:
        """The finished runs of this preset and version whose configuration has these values."""
        config = self.config(preset, **wanted)
        return [r for r in store if all(r.config.get(key) == value for key, value in config.items())]


def verdict(holds: bool) -> Verdict:
    """The verdict on a claim that was put to the test."""
    return "holds" if holds else "does not hold"


def compare(
    id: str, words: str, smaller: tuple[str, float], larger: tuple[str, float], *, judged: bool = True
) -> Judged:
    """The verdict on a claim that one measured number is smaller than another."""
    finding = f"{smaller[0]}: {smaller[1]:.3g}; {larger[0]}: {larger[1]:.3g}."
    return Judged(id, words, verdict(smaller[1] < larger[1]) if judged else "cannot be judged", finding)
