"""The trainings of the study of prediction: one problem in one form, probes of a few steps, and what a step takes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import egop
from egop_lab.training.loop import train
from egop_lab.training.problems import PROBLEMS, Task

__all__ = ["FORMS", "ORIGINAL", "Start", "one_step", "optimizer", "probed", "started", "step_times", "trained"]

ORIGINAL = "original"
FIXED, ONE_SIDED, TWO_SIDED, EGOP = "fixed", "online one-sided", "online two-sided", "EGOP"
FORMS = (ORIGINAL, FIXED, ONE_SIDED, TWO_SIDED, EGOP)

# Of AdamW in whatever coordinates, and of EGOP: only what is studied differs.
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
_STRUCTURES = {ONE_SIDED: egop.Shared(), TWO_SIDED: egop.Kronecker()}


class Start:
    """A problem at the start of a training.

    Args:
        problem: its id.
        seed: of everything that is random.
    """

    def __init__(self, problem: str, seed: int) -> None:
        self.problem, self.seed = PROBLEMS[problem], seed
        self.task: Task = self.problem.make(seed)

    @functools.cached_property
    def weights(self) -> list[str]:
        """What gets a basis: what ``Online()`` takes; where it would leave everything, all matrices."""
        model = copy.deepcopy(self.task.model)
        with _quiet():
            trial = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr=0.0)
            one_step(self.task, model, trial, 0)
        named = self.task.model.named_parameters()
        return list(trial.basis) or [name for name, weight in named if weight.requires_grad and weight.dim() > 1]

    @functools.cached_property
    def objective(self) -> egop.Objective:
        """The objective of a copy of the task's model."""
        return egop.Objective(copy.deepcopy(self.task.model), self.task.loss, self.task.batches)

    @functools.cached_property
    def basis(self) -> egop.Basis:
        """The basis estimated from gradients at draws of the task's distribution."""
        with _quiet():
            return egop.estimate(
                self.objective,
                rho=self.task.rho,
                partition="parameter",
                structure=dict.fromkeys(self.weights, egop.Shared()),
                samples=self.problem.draws,
                generator=torch.Generator().manual_seed(self.seed),
                sampling="loop",
                progress=False,
            )


@functools.lru_cache(maxsize=4)
def started(problem: str, seed: int) -> Start:
    """The start, kept for the runs to come."""
    return Start(problem, seed)


def optimizer(form: str, start: Start, model: nn.Module, lr: float) -> Optimizer:
    """The optimizer of a form, for a copy of the start's model."""
    if form == ORIGINAL:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, **SETTINGS)
    if form == EGOP:
        return egop.EGOP(model, lr=lr, **SETTINGS)
    if form == FIXED:
        return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, start.basis, lr=lr, **SETTINGS)
    refresh = egop.Online(structure=dict.fromkeys(start.weights, _STRUCTURES[form]))
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=lr, **SETTINGS)


def one_step(task: Task, model: nn.Module, optimizer: Optimizer, place: int) -> None:
    """A step with the batch at a place."""
    optimizer.zero_grad()
    task.loss(model, task.batches[place % len(task.batches)]).backward()
    optimizer.step()


class _Pass:
    """The batches between two looks at the judged loss; sets the learning rate before each."""

    def __init__(self, task: Task, optimizer: Optimizer, lr: float, factors: Iterable[float], length: int) -> None:
        self._batches, self._optimizer, self._lr, self._length = itertools.cycle(task.batches), optimizer, lr, length
        self._factors = iter(factors)

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(self._batches, self._length):
            factor = next(self._factors)
            for group in self._optimizer.param_groups:
                group["lr"] = self._lr * factor
            yield batch


def trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """The judged loss at the start and at every look of a training; warm-up, then constant, then linear to nearly 0."""
    steps, looks = config["steps"], config["looks"]
    warm, decay = config["warm-up"] * steps, config["decay"] * steps
    factors = [min(1.0, step / warm, (steps - step + 1) / decay) for step in range(1, steps + 1)]
    return _run(config, factors, looks)


def probed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The judged loss at the start, in the middle and at the end of a few steps with a constant rate."""
    steps = config["steps"]
    factors = [min(1.0, 4 * step / steps) for step in range(1, steps + 1)]
    return _run(config, factors, 2)


def _run(config: Mapping[str, Any], factors: list[float], looks: int) -> dict[str, Any]:
    start = started(config["problem"], config["seed"])
    task, model = start.task, copy.deepcopy(start.task.model)
    length = len(factors) // looks
    losses: list[float] = []

    def judged(model: nn.Module) -> dict[str, Tensor]:
        loss = task.loss(model, task.judged)
        losses.append(float(loss))
        return {"loss": loss}

    # A basis of gradients that overflowed cannot be decomposed: the run has diverged like any other.
    with _quiet(), contextlib.suppress(torch.linalg.LinAlgError):
        made = optimizer(config["method"], start, model, config["lr"])
        batches = _Pass(task, made, config["lr"], factors, length)
        train(model, made, task.loss, batches, looks, evaluate=judged, progress=False)
    return {"loss": [*losses, *[math.nan] * (looks + 1 - len(losses))]}


def step_times(problem: str, seed: int, *, rounds: int, warm: int, timed: int) -> dict[str, dict[str, float]]:
    """Seconds of a step and before the first one, for each form: medians over rounds in which the forms take turns."""
    start = started(problem, seed)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    with _quiet():
        began = time.perf_counter()
        Start(problem, seed).basis  # noqa: B018 - a fresh one, to see how long it takes
        before = time.perf_counter() - began
        for _, form in itertools.product(range(rounds), FORMS):
            model = copy.deepcopy(start.task.model)
            made = optimizer(form, start, model, 1e-3)
            for step in range(warm + timed):
                if step == warm:
                    began = time.perf_counter()
                one_step(start.task, model, made, step)
            seconds[form].append((time.perf_counter() - began) / timed)
    return {
        form: {"step": statistics.median(values), "before": before if form == FIXED else 0.0}
        for form, values in seconds.items()
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that there is nothing to rotate: problems without a weight for a basis are part of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
