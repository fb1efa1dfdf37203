"""Experiments on timed trainings: each method at its own learning rate, and what it takes to AdamW's best loss."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from egop_lab.experiments.base import Experiment, Judgement, Kind, count_decades, make_alternative, to_verdict
from egop_lab.experiments.curves import best_rate, first_below, median, quartiles
from egop_lab.methods import get_label
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials, fast_math, shared_config

_TOO_SMALL = " This preset is too small to judge by."

Runs = dict[str, list[Record]]  # the reported runs by method
Measures = Mapping[str, tuple[str, Callable[[Record], float]]]  # description of a measure, and its number for a run


@dataclass(frozen=True)
class Claim:
    """The claim that a method has a smaller number than another one.

    Attributes:
        name: the last part of the claim's id.
        statement: the claim in words.
        measure: the compared quantity.
        method: the method with the smaller number.
        other: the method with the larger number.
        part: the largest allowed ratio of the two; strictly less than one by default.
        paper: both numbers in the paper.
        threshold: says that the ratio is our choice.
        kind: overrides the kind of the experiment's claims.
    """

    name: str
    statement: str
    measure: str
    method: str
    other: str
    part: float | None = None
    paper: str = ""
    threshold: str = ""
    kind: Kind | None = None

    def holds(self, one: float, other: float) -> bool:
        """Return True if the claim holds for the two numbers."""
        return one < other if self.part is None else one <= self.part * other


class TimedExperiment(Experiment):
    """Experiment whose settings have ``methods``, ``trials`` and, under the name in ``length``, a run's length."""

    comparison: ClassVar[str]
    training: ClassVar[Callable[..., Any]]  # builds a run from data, a configuration and a device
    length: ClassVar[str]
    claims: ClassVar[Sequence[Claim]]
    kind: ClassVar[Kind] = "claim"

    @abc.abstractmethod
    def trials(self, store: Store, context: Context) -> Trials:
        """Return the series of runs, with the data that the context names."""

    @abc.abstractmethod
    def find_rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        """Return the learning rate that the tuning runs choose; raise LookupError if some are missing."""

    def measures(self, goal: float) -> Measures:
        """Return the compared quantities by name; the goal is a validation loss."""
        where = f"to a validation loss of {goal:.3f}"
        return {
            self.length: (f"{self.length.capitalize()} {where}", lambda run: length_to(run, goal)),
            "seconds": (f"Seconds {where}", lambda run: seconds_to(run, goal)),
        }

    @abc.abstractmethod
    def format_numbers(self, claim: Claim, one: float, other: float) -> str:
        """Format both numbers."""

    def required_methods(self, preset: Preset) -> set[str]:
        """Return the methods whose runs must all be there; others are shown with those they have."""
        return set(self.settings(preset)["methods"])

    def choose_rate(self, store: Store, preset: Preset, method: str) -> float:
        """Return a method's learning rate."""
        return self.find_rate(self.settings(preset), self.finished_runs(store, preset), method)

    def run_reported(self, trials: Trials, methods: Sequence[str]) -> bool:
        """Do the reported runs of methods that are tuned; return True if all are done."""
        settings = self.settings(trials.context.preset)
        best = {method: self.find_rate(settings, trials.done, method) for method in methods}
        runs = [(seed, method) for seed in range(settings["trials"]) for method in methods]
        length = {self.length: settings[self.length]}
        with fast_math(trials.context.device):
            return all(trials.do(method=method, lr=best[method], **length, seed=seed) for seed, method in runs)

    def reported_runs(self, store: Store, preset: Preset) -> Runs:
        """Return each method's runs at its chosen rate."""
        settings, done, required = (
            self.settings(preset),
            self.finished_runs(store, preset),
            self.required_methods(preset),
        )
        by_method: Runs = {}
        for method in settings["methods"]:
            try:
                wanted = (method, self.find_rate(settings, done, method), settings[self.length])
                runs = [run for run in done if not is_tuning(run) and self.run_key(run) == wanted]
                if len(runs) < (settings["trials"] if method in required else 1):
                    raise LookupError(f"{method} has {len(runs)} of {settings['trials']} runs")
            except LookupError:
                if method in required:
                    raise
            else:
                by_method[method] = runs
        return by_method

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        return self.judge_claims(self.reported_runs(store, preset), preset, self.claims)

    def judge_claims(self, runs: Runs, preset: Preset, claims: Sequence[Claim]) -> list[Judgement]:
        """Judge some claims by these runs, for every goal."""
        (_, goal), *others = self.goals(runs).items()
        judged = [self._judge_claim(claim, runs, goal, preset) for claim in claims]
        for rule, goal in others:
            pairs = zip(judged, [self._judge_claim(claim, runs, goal, preset) for claim in claims], strict=True)
            judged = [
                one
                if _adds_nothing(other, one)
                else replace(one, alternatives=(*one.alternatives, make_alternative(rule, other)))
                for one, other in pairs
            ]
        return judged

    def _judge_claim(self, claim: Claim, runs: Runs, goal: float, preset: Preset) -> Judgement:
        what, number = self.measures(goal)[claim.measure]
        both = [runs[method] for method in (claim.method, claim.other)]
        one, other = (median([number(run) for run in own]) for own in both)
        judged = preset == "full" and min(one, other) < math.inf  # nothing to compare if neither gets there
        whole = [median([self._total(claim.measure, run) for run in own]) for own in both]
        return Judgement(
            f"{self.id}/{claim.name}",
            claim.statement,
            to_verdict(claim.holds(one, other)) if judged else "cannot be judged",
            f"{what}: {self.format_numbers(claim, one, other)}.{'' if preset == 'full' else _TOO_SMALL}",
            claim.kind or self.kind,
            claim.paper,
            claim.threshold,
            margin=count_decades(min(one, whole[0]), min(other, whole[1])) if judged else None,
        )

    def _total(self, measure: str, run: Record) -> float:
        """Return the total of a run: a lower bound on what it takes to a goal that it does not reach."""
        if measure == self.length:
            return float(run.config[self.length])
        return float(run.result["seconds"][-1]) if measure == "seconds" else math.inf

    def goals(self, runs: Runs) -> Mapping[str, float]:
        """Return the validation losses to reach, by rule; the first one judges, the others are alternatives."""
        return {"AdamW's lowest": self.goal(runs)}

    def goal(self, runs: Runs) -> float:
        """Return AdamW's lowest median validation loss after any pass."""
        curves = [run.result["validation loss"] for run in runs[get_label(self.comparison, "adamw")]]
        return min(quartiles(curves)[1])

    def finished_runs(self, store: Store, preset: Preset) -> list[Record]:
        """Return the runs on the same data and with the same settings as the last one."""
        runs = self.records(store, preset)
        return [run for run in runs if shared_config(run) == shared_config(runs[-1])]

    def run_key(self, run: Record) -> tuple[str, float, int]:
        """Return method, learning rate and length."""
        return run.config["method"], run.config["lr"], run.config[self.length]


