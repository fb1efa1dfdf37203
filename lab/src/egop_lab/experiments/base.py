"""The interface of experiments: settings, runs, claims and pictures, all plain values; drawing happens elsewhere."""

from __future__ import annotations

import abc
import math
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Literal, TypeVar

import torch

from egop_lab.plots.picture import Picture
from egop_lab.training import batched
from egop_lab.training.context import Context, make_record
from egop_lab.training.records import Record, Store

E = TypeVar("E", bound="Experiment")
P = TypeVar("P", bound=batched.Problem)
Preset = Literal["quick", "full"]  # small sizes and few trials, labelled as such; the paper's
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

    def add_alternative(self, rule: str, other: Judgement) -> Judgement:
        """Return the judgement with the result of an alternative rule beside it."""
        return replace(self, alternatives=(*self.alternatives, Alternative(rule, other.verdict, other.finding)))


@dataclass(frozen=True)
class Table:
    """A table of formatted numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@cache
def _load_declarations() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "declarations.toml").read_text(encoding="utf-8"))


class Experiment(abc.ABC):
    """A figure or table of the paper, at the sizes of a preset and with the records of its runs.

    A subclass is one file. It says what to run, and what the records mean.
    """

    id: ClassVar[str]  # its table in declarations.toml
    version: ClassVar[int] = 1  # part of every configuration; increase it when the code changes what a run does

    def __init__(self, preset: Preset = "quick", store: Store | None = None) -> None:
        self.preset, self.store = preset, Store() if store is None else store
        self._beside: dict[type[Experiment], Any] = {}
        self.declared = self.declare()
        self.title: str = self.declared["title"]
        self.figures: str = self.declared["figures"]  # of the paper
        self.labels: list[str] = self.declared.get("labels", [])  # in the LaTeX source
        self.paper: dict[str, str] = self.declared.get("paper", {})  # the paper's settings, of those that it names

    @classmethod
    def declare(cls) -> dict[str, Any]:
        """Return what ``declarations.toml`` says about the experiment."""
        found: dict[str, Any] = _load_declarations()[cls.id]
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """Sizes, trials and grids as plain values, which the report shows."""
        quick = self.declared.get("quick", {}) if self.preset == "quick" else {}
        return {**self.declared["full"], **quick}

    @abc.abstractmethod
    def run(self, context: Context) -> None:
        """Do the runs that the store does not have yet; add each as soon as it is finished."""

    @abc.abstractmethod
    def judge(self) -> list[Judgement]:
        """Return each claim with its verdict, from the records alone."""

    def pictures(self) -> list[Picture]:
        """Return the figures, from the records alone; none by default."""
        return []

    def tables(self) -> list[Table]:
        """Return tables, from the records alone; none by default."""
        return []

    def remarks(self) -> list[str]:
        """Return remarks that come before everything else, from the records alone; none by default."""
        return []

    def config(self, **entries: Any) -> dict[str, Any]:
        """Return the configuration of one run: common entries and its own settings."""
        return {"experiment": self.id, "version": self.version, "preset": self.preset, **entries}

    def records(self, **wanted: Any) -> list[Record]:
        """Return the finished runs of this preset and version whose configuration has these values."""
        config = self.config(**wanted)
        return [r for r in self.store if all(r.config.get(key) == value for key, value in config.items())]

    def beside(self, other: type[E]) -> E:
        """Return another experiment with the same preset, whose records are in the same folder."""
        if other not in self._beside:
            self._beside[other] = other(self.preset, self.store.open_beside(other.id))
        found: E = self._beside[other]
        return found

    def do_missing(
        self,
        configs: Iterable[Mapping[str, Any]],
        run: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        device: torch.device | str = "cpu",
    ) -> None:
        """Do the runs that the store does not have yet, one after the other; ``run`` returns a result."""
        for config in self.store.missing(configs):
            began = time.perf_counter()
            result = run(config)
            self.store.add(make_record(config, result, time.perf_counter() - began, device))

    def sweep(
        self,
        context: Context,
        problem: Callable[[Sequence[int]], P],
        basis: Callable[[P, str], batched.Basis | None],
        *,
        rates: Mapping[str, Sequence[float]],
        seeds: Sequence[int],
        coordinates: Sequence[str],
        steps: int,
        record_every: int,
        at_once: int | None = None,
        extra: Mapping[str, Any] | None = None,
        compact: Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Do the runs of a sweep that the store does not have yet; all rates and some trials of one method at a time.

        Args:
            context: the device.
            problem: builds the problems of several seeds.
            basis: builds their bases for a kind of coordinates; called once for all optimizers.
            rates: the learning rates of each optimizer.
            seeds: one per trial.
            coordinates: "original", "EGOP" or another kind that the experiment knows.
            steps: the number of steps of a run.
            record_every: steps between two recorded evaluations.
            at_once: trials to run together, limited by memory; all by default.
            extra: further settings that go into every configuration.
            compact: returns what to record of a result, given the configuration; everything by default.
            **options: further arguments of the training.
        """
        at_once = at_once or len(seeds)
        for trials in (seeds[first : first + at_once] for first in range(0, len(seeds), at_once)):
            made: P | None = None
            for kind in coordinates:
                left: dict[str, dict[float, list[dict[str, Any]]]] = {}
                for optimizer, grid in rates.items():
                    method = {"optimizer": optimizer, "coordinates": kind}
                    further = {"steps": steps, **(extra or {})}
                    runs = {lr: [self.config(**method, lr=lr, **further, seed=seed) for seed in trials] for lr in grid}
                    left[optimizer] = {lr: configs for lr, configs in runs.items() if self.store.missing(configs)}
                if not any(left.values()):
                    continue
                made = problem(trials) if made is None else made
                options |= {"basis": basis(made, kind), "record_every": record_every, "progress": context.progress}
                for optimizer, missing in left.items():
                    if not missing:
                        continue
                    curves, seconds = batched.train(made, optimizer, list(missing), steps, **options)
                    records = []
                    for column, configs in enumerate(missing.values()):
                        for row, config in enumerate(configs):
                            result = {name: values[row, column].tolist() for name, values in curves.items()}
                            kept = result if compact is None else compact(config, result)
                            share = seconds / len(missing) / len(trials)
                            records.append(make_record(config, kept, share, context.device))
                    self.store.add(*records)


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
    shown = always or other.verdict not in (one.verdict, "cannot be judged")
    joined = one.add_alternative(rule, other) if shown else one
    more = [replace(each, rule=f"{rule}, {each.rule}") for each in other.alternatives
            if each.verdict != known.get(each.rule, one.verdict)]  # fmt: skip
    return replace(joined, alternatives=(*joined.alternatives, *more))
