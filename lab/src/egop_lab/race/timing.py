"""Time the steps of methods: ``python -m egop_lab.race.timing --help``. Nothing else may use the device meanwhile."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from egop.optim import RotatedPolarAdam
from egop_lab.gpu import synchronize
from egop_lab.race.methods import METHODS
from egop_lab.race.problems import Problem, make_problem
from egop_lab.race.run import append_record, describe_code
from egop_lab.race.tasks import TASKS, Run, Task
from egop_lab.race.train import configure_torch, make_optimizer, take_step


def time_steps(problem: Problem, task: Task, method: str, warm: int, steps: int) -> tuple[float, float]:
    """Return the mean seconds of a step with a new optimizer, after some untimed ones; and those of EGOP's renewals."""
    known = "SOAP" if method == "SOAP, package" else method
    beta, rate = task.betas[known][0], task.guesses[known] - 8  # a small rate: nothing may diverge
    run = Run(
        task=task.name, method=method, steps=warm + steps, seed=0, rate=rate, beta=beta, warmup=1, clip=task.clips[-1]
    )
    problem.reset(run.seed)
    optimizer = make_optimizer(problem, task, run)
    (batch,) = problem.batches(run.seed, 1)
    problem.model.train()

    def take_steps(count: int) -> float:
        synchronize(problem.device)
        started = time.perf_counter()
        for _ in range(count):
            take_step(problem, batch, optimizer, run.clip)
        synchronize(problem.device)
        return (time.perf_counter() - started) / count

    take_steps(warm)
    renewing = next((part for part in getattr(optimizer, "parts", ()) if isinstance(part, RotatedPolarAdam)), None)
    if renewing is None:
        return take_steps(steps), 0.0
    every = renewing.defaults["every"]
    _move_counters(renewing, 10 * every + 1)  # the step after a renewal
    without = take_steps(steps)
    _move_counters(renewing, 11 * every - steps // 2)
    return without, (take_steps(steps) - without) * steps


def _move_counters(optimizer: RotatedPolarAdam, step: int) -> None:
    """Set an optimizer's step counters, which decide when bases are renewed."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def time_methods(
    problem: Problem, task: Task, methods: Sequence[str], rounds: int, warm: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the times of steps by method and round; the methods take turns, and a first round is discarded."""
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    for turn, method in itertools.product(range(rounds + 1), methods):
        seconds = time_steps(problem, task, method, warm, steps)
        if turn:
            found[method].append(seconds)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Time the steps of methods, in turns.")
    parser.add_argument("--tasks", nargs="+", required=True, choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all that the task knows")
    parser.add_argument("--data", help="folder with the data")
    parser.add_argument("--out", type=Path, required=True, help="file to which records are appended")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument(
        "--warm",
        type=int,
        default=40,
        help="steps before the timed ones, in which GPU graphs are recorded (default: 40)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        help="timed steps: multiples of 10, after which SOAP renews its bases (default: 40)",
    )
    parser.add_argument("--no-eager", action="store_true", help="on a GPU, skip the network without a CUDA graph")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    configure_torch(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    info = {**describe_code(), "torch": torch.__version__, "device": name}
    for task in (TASKS[name] for name in options.tasks):
        methods = options.methods or [*task.guesses, "SOAP, package"]
        for fast in (False,) if device.type == "cpu" else (True,) if options.no_eager else (True, False):
            problem: Any = None  # free the last one before the next is made
            problem = make_problem(task, options.data, device, fast=fast)
            network = ("compiled" if task.compiled else "CUDA graph") if fast else "eager"
            found = time_methods(problem, task, methods, options.rounds, options.warm, options.steps)
            for method, times in found.items():
                seconds, renewals = zip(*times, strict=True)
                record = {"task": task.name, "method": method, "network": network}
                append_record(options.out, record | {"step seconds": seconds, "renewal seconds": renewals} | info)
                median, low, high = (1e3 * kind(seconds) for kind in (statistics.median, min, max))
                print(f"{task.name}, {network}, {method}: {median:.2f} ms ({low:.2f} to {high:.2f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
