"""The race: candidates and learning rates on copies of the model, in two stages of successive halving.

The first stage searches each candidate's learning rate with short runs. The second stage repeats the best rates with
longer runs. Further seeds repeat the comparison that decides.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from tqdm.auto import tqdm

from egop.basis import Plan
from egop.diagnose.training import Build, Run, Trainer, build_optimizer, clock
from egop.estimation import Objective
from egop.formatting import pluralize, progress_interval
from egop.numerics import check_positive_int

# Steps of a run in each stage: a fraction of the planned training, or a fixed number if its length is unknown.
_FRACTIONS, _LENGTHS = (0.08, 0.2), (60, 150)
# Runs are never shorter than this, whatever the budget, unless the planned training is.
_SHORTEST = (20, 50)
# Shorter runs than this say little.
SHORT = 30
# Evaluations of a run in each stage.
_EVALUATIONS = (12, 30)
# The most that other programs are expected to slow down a race.
_MOST_STRETCH = 3.0
# Learning rates to try: 1, 2 and 5 times each power of ten. The search starts at the first candidate's.
RATES = (*(float(f"{digit}e{power}") for power in range(-6, 0) for digit in (1, 2, 5)), 1.0)
_START = 2e-3
# The search in one direction ends after this many rates in a row that are no better.
_WORSE = 2
# A search usually takes this many runs.
_USUAL = 6
# Timing the first steps of a candidate may take this fraction of the budget.
_TIMING = 0.1
# The second stage begins after this fraction of the budget at the latest.
_FIRST_STAGE = 0.6
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left{postfix}"


@dataclass(frozen=True)
class Candidate:
    """An optimizer that takes part in the race.

    Attributes:
        name: shown in the answer.
        build: builds it for a copy of the model.
        code: what a user writes, with ``{lr}`` for the learning rate.
    """

    name: str
    build: Build
    code: str = ""


@dataclass(frozen=True)
class Comparison:
    """A candidate compared with the baseline, the first candidate, at the loss that both reach.

    Attributes:
        steps: steps to that loss, as a multiple of the baseline's; infinite if the candidate never lowered the loss.
        slowdown: time of a step, as a multiple of the baseline's.
    """

    steps: float
    slowdown: float

    @property
    def time(self) -> float:
        """Time to that loss, as a multiple of the baseline's."""
        return self.steps * self.slowdown


@dataclass
class Race:
    """The runs of a race.

    Attributes:
        planned: length of the planned training, if known.
        lengths: steps of a run in each stage.
        seeds: the seeds; the first one is used in both stages, the others repeat the second.
        rates: learning rates that may be tried, ascending.
        start: loss before training.
        runs: finished runs of each candidate in each stage.
        left_out: why some candidates did not take part.
        ended: why the race is incomplete; empty if it is complete.
    """

    planned: int | None
    seeds: tuple[int, ...]
    lengths: tuple[int, int] = _LENGTHS
    rates: tuple[float, ...] = RATES
    start: float = math.nan
    runs: tuple[dict[str, list[Run]], dict[str, list[Run]]] = field(default_factory=lambda: ({}, {}))
    left_out: dict[str, str] = field(default_factory=dict)
    ended: str = ""

    @property
    def stage(self) -> int:
        """The stage that decides: the second if the baseline and, unless it is alone, another candidate finished it."""
        names = [name for name, runs in self.runs[0].items() if runs]
        return int(bool(self.ranked(names[0], 1)) and len(self.runs[1]) >= min(2, len(names)))

    def ranked(self, name: str, stage: int | None = None, seed: int | None = None) -> list[Run]:
        """Return a candidate's runs that lowered the loss, best first; by default those of the stage that decides."""
        stage, seed = self.stage if stage is None else stage, self.seeds[0] if seed is None else seed
        runs = [run for run in self.runs[stage].get(name, []) if run.seed == seed and run.final < self.start]
        return sorted(runs, key=lambda run: run.final)

    def propose_rates(self, name: str) -> tuple[float, ...]:
        """Return two or three learning rates for a candidate in the planned training, the most likely one first.

        The best rate of a longer training is usually lower, at most by the ratio of the lengths. So the best rate is
        proposed divided by the root of this ratio, divided by the ratio, and as it is. If no longer training is
        planned, these are the best two rates.
        """
        runs = self.ranked(name) + self.ranked(name, 0)
        rates = list(dict.fromkeys(run.lr for run in runs))
        if not runs or self.planned is None or self.planned <= runs[0].steps:
            return tuple(rates[:2])
        ratio = runs[0].steps / self.planned
        scaled = [_find_nearest(self.rates, rates[0] * ratio**power) for power in (0.5, 1.0, 0.0)]
        return tuple(dict.fromkeys([*scaled, *rates]))[:3]

    def compare(self, name: str, stage: int, seed: int | None = None) -> Comparison | None:
        """Compare a candidate's best run with the baseline's in one stage; None if one of them has no run."""
        seed = self.seeds[0] if seed is None else seed
        baseline = next(iter(self.runs[0]), name)
        own, base = self.ranked(name, stage, seed), self.ranked(baseline, stage, seed)
        if not base or not any(run.seed == seed for run in self.runs[stage].get(name, [])):
            return None
        # The fastest runs count: other programs may have slowed down the rest.
        seconds, base_seconds = (min(run.step_seconds for run in self.runs[stage][key]) for key in (name, baseline))
        slowdown = seconds / max(base_seconds, 1e-9)
        if not own:
            return Comparison(math.inf, slowdown)
        target = max(own[0].final, base[0].final)
        return Comparison(own[0].steps_to(target) / max(base[0].steps_to(target), 1e-9), slowdown)


