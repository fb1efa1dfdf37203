"""The training loop of the experiments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm


@dataclass(frozen=True)
class Curve:
    """One training run by epoch; index 0 is the starting point.

    Attributes:
        loss: loss over the whole training set.
        metrics: other evaluated quantities by name, as long as ``loss``.
        seconds: time spent in training steps, without evaluation.
        diverged: whether the loss became non-finite, which ended the run; it is then the last entry.
    """

    loss: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    diverged: bool = False

    @property
    def final(self) -> float:
        """The final loss."""
        return self.loss[-1]

    def epochs_to(self, target: float) -> int | None:
        """Return the first epoch after which the loss is at most ``target``, or None."""
        return next((epoch for epoch, loss in enumerate(self.loss) if loss <= target), None)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    epochs: int,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, Tensor | float]],
    progress: bool = True,
    description: str = "training",
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Curve:
    """Train a model and evaluate it before the first epoch and after every one.

    A non-finite loss ends the run: the curve so far is returned with ``diverged=True``, and the progress bar says so.
    Nothing is raised, because a learning rate that is too large is a result like any other.

    Args:
        model: trained in place, with each of its modules in the mode it is in.
        optimizer: steps the model's parameters.
        loss_fn: ``loss_fn(model, batch)``, a scalar.
        batches: one pass over it is one epoch.
        epochs: the number of passes.
        evaluate: ``evaluate(model)`` returns named numbers, among them ``"loss"`` over the whole training set; called
            in evaluation mode, without gradients.
        progress: show a progress bar on standard error.
        description: its title.
        scheduler: a learning-rate scheduler, advanced after every step.
    """
    modes = [(module, module.training) for module in model.modules()]
    history = [_evaluate(model, evaluate)]
    seconds = 0.0
    try:
        with tqdm(total=epochs, desc=description, unit="epoch", disable=not progress) as bar:
            while len(history) <= epochs and math.isfinite(history[-1]["loss"]):
                _set_modes(modes)
                seconds += _train_epoch(model, optimizer, loss_fn, batches, scheduler)
                history.append(_evaluate(model, evaluate))
                bar.set_postfix_str(f"loss {history[-1]['loss']:.2e}", refresh=False)
                bar.update()
            if diverged := not math.isfinite(history[-1]["loss"]):
                bar.set_postfix_str(f"diverged: loss {history[-1]['loss']} after epoch {len(history) - 1}, stopped")
    finally:
        _set_modes(modes)
    by_name = {name: tuple(entry[name] for entry in history) for name in history[0]}
    return Curve(loss=by_name.pop("loss"), metrics=by_name, seconds=seconds, diverged=diverged)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> float:
    """Pass over the batches once; return the seconds it took."""
    start = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if torch.accelerator.is_available():  # wait for kernels that are still running
        torch.accelerator.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def _evaluate(model: nn.Module, evaluate: Callable[[nn.Module], Mapping[str, Tensor | float]]) -> dict[str, float]:
    model.eval()
    return {name: float(value) for name, value in evaluate(model).items()}
