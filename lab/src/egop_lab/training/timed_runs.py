"""Timed trainings: one recorded run by one method, its clock, and series of runs within a time budget.

Seconds are those of training, bases included; evaluation is not counted. On a GPU a network's forward and backward pass
are replayed as a CUDA graph: the launching of single kernels would hide what the methods themselves cost.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

import egop
from egop_lab.builders import Setup
from egop_lab.methods import get_methods
from egop_lab.training.context import Context, make_record
from egop_lab.training.loop import train
from egop_lab.training.records import Record, Store

M = TypeVar("M", bound=nn.Module)


class Run(abc.ABC):
    """One training for the training loop, which evaluates after every pass: batches, schedule, loss, clock.

    A subclass is one kind of network on one kind of data. It sets ``model`` (at its start), ``batches`` and
    ``objective``.

    Args:
        config: ``method``, ``lr`` and ``seed``, and what the subclass needs.
        device: the device to train on.
    """

    comparison: ClassVar[str]  # the comparison that the methods belong to
    unit: ClassVar[str]  # name of a pass
    curves: ClassVar[tuple[str, ...]]  # recorded after every pass

    model: nn.Module
    batches: Iterable[Any]
    objective: egop.Objective

    def __init__(self, config: Mapping[str, Any], device: torch.device) -> None:
        self.config, self.device = config, device
        self.steps = 0
        self.seconds = 0.0
        self.losses: list[Tensor] = []

    @property
    @abc.abstractmethod
    def passes(self) -> int:
        """Number of passes of the training."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Number of steps of the training."""

    @abc.abstractmethod
    def make_setup(self) -> Setup:
        """Return the setup that the optimizer is built from."""

    @abc.abstractmethod
    def training_loss(self, batch: Any) -> Tensor:
        """Compute the loss of a batch, with a CUDA graph if there is one."""

    @abc.abstractmethod
    def validate(self) -> dict[str, float]:
        """Compute the loss on the validation set, and other recorded numbers."""

    def final_metrics(self) -> dict[str, float]:
        """Return numbers that are recorded for the trained model only."""
        return {}

    def loss(self, _: nn.Module, batch: Any) -> Tensor:
        loss = self.training_loss(batch)
        self.losses.append(loss.detach().clone())  # a CUDA graph writes every loss to the same tensor
        return loss

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass, setting the learning rate for each: a warm-up, then constant.

        With a decay, which is a part of the training, it falls to nearly nothing over the last steps.
        """
        scheduled = "warm-up" in self.config or "decay" in self.config
        self.losses = []
        self.began = time.perf_counter()
        for batch in self.batches:
            self.steps += 1
            if scheduled:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config["lr"] * self.lr_factor(self.steps)
            yield batch

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate in a step; the first step is 1."""
        factor = min(1.0, step / self.config.get("warm-up", 1))
        if (decay := self.config.get("decay")) is not None:
            factor = min(factor, (self.length - step + 1) / (decay * self.length))
        return factor

    def evaluate(self, _: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self.began  # the training loop has just waited for the device
        training = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        return {**self.validate(), "training loss": training, "seconds": self.seconds}

    def set_up(self) -> None:
        """Build the optimizer, with the basis that it may need."""
        self.model.train()
        self.began = time.perf_counter()
        self.optimizer = get_methods(self.comparison)[self.config["method"]].make(self.make_setup())
        self.wait()

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_steps(self, warm: int, timed: int) -> tuple[float, float]:
        """Return the seconds before the first step, and the mean of some whole steps after a warm-up."""
        self.set_up()
        before = time.perf_counter() - self.began
        passes = itertools.chain.from_iterable(itertools.repeat(self))
        for count, batch in enumerate(itertools.islice(passes, warm + timed)):
            if count == warm:
                self.wait()
                started = time.perf_counter()
            self.optimizer.zero_grad()
            self.loss(self.model, batch).backward()
            self.optimizer.step()
        self.wait()
        return before, (time.perf_counter() - started) / timed

    def __call__(self, progress: bool) -> dict[str, Any]:
        config = self.config
        self.set_up()
        options: dict[str, Any] = {"evaluate": self.evaluate, "progress": progress, "unit": self.unit}
        options["description"] = f"{config['method']}, lr {config['lr']:g}, seed {config['seed']}"
        curves: dict[str, Sequence[float]] = dict.fromkeys(self.curves, ())
        diverged = True
        with warnings.catch_warnings(), contextlib.suppress(torch.linalg.LinAlgError):  # a decomposed matrix overflowed
            warnings.filterwarnings("ignore", "There is a performance drop")  # of attention under vmap
            curve = train(self.model, self.optimizer, self.loss, self, self.passes, **options)
            curves, diverged = {"validation loss": curve.loss, **curve.metrics}, curve.diverged
        # A run that diverged ended early.
        whole = {name: [*values, *[math.nan] * (self.passes + 1 - len(values))] for name, values in curves.items()}
        return whole | self.final_metrics() | {"diverged": diverged}


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


_networks: dict[Any, Any] = {}


def get_network(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return a network and its CUDA graph, cached for later runs. A process keeps one at a time.

    The last one goes before the next is made: graphs are recorded on one stream, and one that goes takes with it what
    the others' products work in (pytorch/pytorch#193402).
    """
    key = (make, *arguments)
    if key not in _networks:
        _networks.clear()
        gc.collect()  # else a graph in a reference cycle would be freed later
        _networks[key] = make(*arguments)
    return _networks[key]


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
