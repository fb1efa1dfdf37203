"""Experiments that compare tuned methods: two-stage search on tuning trials, then fresh trials at the rates found.

All of it is small and in float64, so it runs on the CPU whatever the device: coordinate-wise methods batched, the
others over processes. Which rate was chosen is never stored: it follows from the records of the tuning trials.
"""

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from egop_lab import methods
from egop_lab.experiments.base import Experiment
from egop_lab.experiments.curves import curve_series, median, rate_series
from egop_lab.experiments.registry import experiment
from egop_lab.plots.picture import Series
from egop_lab.training import batched
from egop_lab.training.context import Context, Preset, make_record, run_in_processes
from egop_lab.training.instances import RANDOM, Trials
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import EGOP, ORIGINAL, TUNING, Sweep, run_sweep
from egop_lab.training.tuning import search_two_stage

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
    case: Case
    method: Method
    rates: Sequence[float]
    seeds: Sequence[int]
    record_every: int


class TunedExperiment(Experiment):
    """Methods on trials of one or more cases, each method tuned for each case.

    The settings have ``trials``, ``tuning trials``, ``steps``, ``record every``, ``record tuning every`` and
    ``exponents``: of the smallest and largest power of ten to try, for each optimizer.
    """

    cosine: ClassVar[bool] = False  # anneal the learning rates to zero, step by step

    @abc.abstractmethod
    def cases(self, preset: Preset) -> list[Case]:
        """Return the kinds of problems: all settings that decide how they are made."""

    def methods(self, preset: Preset) -> list[Method]:
        """Return the compared methods: Adam and Adagrad in all coordinates, and the baselines of the settings."""
        kinds = [ORIGINAL, EGOP, RANDOM] if preset == "full" else [ORIGINAL, EGOP]
        coordinatewise = [Method(name, kind) for name in ("Adam", "Adagrad") for kind in kinds]
        return coordinatewise + [Method(name) for name in self.settings(preset)["baselines"]]

    def pairs(self, preset: Preset) -> list[tuple[Case, Method]]:
        """Return the pairs to run: every method on every case."""
        return [(case, method) for case in self.cases(preset) for method in self.methods(preset)]

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

    def run(self, store: Store, context: Context) -> None:
        with single_threaded(context) as context:
            settings = self.settings(context.preset)
            pairs = self.pairs(context.preset)
            while tasks := [task for pair in pairs for task in self._tuning_left(store, context.preset, *pair)]:
                self._run_tasks(tasks, store, context, "tuning")
            reported = []
            for case, method in pairs:
                rates = {self.choose_rate(store, context.preset, case, method, score) for score in self.scores(case)}
                fresh = range(settings["trials"])
                reported.append(_Task(case, method, sorted(rates), fresh, settings["record every"]))
            self._run_tasks(reported, store, context, "trials")

    def choose_rate(
        self, store: Store, preset: Preset, case: Case, method: Method, score: Score | None = None
    ) -> float:
        """Return the learning rate that the two-stage search by a score finds on the tuning trials."""
        best, left, _ = self._search(store, preset, case, self.tuning_method(method), score or self.score)
        if left:
            raise LookupError(f"{self.id}: the {preset} preset has not been run to its end; {method} is not tuned yet.")
        return best

    def at_edge(self, store: Store, preset: Preset, case: Case, method: Method) -> str:
        """Return a remark if the chosen rate is the smallest or largest that was tried, else ""."""
        method = self.tuning_method(method)
        ends = [10.0**exponent for exponent in self.settings(preset)["exponents"][method.optimizer]]
        chosen = self.choose_rate(store, preset, case, method)
        return f" ({method}: best at the end of the grid, {chosen:g})" if chosen in ends else ""

    def tuning_runs(self, store: Store, preset: Preset, case: Case, method: Method) -> list[Record]:
        """Return all runs of the search for a learning rate."""
        return self._search(store, preset, case, method, self.score)[2]

    def reported_runs(
        self, store: Store, preset: Preset, case: Case, method: Method, rate: float | None = None
    ) -> list[Record]:
        """Return the runs on fresh trials, at the chosen rate unless another one is given."""
        settings = self.settings(preset)
        rate = self.choose_rate(store, preset, case, method) if rate is None else rate
        task = _Task(case, method, [rate], range(settings["trials"]), settings["record every"])
        runs = [store.get(config) for config in self._configs(preset, task, rate)]
        records = [run for run in runs if run is not None]
        if len(records) < len(runs):
            raise LookupError(f"{self.id}: the {preset} preset has not been run to its end; {method} has trials left.")
        return records

    def curve(
        self, store: Store, preset: Preset, case: Case, method: Method, name: str, rate: float | None = None
    ) -> Series:
        """Return a recorded curve of the reported trials by step."""
        settings = self.settings(preset)
        every, last = settings["record every"], settings["steps"]
        places = [min(step, last) for step in range(0, last + every, every)]
        runs = self.reported_runs(store, preset, case, method, rate)
        return _style(curve_series(runs, name, method.optimizer, method.coordinates, places), method)

    def sweep(self, store: Store, preset: Preset, case: Case, method: Method, score: Score | None = None) -> Series:
        """Return the score (or another one) of the search over learning rates, with the chosen one marked."""
        chosen = self.choose_rate(store, preset, case, method)
        runs = self.tuning_runs(store, preset, case, method)
        return _style(rate_series(runs, score or self.score, method.optimizer, method.coordinates, chosen), method)

    def _search(
        self, store: Store, preset: Preset, case: Case, method: Method, score: Score
    ) -> tuple[float, _Task | None, list[Record]]:
        """Return the best rate so far, the runs that the search needs before it can go on, and those it has seen."""
        settings = self.settings(preset)
        seeds = range(TUNING, TUNING + settings["tuning trials"])
        task = _Task(case, method, [], seeds, settings["record tuning every"])
        left: list[float] = []
        seen: list[Record] = []

        def evaluate(rates: Sequence[float]) -> dict[float, float]:
            configs = {rate: self._configs(preset, task, rate) for rate in rates}
            left.extend(rate for rate in rates if store.missing(configs[rate]))
            if left:  # judge a stage only when it is complete: a killed run must not decide where to search next
                return dict.fromkeys(rates, math.inf)
            runs = {rate: [run for config in configs[rate] if (run := store.get(config))] for rate in rates}
            seen.extend(run for records in runs.values() for run in records)
            return {rate: median([score(run.result) for run in records]) for rate, records in runs.items()}

        best, _ = search_two_stage(evaluate, *settings["exponents"][method.optimizer])
        return best, replace(task, rates=left) if left else None, seen

    def _tuning_left(self, store: Store, preset: Preset, case: Case, method: Method) -> Iterable[_Task]:
        if self.tuning_method(method) != method:
            return []
        searches = [self._search(store, preset, case, method, score)[1] for score in self.scores(case)]
        left = [task for task in searches if task is not None]
        rates = sorted({rate for task in left for rate in task.rates})  # searches share the rates that both need
        return [replace(left[0], rates=rates)] if left else []

    def _run_tasks(self, tasks: Sequence[_Task], store: Store, context: Context, what: str) -> None:
        """Do the runs that the store does not have yet."""
        for task in tasks:
            if methods.describe(task.method.optimizer):
                continue
            run_sweep(
                self.config,
                Sweep(
                    rates={task.method.optimizer: task.rates},
                    seeds=task.seeds,
                    coordinates=[task.method.coordinates],
                    steps=self.settings(context.preset)["steps"],
                    record_every=task.record_every,
                    at_once=len(task.seeds),
                    extra=self._extra(task),
                ),
                store,
                context,
                problem=lambda seeds, case=task.case: self.trials(case, seeds),  # type: ignore[misc]
                basis=lambda problem, kind: problem.basis(kind),
                schedule=batched.cosine(self.settings(context.preset)["steps"]) if self.anneals(task.case) else None,
                schedule_every=1,
            )
        configs = [
            config
            for task in tasks
            if methods.describe(task.method.optimizer)
            for rate in task.rates
            for config in self._configs(context.preset, task, rate)
        ]
        if configs:
            run_in_processes(run_single, store.missing(configs), store, context, f"{self.id}, {what}")

    def _extra(self, task: _Task) -> dict[str, Any]:
        extra = {**task.case, "record every": task.record_every}
        call = methods.describe(task.method.optimizer)
        return {**extra, "call": call} if call else extra

    def _configs(self, preset: Preset, task: _Task, rate: float) -> list[dict[str, Any]]:
        entries = {"optimizer": task.method.optimizer, "coordinates": task.method.coordinates, "lr": rate}
        steps = self.settings(preset)["steps"]
        return [self.config(preset, **entries, steps=steps, **self._extra(task), seed=seed) for seed in task.seeds]


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
    tuned = experiment(config["experiment"])
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
