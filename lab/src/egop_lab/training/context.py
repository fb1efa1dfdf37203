"""The context of a run: device and data; the record it leaves; runs in several processes."""

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from tqdm.auto import tqdm

from egop_lab.gpu import describe_device
from egop_lab.training.records import Record, Store


@dataclass(frozen=True)
class Context:
    """Settings that an experiment runs with."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: str | None = None  # the folder with data sets that do not ship with the package
    progress: bool = True
    workers: int = 2  # processes for runs that cannot be batched
    say: Callable[[str], object] = lambda line: None  # shows a line to the user


def make_record(
    config: Mapping[str, Any], result: Mapping[str, Any], seconds: float, device: torch.device | str = "cpu"
) -> Record:
    """Build the record of a run that has just ended here."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Record(config, result, seconds, describe_device(torch.device(device)), versions)


def run_in_processes(
    function: Callable[[Mapping[str, Any]], Record],
    configs: Sequence[Mapping[str, Any]],
    store: Store,
    context: Context,
    description: str,
) -> None:
    """Do runs that cannot be batched in several processes; store each record as soon as it is there."""
    if not configs:
        return
    with (
        tqdm(total=len(configs), desc=description, unit="run", disable=not context.progress) as bar,
        ProcessPoolExecutor(
            context.workers, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool,
    ):
        futures = [pool.submit(function, config) for config in configs]
        try:
            for future in as_completed(futures):
                store.add(future.result())
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
