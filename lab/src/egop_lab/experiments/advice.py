"""Check the advice of ``egop.diagnose`` and ``egop.find_lr`` against full trainings of many small problems.

Full trainings of every candidate at several learning rates give the truth; the race of ``egop.diagnose`` gives the
prediction. Records hold the runs of the race, so the advice is recomputed when the rules of the library change.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import egop
from egop_lab.experiments.advice_results import ADAMW, CANDIDATES, Results
from egop_lab.experiments.base import Experiment, Judgement, Table
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context
from egop_lab.training.problems import PROBLEMS, Task

_QUICK = ("table", "linear-network", "matrix-sensing", "table-mixed")
_START = 5e-3  # first learning rate of AdamW
_BUDGET = 3600.0  # seconds: a busy machine must not shorten a race


class AdviceExperiment(Experiment):
    """Race and full trainings of 28 small problems, half of which were chosen before the rules were tuned."""

    id: ClassVar[str] = "advice"

    @property
    def settings(self) -> dict[str, Any]:
        full = self.preset == "full"
        problems = {
            name: {"kind": each.kind, "half": each.half, "steps": each.steps if full else 40}
            for name, each in PROBLEMS.items()
            if full or name in _QUICK
        }
        return super().settings | {"problems": problems, "candidates": list(CANDIDATES)}

    def run(self, context: Context) -> None:
        for name in self.settings["problems"]:
            began = time.monotonic()
            runner = _Runner(self, context, name)
            for candidate in CANDIDATES:
                runner.find_truth(candidate)
            runner.race()
            context.say(f"{name}: {time.monotonic() - began:.0f} s")

    def results(self) -> Results:
        return Results(self.settings, self.records())

    def judge(self) -> list[Judgement]:
        results = self.results()
        judged = results.summarize()
        if self.preset == "full" and len(results.complete) == len(results.settings["problems"]):
            return judged
        return [replace(each, verdict="cannot be judged") for each in judged]

    def pictures(self) -> list[Picture]:
        results = self.results()
        series = []
        for half in ("open", "frozen"):
            pairs = results.pairs(half)
            series.append(Series(half, [each.predicted.steps for each in pairs], [each.true.steps for each in pairs]))
        xlabel, ylabel = "race: steps, AdamW = 1", "training: steps, AdamW = 1"
        panel = Panel("Steps to the same loss", xlabel, ylabel, series, "log", "log", "points")
        caption = "Steps to the same loss as AdamW, by candidate and problem: in the race and in full trainings."
        return [Picture("advice", caption, [panel])]

    def remarks(self) -> list[str]:
        times = (
            "The machine was shared, so times are processor times of single-threaded runs, and the correlation is that "
            "of steps. The minutes below are wall-clock times of several runs side by side."
        )
        code = (
            "The race and the full trainings ran the same code. Since then, EGOP's updates follow the size of Adam's "
            "in models without normalization layers. In others, they are larger where a layer has more inputs than "
            "outputs, and for convolutions."
        )
        rules = (
            "The rules were chosen on the open half before the frozen half was looked at, but for one: a third "
            "learning rate, the race's own best one, was added to the proposals after that."
        )
        return [times, code, rules]

    def tables(self) -> list[Table]:
        results = self.results()
        return [results.problem_table(), results.rate_table()]


class _Runner:
    """The runs of one problem."""

    def __init__(self, experiment: AdviceExperiment, context: Context, name: str) -> None:
        self.experiment, self.context, self.name = experiment, context, name
        self.settings = experiment.settings
        self.steps = self.settings["problems"][name]["steps"]

    def find_truth(self, candidate: str) -> None:
        """Search for the candidate's best rate with full training runs, and repeat it with the other seeds."""
        rates = self.settings["rates"]
        known = self._losses("EGOP") if candidate == "EGOP without rotation" else self._losses(ADAMW)
        start = _START if candidate == ADAMW else min(known, key=known.__getitem__)
        middle = rates.index(start)
        best = self.train(candidate, start)
        for direction in (rates[middle + 1 :], rates[:middle][::-1]):
            for rate in direction:
                loss = self.train(candidate, rate)
                if not loss < best:
                    break
                best = loss
        losses = self._losses(candidate)
        best_rate = min(losses, key=losses.__getitem__)
        for seed in range(1, self.settings["seeds"]):
            self.train(candidate, best_rate, seed)

    def race(self) -> None:
        """Race as a user would."""
        self._do(lambda: _race(self._make(0), self.steps), what="race", seed=0)

    def train(self, candidate: str, lr: float, seed: int = 0) -> float:
        """Train in full and return the final loss; infinite if the run diverged."""
        count = self.settings["evaluations"]
        result = self._do(
            lambda: train(self._make(seed), functools.partial(build_optimizer, candidate), lr, self.steps, count, seed),
            what="training",
            candidate=candidate,
            lr=lr,
            seed=seed,
        )
        final = float(result["losses"][-1])
        return final if math.isfinite(final) else math.inf

    def _losses(self, candidate: str) -> dict[float, float]:
        wanted = {"problem": self.name, "steps": self.steps, "what": "training", "candidate": candidate, "seed": 0}
        runs = self.experiment.records(**wanted)
        finals = {run.config["lr"]: float(run.result["losses"][-1]) for run in runs}
        return {lr: loss if math.isfinite(loss) else math.inf for lr, loss in finals.items()}

    def _make(self, seed: int) -> Task:
        return _make_task(self.name, seed, self.context.data)

    def _do(self, work: Callable[[], dict[str, Any]], **entries: Any) -> Mapping[str, Any]:
        def run(_: Mapping[str, Any]) -> dict[str, Any]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return work()

        config = self.experiment.config(problem=self.name, steps=self.steps, **entries)
        self.experiment.do_missing([config], run)
        record = self.experiment.store.get(config)
        assert record is not None
        return record.result


