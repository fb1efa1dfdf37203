"""Results of the study of advice: what the race predicted and what full trainings gave."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from egop.diagnose import CANDIDATES as _DEFAULTS
from egop.diagnose import Comparison, Diagnosis, Race, Run
from egop_lab.experiments.base import Judgement, Table, to_verdict
from egop_lab.experiments.curves import rank_correlation
from egop_lab.training.records import Record

CANDIDATES = tuple(each.name for each in _DEFAULTS)
HALVES = ("open", "frozen")
ADAMW = CANDIDATES[0]

# Targets: rank correlation, gains that the advice must not miss or reverse, and the share of good learning rates.
CORRELATION, MISSED, REVERSED, GOOD_RATES = 0.7, 0.15, 0.10, 0.85
_CLOSE = 1.05  # a rate is good if its final loss is at most this multiple of the tuned one
_RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """One candidate on one problem: the race's prediction and the result of full trainings."""

    problem: str
    candidate: str
    predicted: Comparison
    true: Comparison


class Results:
    """What the records of the study say."""

    def __init__(self, settings: Mapping[str, Any], records: Sequence[Record]) -> None:
        self.settings = settings
        self._trainings: dict[tuple[str, str], list[Run]] = {}
        self._races: dict[str, Mapping[str, Any]] = {}
        for record in records:
            config, problem = record.config, record.config["problem"]
            if config["steps"] != settings["problems"][problem]["steps"]:
                continue  # of another version of the problem
            if config["what"] == "race":
                self._races[problem] = record.result
            else:
                run = _read_training(config, record.result, settings["evaluations"])
                self._trainings.setdefault((problem, config["candidate"]), []).append(run)

    @property
    def complete(self) -> list[str]:
        """Problems whose trainings, race and proposed rates are all recorded."""
        return [
            name
            for name in self.settings["problems"]
            if name in self._races and all((name, each) in self._trainings for each in CANDIDATES)
        ]

    def select(self, half: str) -> list[str]:
        return [name for name in self.complete if self.settings["problems"][name]["half"] == half]

    def tuned(self, problem: str, candidate: str) -> list[Run]:
        """Return the runs at the rate with the lowest mean final loss, one for each seed."""
        by_rate: dict[float, list[Run]] = {}
        for run in self._trainings[problem, candidate]:
            by_rate.setdefault(run.lr, []).append(run)
        repeated = [runs for runs in by_rate.values() if len(runs) == self.settings["seeds"]]
        best = min(repeated, key=lambda runs: sum(run.final for run in runs))
        return sorted(best, key=lambda run: run.seed)

    def compare(self, problem: str, candidate: str) -> Comparison:
        """Compare a candidate with AdamW in full trainings, each at its tuned rate; the geometric mean over seeds."""
        ratios = []
        for own, base in zip(self.tuned(problem, candidate), self.tuned(problem, ADAMW), strict=True):
            target = max(own.final, base.final)
            ratios.append(own.steps_to(target) / max(base.steps_to(target), 1e-9))
        seconds = [
            statistics.median(run.step_seconds for run in self._trainings[problem, name] if math.isfinite(run.final))
            for name in (candidate, ADAMW)
        ]
        return Comparison(math.exp(statistics.mean(math.log(ratio) for ratio in ratios)), seconds[0] / seconds[1])

    def diagnose(self, problem: str, *, equal_steps: bool = False) -> Diagnosis:
        """Rebuild the diagnosis from the recorded race, perhaps as if a step of every candidate took the same time."""
        result = self._races[problem]
        stages = [
            {name: [_read_run(run, equal_steps) for run in runs] for name, runs in stage.items()}
            for stage in result["runs"]
        ]
        race = Race(
            self.settings["problems"][problem]["steps"],
            (0, 1),
            lengths=tuple(result["lengths"]),
            start=result["start"],
            runs=(stages[0], stages[1]),
            left_out=dict(result["left_out"]),
        )
        return Diagnosis(tuple(each for each in _DEFAULTS if stages[0].get(each.name)), race)

    def pairs(self, half: str) -> list[Pair]:
        """Return the predictions and results of all candidates on the problems of one half."""
        found = []
        for problem in self.select(half):
            predicted = self.diagnose(problem).comparisons
            names = [name for name in predicted if name != ADAMW]
            found += [Pair(problem, name, predicted[name], self.compare(problem, name)) for name in names]
        return found

    def correlate(self, half: str) -> tuple[float, float, float]:
        """Return the rank correlation of predicted and true steps, with a 95 % bootstrap interval over problems."""
        grouped: dict[str, list[tuple[float, float]]] = {}
        for each in self.pairs(half):
            grouped.setdefault(each.problem, []).append((each.predicted.steps, each.true.steps))
        return _bootstrap(
            list(grouped.values()),
            lambda groups: rank_correlation(*zip(*(pair for group in groups for pair in group), strict=True)),
        )

    def correlate_best(self, half: str) -> tuple[float, float, float]:
        """Return the same for the best candidate of each problem alone."""
        grouped = []
        for problem in self.select(half):
            pairs = [each for each in self.pairs(half) if each.problem == problem]
            best = (min(each.predicted.steps for each in pairs), min(each.true.steps for each in pairs))
            grouped.append([best])
        return _bootstrap(grouped, lambda groups: rank_correlation(*zip(*(group[0] for group in groups), strict=True)))

    def mistakes(self, half: str, *, equal_steps: bool) -> tuple[list[str], list[str]]:
        """Return the problems with a missed gain and those where the advice is slower than AdamW, by time or steps."""
        missed, reversed_ = [], []
        for problem in self.select(half):
            truth = {name: self.compare(problem, name) for name in CANDIDATES}
            cost = {name: each.steps if equal_steps else each.time for name, each in truth.items()}
            advised = self.diagnose(problem, equal_steps=equal_steps).advised
            if advised == ADAMW and min(cost.values()) < 1 - MISSED:
                missed.append(problem)
            if cost[advised] > 1 / (1 - REVERSED):
                reversed_.append(problem)
        return missed, reversed_

    def check_rates(self, half: str, count: int = 2) -> dict[tuple[str, str], bool]:
        """Return for each problem and candidate whether one of the first rates that the race proposes is good.

        A rate that was not trained in full counts as bad: it is beyond one at which the final loss got worse.
        """
        found = {}
        for problem, candidate in itertools.product(self.select(half), CANDIDATES):
            finals = {run.lr: run.final for run in self._trainings[problem, candidate] if run.seed == 0}
            rates = self.diagnose(problem).race.propose_rates(candidate)[:count]
            losses = [finals.get(rate, math.inf) for rate in rates]
            found[problem, candidate] = min(losses, default=math.inf) <= _CLOSE * min(finals.values())
        return found

    def summarize(self) -> list[Judgement]:
        """Judge the targets on the frozen half; the findings give both halves."""
        counts = {half: len(self.select(half)) for half in HALVES}
        steps = {half: self.mistakes(half, equal_steps=True) for half in HALVES}
        times = {half: self.mistakes(half, equal_steps=False) for half in HALVES}
        rates = {half: list(self.check_rates(half).values()) for half in HALVES}
        good = {half: sum(each) for half, each in rates.items()}
        with_third = {half: sum(self.check_rates(half, 3).values()) for half in HALVES}
        correlations = {half: self.correlate(half) for half in HALVES}
        best = {half: self.correlate_best(half) for half in HALVES}

        def count(which: int) -> str:
            return "; ".join(
                f"{half}: {len(times[half][which])} of {counts[half]} by time{_list(times[half][which])}, "
                f"{len(steps[half][which])} by steps{_list(steps[half][which])}"
                for half in reversed(HALVES)
            )

        return [
            Judgement(
                "advice/correlation",
                f"Target: the rank correlation of predicted and final steps to a loss is at least {CORRELATION}.",
                to_verdict(correlations["frozen"][0] >= CORRELATION),
                "; ".join(
                    f"{half}: {_interval(correlations[half])} over all candidates, {_interval(best[half])} for the "
                    f"best candidate of each of {counts[half]} problems"
                    for half in reversed(HALVES)
                )
                + ".",
                "target",
            ),
            Judgement(
                "advice/missed",
                f"Target: AdamW is never advised where a candidate is more than {MISSED:.0%} faster.",
                to_verdict(not times["frozen"][0]),
                f"{count(0)}.",
                "target",
            ),
            Judgement(
                "advice/reversed",
                f"Target: a candidate is never advised where AdamW is more than {REVERSED:.0%} faster.",
                to_verdict(not times["frozen"][1]),
                f"{count(1)}.",
                "target",
            ),
            Judgement(
                "advice/rates",
                f"Target: one of the first two proposed rates is within 5 % of the tuned loss in {GOOD_RATES:.0%} of "
                "cases.",
                to_verdict(good["frozen"] >= GOOD_RATES * len(rates["frozen"])),
                "; ".join(
                    f"{half}: {good[half]} of {len(rates[half])} ({_wilson(good[half], len(rates[half]))}), "
                    f"{with_third[half]} with the third rate"
                    for half in reversed(HALVES)
                )
                + ".",
                "target",
            ),
        ]

    def problem_table(self) -> Table:
        """Return predicted and true steps of each candidate, and the advice, for each problem."""
        others, rows = CANDIDATES[1:], []
        for name in self.complete:
            kind, half = (self.settings["problems"][name][key] for key in ("kind", "half"))
            diagnosis, truth = self.diagnose(name), {each: self.compare(name, each) for each in others}
            predicted = diagnosis.comparisons
            cells = [
                f"{predicted[each].steps:.2f} / {truth[each].steps:.2f} ({truth[each].time:.2f})"
                if each in predicted
                else "-"
                for each in others
            ]
            sure = "" if not diagnosis.doubts else " (uncertain)"
            rows.append((name, kind, half, *cells, f"{diagnosis.advised}{sure}"))
        title = "Steps to the same loss as a multiple of AdamW's: race / full training (time in full training)"
        return Table(title, ("problem", "kind", "half", *others, "advice by time"), tuple(rows))

    def rate_table(self) -> Table:
        """Return the median of the best learning rates of full trainings, and their range, by kind of model."""
        kinds = dict.fromkeys(self.settings["problems"][name]["kind"] for name in self.complete)
        rows = []
        for kind in kinds:
            names = [name for name in self.complete if self.settings["problems"][name]["kind"] == kind]
            cells = []
            for candidate in CANDIDATES:
                rates = sorted(self.tuned(name, candidate)[0].lr for name in names)
                spread = "" if rates[0] == rates[-1] else f" ({rates[0]:g}–{rates[-1]:g})"
                cells.append(f"{statistics.median_low(rates):g}{spread}")
            rows.append((kind, str(len(names)), *cells))
        return Table("Best learning rates of full trainings", ("kind", "problems", *CANDIDATES), tuple(rows))


