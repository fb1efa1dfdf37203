"""Experiments that compare tuned methods: two-stage search on tuning trials, then fresh trials at the rates found.

All of it is small and in float64, so it runs on the CPU whatever the device: coordinate-wise methods batched, the
others over processes. Which rate was chosen is never stored: it follows from the records of the tuning trials.
"""

import abc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from egop_lab import methods
from egop_lab.experiments.base import Experiment
from egop_lab.experiments.curves import curve_series, median, rate_series
from egop_lab.experiments.registry import find_experiment
from egop_lab.plots.picture import Series
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL, RANDOM
from egop_lab.training.context import Context, make_record, run_in_processes
from egop_lab.training.instances import Trials
from egop_lab.training.records import Record
from egop_lab.training.tuning import TUNING, search_two_stage

Case = Mapping[str, Any]
Score = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Method:
    """An optimizer in a kind of coordinates."""

    optimizer: str
    coordinates: str = ORIGINAL

    def __str__(self) -> str:
        return self.optimizer if self.coordinates == ORIGINAL else f"{self.coordinates} {self.optimizer}"


@dataclass(frozen=True)
class _Task:
    """Runs of a method on a case at some rates, on the tuning trials or on the reported ones."""

    case: Case
    method: Method
    rates: Sequence[float]
    tuning: bool = False


