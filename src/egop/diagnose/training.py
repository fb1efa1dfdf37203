"""One run of a race: train a copy of the model with warm-up and decay, and record its loss."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base class of all batch norms has no public name
from torch.optim.lr_scheduler import LambdaLR

from egop.estimation import Objective

Build = (
    Callable[[nn.Module], torch.optim.Optimizer]
    | type[torch.optim.Optimizer]
    | tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
)

# Fractions of a run over which the learning rate rises and then falls.
WARM_UP, DECAY = 0.1, 0.4
# Number of batches to train on (repeated in longer runs) and number of batches to evaluate on.
_TRAINING, _EVALUATION = 100, 4
_STATISTICS = 8  # number of batches from which batch norm's statistics are computed before an evaluation
# A run ends early when its loss exceeds the initial loss by this factor.
_RUNAWAY = 10.0


@dataclass(frozen=True)
class Run:
    """The losses of one training run.

    Attributes:
        lr: peak learning rate.
        seed: seed of the order of the batches and of dropout.
        steps: planned length.
        every: number of steps between two evaluations.
        losses: loss before the first step and after every ``every`` steps.
        step_seconds: mean time of a step, without evaluation and without the first few steps.
    """

    lr: float
    seed: int
    steps: int
    every: int
    losses: tuple[float, ...]
    step_seconds: float

    @property
    def final(self) -> float:
        """Final loss; infinite if the run diverged."""
        return self.losses[-1]

    def steps_to(self, target: float) -> float:
        """Return after how many steps the loss first reached the target, interpolated; infinite if it never did."""
        for index, loss in enumerate(self.losses):
            if loss <= target:
                before = self.losses[index - 1] if index else loss
                excess = (loss - target) / (loss - before) if loss < before else 0.0
                return (index - excess) * self.every
        return math.inf


class Trainer:
    """A trainer for copies of an objective's model, all with the same start and the same batches.

    Args:
        objective: the model, its loss and its batches.
        steps: length of the longest run.
        seed: seed for drawing the batches.

    Attributes:
        start: loss before training.
        evaluation_seconds: time of one evaluation.
    """

    def __init__(self, objective: Objective, steps: int, seed: int) -> None:
        self.objective = objective
        with objective.preserve(seed=seed):
            count = _EVALUATION + min(steps, _TRAINING)
            batches = objective.move_batches(itertools.islice(objective.batches(), count))
            # Evaluation batches come first, so that with a large data set none of them is trained on.
            self._evaluation, self._training = batches[:_EVALUATION], batches[_EVALUATION:]
            model, loss_fn = objective.trainable_copy()
            _check_gradient(model, loss_fn, batches[0])
            began = clock()
            self.start = self._evaluate(model, loss_fn)
            self.evaluation_seconds = clock() - began
        if not math.isfinite(self.start):
            raise ValueError(
                f"The loss is {self.start} before the first step, so nothing can be trained from here. "
                "Check the model's parameters and the batches."
            )

    def train(
        self, build: Build, lr: float, steps: int, seed: int, evaluations: int, on_step: Callable[[], object] = int
    ) -> Run:
        """Train a copy of the model until its steps are done or it diverges; call ``on_step`` after each step."""
        every = math.ceil(steps / evaluations)
        order = torch.randperm(len(self._training), generator=torch.Generator().manual_seed(seed), device="cpu")
        stream = itertools.cycle(order.tolist())
        losses, times = [self.start], [0.0]
        with self.objective.preserve(seed=seed):
            model, loss_fn = self.objective.trainable_copy()
            modes = [(module, module.training) for module in model.modules()]
            optimizer = build_optimizer(build, model)
            _set_lr(optimizer, lr)
            scheduler = None if hasattr(optimizer, "eval") else warm_up_and_decay(optimizer, steps)
            for done in range(0, steps, every):
                count = min(every, steps - done)
                for module, training in modes:
                    if module.training is not training:
                        module.train(training)
                _switch(optimizer, "train")
                began = clock()
                for index in itertools.islice(stream, count):
                    optimizer.zero_grad()
                    loss_fn(model, self._training[index]).backward()
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    on_step()
                times.append((clock() - began) / count)
                _switch(optimizer, "eval")
                loss = self._evaluate(model, loss_fn)
                diverged = not math.isfinite(loss) or loss > _RUNAWAY * self.start > 0
                losses.append(math.inf if diverged else loss)
                if diverged:
                    break
        steady = times[2:] or times[1:]
        return Run(lr, seed, steps, every, tuple(losses), sum(steady) / len(steady))

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> float:
        """Return the mean loss in evaluation mode, with fresh statistics of batch norm.

        In runs this short its running statistics lag behind, especially at high learning rates.
        """
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over all batches
            norm.train()
        for batch in self._training[:_STATISTICS] if norms else ():
            loss_fn(model, batch)
        model.eval()
        return sum(float(loss_fn(model, batch)) for batch in self._evaluation) / len(self._evaluation)


def warm_up_and_decay(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Build a scheduler that warms up over the first tenth of the steps and decays to zero over the last 40 %."""
    rise, fall = max(1, round(WARM_UP * steps)), max(1, round(DECAY * steps))
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise, (steps - step) / fall))


def build_optimizer(build: Build, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for a copy of the model."""
    kind: Any
    options: Mapping[str, Any]
    kind, options = build if isinstance(build, tuple) else (build, {})
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # egop's own optimizers need the module to know which parameters are embeddings, heads and norms.
        optimizer = kind(model if getattr(kind, "has_own_basis", False) else trained, **options)  # type: ignore[arg-type]
    elif callable(kind):
        optimizer = kind(model, **options)
    else:
        raise TypeError(
            "optimizer must be an optimizer class, a pair of a class and its options, or a function of the model that "
            f"returns an optimizer, got {type(kind).__name__}."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer(model) must return a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "optimizer(model) is called with a copy of the model, but it returned an optimizer of other parameters. "
            "Write lambda model: Optimizer(model.parameters())."
        )
    return optimizer


def clock() -> float:
    """Return the time in seconds, after waiting for kernels that are still running.

    With a single CPU thread this is the processor time, so that other programs do not count.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the first group; the others keep their ratio to it."""
    given = [float(group["lr"]) for group in optimizer.param_groups]
    if not given[0] > 0:
        raise ValueError(
            f"The first parameter group has lr {given[0]:g}. It must be positive: other groups keep their ratio to it."
        )
    for group, own in zip(optimizer.param_groups, given, strict=True):
        scaled = lr * own / given[0]
        group["lr"] = torch.full_like(group["lr"], scaled) if isinstance(group["lr"], Tensor) else scaled


def _switch(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Switch a schedule-free optimizer between training and evaluation weights; others have no modes."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def _check_gradient(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
    loss = loss_fn(model, batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients: Sequence[Tensor | None] = []
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "The loss does not depend on the model that it is given, which is a copy. "
            "Use loss_fn(model, batch)'s own model argument, without detach or no_grad."
        )
