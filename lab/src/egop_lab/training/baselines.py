"""Optimizers of another library that the paper compares with: which class, with which arguments, and their runs.

They couple the entries of a matrix, so their runs cannot be stacked: one run at a time, several processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop_lab.training import batched

# As every method here, they have no weight decay and momentum constants as Adam's. SOAP's own are (0.95, 0.95), which
# is a row of its own: which of the two is better depends on the problem.
_ADAM = (0.9, 0.999)


@dataclass(frozen=True)
class Baseline:
    """A class of ``pytorch_optimizer``.

    Attributes:
        name: of the class.
        arguments: all that differ from its defaults, besides the learning rate.
        cadence: the argument that says after how many steps the basis is renewed; none where that is fixed.
    """

    name: str
    arguments: Mapping[str, Any]
    cadence: str | None

    def call(self, every: int) -> dict[str, Any]:
        """The arguments for a basis that is renewed after so many steps."""
        return {**self.arguments} if self.cadence is None else {**self.arguments, self.cadence: every}


BASELINES: dict[str, Baseline] = {
    "SOAP": Baseline("SOAP", {"betas": _ADAM, "weight_decay": 0.0}, "precondition_frequency"),
    "SOAP (0.95)": Baseline("SOAP", {"betas": (0.95, 0.95), "weight_decay": 0.0}, "precondition_frequency"),
    "Shampoo": Baseline("Shampoo", {}, "preconditioning_compute_steps"),
    # No reduction: what is left is its change of basis. Its moments do not follow a new projection, so that one every
    # step would make them meaningless: its authors' 200 steps. The class's eps is a hundred times Adam's.
    "GaLore": Baseline(
        "GaLore",
        {"betas": _ADAM, "eps": 1e-8, "rank": None, "scale": 1.0, "projection_type": "std", "update_proj_gap": 200},
        None,
    ),
}


class MissingPackageError(ImportError):
    """A package is not installed; the message says what to install."""


def describe(name: str, every: int = 1) -> str:
    """The call that makes a baseline, for settings and configurations."""
    baseline = BASELINES[name]
    arguments = ", ".join(f"{key}={value}" for key, value in baseline.call(every).items())
    return f"pytorch_optimizer.{baseline.name}({arguments})"


def make(name: str, parameters: Iterable[Tensor], lr: float, every: int = 1) -> torch.optim.Optimizer:
    """A baseline by name, whose basis is renewed after so many steps."""
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise MissingPackageError(
            f"{name} comes from the package pytorch_optimizer, which is not installed: pip install pytorch-optimizer."
        ) from error
    baseline = BASELINES[name]
    found: torch.optim.Optimizer = getattr(pytorch_optimizer, baseline.name)(
        list(parameters), lr=lr, **baseline.call(every)
    )
    return found


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
    """Train the only trial of a problem with a baseline.

    Args:
        problem: of one trial.
        name: in :data:`BASELINES`.
        lr: the learning rate.
        steps: how many steps.
        every: renew the basis after so many.
        record_every: evaluate after so many (and before the first).
        cosine: anneal the learning rate to zero, step by step.

    Returns:
        What ``problem.evaluate`` gave, a list each, and the seconds. A run that diverges ends there; ``nan`` fills up.
    """
    leaves = {key: value[0].clone().requires_grad_() for key, value in problem.start().items()}
    optimizer = make(name, leaves.values(), lr, every)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    history = [_evaluated(problem, leaves)]
    began = time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = problem.losses(_stacked(leaves), problem.batch(step)).sum()
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        try:
            optimizer.step()
        except torch.linalg.LinAlgError:  # what it decomposes has overflowed
            break
        if schedule is not None:
            schedule.step()
        if (step + 1) % record_every == 0 or step + 1 == steps:
            history.append(_evaluated(problem, leaves))
    left = 1 + math.ceil(steps / record_every) - len(history)
    curves = {key: [entry[key] for entry in history] + [math.nan] * left for key in history[0]}
    return curves, time.perf_counter() - began


def _stacked(leaves: Mapping[str, Tensor]) -> batched.Point:
    return {name: value[None, None] for name, value in leaves.items()}


@torch.no_grad()
def _evaluated(problem: batched.Problem, leaves: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in problem.evaluate(_stacked(leaves)).items()}