def run_race(
    objective: Objective,
    candidates: Sequence[Candidate],
    *,
    steps: int | None,
    budget: float,
    seeds: Sequence[int],
    keep: int,
    rates: Sequence[float] = RATES,
    progress: bool,
) -> Race:
    """Race candidates against each other on copies of the model; the first one is the baseline.

    The second stage repeats the best ``keep`` learning rates of each candidate. The race is incomplete if it was
    interrupted or its budget was used up after the baseline lowered the loss; before that, this is an error.
    """
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be an egop.Objective, got {type(objective).__name__}. "
            "Use egop.Objective(model, loss_fn, batches)."
        )
    if steps is not None:
        check_positive_int("steps", steps)
    if not budget > 0:
        raise ValueError(f"Invalid budget value: {budget}. Must be a positive number of seconds.")
    if not seeds:
        raise ValueError("Invalid seeds value: (). Must be at least one seed.")
    rates = tuple(sorted({float(rate) for rate in rates}))
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"Invalid rates value: {rates}. Must be one or more positive numbers.")
    racer = _Racer(objective, list(candidates), Race(steps, tuple(seeds), rates=rates), budget, keep, progress)
    with torch.inference_mode(False), torch.enable_grad(), objective.preserve():
        return racer.run()


class _OutOfTimeError(Exception):
    pass


