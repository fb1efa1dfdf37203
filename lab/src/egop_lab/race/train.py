"""The one training loop for all tasks and methods."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egop_lab.race.methods import METHODS, Setup
from egop_lab.race.problems import Problem
from egop_lab.race.tasks import DECAY, Run, Task

_DIGEST_STEPS = 3  # steps after which the parameters are summarised, to recognise a method's arithmetic


def configure_torch(device: torch.device) -> None:
    """Use TF32 for float32 products on a GPU, and silence egop's log."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logging.getLogger("egop").setLevel(logging.ERROR)


def schedule(step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up, constant, linear to nearly 0 at the end."""
    return min(1.0, step / warmup, (steps - step + 1) / (DECAY * steps))


def make_optimizer(problem: Problem, task: Task, run: Run) -> Optimizer:
    """Build the optimizer of a run."""
    setup = Setup(
        model=problem.model,
        hidden=problem.hidden,
        lr=run.lr,
        beta=run.beta,
        beta2=task.beta2,
        weight_decay=task.weight_decay,
        seed=run.seed,
    )
    return METHODS[run.method](setup)


def train(problem: Problem, task: Task, run: Run) -> dict[str, Any]:
    """Train once and return the results for the record. A loss that is not finite ends the run as diverged."""
    started = time.perf_counter()
    problem.reset(run.seed)
    optimizer = make_optimizer(problem, task, run)
    results: dict[str, Any] = {"curve": [], "train": []}
    scores: dict[str, dict[str, float]] = {}
    try:
        diverged = not _take_steps(problem, task, run, optimizer, results)
    except torch.linalg.LinAlgError:  # a decomposition of matrices that overflowed
        diverged = True
    if not diverged:
        scores = {part: problem.evaluate(part) for part in ("validation", *(() if run.is_tuning else ("test",)))}
        diverged = not math.isfinite(scores["validation"]["loss"])
    for part in ("validation", "test"):
        found = {} if diverged else scores.get(part, {})
        results |= {part: found.get("loss"), f"{part} accuracy": found.get("accuracy")}
    del optimizer
    gc.collect()  # an optimizer may be part of a cycle
    return results | {"diverged": diverged, "data": problem.data.digest, "seconds": time.perf_counter() - started}


def _take_steps(problem: Problem, task: Task, run: Run, optimizer: Optimizer, results: dict[str, Any]) -> bool:
    """Take all steps and fill in the results on the way; return False if the loss is no longer finite."""
    looks = {round(run.steps * (look + 1) / task.evaluations) for look in range(task.evaluations)}
    parameters = list(problem.model.parameters())
    losses: list[Tensor] = []
    problem.model.train()
    for step, batch in enumerate(problem.batches(run.seed, run.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = group.get("scale", 1.0) * run.lr * schedule(step, run.steps, run.warmup)
        losses.append(take_step(problem, batch, optimizer, run.clip))
        if step == _DIGEST_STEPS:
            results["first losses"] = torch.stack(losses).tolist()
            results["first digest"] = summarize_parameters(parameters)
        if step in looks:
            found = problem.evaluate("curve")["loss"]
            if not math.isfinite(found):
                return False
            results["curve"].append([step, round(found, 6)])
            results["train"].append(round(float(torch.stack(losses).mean()), 6))
            losses = []
    return True


def take_step(problem: Problem, batch: Any, optimizer: Optimizer, clip: float | None) -> Tensor:
    """Take one step and return the loss before it."""
    optimizer.zero_grad()
    loss = problem.loss(*batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(problem.model.parameters(), clip)
    optimizer.step()
    return loss.detach().clone()  # a graph writes every loss to the same place


@torch.no_grad()
def summarize_parameters(parameters: Iterable[Tensor]) -> dict[str, str]:
    """Return the sum and the norm of all parameters, computed in float64, to ten digits."""
    sums = torch.stack([torch.stack((each.double().sum(), each.double().square().sum())) for each in parameters])
    total, norm = sums.sum(0)[0], sums.sum(0)[1].sqrt()
    return {"sum": f"{float(total):.10g}", "norm": f"{float(norm):.10g}"}
