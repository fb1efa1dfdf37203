"""Experiments that compare tuned methods: two-stage search on tuning trials, then fresh trials at the rates found.

All of it is small and in float64, so it runs on the CPU whatever the device: coordinate-wise methods batched, the
others over processes. Which rate was chosen is never stored: it follows from the records of the tuning trials.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

import egop
from egop.experiments import baselines, batched
from egop.experiments.base import Context, Experiment, Preset, Series, finished, in_processes, median
from egop.experiments.records import Record, Store
from egop.experiments.sweeps import EGOP, ORIGINAL, TUNING, Sweep, curve_series, rate_series, run_sweep
from egop.experiments.tuning import two_stage
from egop.linalg import random_orthonormal

RANDOM = "random rotation"

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """An optimizer in a kind of coordinates."""

    optimizer: str
    coordinates: str = ORIGINAL

    def __str__(self) -> str:
        return self.optimizer if self.coordinates == ORIGINAL else f"{self.coordinates} {self.optimizer}"


class Trials(batched.Problem):
    """Independent random instances of a problem, one a seed, with a basis each.

    Attributes:
        seeds: one a trial.
        samples: gradients for a basis, at points drawn from N(0, I).
    """

    seeds: Sequence[int]
    samples: int

    @abc.abstractmethod
    def alone(self, seed: int) -> Self:
        """The problem of one trial."""

    def objective(self, seed: int) -> egop.Objective:
        """The loss of one trial, for the library."""
        one = self.alone(seed)

        def loss(**values: Tensor) -> Tensor:
            return one.losses({name: value[None, None] for name, value in values.items()}, 0).sum()

        return egop.Objective.from_function(loss, {name: value[0] for name, value in one.start().items()})

    def basis(self, coordinates: str) -> batched.Basis | None:
        """A basis for each trial, one block a parameter; none for original coordinates."""
        if coordinates == ORIGINAL:
            return None
        return batched.Basis.stack(
            [
                egop.estimate(
                    self.objective(seed),
                    rho=egop.Gaussian(),
                    partition="parameter",
                    structure=egop.Full() if coordinates == EGOP else egop.RandomRotation(seed=seed),
                    samples=self.samples,
                    generator=torch.Generator().manual_seed(seed),
                    progress=False,
                )
                for seed in self.seeds
            ]
        )


@dataclass(frozen=True)
class _Task:
    case: Case
    method: Method
    rates: Sequence[float]
    seeds: Sequence[int]
    record_every: int


class TunedExperiment(Experiment):
    """Methods on trials of one or more cases, each method tuned for each case.

    The settings have ``trials``, ``tuning trials``, ``steps``, ``record every`` and ``exponents``: of the smallest and
    largest power of ten to try, for each optimizer.
    """

    cosine: ClassVar[bool] = False  # anneal the learning rates to zero, step by step
    process: ClassVar[Callable[[Mapping[str, Any]], Record]]  # a run that cannot be batched, from its configuration

    @abc.abstractmethod
    def cases(self, preset: Preset) -> list[Case]:
        """The kinds of problems: whatever of the settings decides how they are made."""

    @abc.abstractmethod
    def methods(self, preset: Preset) -> list[Method]:
        """What is compared."""

    @abc.abstractmethod
    def trials(self, case: Case, seeds: Sequence[int]) -> Trials:
        """The problems of several seeds."""

    def score(self, result: Mapping[str, Any]) -> float:
        """What a learning rate is chosen by, median over the tuning trials; the smaller the better."""
        return float(result["loss"][-1])

    def tuned_as(self, method: Method) -> Method:
        """The method whose learning rates a method is given; itself unless the two are known to be the same."""
        return method

    def rates(self, store: Store, preset: Preset, case: Case, method: Method) -> list[float]:
        """The learning rates of the reported runs."""
        return [self.chosen(store, preset, case, method)]

    def run(self, store: Store, context: Context) -> None:
        settings, here = self.settings(context.preset), replace(context, device=torch.device("cpu"))
        pairs = [(case, method) for case in self.cases(context.preset) for method in self.methods(context.preset)]
        while tasks := [task for pair in pairs for task in self._tuning_left(store, context.preset, *pair)]:
            self._do(tasks, store, here, "tuning")
        fresh = range(settings["trials"])
        reported = [
            _Task(case, method, self.rates(store, context.preset, case, method), fresh, settings["record every"])
            for case, method in pairs
        ]
        self._do(reported, store, here, "trials")

    def chosen(self, store: Store, preset: Preset, case: Case, method: Method) -> float:
        """The learning rate that the two-stage search gives on the tuning trials."""
        best, left = self._search(store, preset, case, self.tuned_as(method))
        if left:
            raise LookupError(f"{self.id}: the {preset} preset has not been run to its end; {method} is not tuned yet.")
        return best

    def tuning(self, store: Store, preset: Preset, case: Case, method: Method) -> list[Record]:
        """All runs of the search for a learning rate."""
        self._search(store, preset, case, method, seen := [])
        return seen

    def reported(
        self, store: Store, preset: Preset, case: Case, method: Method, rate: float | None = None
    ) -> list[Record]:
        """The runs on fresh trials, at the chosen rate unless another one is named."""
        settings = self.settings(preset)
        rate = self.chosen(store, preset, case, method) if rate is None else rate
        task = _Task(case, method, [rate], range(settings["trials"]), settings["record every"])
        runs = [store.get(config) for config in self._configs(preset, task, rate)]
        found = [run for run in runs if run is not None]
        if len(found) < len(runs):
            raise LookupError(f"{self.id}: the {preset} preset has not been run to its end; {method} has trials left.")
        return found

    def curve(
        self, store: Store, preset: Preset, case: Case, method: Method, name: str, rate: float | None = None
    ) -> Series:
        """A recorded curve of the reported trials by step."""
        settings = self.settings(preset)
        places = [min(step, settings["steps"]) for step in _recorded(settings["steps"], settings["record every"])]
        runs = self.reported(store, preset, case, method, rate)
        return _styled(curve_series(runs, name, method.optimizer, method.coordinates, places), method)

    def sweep(self, store: Store, preset: Preset, case: Case, method: Method) -> Series:
        """What the search saw: the score over learning rates, the chosen one marked."""
        chosen = self.chosen(store, preset, case, method)
        runs = self.tuning(store, preset, case, method)
        return _styled(rate_series(runs, self.score, method.optimizer, method.coordinates, chosen), method)

    def _search(
        self, store: Store, preset: Preset, case: Case, method: Method, seen: list[Record] | None = None
    ) -> tuple[float, _Task | None]:
        """How far the search has come: the best rate so far, and what is to be run before it can go on."""
        settings = self.settings(preset)
        seeds = range(TUNING, TUNING + settings["tuning trials"])
        task = _Task(case, method, [], seeds, max(1, settings["steps"] // 20))
        left: list[float] = []

        def evaluate(rates: Sequence[float]) -> dict[float, float]:
            configs = {rate: self._configs(preset, task, rate) for rate in rates}
            left.extend(rate for rate in rates if store.missing(configs[rate]))
            if left:  # a stage is judged as a whole: what a killed run left must not decide where to look next
                return dict.fromkeys(rates, math.inf)
            runs = {rate: [run for config in configs[rate] if (run := store.get(config))] for rate in rates}
            if seen is not None:
                seen.extend(run for found in runs.values() for run in found)
            return {rate: median([self.score(run.result) for run in found]) for rate, found in runs.items()}

        best, _ = two_stage(evaluate, *settings["exponents"][method.optimizer])
        return best, replace(task, rates=left) if left else None

    def _tuning_left(self, store: Store, preset: Preset, case: Case, method: Method) -> Iterable[_Task]:
        _, left = self._search(store, preset, case, self.tuned_as(method))
        return [left] if left is not None and self.tuned_as(method) == method else []

    def _do(self, tasks: Sequence[_Task], store: Store, context: Context, what: str) -> None:
        """Do what the store does not have yet."""
        for task in tasks:
            if task.method.optimizer in baselines.BASELINES:
                continue
            run_sweep(
                self,
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
                schedule=self._schedule(context.preset),
                schedule_every=1,
            )
        configs = [
            config
            for task in tasks
            if task.method.optimizer in baselines.BASELINES
            for rate in task.rates
            for config in self._configs(context.preset, task, rate)
        ]
        in_processes(type(self).process, store.missing(configs), store, context, f"{self.id}, {what}")

    def _schedule(self, preset: Preset) -> Callable[[torch.optim.Optimizer], Any] | None:
        steps = self.settings(preset)["steps"]
        return (lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)) if self.cosine else None

    def _extra(self, task: _Task) -> dict[str, Any]:
        extra = {**task.case, "record every": task.record_every}
        name = task.method.optimizer
        return {**extra, "call": baselines.describe(name)} if name in baselines.BASELINES else extra

    def _configs(self, preset: Preset, task: _Task, rate: float) -> list[dict[str, Any]]:
        own = {"optimizer": task.method.optimizer, "coordinates": task.method.coordinates, "lr": rate}
        steps = self.settings(preset)["steps"]
        return [self.config(preset, **own, steps=steps, **self._extra(task), seed=seed) for seed in task.seeds]


def run_alone(experiment: TunedExperiment, config: Mapping[str, Any]) -> Record:
    """One run of a baseline, as its configuration says."""
    problem = experiment.trials(config, [config["seed"]])
    found, seconds = baselines.train(
        problem,
        config["optimizer"],
        config["lr"],
        config["steps"],
        record_every=config["record every"],
        cosine=experiment.cosine,
    )
    return finished(config, found, seconds)


def with_decay(rows: int, columns: int, decay: float, generator: torch.Generator) -> Tensor:
    """A matrix with singular values k^-decay and random singular vectors, in float64."""
    rank = min(rows, columns)
    left, right = (random_orthonormal(size, rank, generator) for size in (rows, columns))
    values = torch.arange(1, rank + 1, dtype=torch.float64) ** -decay
    return left * values @ right.mT


def _recorded(steps: int, every: int) -> list[int]:
    return list(range(0, steps + every, every))


def _styled(series: Series, method: Method) -> Series:
    """Random rotations are a control: their own colour, and not dashed."""
    if method.coordinates != RANDOM:
        return series
    return replace(series, method=str(method), egop=False)
