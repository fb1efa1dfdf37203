"""Problems to train on, and the one training loop for all of them."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from egop_lab.data.text import Windows
from egop_lab.models.gpt import GPT, initialize_
from egop_lab.race.data import cut_windows, load_parts
from egop_lab.race.methods import METHODS, Setup
from egop_lab.race.tasks import DECAY, Run, Task

M = TypeVar("M", bound=nn.Module)

_DIGEST_STEPS = 3  # steps after which the parameters are summarised, to recognise a method's arithmetic


class Problem(Protocol):
    """A model and its data on a device; made once for each task and used for all its runs."""

    model: nn.Module
    hidden: list[str]  # names of the weights that optimizers for matrices step
    digest: str  # of the data

    def reset(self, seed: int) -> None:
        """Initialise the model."""

    def batches(self, seed: int, steps: int) -> Iterable[Any]:
        """Yield one training batch for each step."""

    def loss(self, batch: Any) -> Tensor:
        """Compute the training loss of a batch."""

    def evaluate(self, part: str) -> float:
        """Compute the loss on a part: ``"curve"`` (fixed validation windows), ``"validation"`` or ``"test"``."""


class _LanguageLoss(nn.Module):
    """Mean cross-entropy of every token of a window but the first, in nats; in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.kind = device.type

    def forward(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.kind == "cuda", cache_enabled=False):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


class LanguageProblem:
    """A GPT on bytes.

    Args:
        task: sizes of model and batch.
        folder: where the data are.
        device: where to train.
    """

    def __init__(self, task: Task, folder: str | None, device: torch.device) -> None:
        self._length, self._batch = task.model["context"] + 1, task.batch
        parts = load_parts(task.data, folder, device)
        self._train, self.digest = parts.train, parts.digest
        windows = {
            "curve": cut_windows(parts.validation, self._length, task.windows),
            "validation": cut_windows(parts.validation, self._length),
            "test": cut_windows(parts.test, self._length),
        }
        self._windows = {part: every.split(2 * task.batch) for part, every in windows.items()}
        self._initial = GPT(**task.model)  # on the CPU, where a seed gives the same numbers everywhere
        self.model: nn.Module = GPT(**task.model).to(device)
        self.hidden = [name for name, weight in self.model.named_parameters() if _is_hidden(name, weight)]
        self._loss = _LanguageLoss(self.model, device)
        self._training_loss = self._loss
        if device.type == "cuda":
            sample = torch.zeros(task.batch, self._length, dtype=torch.uint8, device=device)
            self._training_loss = capture_graphs(_LanguageLoss(self.model, device), sample)

    def reset(self, seed: int) -> None:
        """Initialise the model."""
        initialize_(self._initial, torch.Generator().manual_seed(seed))
        self.model.load_state_dict(self._initial.state_dict())
        self.model.zero_grad()

    def batches(self, seed: int, steps: int) -> Iterable[Tensor]:
        """Return windows at random places of the training text."""
        return Windows(self._train, length=self._length, size=self._batch, count=steps, seed=2 * seed)

    def loss(self, batch: Tensor) -> Tensor:
        """Compute the training loss of a batch, by a CUDA graph on a GPU."""
        return self._training_loss(batch)

    @torch.no_grad()
    def evaluate(self, part: str) -> float:
        """Compute the loss on a part."""
        total = sum(self._loss(windows).double() * len(windows) for windows in self._windows[part])
        return float(total) / sum(map(len, self._windows[part]))


def _is_hidden(name: str, weight: Tensor) -> bool:
    return name.startswith("blocks.") and weight.dim() > 1


def capture_graphs(module: M, sample: Tensor) -> M:
    """Capture a module's forward and backward pass, for inputs like the sample, as CUDA graphs."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # choose the fastest kernels once, for the graph
    torch.cuda.make_graphed_callables(module, (sample,))
    torch.backends.cudnn.benchmark = benchmark
    return module


def make_problem(task: Task, folder: str | None, device: torch.device) -> Problem:
    """Make the problem of a task. Keep only one per process: discarding one CUDA graph can break another."""
    gc.collect()  # the last one may be part of a cycle
    return LanguageProblem(task, folder, device)


def configure_torch(device: torch.device) -> None:
    """Use TF32 for float32 products on a GPU, and silence egop's log."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logging.getLogger("egop").setLevel(logging.ERROR)


def schedule(step: int, steps: int, warmup: int) -> float:
    """Return the factor of the learning rate: linear warm-up, constant, linear to nearly 0 at the end."""
    return min(1.0, step / warmup, (steps - step + 1) / (DECAY * steps))


def train(problem: Problem, task: Task, run: Run) -> dict[str, Any]:
    """Train once and return the results for the record. A loss that is not finite ends the run as diverged."""
    started = time.perf_counter()
    problem.reset(run.seed)
    optimizer = METHODS[run.method](
        Setup(
            model=problem.model,
            hidden=problem.hidden,
            lr=run.lr,
            beta=run.beta,
            beta2=task.beta2,
            weight_decay=task.weight_decay,
        )
    )
    results: dict[str, Any] = {"curve": [], "train": [], "validation": None, "test": None}
    try:
        diverged = not _take_steps(problem, task, run, optimizer, results)
    except torch.linalg.LinAlgError:  # a decomposition of matrices that overflowed
        diverged = True
    if not diverged:
        problem.model.eval()
        results["validation"] = problem.evaluate("validation")
        if not run.is_tuning:
            results["test"] = problem.evaluate("test")
        diverged = not math.isfinite(results["validation"])
    if diverged:
        results["validation"] = results["test"] = None
    del optimizer
    gc.collect()  # an optimizer may be part of a cycle
    return results | {"diverged": diverged, "data": problem.digest, "seconds": time.perf_counter() - started}


def _take_steps(
    problem: Problem, task: Task, run: Run, optimizer: torch.optim.Optimizer, results: dict[str, Any]
) -> bool:
    """Take all steps and fill in the results on the way; return False if the loss is no longer finite."""
    looks = {round(run.steps * (look + 1) / task.evaluations) for look in range(task.evaluations)}
    parameters = list(problem.model.parameters())
    losses: list[Tensor] = []
    problem.model.train()
    for step, batch in enumerate(problem.batches(run.seed, run.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * schedule(step, run.steps, run.warmup)
        optimizer.zero_grad()
        loss = problem.loss(batch)
        loss.backward()
        if run.clip is not None:
            nn.utils.clip_grad_norm_(parameters, run.clip)
        optimizer.step()
        losses.append(loss.detach().clone())  # a graph writes every loss to the same place
        if step == _DIGEST_STEPS:
            results["first losses"] = torch.stack(losses).tolist()
            results["first digest"] = summarize_parameters(parameters)
        if step in looks:
            problem.model.eval()
            found = problem.evaluate("curve")
            problem.model.train()
            if not math.isfinite(found):
                return False
            results["curve"].append([step, round(found, 6)])
            results["train"].append(round(float(torch.stack(losses).mean()), 6))
            losses = []
    return True


@torch.no_grad()
def summarize_parameters(parameters: Iterable[Tensor]) -> dict[str, str]:
    """Return the sum and the norm of all parameters, computed in float64, to ten digits."""
    sums = torch.stack([torch.stack((each.double().sum(), each.double().square().sum())) for each in parameters])
    total, norm = sums.sum(0)[0], sums.sum(0)[1].sqrt()
    return {"sum": f"{float(total):.10g}", "norm": f"{float(norm):.10g}"}
