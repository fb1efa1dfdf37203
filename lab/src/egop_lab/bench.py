"""Measure what a step costs on a CPU: ``egop-lab bench``. Steps on a GPU are timed in the race (``race.timing``)."""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import egop
from egop_lab.formatting import format_table

ADAMW, FIXED, FULL = "AdamW", "AdamW in a fixed Shared basis", "EGOP"
TARGETS = {ADAMW: "", FIXED: "at most 1.4x", FULL: "at most 2x, 150 calls, 12 files"}
_WIDTH, _LAYERS, _WARM_UP = 8, 7, 45  # 45 steps: past the first bases, and not at a renewal
# Width of the layers and examples in a batch of :func:`measure_batches`.
_BATCHES = ((64, 64), (256, 64), (256, 1024), (512, 64), (512, 1024), (512, 8192))
_LIBRARY = str(Path(egop.__file__).parent)


class Calls(NamedTuple):
    """Calls of the library's own functions in one step."""

    own: int
    files: int
    frames: int  # of all Python code, from the step down to the deepest call


def measure_steps(smoke: bool) -> str:
    """Return a table of the host time of a step on seven small linear layers, where Python takes most of it.

    Measure in one CPU thread; methods take turns, so that all are disturbed alike.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trials = {name: make_trial(name) for name in TARGETS}
        calls = {name: count_calls(optimizer) for name, (_, optimizer) in trials.items()}
        times: dict[str, list[float]] = {name: [] for name in trials}
        for _ in range(2 if smoke else 15):
            for name, trial in trials.items():
                times[name].append(_time_step(*trial, steps=2 if smoke else 100))
    finally:
        torch.set_num_threads(threads)
    rows = []
    for name, seconds in times.items():
        ratios = [own / adamw for own, adamw in zip(seconds, times[ADAMW], strict=True)]
        row = [name, _format_duration(median(seconds)), f"{median(ratios):.2f}x"]
        rows.append([*row, f"{min(ratios):.2f} to {max(ratios):.2f}", TARGETS[name], *map(str, calls[name])])
    return format_table(
        ["method", "step", "/ AdamW", "over the rounds", "target", "own calls", "files", "frames"], rows
    )


def make_trial(name: str) -> tuple[nn.Module, Optimizer]:
    """Build the network and one of the three optimizers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    if name == ADAMW:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if name == FULL:
        return model, egop.EGOP(model, lr=1e-4, foreach=True)
    objective = egop.Objective(model, _compute_loss, [torch.randn(4, _WIDTH)])
    basis = egop.estimate(objective, partition="parameter", structure=egop.Shared(), progress=False)
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=1e-4, foreach=True)


def _compute_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def _time_step(model: nn.Module, optimizer: Optimizer, steps: int) -> float:
    """Train for some steps and return the mean seconds of an optimizer step.

    The time is that of this thread, so that other programs do not count. Forward and backward are not timed, but they
    are there: without them the caches would be warmer than in any training.
    """
    inputs = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(2))
    gc.collect()
    gc.disable()
    elapsed = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        _compute_loss(model, inputs).backward()
        began = time.thread_time()
        optimizer.step()
        elapsed += time.thread_time() - began
    gc.enable()
    return elapsed / steps


def count_calls(optimizer: Optimizer, warm_up: int = _WARM_UP) -> Calls:
    """Count the calls of the library's functions in one step, after some steps with random gradients."""
    generator = torch.Generator().manual_seed(1)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    for _ in range(warm_up):
        optimizer.step()
    files: list[str] = []
    depth = deepest = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth, deepest
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            if frame.f_code.co_filename.startswith(_LIBRARY):
                files.append(frame.f_code.co_filename)
        elif event == "return":
            depth -= 1

    sys.setprofile(watch)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return Calls(len(files), len(set(files)), deepest)


def measure_batches(smoke: bool) -> str:
    """Return a table of the time of a whole training step of a small network, by width and batch size.

    Measure in one CPU thread, between two renewals of EGOP's bases; methods take turns.
    """
    builders: dict[str, Callable[[nn.Module], Optimizer]] = {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
        "EGOP": egop.EGOP,
        "EGOP, rotate=False": lambda model: egop.EGOP(model, rotate=False),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for width, batch in _BATCHES[: 1 if smoke else None]:
            times: dict[str, list[float]] = {name: [] for name in builders}
            for _ in range(1 if smoke else 3):
                for name, build in builders.items():
                    times[name].append(_time_training_step(build, width, batch))
            adamw, *others = map(median, times.values())
            rows.append([str(width), str(batch), _format_duration(adamw), *(f"{each / adamw:.1f}x" for each in others)])
    finally:
        torch.set_num_threads(threads)
    return format_table(["width", "examples", *builders], rows)


def _time_training_step(build: Callable[[nn.Module], Optimizer], width: int, batch: int) -> float:
    """Return the median seconds of steps 10 to 12 of a network with two square weights; EGOP renews after 8 and 12."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = build(model)
    inputs, labels = torch.randn(batch, width), torch.randint(10, (batch,))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return median(times[9:])


def _format_duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
