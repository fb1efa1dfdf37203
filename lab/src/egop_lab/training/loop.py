"""The training loop of the experiments."""

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
    """One training run by epoch; index 0 is the starting point."""

    loss: tuple[float, ...]  # over the whole training set
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by name, as long as the loss
    seconds: float = 0.0  # spent in training steps, without evaluation
    diverged: bool = False  # the run ended early

    @property
    def final(self) -> float:
        return self.loss[-1]

    def epochs_to(self, target: float) -> int | None:
        """Return the first epoch after which the loss is at most ``target``, or None."""
        return next((epoch for epoch, loss in enumerate(self.loss) if loss <= target), None)


def run_epochs(
    step: Callable[[Any], object],
    batches: Callable[[int], Iterable[Any]],
    evaluate: Callable[[], dict[str, Any]],
    epochs: int,
    *,
    description: str = "training",
    progress: bool = True,
) -> tuple[dict[str, list[Any]], float]:
    """Take the steps of each epoch, and evaluate before the first one and after every one.

    The run ends early if the first evaluated number is not finite, or if a decomposed matrix overflowed. Nothing is
    raised then, because a learning rate that is too large is a result like any other.

    Returns:
        What was evaluated, a list each, and the seconds of the steps.
    """
    history, seconds, overflowed = [evaluate()], 0.0, False
    with tqdm(total=epochs, desc=description, unit="epoch", disable=not progress) as bar:
        while len(history) <= epochs and not overflowed and not _has_diverged(history[-1]):
            began = time.perf_counter()
            try:
                for batch in batches(len(history) - 1):
                    step(batch)
            except torch.linalg.LinAlgError:
                overflowed = True
                continue
            if torch.accelerator.is_available():  # wait for kernels that are still running
                torch.accelerator.synchronize()
            seconds += time.perf_counter() - began
            history.append(evaluate())
            bar.update()
        if overflowed or _has_diverged(history[-1]):
            bar.set_postfix_str(f"diverged after epoch {len(history) - 1}, stopped")
    return {name: [entry[name] for entry in history] for name in history[0]}, seconds


def _has_diverged(values: Mapping[str, Any]) -> bool:
    first = next(iter(values.values()))
    return isinstance(first, float) and not math.isfinite(first)


def pad(values: Iterable[float], epochs: int) -> list[float]:
    """Fill up the curve of a run that ended early with ``nan``."""
    known = list(values)
    return known + [math.nan] * (epochs + 1 - len(known))


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
    """Train a model in place and evaluate it before the first epoch and after every one; see :func:`run_epochs`.

    One pass over the batches is one epoch. ``evaluate(model)`` is called in evaluation mode, without gradients, and
    returns named numbers: first the loss over the whole training set. The scheduler is advanced after every step.
    """
    modes = [(module, module.training) for module in model.modules()]

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    @torch.no_grad()
    def score() -> dict[str, float]:
        model.eval()
        try:
            return {name: float(value) for name, value in evaluate(model).items()}
        finally:
            restore()

    def restore() -> None:
        for module, training in modes:
            module.training = training

    curves, seconds = run_epochs(step, lambda _: batches, score, epochs, description=description, progress=progress)
    loss, *metrics = ((name, tuple(values)) for name, values in curves.items())
    diverged = len(loss[1]) <= epochs or not math.isfinite(loss[1][-1])
    return Curve(loss[1], dict(metrics), seconds, diverged)
