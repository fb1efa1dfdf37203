"""Host time of an optimizer step on seven small linear layers, where Python takes longer than the arithmetic."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

import egop
from egop_lab.bench.machine import Row, Setting
from egop_lab.bench.setups import make_basis
from egop_lab.bench.timing import interleave, spread

ADAMW, FIXED, FULL = "AdamW", "AdamW in a fixed Shared basis", "EGOP"
_WIDTH, _LAYERS, _WARM_UP = 8, 7, 45  # 45 steps: past the first bases, and not at a renewal
_LIBRARY = str(Path(egop.__file__).parent)
TARGETS = {FIXED: "at most 1.4x", FULL: "at most 2x, 150 calls, 12 files"}


class Calls(NamedTuple):
    """Calls of the library's own functions in one step."""

    own: int
    files: int
    frames: int  # of all Python code, from the step down to the deepest call


def run(setting: Setting) -> Iterator[Row]:
    """Measure the host part of the benchmark, on the CPU and in one thread whatever the device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _rows(setting.turns(2 if setting.smoke else 15), 2 if setting.smoke else 100)
    finally:
        torch.set_num_threads(threads)


def _rows(rounds: int, steps: int) -> Iterator[Row]:
    models = {name: _network() for name in OPTIMIZERS}
    optimizers = {name: make(models[name]) for name, make in OPTIMIZERS.items()}
    calls = {name: count_calls(optimizer) for name, optimizer in optimizers.items()}
    turns = {name: _timer(models[name], optimizers[name], steps) for name in OPTIMIZERS}
    times, failed = interleave(turns, rounds)
    for name, seconds in times.items():
        ratios = [own / adamw for own, adamw in zip(seconds, times[ADAMW], strict=True)]
        row: Row = {"method": name, "step": median(seconds), "step spread": spread(seconds)}
        row |= {"step over AdamW": median(ratios), "ratio spread": spread(ratios)}
        row |= {"range": f"{min(ratios):.2f} to {max(ratios):.2f}", "target": TARGETS.get(name)}
        yield row | {"calls": calls[name].own, "files": calls[name].files, "frames": calls[name].frames}
    for name, problem in failed.items():
        yield {"method": name, "failed": problem}


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    return nn.Sequential(*layers)


def _fixed(model: nn.Module) -> Optimizer:
    basis = make_basis(model, egop.Shared())
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=1e-4, foreach=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    ADAMW: lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True),
    FIXED: _fixed,
    FULL: lambda model: egop.EGOP(model, lr=1e-4, foreach=True),
}


def _timer(model: nn.Module, optimizer: Optimizer, steps: int) -> Callable[[], float]:
    """Return a function that trains for some steps and returns the seconds of one optimizer step.

    The time is that of this thread, so that other programs do not count. Forward and backward are not timed, but they
    are there: without them the caches would be warmer than in any training.
    """
    inputs = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(2))

    def measure_step() -> float:
        gc.collect()
        gc.disable()
        elapsed = 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            began = time.thread_time()
            optimizer.step()
            elapsed += time.thread_time() - began
        gc.enable()
        return elapsed / steps

    return measure_step


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
