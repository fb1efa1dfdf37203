"""Timed trainings by one method each: the run that is recorded, its clock, and many runs while time lasts.

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
from egop_lab.making import Start
from egop_lab.methods import compared
from egop_lab.training.context import Context, finished
from egop_lab.training.loop import train
from egop_lab.training.records import Record, Store

M = TypeVar("M", bound=nn.Module)


class Run(abc.ABC):
    """One training for the training loop, which evaluates after every pass: batches, schedule, loss, clock.

    A subclass is one kind of network on one kind of data. It sets ``model`` (at its start), ``batches`` and
    ``objective``.

    Args:
        config: of the run; ``method``, ``lr`` and ``seed``, and what the subclass wants.
        device: where.
    """

    comparison: ClassVar[str]  # whose methods they are
    unit: ClassVar[str]  # what a pass is called
    curves: ClassVar[tuple[str, ...]]  # what is recorded after every pass

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
        """How many passes the training has."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """How many steps the training has."""

    @abc.abstractmethod
    def start(self) -> Start:
        """What the optimizer is made from."""

    @abc.abstractmethod
    def training_loss(self, batch: Any) -> Tensor:
        """The loss of a batch, by a graph where there is one."""

    @abc.abstractmethod
    def validate(self) -> dict[str, float]:
        """The loss on the validation set, and what else is recorded of it."""

    def at_end(self) -> dict[str, float]:
        """What is recorded of the trained model alone."""
        return {}

    def loss(self, _: nn.Module, batch: Any) -> Tensor:
        loss = self.training_loss(batch)
        self.losses.append(loss.detach().clone())  # a graph writes every loss to the same place
        return loss

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass; with a warm-up, the learning rate rises by every step of it and then stays.

        With a decay, which is a part of the training, it falls to nearly nothing over the last steps.
        """
        scheduled = "warm-up" in self.config or "decay" in self.config
        self.losses = []
        self.began = time.perf_counter()
        for batch in self.batches:
            self.steps += 1
            if scheduled:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.config["lr"] * self.factor(self.steps)
            yield batch

    def factor(self, step: int) -> float:
        """Of the learning rate in a step; the first is 1."""
        factor = min(1.0, step / self.config.get("warm-up", 1))
        if (decay := self.config.get("decay")) is not None:
            factor = min(factor, (self.length - step + 1) / (decay * self.length))
        return factor

    def evaluate(self, _: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self.began  # the training loop has just waited for the device
        training = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        return {**self.validate(), "training loss": training, "seconds": self.seconds}

    def begin(self) -> None:
        """Make the optimizer, with the basis that it may need."""
        self.model.train()
        self.began = time.perf_counter()
        self.optimizer = compared(self.comparison)[self.config["method"]].make(self.start())
        self.wait()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step_seconds(self, warm: int, timed: int) -> tuple[float, float]:
        """The seconds before the first step, and the mean of some whole steps after some that nobody times."""
        self.begin()
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
        self.begin()
        options: dict[str, Any] = {"evaluate": self.evaluate, "progress": progress, "unit": self.unit}
        options["description"] = f"{config['method']}, lr {config['lr']:g}, seed {config['seed']}"
        curves: dict[str, Sequence[float]] = dict.fromkeys(self.curves, ())
        diverged = True
        with warnings.catch_warnings(), contextlib.suppress(torch.linalg.LinAlgError):  # what is decomposed overflowed
            warnings.filterwarnings("ignore", "There is a performance drop")  # attention vmapped over samples
            curve = train(self.model, self.optimizer, self.loss, self, self.passes, **options)
            curves, diverged = {"validation loss": curve.loss, **curve.metrics}, curve.diverged
        # A run that diverged ended early.
        whole = {name: [*values, *[math.nan] * (self.passes + 1 - len(values))] for name, values in curves.items()}
        return whole | self.at_end() | {"diverged": diverged}


class Trials:
    """Does runs that are not done, one after the other, while there is time.

    Args:
        store: where finished runs are.
        context: the preset, the device, and how long runs may be started.
        configured: the whole configuration of a run, from its own settings.
        run: makes a run of a configuration.
        warm_up: called before a run whose time may be read, with its configuration.
    """

    def __init__(
        self,
        store: Store,
        context: Context,
        configured: Callable[..., dict[str, Any]],
        run: Callable[[dict[str, Any]], Callable[[bool], dict[str, Any]]],
        warm_up: Callable[[dict[str, Any]], None],
    ) -> None:
        self.store, self.context = store, context
        self.configured, self._run, self._warm_up = configured, run, warm_up
        self._began = time.monotonic()

    @property
    def done(self) -> list[Record]:
        """The finished runs on this data and with these settings."""
        return [run for run in self.store if shared(run) == self.configured()]

    @property
    def ends(self) -> float:
        """When no further run is started, by the monotonic clock."""
        budget = self.context.time_budget
        return math.inf if budget is None else self._began + budget

    def do(self, **entries: Any) -> bool:
        """Do one run, unless it is done; false when the time is over."""
        config, context = self.configured(**entries), self.context
        if config in self.store:
            return True
        if time.monotonic() > self.ends:
            return False
        self._warm_up(config)
        started = time.perf_counter()
        result = self._run(config)(context.progress)
        self.store.add(finished(config, result, time.perf_counter() - started, context.device))
        return True


def shared(run: Record) -> dict[str, Any]:
    """What all runs that are compared have in common: the rest of a configuration."""
    keys = ("method", "lr", "steps", "epochs", "seed")
    return {key: value for key, value in run.config.items() if key not in keys}


_networks: dict[Any, Any] = {}


def network(make: Callable[..., Any], *arguments: Any) -> Any:
    """What a function makes, a network and its graph; kept for the runs to come. A process has one at a time.

    The last one goes before the next is made: graphs are recorded on one stream, and one that goes takes with it what
    the others' products work in (pytorch/pytorch#193402).
    """
    key = (make, *arguments)
    if key not in _networks:
        _networks.clear()
        gc.collect()  # a graph that is still part of a cycle would go later
        _networks[key] = make(*arguments)
    return _networks[key]


def precision(device: torch.device) -> str:
    """What timed trainings compute in, for configurations."""
    return "bfloat16, TF32" if device.type == "cuda" else "float32"


def graphed(module: M, sample: Tensor) -> M:
    """The module, its forward and backward pass for inputs like the sample recorded as CUDA graphs."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
    kept = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # the fastest kernels are chosen once, for the graph
    torch.cuda.make_graphed_callables(module, (sample,))
    torch.backends.cudnn.benchmark = kept
    return module


@contextlib.contextmanager
def fast(device: torch.device) -> Iterator[None]:
    """On a GPU, TF32 for products in float32. Without the log lines of the sampling, one a renewal."""
    logger = logging.getLogger("egop")
    kept = torch.get_float32_matmul_precision(), logger.level
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    logger.setLevel(logging.ERROR)  # they say that batch norm cannot be vmapped
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        logger.setLevel(kept[1])
