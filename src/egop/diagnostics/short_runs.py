"""Short trainings on copies of a model, for the race and for the search of a learning rate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from egop.estimation import Objective

__all__ = [
    "Curve",
    "batch_losses",
    "check_gradient",
    "clock",
    "held_batches",
    "mean_loss",
    "train",
    "trained_parameters",
]

# At most so many different batches are held; a longer run goes through them again.
_BATCHES = 100


def held_batches(objective: Objective, steps: int, seed: int) -> list[Any]:
    """Return the batches for runs of this many steps. They are held, so that every run sees the same ones."""
    with objective.preserve(seed=seed):
        return objective.move_batches(itertools.islice(objective.batches(), min(steps, _BATCHES)))


@dataclass(frozen=True)
class Curve:
    """The losses of one run.

    Attributes:
        loss: the loss before the first step and after every few.
        seconds: the time spent in training steps, without evaluation.
        diverged: whether the loss became non-finite, which ended the run; it is then the last entry.
    """

    loss: tuple[float, ...]
    seconds: float = 0.0
    diverged: bool = False

    def find(self, target: float) -> int | None:
        """Return the index of the first loss that is at most ``target``, or None."""
        return next((index for index, loss in enumerate(self.loss) if loss <= target), None)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Sequence[Any],
    *,
    steps: int,
    every: int,
    evaluate: Callable[[nn.Module], float],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    progress: bool = True,
    description: str = "training",
) -> Curve:
    """Train a model, cycling through the batches, until the loss is no longer finite or the steps are done.

    Args:
        model: trained in place.
        optimizer: steps the model's parameters.
        loss_fn: ``loss_fn(model, batch)``, a scalar.
        batches: the batches, at least one.
        steps: the number of steps, a multiple of ``every``.
        every: evaluate after this many steps.
        evaluate: returns the loss to record; called in evaluation mode, without gradients.
        scheduler: a learning-rate scheduler, advanced after every step.
        progress: show a progress bar.
        description: its title.
    """
    stream = itertools.cycle(batches)
    modes = [(module, module.training) for module in model.modules()]
    losses, seconds = [_evaluate(model, evaluate)], 0.0
    with tqdm(total=steps, desc=description, unit="step", disable=not progress) as bar:
        while (done := every * (len(losses) - 1)) < steps and math.isfinite(losses[-1]):
            for module, training in modes:
                module.training = training
            start = time.perf_counter()
            for batch in itertools.islice(stream, every):
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            if torch.accelerator.is_available():  # wait for kernels that are still running
                torch.accelerator.synchronize()
            seconds += time.perf_counter() - start
            losses.append(_evaluate(model, evaluate))
            bar.set_postfix_str(f"loss {losses[-1]:.2e}", refresh=False)
            bar.update(every)
        if diverged := not math.isfinite(losses[-1]):
            bar.set_postfix_str(f"diverged: loss {losses[-1]} after step {done}, stopped")
    return Curve(tuple(losses), seconds, diverged)


@torch.no_grad()
def _evaluate(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    model.eval()
    return float(evaluate(model))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_gradient(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
    """Raise an error when the loss of a copy does not depend on the copy."""
    loss = loss_fn(model, batch)
    trained = trained_parameters(model)
    gradients = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else []
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "Copies of the model are trained, but the loss does not depend on the model that it is given. "
            "Use loss_fn(model, batch)'s own model argument."
        )


def batch_losses(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]
) -> tuple[float, ...]:
    """Return the loss of each batch."""
    return tuple(float(loss_fn(model, batch)) for batch in batches)


def mean_loss(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> float:
    """Return the mean loss over batches."""
    return sum(batch_losses(model, loss_fn, batches)) / len(batches)


def clock() -> float:
    """Wait for running kernels and return the seconds of a clock to time work with.

    With one thread it is the processor's time, which does not count other programs.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
