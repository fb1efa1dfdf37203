"""One experiment = settings, runs, claims, pictures. All of them are values; drawing and reporting happen elsewhere."""

from __future__ import annotations

import abc
import math
import pickle
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from egop.runs import Panel, Picture, Series
from egop_lab.experiments.records import Record, Store

Preset = Literal["quick", "full"]
Verdict = Literal["holds", "does not hold", "cannot be judged"]
Kind = Literal["claim", "target", "check"]


@dataclass(frozen=True)
class Judged:
    """A claim of the paper and what was found.

    Attributes:
        id: of the claim, ``experiment/short-name``; one that is judged more than once has it every time.
        words: the paper's claim in short.
        verdict: what the records say; "cannot be judged" where this preset is too small for it.
        found: the measured numbers on both sides, in a sentence made from the records.
        kind: a claim of the paper, a target of this project, or a check that the code is right: one that fails is an
            error, so there are only checks that hold.
    """

    id: str
    words: str
    verdict: Verdict
    found: str
    kind: Kind = "claim"


@dataclass(frozen=True)
class Context:
    """What an experiment runs with.

    Attributes:
        preset: ``"quick"`` (small sizes, few trials; labelled as such) or ``"full"`` (the paper's).
        device: where to run.
        data: the folder with data sets that do not ship with the package.
        progress: show progress bars.
        workers: processes for runs that cannot be batched.
        time_budget: seconds after which an experiment of long runs starts no further one; none by default.
        say: shows a line to the user; none by default.
    """

    preset: Preset = "quick"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: str | None = None
    progress: bool = True
    workers: int = 2
    time_budget: float | None = None
    say: Callable[[str], object] = lambda line: None


class MissingDataError(Exception):
    """A data set is not there; the message says exactly what to do."""


class Experiment(abc.ABC):
    """A figure or table of the paper. A subclass is one file; an instance has no state."""

    id: ClassVar[str]
    title: ClassVar[str]
    figures: ClassVar[str]  # which ones of the paper
    version: ClassVar[int] = 1  # goes into every configuration; raised when the code changes what a run does
    gpu: ClassVar[bool] = False  # whether the full preset is meant for one

    @abc.abstractmethod
    def settings(self, preset: Preset) -> dict[str, Any]:
        """Sizes, trials, grids: plain values, shown in the report."""

    @abc.abstractmethod
    def run(self, store: Store, context: Context) -> None:
        """Do the runs that the store does not have yet, adding each as it is finished."""

    @abc.abstractmethod
    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        """Each claim with its verdict, from the records alone."""

    @abc.abstractmethod
    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        """The figures, from the records alone."""

    def config(self, preset: Preset, **own: Any) -> dict[str, Any]:
        """The configuration of one run: what is common to all, and its own settings."""
        return {"experiment": self.id, "version": self.version, "preset": preset, **own}

    def records(self, store: Store, preset: Preset, **wanted: Any) -> list[Record]:
        """The finished runs of this preset and version whose configuration has these values."""
        own = {"experiment": self.id, "version": self.version, "preset": preset, **wanted}
        return [r for r in store if all(r.config.get(key) == value for key, value in own.items())]


def finished(
    config: Mapping[str, Any], result: Mapping[str, Any], seconds: float, device: torch.device | str = "cpu"
) -> Record:
    """The record of a run that has just ended here."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Record(config, result, seconds, name, versions)


def quartiles(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """First quartile, median and third quartile over trials, entry by entry; what is not finite counts as worst."""
    stacked = np.nan_to_num(np.asarray(curves, dtype=float), nan=np.inf, posinf=np.inf)
    low, middle, high = np.quantile(stacked, (0.25, 0.5, 0.75), axis=0, method="nearest")
    return low.tolist(), middle.tolist(), high.tolist()


def bar_panel(title: str, what: str, runs: Mapping[str, Sequence[Record]], number: Callable[[Record], float]) -> Panel:
    """One bar a method with a number of each of its runs; none where the median is not finite."""
    found = [quartiles([[number(run)] for run in own]) for own in runs.values()]
    low, middle, high = (
        [each[part][0] if math.isfinite(each[part][0]) else math.nan for each in found] for part in range(3)
    )
    return Panel(title, "", what, [Series(what, list(runs), middle, low, high)], yscale="linear", kind="bar")


def median(values: Sequence[float]) -> float:
    """The median, what is not finite counting as worst (largest)."""
    return statistics.median_low([value if value == value else float("inf") for value in values])


def verdict(holds: bool) -> Verdict:
    """The verdict on a claim that was put to the test."""
    return "holds" if holds else "does not hold"


def compare(
    id: str, words: str, smaller: tuple[str, float], larger: tuple[str, float], *, judged: bool = True
) -> Judged:
    """The verdict on a claim that one measured number is smaller than another."""
    found = f"{smaller[0]}: {smaller[1]:.3g}; {larger[0]}: {larger[1]:.3g}."
    return Judged(id, words, verdict(smaller[1] < larger[1]) if judged else "cannot be judged", found)


def first_below(curve: Sequence[float], target: float) -> int | None:
    """The first index at which a curve is at most the target; None when that never happens."""
    return next((index for index, value in enumerate(curve) if value <= target), None)


def in_processes(
    function: Callable[[Mapping[str, Any]], Record],
    configs: Sequence[Mapping[str, Any]],
    store: Store,
    context: Context,
    description: str,
) -> None:
    """Do runs that cannot be batched, several processes at a time; each record is stored as it comes."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    from tqdm.auto import tqdm

    if not configs:
        return
    with (
        tqdm(total=len(configs), desc=description, unit="run", disable=not context.progress) as bar,
        ProcessPoolExecutor(context.workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool,
    ):
        futures = [pool.submit(function, config) for config in configs]
        try:
            for future in as_completed(futures):
                store.add(future.result())
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def over_processes(function: Callable[[Any], Any], arguments: Sequence[Any], workers: int) -> list[Any]:
    """What a function gives for each argument, in their order; by several processes where there is more to do."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    workers = min(workers, len(arguments))
    if workers <= 1:
        return [function(argument) for argument in arguments]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        return [pickle.loads(found) for found in pool.map(partial(_pickled, function), arguments)]


def _pickled(function: Callable[[Any], Any], argument: Any) -> bytes:
    """As bytes: tensors themselves would go through shared memory, of which containers have little."""
    return pickle.dumps(function(argument))


def _one_thread() -> None:
    torch.set_num_threads(1)