def _adds_nothing(other: Judgement, one: Judgement) -> bool:
    """Return True if an alternative rule sees the same numbers, or has nothing to compare where this one has."""
    return other.finding == one.finding or (other.verdict == "cannot be judged" != one.verdict)


def search_rates(
    ladder: Sequence[float], first: Sequence[float], runs: Sequence[Record], score: Callable[[Mapping[str, Any]], float]
) -> tuple[float, list[float]]:
    """Return the best learning rate, and the rates still to try before it is known.

    While the best is the first or last rate tried, the next one of the ladder on that side is to be tried too.

    Args:
        ladder: all rates that may be tried, ascending.
        first: the rates that are always tried.
        runs: the runs so far.
        score: score of a result; the smaller the better.
    """
    there = {run.config["lr"] for run in runs}
    low, high = ladder.index(min(first)), ladder.index(max(first))
    while True:
        tried = ladder[low : high + 1]
        if left := [rate for rate in tried if rate not in there]:
            return math.nan, left
        best = ladder.index(best_rate([run for run in runs if run.config["lr"] in tried], score))
        if best == low > 0:
            low -= 1
        elif best == high < len(ladder) - 1:
            high += 1
        else:
            return ladder[best], []


def is_tuning(run: Record) -> bool:
    """Return True if a run is for choosing a learning rate."""
    return bool(run.config["seed"] >= TUNING)


def length_to(run: Record, goal: float) -> float:
    """Return the steps or epochs after which the validation loss is at most the goal; infinite if never."""
    place = first_below(run.result["validation loss"], goal)
    return math.inf if place is None else place * int(run.config.get("interval", 1))


def seconds_to(run: Record, goal: float) -> float:
    """Return the seconds of training, estimation of bases included, until the validation loss is at most the goal."""
    place = first_below(run.result["validation loss"], goal)
    return math.inf if place is None else run.result["seconds"][place]


def lowest_loss(result: Mapping[str, Any]) -> float:
    """Return the lowest validation loss of a run."""
    return min((value for value in result["validation loss"] if value == value), default=math.inf)


def find_lowest_pass(result: Mapping[str, Any]) -> int:
    """Return the number of passes after which the validation loss is lowest."""
    losses: list[float] = result["validation loss"]
    return losses.index(lowest_loss(result)) if math.isfinite(lowest_loss(result)) else 0


def format_number(value: float, digits: int) -> str:
    """Format a number of passes or seconds."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "never"