@functools.lru_cache(maxsize=2)
def _make_task(name: str, seed: int, data: str | None) -> Task:
    return PROBLEMS[name].make(seed, data)


def build_optimizer(candidate: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build a candidate's optimizer."""
    if candidate == "AdamW":
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    if candidate == "AdamW with Online":
        return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=1e-3, refresh=egop.Online())
    return egop.EGOP(model, lr=1e-3, rotate=candidate == "EGOP")


def train(
    task: Task,
    build: Callable[[nn.Module], torch.optim.Optimizer],
    lr: float,
    steps: int,
    evaluations: int,
    seed: int,
) -> dict[str, Any]:
    """Train a copy of the model; return its losses on held-out batches and the processor time of a step."""
    torch.manual_seed(seed)
    model = copy.deepcopy(task.model)
    optimizer = build(model)
    for group in optimizer.param_groups:
        group["lr"] = lr
    warm_up, decay = 0.1 * steps, 0.4 * steps
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up, (steps - step) / decay))
    every = steps // evaluations
    losses, seconds = [_evaluate(task, model)], 0.0
    batches = itertools.islice(itertools.cycle(task.batches), steps)
    began = time.process_time()
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        try:
            optimizer.step()
        except (torch.linalg.LinAlgError, ValueError):  # gradients overflowed
            losses.append(math.nan)
            break
        scheduler.step()
        if step % every == 0:
            seconds += time.process_time() - began
            losses.append(_evaluate(task, model))
            if not losses[-1] < 10 * abs(losses[0]):
                losses[-1] = math.nan
                break
            began = time.process_time()
    return {"losses": losses, "step_seconds": seconds / steps}


@torch.no_grad()
def _evaluate(task: Task, model: nn.Module) -> float:
    model.eval()
    loss = sum(float(task.loss(model, batch)) for batch in task.held_out) / len(task.held_out)
    model.train()
    return loss


def _race(task: Task, steps: int) -> dict[str, Any]:
    objective = egop.Objective(task.model.train(), task.loss, task.batches)
    race = egop.diagnose(objective, steps=steps, budget=_BUDGET, progress=False).race
    runs = [{name: [asdict(run) for run in runs] for name, runs in stage.items()} for stage in race.runs]
    return {"runs": runs, "lengths": list(race.lengths), "start": race.start, "left_out": dict(race.left_out)}
