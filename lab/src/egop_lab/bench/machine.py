"""Name, settings and peak speed of the machine that is measured on."""

from __future__ import annotations

import contextlib
import gc
import importlib
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from egop_lab.bench.timing import Marks
from egop_lab.training.timed_runs import fast_math

T = TypeVar("T")
Row = dict[str, Any]  # measurements of one method or structure on one network


@dataclass(frozen=True)
class Rates:
    """Peak rates of the machine, which give a lower bound on the time of a step.

    Attributes:
        flops: floating-point operations per second of a large float32 product, at the precision that is set.
        bytes: bytes read or written per second by a large copy.
    """

    flops: float
    bytes: float

    def seconds(self, flops: float, size: float) -> float:
        """Return the least time for some operations and memory traffic."""
        return max(flops / self.flops, size / self.bytes)


@dataclass(frozen=True)
class Setting:
    """How to measure.

    Attributes:
        device: the device to measure on.
        smoke: use tiny sizes, only to see that everything works.
        rounds: turns of each method; by default what the part of the benchmark says.
        rates: peak rates of the machine.
    """

    device: torch.device
    smoke: bool
    rounds: int | None
    rates: Rates

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def pick(self, *, smoke: T, cpu: T, gpu: T) -> T:
        """Pick one of three values: for a smoke run, the CPU or a GPU."""
        return smoke if self.smoke else gpu if self.gpu else cpu

    def turns(self, usual: int) -> int:
        """Return the number of rounds."""
        return self.rounds or (1 if self.smoke else usual)


@contextlib.contextmanager
def measurement_mode(device: torch.device) -> Iterator[None]:
    """Use TF32 and the fastest convolutions on a GPU, and keep the garbage collector off while measuring."""
    convolutions, collecting = torch.backends.cudnn.benchmark, gc.isenabled()
    with fast_math(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # of attention under vmap
        torch.backends.cudnn.benchmark = device.type == "cuda"
        gc.collect()
        gc.freeze()  # keep the collector from visiting existing objects again
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            torch.backends.cudnn.benchmark = convolutions
            if collecting:
                gc.enable()


def release(device: torch.device) -> None:
    """Free the memory that the previous part held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, Any]:
    """Describe the machine and its settings; call it inside :func:`settled`."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else _processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "versions": {name: _version(name) for name in ("egop", "torch", "numpy", "pytorch_optimizer")},
        "python": platform.python_version(),
        "cuda": torch.version.cuda if gpu else None,
    }


def measure(device: torch.device, *, smoke: bool) -> Rates:
    """Measure the best rate of some large products and copies."""
    side, entries = (256, 2**20) if smoke else (8192, 2**28) if device.type == "cuda" else (2048, 2**26)
    left, right = torch.randn(2, side, side, device=device)
    source, target = torch.zeros(2, entries, device=device)
    product = torch.empty_like(left)
    return Rates(
        flops=2 * side**3 / _best(lambda: torch.mm(left, right, out=product), device),
        bytes=2 * source.nbytes / _best(lambda: target.copy_(source), device),
    )


def _best(work: Callable[[], object], device: torch.device) -> float:
    marks = Marks(device)
    for _ in range(6):
        marks.mark()
        work()
    marks.mark()
    return min(marks.seconds())


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    with contextlib.suppress(ImportError):  # it may be importable without being installed
        return str(getattr(importlib.import_module(package), "__version__", "of unknown version"))
    return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