@dataclass
class _Racer:
    """The runner of a race, which keeps track of time."""

    objective: Objective
    candidates: list[Candidate]
    race: Race
    budget: float
    keep: int
    progress: bool
    step_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + self.budget
        self.bar = tqdm(disable=True)

    def run(self) -> Race:
        race = self.race
        try:
            self._prepare()
            self._search_rates()
            self._repeat_best_rates()
            self._repeat_with_other_seeds()
        except KeyboardInterrupt:
            if not self._has_result():
                raise
            race.ended = "it was interrupted"
        except _OutOfTimeError:
            if not self._has_result():
                raise TimeoutError(
                    f"The budget of {self.budget:g} s was used up before {self.candidates[0].name} lowered the loss. "
                    "Allow more time (budget=)."
                ) from None
            race.ended = f"the budget of {self.budget:g} s was used up: allow more (budget=)"
        finally:
            self.bar.set_postfix_str("")  # the last run may not be the best one
            self.bar.close()
        return race

    def _has_result(self) -> bool:
        return bool(self.race.ranked(self.candidates[0].name, 0))

    def _prepare(self) -> None:
        """Draw the batches, time a few steps of each candidate, and choose lengths that fit into the budget."""
        race = self.race
        lengths = _choose_lengths(race.planned)
        self.trainer = Trainer(self.objective, lengths[1], race.seeds[0])
        race.start = self.trainer.start
        wall, busy = time.monotonic(), clock()
        for candidate in list(self.candidates):
            if len(self.candidates) > 1 and (reason := self._find_obstacle(candidate)):
                race.left_out[candidate.name] = reason
                self.candidates.remove(candidate)
                continue
            if self.step_seconds:  # the baseline may use all of the time
                self.deadline = time.monotonic() + _TIMING * self.budget
            try:
                for _ in range(2):  # in case something else is running on the machine
                    run = self.trainer.train(candidate.build, race.rates[0], 6, race.seeds[0], 3, self._check_time)
                    known = self.step_seconds.get(candidate.name, math.inf)
                    self.step_seconds[candidate.name] = min(run.step_seconds, known)
            except _OutOfTimeError:
                if not self.step_seconds:
                    raise
                if candidate.name not in self.step_seconds:
                    self._drop(candidate, f"six steps took longer than {100 * _TIMING:.0f} % of the budget")
        # On a busy machine, steps take longer than the processor time that is measured.
        self.stretch = min(max(1.0, (time.monotonic() - wall) / max(clock() - busy, 1e-9)), _MOST_STRETCH)
        time_left = max(0.0, self.began + self.budget - time.monotonic())
        race.lengths = _shorten(lengths, time_left / self._estimate(lengths))
        if self.progress:
            self._announce("" if race.lengths == lengths else f", shortened from {lengths[0]} and {lengths[1]}")

    def _announce(self, shortened: str) -> None:
        """Print what the race costs and start the progress bar."""
        first, second = self.race.lengths
        searches, repeats = _USUAL * len(self.candidates), self._count_repeats()
        steps = searches * first + repeats * second
        estimate = self._estimate(self.race.lengths)
        too_long = " That is more than the budget: to finish, allow more time (budget=)."
        tqdm.write(
            f"Race of {pluralize(len(self.candidates), 'candidate')}: about {searches} runs of {first} steps and "
            f"{repeats} of {second}{shortened}; {steps:,} steps, about {estimate:.0f} s "
            f"(budget {self.budget:g} s).{too_long if estimate > self.budget else ''}",
            file=sys.stderr,
        )
        self.bar = tqdm(total=steps, desc="Race", bar_format=_BAR, delay=1e-9, mininterval=progress_interval())

    def _drop(self, candidate: Candidate, reason: str) -> None:
        self.candidates.remove(candidate)
        self.race.left_out[candidate.name] = reason
        self.race.ended = f"the budget of {self.budget:g} s was too small for {candidate.name}"

    def _find_obstacle(self, candidate: Candidate) -> str:
        """Return why a candidate cannot take part; empty if it can."""
        model, _ = self.objective.trainable_copy()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # EGOP's own warning that it rotates nothing
                plan: Plan | None = getattr(build_optimizer(candidate.build, model), "plan", None)
        except (MemoryError, ValueError) as error:
            return str(error)
        return "" if plan is None or plan.chosen else "it would leave every weight of this model to AdamW"

    def _count_repeats(self) -> int:
        """Return the number of runs after the search: the best rates of all, and two candidates with other seeds."""
        return self.keep * len(self.candidates) + min(2, len(self.candidates)) * (len(self.race.seeds) - 1)

    def _estimate(self, lengths: tuple[int, int]) -> float:
        """Estimate the seconds that a race with runs of these lengths takes."""
        mean = sum(self.step_seconds[each.name] for each in self.candidates) / len(self.candidates)
        counts = (_USUAL * len(self.candidates), self._count_repeats())
        return self.stretch * sum(
            count * (length * mean + min(length, evaluations) * self.trainer.evaluation_seconds)
            for count, length, evaluations in zip(counts, lengths, _EVALUATIONS, strict=True)
        )

    def _search_rates(self) -> None:
        """Search for each candidate's learning rate with short runs; move on when the first stage's time is used up."""
        end = self.began + _FIRST_STAGE * self.budget
        start = _START
        # The fastest first, so that slow candidates do not use up the time of the others.
        baseline, *others = self.candidates
        waiting = [baseline, *sorted(others, key=lambda each: self.step_seconds[each.name])]
        while waiting:
            now = time.monotonic()
            self.deadline = now + (end - now) / len(waiting)  # an equal share of what is left
            candidate = waiting.pop(0)
            runs = self.race.runs[0].setdefault(candidate.name, [])
            try:
                search_rates(self.race.rates, start, partial(self._train, candidate), self.race.start)
            except _OutOfTimeError:
                if not self._has_result():
                    self.deadline = self.began + self.budget  # the baseline may use all of the time
                    self._train(candidate, start)
                if not runs:
                    self._drop(candidate, "no run was finished within its share of the budget")
            if candidate is self.candidates[0]:
                self._check_progress(runs)
                start = self.race.ranked(candidate.name, 0)[0].lr
        self.deadline = self.began + self.budget

    def _check_progress(self, runs: list[Run]) -> None:
        """Raise ValueError if no learning rate of the baseline lowered the loss."""
        if self._has_result():
            return
        best = min(runs, key=lambda run: run.final)
        found = f"lowest loss {best.final:.3g}, at {best.lr:g}" if math.isfinite(best.final) else "all runs diverged"
        rates = [run.lr for run in runs]
        raise ValueError(
            f"No learning rate of {self.candidates[0].name} from {min(rates):g} to {max(rates):g} lowered the loss "
            f"from {self.race.start:.3g} within {pluralize(self.race.lengths[0], 'step')} ({found}). "
            "Check the loss and the batches, or try other rates or more steps."
        )

    def _repeat_best_rates(self) -> None:
        """Repeat the best rates of each candidate with longer runs, the most promising candidates first."""
        race = self.race
        promising = sorted(self.candidates[1:], key=lambda each: _time(race.compare(each.name, 0)))
        if self.bar.total:  # the search is over, regardless of how many runs it took
            self.bar.total = self.bar.n + self._count_repeats() * race.lengths[1]
        for candidate in [self.candidates[0], *promising]:
            for run in race.ranked(candidate.name, 0)[: self.keep]:
                self._train(candidate, run.lr, 1)

    def _repeat_with_other_seeds(self) -> None:
        """Repeat the best runs of the baseline and of the most promising candidate with other seeds."""
        race = self.race
        others = sorted(self.candidates[1:], key=lambda each: _time(race.compare(each.name, 1)))
        for seed in race.seeds[1:]:
            for candidate in [self.candidates[0], *others[:1]]:
                if best := race.ranked(candidate.name):
                    self._train(candidate, best[0].lr, 1, seed)

    def _train(self, candidate: Candidate, lr: float, stage: int = 0, seed: int | None = None) -> Run:
        def advance() -> None:
            self.bar.update(0 if self.bar.n == self.bar.total else 1)
            self._check_time()

        self.bar.set_postfix_str(f"{candidate.name}, lr {lr:g}", refresh=False)
        seed = self.race.seeds[0] if seed is None else seed
        run = self.trainer.train(candidate.build, lr, self.race.lengths[stage], seed, _EVALUATIONS[stage], advance)
        self.race.runs[stage].setdefault(candidate.name, []).append(run)
        return run

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError


