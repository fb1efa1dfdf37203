"""How to measure: sizes by device, quiet surroundings, and a description of the machine."""

from __future__ import annotations

import contextlib
import gc
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import egop
from egop_lab.gpu import describe_device, fast_math

T = TypeVar("T")
Row = dict[str, Any]  # measurements of one method or structure on one network


@dataclass(frozen=True)
class Setting:
    """How to measure.

    Attributes:
        device: the device to measure on.
        smoke: use tiny sizes, only to see that everything works.
        rounds: turns of each method; by default what the part of the benchmark says.
    """

    device: torch.device
    smoke: bool
    rounds: int | None

    def pick(self, *, smoke: T, cpu: T, gpu: T) -> T:
        """Pick one of three values: for a smoke run, the CPU or a GPU."""
        return smoke if self.smoke else gpu if self.device.type == "cuda" else cpu

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
    """Describe the machine and its settings; call it inside :func:`measurement_mode`."""
    return {
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "versions": {"egop": egop.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
