"""Division of work among processes. An error in one of them is raised in all.

Without a process group, or with a single process, everything here works without collectives.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# Another process's error is raised as one of these where possible, so that callers catch the same type everywhere.
_ERRORS = (FloatingPointError, torch.linalg.LinAlgError, torch.OutOfMemoryError, MemoryError, TypeError, ValueError)


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if world_size() > 1 else 0


def local_share(total: int) -> range:
    """Return this process's share of ``range(total)``. Shares differ by at most one item."""
    here, world = rank(), world_size()
    return range(here * total // world, (here + 1) * total // world)


def gather_results(action: Callable[[], T]) -> list[T]:
    """Run an action in every process and return all results by rank. All processes must call this.

    If the action fails anywhere, the error of the first process where it failed is raised everywhere, so that no
    process waits for one that has given up.

    Args:
        action: returns plain values or small CPU tensors.
    """
    if world_size() == 1:
        return [action()]
    value, error, failure = None, None, None
    try:
        value = action()
    except Exception as raised:  # raised again below
        error = raised
        kind = next((index for index, known in enumerate(_ERRORS) if isinstance(raised, known)), None)
        failure = kind, f"{type(raised).__name__}: {raised}"
    answers: list[Any] = [None] * world_size()
    dist.all_gather_object(answers, (failure, value))
    for process, (failure, _) in enumerate(answers):
        if failure is not None:
            if process == rank() and error is not None:
                raise error
            kind, text = failure
            raise (RuntimeError if kind is None else _ERRORS[kind])(f"Process {process} failed. {text}") from error
    return [answer for _, answer in answers]


def run_collectively(action: Callable[[], T]) -> T:
    """Run an action in every process and return this process's result; an error in one is raised in all."""
    results: list[T] = []
    gather_results(lambda: results.append(action()))
    return results[0]


def broadcast_object(value: T, sender: int, device: torch.device) -> T:
    """Return the sender's value in all processes. All processes must call this.

    Args:
        value: this process's value; the sender's is pickled.
        sender: rank of the process whose value is returned.
        device: where the other processes put tensors that the sender has on a GPU.
    """
    if world_size() == 1:
        return value
    packed = [run_collectively(lambda: _pack(value) if rank() == sender else b"")]
    dist.broadcast_object_list(packed, sender)
    return run_collectively(lambda: value if rank() == sender else _unpack(packed[0], device))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes, device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(packed), map_location=place, weights_only=False)
