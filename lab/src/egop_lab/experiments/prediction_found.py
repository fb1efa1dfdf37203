"""What the records of the study of prediction say: gains, candidates, the one that is chosen, and how it does."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from egop_lab.experiments.curves import median
from egop_lab.experiments.timed_experiment import is_tuning, search_rates
from egop_lab.training.prediction import FORMS, ORIGINAL
from egop_lab.training.records import Record

Half = Literal["chosen on", "held out"]
HALVES: tuple[Half, Half] = ("chosen on", "held out")
WORTH = 0.1  # a gain that nobody is to be advised against
BUDGET = 0.05  # of a training, for probes


def half(problem: str) -> Half:
    """Which half of the study a problem is in: a rule that was fixed before anything was run."""
    return HALVES[hashlib.sha256(problem.encode()).digest()[0] % 2]


@dataclass(frozen=True)
class Gain:
    """What a form gains over the original on one problem; medians over seeds.

    Attributes:
        share: of the original's steps, until the loss is as low as the original's last one; infinite where it never is.
        time: the same in seconds.
        ratio: the logarithm of the original's last loss by this one's.
    """

    share: float
    time: float
    ratio: float

    @property
    def steps(self) -> float:
        """The part of the steps that is saved; 0 where none is, since nobody has to use the form."""
        return max(0.0, 1 - self.share)


@dataclass(frozen=True)
class Candidate:
    """A number from before the training that may say what a form gains.

    Attributes:
        name: what it is.
        values: by problem.
        budget: the part of a training that its trial steps take.
    """

    name: str
    values: Mapping[str, float]
    budget: float = 0.0


@dataclass(frozen=True)
class Chosen:
    """The candidate that does best on the first half, and how it does on the other.

    Attributes:
        candidate: the one.
        sign: 1 where large values promise a gain, -1 where small ones do.
        correlations: with the measured gain, by half.
        threshold: below it (of sign times value) the advice is to leave it.
        left: the problems of the held-out half that get this advice.
        missed: those of them that would have gained more than a tenth.
    """

    candidate: Candidate
    sign: int
    correlations: Mapping[Half, float]
    threshold: float
    left: Sequence[str]
    missed: Sequence[str]


class Found:
    """The records of some problems.

    Args:
        settings: of the experiment.
        records: of each problem.
    """

    def __init__(self, settings: Mapping[str, Any], records: Mapping[str, Sequence[Record]]) -> None:
        self.settings, self.records = settings, records
        self._known: dict[tuple[str, str], Gain] = {}  # asked for many times

    def trainings(self, problem: str, form: str) -> list[Record]:
        """The whole trainings of a form."""
        runs = self.records.get(problem, ())
        return [run for run in runs if "what" not in run.config and run.config["method"] == form]

    def search(self, problem: str, form: str) -> tuple[float, list[float]]:
        """A form's learning rate, and those that are to be tried before there is one.

        The original begins with three rates of the problem, other forms with those around the original's.
        """
        ladder = self.settings["ladder"]
        middle = self.settings["problems"][problem]["rate"] if form == ORIGINAL else self.rate(problem, ORIGINAL)
        place = ladder.index(middle)
        runs = [run for run in self.trainings(problem, form) if is_tuning(run)]
        return search_rates(ladder, ladder[max(0, place - 1) : place + 2], runs, final)

    def rate(self, problem: str, form: str) -> float:
        """A form's learning rate; a LookupError before there is one."""
        best, left = self.search(problem, form)
        if left:
            raise LookupError(f"{problem}: {form} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def reported(self, problem: str, form: str) -> list[Record]:
        """The runs at a form's learning rate, one a seed; a LookupError while some are missing."""
        rate, count = self.rate(problem, form), self.settings["trials"]
        runs = [run for run in self.trainings(problem, form) if run.config["lr"] == rate and not is_tuning(run)]
        if len(runs) < count:
            raise LookupError(f"{problem}: {form} has {len(runs)} of {count} runs")
        return sorted(runs, key=lambda run: int(run.config["seed"]))

    def measured(self, problem: str, what: str) -> Mapping[str, Any]:
        """What else was recorded of a problem: ``times``, ``predictors`` or ``probes``."""
        for run in self.records.get(problem, ()):
            if run.config.get("what") == what:
                return run.result
        raise LookupError(f"{problem}: {what} are missing")

    def gain(self, problem: str, form: str) -> Gain:
        """What a form gains; seed by seed, since problems differ from seed to seed."""
        if (problem, form) not in self._known:
            self._known[problem, form] = self._gain(problem, form)
        return self._known[problem, form]

    def _gain(self, problem: str, form: str) -> Gain:
        times = self.measured(problem, "times")
        steps = self.settings["problems"][problem]["steps"]
        shares, spent, ratios = [], [], []
        for run, other in zip(self.reported(problem, form), self.reported(problem, ORIGINAL), strict=True):
            goal = final(other.result)
            needed, usual = (reached(each.result["loss"], goal) for each in (run, other))
            shares.append(needed / usual)
            seconds = times[form]["before"] + steps * needed * times[form]["step"]
            spent.append(seconds / (steps * usual * times[ORIGINAL]["step"]))
            ratios.append(math.log(goal / final(run.result)) if final(run.result) > 0 else math.nan)
        return Gain(median(shares), median(spent), -median([-ratio for ratio in ratios]))

    def best(self, problem: str) -> str:
        """The form that saves most steps; of equal ones the one that ends lowest."""
        gains = {form: self.gain(problem, form) for form in FORMS if form != ORIGINAL}
        return max(gains, key=lambda form: (gains[form].steps, gains[form].ratio))

    def best_gain(self, problem: str) -> float:
        """The part of the steps that the best form saves."""
        return self.gain(problem, self.best(problem)).steps

    @functools.cached_property
    def complete(self) -> list[str]:
        """The problems of which everything is there."""
        return [problem for problem in self.settings["problems"] if self._is_complete(problem)]

    def _is_complete(self, problem: str) -> bool:
        try:
            return all(self.measured(problem, what) for what in ("times", "predictors", "probes")) and all(
                len(self.reported(problem, form)) > 0 for form in FORMS
            )
        except LookupError:
            return False

    def of(self, part: Half) -> list[str]:
        """The complete problems of a half."""
        return [problem for problem in self.complete if half(problem) == part]

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """All of them: quantities of gradients and curvature, and probes of a few steps."""
        known = {problem: self.measured(problem, "predictors") for problem in self.complete}
        names = list(dict.fromkeys(name for numbers in known.values() for name in numbers))
        length = self.settings["probe"]
        still = [
            Candidate(
                name,
                {problem: numbers.get(name, math.nan) for problem, numbers in known.items()},
                length if name.startswith("early") or "early" in name else 0.0,
            )
            for name in names
        ]
        forms = [form for form in FORMS if form != ORIGINAL]
        short = [
            Candidate(f"probe: {form}", {problem: self._probe(problem, [form], 1, 1) for problem in known}, length)
            for form in forms
        ]
        count = len(FORMS) * len(self.settings["probe rates"])
        values = {problem: self._probe(problem, forms, None, 2) for problem in known}
        return [*still, *short, Candidate("probe: all forms, three rates", values, count * length)]

    def _probe(self, problem: str, forms: Sequence[str], rate: int | None, look: int) -> float:
        """The logarithm of the original's loss by the best of some forms': with one rate, or the best of all."""
        probes = self.measured(problem, "probes")

        def lowest(form: str) -> float:
            runs = probes[form] if rate is None else [probes[form][rate]]
            return min(run[look] if math.isfinite(run[look]) else math.inf for run in runs)

        one, other = lowest(ORIGINAL), min(map(lowest, forms))
        if math.isinf(one) or math.isinf(other):
            return 0.0 if one == other else math.copysign(math.inf, one - other)
        return math.log(max(one, 1e-300) / max(other, 1e-300))

    def correlation(self, candidate: Candidate, part: Half) -> float:
        """The rank correlation of a candidate with the measured gain on one half."""
        problems = [problem for problem in self.of(part) if not math.isnan(candidate.values[problem])]
        gains = [self._gains[problem] for problem in problems]
        return spearman([candidate.values[problem] for problem in problems], gains)

    @functools.cached_property
    def _gains(self) -> dict[str, float]:
        return {problem: self.best_gain(problem) for problem in self.complete}

    @functools.cached_property
    def chosen(self) -> Chosen:
        """By the first half alone: the largest rank correlation, whatever its sign, of what is within the budget."""
        if any(len(self.of(part)) < 2 for part in HALVES):
            raise LookupError(f"{len(self.complete)} problems are complete: too few in one half to choose or to judge")
        first, second = HALVES
        eligible = [each for each in self.candidates if each.budget <= BUDGET + 1e-9]
        correlations = {each.name: self.correlation(each, first) for each in eligible}
        best = max(eligible, key=lambda each: _size(correlations[each.name]))
        sign = -1 if correlations[best.name] < 0 else 1
        worth = [sign * best.values[problem] for problem in self.of(first) if self._gains[problem] > WORTH]
        threshold = min((value for value in worth if value == value), default=math.inf)
        left = [problem for problem in self.of(second) if sign * best.values[problem] < threshold]
        missed = [problem for problem in left if self._gains[problem] > WORTH]
        held = self.correlation(best, second)
        return Chosen(best, sign, {first: correlations[best.name], second: held}, threshold, left, missed)


def _size(correlation: float) -> float:
    return abs(correlation) if correlation == correlation else -1.0


def final(result: Mapping[str, Any]) -> float:
    """The last judged loss; infinite where it is not finite."""
    last = float(result["loss"][-1])
    return last if math.isfinite(last) else math.inf


def reached(curve: Sequence[float], goal: float) -> float:
    """After which part of the training a loss is at most the goal, on lines between looks; infinite if never."""
    for place, value in enumerate(curve):
        if value <= goal:
            if place == 0:
                return 1 / len(curve)  # as good as at once; something can still be divided by it
            before = curve[place - 1]
            part = (before - goal) / (before - value) if math.isfinite(before) else 1.0
            return (place - 1 + part) / (len(curve) - 1)
    return math.inf


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank correlation, equal values having the mean of their ranks; not a number where there is nothing to rank.

    Example:
        >>> spearman([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
    """
    if len(one) < 2:
        return math.nan
    ranks = [_ranks(values) for values in (one, other)]
    centred = [rank - rank.mean() for rank in ranks]
    size = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return round(float((centred[0] * centred[1]).sum()) / size, 12) if size > 0 else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    array = np.asarray(values, dtype=float)
    _, places, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], dtype=float)
