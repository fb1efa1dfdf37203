"""Series of long runs within a time budget, and what timed runs need on a GPU: CUDA graphs and TF32."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from egop_lab.training.context import Context, make_record
from egop_lab.training.records import Record, Store

M = TypeVar("M", bound=nn.Module)


class Trials:
    """A series of runs, done one after the other until the time budget ends; finished ones are skipped.

    Args:
        store: the store of finished runs.
        context: the preset, the device and the time budget.
        make_config: builds the configuration of a run from its own settings.
        run: builds a run from a configuration.
        warm_up: called with the configuration before a run that may be timed.
    """

    def __init__(
        self,
        store: Store,
        context: Context,
        make_config: Callable[..., dict[str, Any]],
        run: Callable[[dict[str, Any]], Callable[[bool], dict[str, Any]]],
        warm_up: Callable[[dict[str, Any]], None],
    ) -> None:
        self.store, self.context = store, context
        self.make_config, self._run, self._warm_up = make_config, run, warm_up
        self._began = time.monotonic()

    @property
    def done(self) -> list[Record]:
        """Finished runs on this data with these settings."""
        return [run for run in self.store if shared_config(run) == self.make_config()]

    @property
    def deadline(self) -> float:
        """Time after which no further run starts, by the monotonic clock."""
        budget = self.context.time_budget
        return math.inf if budget is None else self._began + budget

    def do(self, **entries: Any) -> bool:
        """Do one run unless it is finished; return False when the time is over."""
        config, context = self.make_config(**entries), self.context
        if config in self.store:
            return True
        if time.monotonic() > self.deadline:
            return False
        self._warm_up(config)
        started = time.perf_counter()
        result = self._run(config)(context.progress)
        self.store.add(make_record(config, result, time.perf_counter() - started, context.device))
        return True


def shared_config(run: Record) -> dict[str, Any]:
    """Return the part of a configuration that all compared runs have in common."""
    keys = ("method", "lr", "steps", "epochs", "seed")
    return {key: value for key, value in run.config.items() if key not in keys}


def describe_precision(device: torch.device) -> str:
    """Return the precision of timed trainings, for configurations."""
    return "bfloat16, TF32" if device.type == "cuda" else "float32"


def capture_graphs(module: M, sample: Tensor) -> M:
    """Record the module's forward and backward pass, for inputs like the sample, as CUDA graphs."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
    kept = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # the fastest kernels are chosen once, for the graph
    torch.cuda.make_graphed_callables(module, (sample,))
    torch.backends.cudnn.benchmark = kept
    return module


@contextlib.contextmanager
def fast_math(device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 products on a GPU, and silence the sampling's log lines, one per refresh."""
    logger = logging.getLogger("egop")
    kept = torch.get_float32_matmul_precision(), logger.level
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logger.setLevel(logging.ERROR)  # the messages say that batch norm cannot be vmapped
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        logger.setLevel(kept[1])
