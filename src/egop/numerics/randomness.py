"""The global random numbers of torch, numpy and Python: seeded, kept apart, put back."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Start the global random numbers anew; only where the states are put back afterwards."""
    # torch.manual_seed would be slow where CUDA is not in use yet: it leaves a note with a stack trace for later.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def drawn_outside_torch(seed: int) -> bool:
    """Whether what ran since ``seed_everything(seed)`` has drawn numbers from Python or numpy; seeds anew."""
    after = random.random(), np.random.random()  # noqa: NPY002
    seed_everything(seed)
    fresh = random.random(), np.random.random()  # noqa: NPY002
    seed_everything(seed)
    return after != fresh


class RandomStream:
    """Global random numbers of one purpose: they go on where they stopped, whatever is drawn between two uses.

    Example:
        >>> stream, same = RandomStream(3), RandomStream(3)
        >>> with stream:
        ...     first = torch.rand(2)
        >>> with stream:
        ...     second = torch.rand(2)
        >>> with same:
        ...     print(torch.equal(torch.rand(4), torch.cat([first, second])))
        True
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = random_state()
        if self._state is None:
            seed_everything(self._seed)
        else:
            set_random_state(self._state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = random_state()
        set_random_state(self._outer)


def random_state() -> Any:
    """The global random states, of every GPU too: seeding reaches all of them."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus  # noqa: NPY002


def set_random_state(state: Any) -> None:
    """Put back what :func:`random_state` gave."""
    python, numpy, cpu, gpus = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
