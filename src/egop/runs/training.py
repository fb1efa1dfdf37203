"""The training loop, the only one of the project."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from egop.runs.records import Curve

__all__ = ["train"]


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
    unit: str = "epoch",
    length: int = 1,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Curve:
    """Train a model and evaluate it before the first epoch and after every one.

    A loss that becomes non-finite ends the run: the curve so far comes back with ``diverged=True``, and the progress
    bar says so. Nothing is raised, because a learning rate that is too large is a result like any other.

    Args:
        model: Trained in place, and left, in the mode that each of its modules is in.
        optimizer: Steps the model's parameters.
        loss_fn: ``loss_fn(model, batch)``, a scalar.
        batches: One pass over it is one epoch.
        epochs: How many passes.
        evaluate: ``evaluate(model)`` gives named numbers, among them ``"loss"`` over the whole training set; called
            in evaluation mode, without gradients.
        progress: Show a progress bar on standard error.
        description: What the progress bar is called.
        unit: What it counts, where a pass over ``batches`` is not an epoch.
        length: How many of these a pass is.
        scheduler: Of the learning rate; goes on after every step of the optimizer.

    Returns:
        Losses and other metrics by epoch, and the seconds spent in training steps.
    """
    if epochs < 0:
        raise ValueError(f"Invalid epochs value: {epochs}. Must not be negative.")
    modes = [(part, part.training) for part in model.modules()]
    history = [_evaluate(model, evaluate)]
    seconds = 0.0
    try:
        with tqdm(total=epochs * length, desc=description, unit=unit, disable=not progress) as bar:
            while len(history) <= epochs and math.isfinite(history[-1]["loss"]):
                _set_modes(modes)
                seconds += _epoch(model, optimizer, loss_fn, batches, scheduler)
                history.append(_evaluate(model, evaluate))
                bar.set_postfix_str(f"loss {history[-1]['loss']:.2e}", refresh=False)
                bar.update(length)
            diverged = not math.isfinite(history[-1]["loss"])
            if diverged:
                last = (len(history) - 1) * length
                bar.set_postfix_str(f"diverged: loss {history[-1]['loss']} after {unit} {last}, stopped")
    finally:
        _set_modes(modes)
    by_name = {name: tuple(entry[name] for entry in history) for name in history[0]}
    return Curve(loss=by_name.pop("loss"), metrics=by_name, seconds=seconds, diverged=diverged)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> float:
    """One pass over the batches; returns its seconds."""
    start = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if torch.accelerator.is_available():  # kernels may still be running: their time belongs to the steps
        torch.accelerator.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def _evaluate(model: nn.Module, evaluate: Callable[[nn.Module], Mapping[str, Tensor | float]]) -> dict[str, float]:
    model.eval()
    values = {name: float(value) for name, value in evaluate(model).items()}
    if "loss" not in values:
        raise ValueError(f"evaluate(model) must give 'loss' among its numbers, but gave {sorted(values)}.")
    return values