def _read_training(config: Mapping[str, Any], result: Mapping[str, Any], evaluations: int) -> Run:
    losses = tuple(loss if math.isfinite(loss) else math.inf for loss in result["losses"])
    every = config["steps"] // evaluations
    return Run(config["lr"], config["seed"], config["steps"], every, losses, result["step_seconds"])


def _read_run(entries: Mapping[str, Any], equal_steps: bool) -> Run:
    losses = tuple(loss if math.isfinite(loss) else math.inf for loss in entries["losses"])
    run = Run(**{**entries, "losses": losses})
    return replace(run, step_seconds=1.0) if equal_steps else run


def _bootstrap(groups: list[Any], function: Callable[[list[Any]], float]) -> tuple[float, float, float]:
    """Return a statistic of groups and the 95 % interval of its values on groups drawn with replacement."""
    if len(groups) < 3:
        return math.nan, math.nan, math.nan
    generator = np.random.default_rng(0)
    drawn = [
        function([groups[place] for place in generator.integers(len(groups), size=len(groups))])
        for _ in range(_RESAMPLES)
    ]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return function(groups), float(low), float(high)


def _interval(values: tuple[float, float, float]) -> str:
    return f"{values[0]:.2f} (95 %: {values[1]:.2f} to {values[2]:.2f})"


def _wilson(successes: int, count: int) -> str:
    if not count:
        return "no cases"
    share, square = successes / count, 1.96**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    width = 1.96 * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return f"{share:.0%}, 95 %: {middle - width:.0%} to {middle + width:.0%}"


def _list(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