def search_rates(rates: Sequence[float], start: float, train: Callable[[float], Run], initial: float) -> None:
    """Try ascending rates from the one nearest to ``start`` upward, then downward, until two in a row are no better.

    Rates whose loss does not get below ``initial``, the loss before training, do not count as good.
    """
    middle = rates.index(_find_nearest(rates, start))
    first = best = train(rates[middle]).final
    # Every rate above a diverging one diverges too.
    for direction in (rates[middle + 1 :] if math.isfinite(first) else [], rates[:middle][::-1]):
        worse = 0
        for rate in direction:
            loss = train(rate).final
            # On the way down, keep going until some rate lowers the loss: before that, no rate can be worse.
            worse = 0 if loss < best or (rate < rates[middle] and best >= initial) else worse + 1
            best = min(best, loss)
            if worse == _WORSE or (rate > rates[middle] and math.isinf(loss)):
                break


def _find_nearest(rates: Sequence[float], rate: float) -> float:
    return min(rates, key=lambda each: abs(math.log(each / rate)))


def _shorten(lengths: tuple[int, int], factor: float) -> tuple[int, int]:
    """Scale lengths down, but not below the shortest ones."""
    first, second = (
        min(length, max(shortest, int(factor * length))) for length, shortest in zip(lengths, _SHORTEST, strict=True)
    )
    return first, second


def _choose_lengths(steps: int | None) -> tuple[int, int]:
    if steps is None:
        return _LENGTHS
    first, second = (max(shortest, round(part * steps)) for part, shortest in zip(_FRACTIONS, _SHORTEST, strict=True))
    return min(first, steps), min(second, steps)


def _time(comparison: Comparison | None) -> float:
    return math.inf if comparison is None else comparison.time
