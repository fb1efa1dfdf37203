"""The context of a run: preset, device, data, time budget; the record it leaves; runs in several processes."""

import pickle
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from egop_lab.gpu import describe_device
from egop_lab.training.records import Record, Store

Preset = Literal["quick", "full"]


@dataclass(frozen=True)
class Context:
    """Settings that an experiment runs with."""

    preset: Preset = "quick"  # small sizes, few trials; labelled as such. "full": the paper's
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: str | None = None  # the folder with data sets that do not ship with the package
    progress: bool = True
    workers: int = 2  # processes for runs that cannot be batched
    time_budget: float | None = None  # seconds after which an experiment of long runs starts no further run
    say: Callable[[str], object] = lambda line: None  # shows a line to the user


def make_record(
    config: Mapping[str, Any], result: Mapping[str, Any], seconds: float, device: torch.device | str = "cpu"
) -> Record:
    """Build the record of a run that has just ended here."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Record(config, result, seconds, describe_device(torch.device(device)), versions)


def record_run(
    store: Store,
    config: Mapping[str, Any],
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    device: torch.device | str = "cpu",
) -> None:
    """Do one run and add its record."""
    began = time.perf_counter()
    result = run(config)
    store.add(make_record(config, result, time.perf_counter() - began, device))


def run_in_processes(
    function: Callable[[Mapping[str, Any]], Record | None],
    configs: Sequence[Mapping[str, Any]],
    store: Store,
    context: Context,
    description: str,
) -> None:
    """Do runs that cannot be batched in several processes; store each record as soon as it is there.

    The function returns None if it did not do its run.
    """
    if not configs:
        return
    with (
        tqdm(total=len(configs), desc=description, unit="run", disable=not context.progress) as bar,
        _make_pool(context.workers) as pool,
    ):
        futures = [pool.submit(function, config) for config in configs]
        try:
            for future in as_completed(futures):
                if (record := future.result()) is not None:
                    store.add(record)
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def map_in_processes(function: Callable[[Any], Any], arguments: Sequence[Any], workers: int) -> list[Any]:
    """Map a function over arguments, in several processes if there is more than one; results keep their order."""
    workers = min(workers, len(arguments))
    if workers <= 1:
        return [function(argument) for argument in arguments]
    with _make_pool(workers) as pool:
        return [pickle.loads(result) for result in pool.map(partial(_call_pickled, function), arguments)]


def _call_pickled(function: Callable[[Any], Any], argument: Any) -> bytes:
    """Return the result as bytes: tensors would go through shared memory, of which containers have little."""
    return pickle.dumps(function(argument))


def _make_pool(workers: int) -> ProcessPoolExecutor:
    """Create a pool of fresh processes with one thread each."""
    return ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )
