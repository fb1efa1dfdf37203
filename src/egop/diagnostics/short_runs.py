"""What short runs on copies of a model have in common: the race's, and those that look for a learning rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egop.estimation import Objective

__all__ = [
    "Stretches",
    "batch_losses",
    "check_gradient",
    "clock",
    "held_batches",
    "mean_loss",
    "trained_parameters",
]

# At most so many different batches are held; a longer run goes through them again.
_BATCHES = 100


def held_batches(objective: Objective, steps: int, seed: int) -> list[Any]:
    """The batches of runs of so many steps: held, so that every run sees the same ones whatever the loader does."""
    with objective.preserved(seed=seed):
        return objective.placed(itertools.islice(objective.batches(), min(steps, _BATCHES)))


class Stretches:
    """Each pass over it is the next stretch of so many batches: steps take the place of epochs."""

    def __init__(self, batches: Sequence[Any], length: int) -> None:
        self._stream, self._length = itertools.cycle(batches), length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._stream, self._length)


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
    """The loss of each batch."""
    return tuple(float(loss_fn(model, batch)) for batch in batches)


def mean_loss(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batches: Sequence[Any]) -> float:
    """The mean of these losses."""
    return sum(batch_losses(model, loss_fn, batches)) / len(batches)


def clock() -> float:
    """The seconds of a clock to measure work by, read when kernels that are still running have ended.

    On one core it stands still while other programs have it, so that a busy machine does not count.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
