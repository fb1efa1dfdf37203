"""The global random number generators of torch, numpy and Python: seed, save and restore them together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all global generators. Callers restore their states afterwards."""
    # torch.manual_seed is slow if CUDA is not initialized: it queues a call together with a stack trace.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def has_drawn_outside_torch(seed: int) -> bool:
    """Return True if Python's or numpy's generator was used since ``seed_everything(seed)``; seed everything again."""
    after = random.random(), np.random.random()  # noqa: NPY002
    seed_everything(seed)
    fresh = random.random(), np.random.random()  # noqa: NPY002
    seed_everything(seed)
    return after != fresh


class RandomStream:
    """A separate global random state that continues from one ``with stream:`` to the next."""

    def __init__(self, seed: int) -> None:
        self._unused = get_random_state()  # either this stream's state or, inside a with statement, that of the others
        seed_everything(seed)
        self._swap()

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        used = get_random_state()
        set_random_state(self._unused)
        self._unused = used


def get_random_state() -> Any:
    """Return the states of all global generators, including those of every GPU."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus  # noqa: NPY002


def set_random_state(state: Any) -> None:
    """Restore states returned by :func:`get_random_state`."""
    python, numpy, cpu, gpus = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
