"""Single runs on a small problem, for optimizers that couple the entries of a matrix and cannot be batched."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from egop_lab.builders import Setup
from egop_lab.methods import SMALL
from egop_lab.training import batched


def train(
    problem: batched.Problem,
    name: str,
    lr: float,
    steps: int,
    *,
    every: int = 1,
    record_every: int = 1,
    cosine: bool = False,
) -> tuple[dict[str, list[float]], float]:
    """Train the only trial of a problem with one of the methods for small problems.

    Args:
        problem: a problem with one trial.
        name: the label of the method.
        lr: the learning rate.
        steps: the number of steps.
        every: steps between two refreshes of the basis.
        record_every: steps between two evaluations (there is one before the first step).
        cosine: anneal the learning rate to zero, step by step.

    Returns:
        What ``problem.evaluate`` gave, a list each, and the seconds. A run that diverges ends there; ``nan`` fills up.
    """
    leaves = {key: nn.Parameter(value[0].clone()) for key, value in problem.start().items()}
    start = Setup(model=nn.ParameterList(leaves.values()), options={"lr": lr}, every=every)
    optimizer = SMALL[name](start)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    history = [_evaluate(problem, leaves)]
    began = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = problem.losses(_add_run_dimensions(leaves), problem.batch(step)).sum()
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        try:
            optimizer.step()
        except torch.linalg.LinAlgError:  # a decomposed matrix overflowed
            break
        if schedule is not None:
            schedule.step()
        if (step + 1) % record_every == 0 or step + 1 == steps:
            history.append(_evaluate(problem, leaves))
    left = 1 + math.ceil(steps / record_every) - len(history)
    curves = {key: [entry[key] for entry in history] + [math.nan] * left for key in history[0]}
    return curves, time.perf_counter() - began


def _add_run_dimensions(leaves: Mapping[str, Tensor]) -> batched.Point:
    return {name: value[None, None] for name, value in leaves.items()}


@torch.no_grad()
def _evaluate(problem: batched.Problem, leaves: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in problem.evaluate(_add_run_dimensions(leaves)).items()}