class TunedExperiment(Experiment):
    """Methods on trials of one or more cases, each method tuned for each case.

    The settings have ``trials``, ``tuning trials``, ``steps``, ``record every``, ``record tuning every`` and
    ``exponents``: of the smallest and largest power of ten to try, for each optimizer.
    """

    @property
    def settings(self) -> dict[str, Any]:
        """Add the calls that build the baselines."""
        settings = super().settings
        calls = {name: call for name in settings["exponents"] if (call := methods.describe(name))}
        return settings | ({"baselines": calls} if calls else {})

    cosine: ClassVar[bool] = False  # anneal the learning rates to zero, step by step

    @abc.abstractmethod
    def cases(self) -> list[Case]:
        """Return the kinds of problems: all settings that decide how they are made."""

    def methods(self) -> list[Method]:
        """Return the compared methods: Adam and Adagrad in all coordinates, and the baselines of the settings."""
        kinds = [ORIGINAL, EGOP, RANDOM] if self.preset == "full" else [ORIGINAL, EGOP]
        coordinatewise = [Method(name, kind) for name in ("Adam", "Adagrad") for kind in kinds]
        return coordinatewise + [Method(name) for name in self.settings["baselines"]]

    def pairs(self) -> list[tuple[Case, Method]]:
        """Return the pairs to run: every method on every case."""
        return [(case, method) for case in self.cases() for method in self.methods()]

    def anneals(self, case: Case) -> bool:
        """Return True if the learning rates of a case are annealed."""
        return self.cosine

    @abc.abstractmethod
    def trials(self, case: Case, seeds: Sequence[int]) -> Trials:
        """Build the problems of several seeds."""

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the score that chooses a learning rate, median over the tuning trials; the smaller the better."""
        return float(result["loss"][-1])

    def tuning_method(self, method: Method) -> Method:
        """Return the method whose learning rates a method uses: itself, unless both are known to be the same."""
        return method

    def scores(self, case: Case) -> list[Score]:
        """Return the scores to search learning rates by; each search gives a rate that is reported."""
        return [self.score]

    def run(self, context: Context) -> None:
        with single_threaded(context) as context:
            pairs = self.pairs()
            while tasks := [task for pair in pairs if (task := self._find_tuning(*pair)).rates]:
                self._run_tasks(tasks, context)
            found = [{self.choose_rate(*pair, score) for score in self.scores(pair[0])} for pair in pairs]
            self._run_tasks([_Task(*pair, sorted(rates)) for pair, rates in zip(pairs, found, strict=True)], context)

    def choose_rate(self, case: Case, method: Method, score: Score | None = None) -> float:
        """Return the learning rate that the two-stage search by a score finds on the tuning trials."""
        best, left, _ = self._search(case, self.tuning_method(method), score or self.score)
        if left:
            raise LookupError(f"{self.id}: {method} is not tuned yet")
        return best

    def at_edge(self, case: Case, method: Method) -> str:
        """Return a remark if the chosen rate is the smallest or largest that was tried, else ""."""
        method = self.tuning_method(method)
        ends = [10.0**exponent for exponent in self.settings["exponents"][method.optimizer]]
        chosen = self.choose_rate(case, method)
        return f" ({method}: best at the end of the grid, {chosen:g})" if chosen in ends else ""

    def reported_runs(self, case: Case, method: Method, rate: float | None = None) -> list[Record]:
        """Return the runs on fresh trials, at the chosen rate unless another one is given."""
        rate = self.choose_rate(case, method) if rate is None else rate
        runs = [self.store.get(config) for config in self._configs(_Task(case, method, [rate]))]
        records = [run for run in runs if run is not None]
        if len(records) < len(runs):
            raise LookupError(f"{self.id}: {method} has trials left")
        return records

    def curve(self, case: Case, method: Method, name: str, rate: float | None = None) -> Series:
        """Return a recorded curve of the reported trials by step."""
        every, last = self.settings["record every"], self.settings["steps"]
        places = [min(step, last) for step in range(0, last + every, every)]
        runs = self.reported_runs(case, method, rate)
        return _style(curve_series(runs, name, method.optimizer, method.coordinates, places), method)

    def curve_by_rate(self, case: Case, method: Method, score: Score | None = None) -> Series:
        """Return the score (or another one) of the search over learning rates, with the chosen one marked."""
        chosen, runs = self.choose_rate(case, method), self._search(case, method, self.score)[2]
        return _style(rate_series(runs, score or self.score, method.optimizer, method.coordinates, chosen), method)

    def _search(self, case: Case, method: Method, score: Score) -> tuple[float, list[float], list[Record]]:
        """Return the best rate so far, the rates to try before the search can go on, and the runs it has seen."""
        left: list[float] = []
        seen: list[Record] = []

        def evaluate(rates: Sequence[float]) -> dict[float, float]:
            configs = {rate: self._configs(_Task(case, method, [rate], tuning=True)) for rate in rates}
            left.extend(rate for rate in rates if self.store.missing(configs[rate]))
            if left:  # judge a stage only when it is complete: a killed run must not decide where to search next
                return dict.fromkeys(rates, math.inf)
            runs = {rate: [run for config in configs[rate] if (run := self.store.get(config))] for rate in rates}
            seen.extend(run for records in runs.values() for run in records)
            return {rate: median([score(run.result) for run in records]) for rate, records in runs.items()}

        best, _ = search_two_stage(evaluate, *self.settings["exponents"][method.optimizer])
        return best, left, seen

    def _find_tuning(self, case: Case, method: Method) -> _Task:
        """Return the runs that the searches for a method's rates need next; they share the rates that both need."""
        scores = self.scores(case) if self.tuning_method(method) == method else []
        rates = {rate for score in scores for rate in self._search(case, method, score)[1]}
        return _Task(case, method, sorted(rates), tuning=True)

    def _run_tasks(self, tasks: Sequence[_Task], context: Context) -> None:
        """Do the runs that the store does not have yet."""
        single = [task for task in tasks if methods.describe(task.method.optimizer)]
        for task in tasks:
            if task not in single:
                self.sweep(
                    context,
                    partial(self.trials, task.case),
                    lambda problem, kind: problem.basis(kind),
                    rates={task.method.optimizer: task.rates},
                    seeds=self._seeds(task),
                    coordinates=[task.method.coordinates],
                    steps=self.settings["steps"],
                    record_every=self._extra(task)["record every"],
                    extra=self._extra(task),
                    schedule=batched.cosine(self.settings["steps"]) if self.anneals(task.case) else None,
                    schedule_every=1,
                )
        configs = self.store.missing(config for task in single for config in self._configs(task))
        run_in_processes(run_single, configs, self.store, context, self.id)

    def _seeds(self, task: _Task) -> range:
        return range(TUNING, TUNING + self.settings["tuning trials"]) if task.tuning else range(self.settings["trials"])

    def _extra(self, task: _Task) -> dict[str, Any]:
        every = self.settings["record tuning every" if task.tuning else "record every"]
        call = methods.describe(task.method.optimizer)
        return {**task.case, "record every": every, **({"call": call} if call else {})}

    def _configs(self, task: _Task) -> list[dict[str, Any]]:
        method = {"optimizer": task.method.optimizer, "coordinates": task.method.coordinates}
        further = {"steps": self.settings["steps"], **self._extra(task)}
        places = itertools.product(task.rates, self._seeds(task))
        return [self.config(**method, lr=rate, **further, seed=seed) for rate, seed in places]


@contextmanager
def single_threaded(context: Context) -> Iterator[Context]:
    """Use the CPU and one thread: the tensors are too small for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield replace(context, device=torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def run_single(config: Mapping[str, Any]) -> Record:
    """Do one run of a method that cannot be batched, as its configuration says."""
    tuned = find_experiment(config["experiment"])()
    assert isinstance(tuned, TunedExperiment)
    problem = tuned.trials(config, [config["seed"]])
    result, seconds = batched.train_single(
        problem,
        config["optimizer"],
        config["lr"],
        config["steps"],
        record_every=config["record every"],
        cosine=tuned.anneals(config),
    )
    return make_record(config, result, seconds)


def _style(series: Series, method: Method) -> Series:
    """Draw random rotations as a control: in their own colour, and not dashed."""
    if method.coordinates != RANDOM:
        return series
    return replace(series, method=str(method), egop=False)
