"""The first bases, by decompositions from scratch: announced where they take long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from tqdm.auto import tqdm

from egop.distributed import processes

# What is over sooner is not announced.
_PATIENCE = 5.0
# Seconds for a matrix of n columns, roughly: a full decomposition takes so many times n³, a partial one n² times rank.
_FULL, _PARTIAL = 1e-10, 3e-10
_FASTER = 10  # than two cores is a GPU


def seconds(width: int, device: torch.device, wide: int, rank: int) -> float:
    """Roughly how long one decomposition takes; those wider than a limit are partial, of some rank."""
    on_cores = _FULL * width**3 if width <= wide else _PARTIAL * width**2 * rank
    return on_cores / (_FASTER if device.type == "cuda" else 1)


@contextlib.contextmanager
def announced(widths: Sequence[int], total: float) -> Iterator[Callable[[], object]]:
    """Show a progress bar, before the work begins, if it takes long; what is called after each matrix.

    Args:
        widths: of the matrices to decompose.
        total: how many seconds all of them take, roughly.
    """
    text = f"First bases: {len(widths)} up to {max(widths, default=0)} wide, about {total:.0f} s"
    with tqdm(total=len(widths), desc=text, disable=total < _PATIENCE or processes.rank() > 0) as bar:
        yield bar.update
