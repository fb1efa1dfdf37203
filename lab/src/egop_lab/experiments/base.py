"""The interface of experiments: settings, runs, claims and pictures, all plain values; drawing happens elsewhere."""

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store

Verdict = Literal["holds", "does not hold", "cannot be judged"]
Kind = Literal["claim", "reading", "target", "control", "check"]


@dataclass(frozen=True)
class Alternative:
    """The result of judging a claim by an alternative rule."""

    rule: str
    verdict: Verdict
    finding: str


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict and the numbers behind it."""

    id: str  # experiment/short-name
    statement: str
    verdict: Verdict  # by the paper's own rule; "cannot be judged" if this preset is too small
    finding: str  # the measured numbers on both sides, in a sentence made from the records
    # A claim of the paper, our reading of one of its figures, a target of this project, a control of ours, or a check
    # of the code (a failing check is an error, so all checks hold).
    kind: Kind = "claim"
    paper: str = ""  # the paper's numbers, if it gives any
    threshold: str = ""  # ours, if the paper gives none
    alternatives: tuple[Alternative, ...] = ()  # results under other rules, which are ours
    margin: float | None = None  # decades between the compared numbers; negative if they are the other way round


@dataclass(frozen=True)
class Table:
    """A table of formatted numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Experiment(abc.ABC):
    """A figure or table of the paper. A subclass is one file; an instance has no state."""

    id: ClassVar[str]
    title: ClassVar[str]
    figures: ClassVar[str]  # of the paper
    labels: ClassVar[tuple[str, ...]] = ()  # their labels in the LaTeX source
    # The paper's values by setting, for the settings that it names.
    paper: ClassVar[Mapping[str, str]] = {}
    version: ClassVar[int] = 1  # part of every configuration; increase it when the code changes what a run does

    @abc.abstractmethod
    def settings(self, preset: Preset) -> dict[str, Any]:
        """Return sizes, trials and grids as plain values, which the report shows."""

    @abc.abstractmethod
    def run(self, store: Store, context: Context) -> None:
        """Do the runs that the store does not have yet; add each as soon as it is finished."""

    @abc.abstractmethod
    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        """Return each claim with its verdict, from the records alone."""

    @abc.abstractmethod
    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        """Return the figures, from the records alone."""

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        """Return tables, from the records alone; none by default."""
        return []

    def remarks(self, store: Store, preset: Preset) -> list[str]:
        """Return remarks that come before everything else, from the records alone; none by default."""
        return []

    def config(self, preset: Preset, **entries: Any) -> dict[str, Any]:
        """Return the configuration of one run: common entries and its own settings."""
        return {"experiment": self.id, "version": self.version, "preset": preset, **entries}

    def records(self, store: Store, preset: Preset, **wanted: Any) -> list[Record]:
        """Return the finished runs of this preset and version whose configuration has these values."""
        config = self.config(preset, **wanted)
        return [r for r in store if all(r.config.get(key) == value for key, value in config.items())]


def to_verdict(holds: bool) -> Verdict:
    """Return the verdict on a claim that was tested."""
    return "holds" if holds else "does not hold"


def count_decades(smaller: float, larger: float, floor: float = 0.0) -> float | None:
    """Return how many decades a number is below another, both clamped to a floor; None if one is not positive."""
    one, other = max(smaller, floor), max(larger, floor)
    return math.log10(other / one) if 0 < one < math.inf and 0 < other < math.inf else None


def compare(id: str, words: str, smaller: tuple[str, float], larger: tuple[str, float], **more: Any) -> Judgement:
    """Judge the claim that one measured number is smaller than another; ``more`` are further fields."""
    finding = f"{smaller[0]}: {smaller[1]:.3g}; {larger[0]}: {larger[1]:.3g}."
    margin = count_decades(smaller[1], larger[1])
    return Judgement(id, words, to_verdict(smaller[1] < larger[1]), finding, margin=margin, **more)


def make_alternative(rule: str, other: Judgement) -> Alternative:
    """Return the result of judging a claim by an alternative rule."""
    return Alternative(rule, other.verdict, other.finding)


def add_alternatives(
    judged: Sequence[Judgement], rule: str, others: Sequence[Judgement], always: Collection[str] = ()
) -> list[Judgement]:
    """Add the results of an alternative rule for some of the claims, where the verdict differs or ``always``.

    So are those of its own alternatives.
    """
    by_id = {each.id: each for each in others}
    return [
        _add_alternative(each, rule, by_id[each.id], each.id in always) if each.id in by_id else each for each in judged
    ]


def _add_alternative(one: Judgement, rule: str, other: Judgement, always: bool) -> Judgement:
    known = {each.rule: each.verdict for each in one.alternatives}
    more = [replace(each, rule=f"{rule}, {each.rule}") for each in other.alternatives
            if each.verdict != known.get(each.rule, one.verdict)]  # fmt: skip
    if always or other.verdict not in (one.verdict, "cannot be judged"):
        more.insert(0, make_alternative(rule, other))
    return replace(one, alternatives=(*one.alternatives, *more))
