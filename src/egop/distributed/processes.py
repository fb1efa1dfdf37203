"""Several processes that work on one thing: each does its share, and an error in one of them is an error in all.

Alone, or outside a process group, everything here does what one process would do, without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Another process's error is raised as one of these, if it is one: what the caller catches must be the same everywhere.
_KINDS = (FloatingPointError, torch.linalg.LinAlgError, torch.OutOfMemoryError, MemoryError, TypeError, ValueError)


class Holding(NamedTuple):
    """What one process has of rows that all of them have seen together.

    Attributes:
        seen: how many it has seen.
        pieces: the shapes of the pieces in which it keeps them.
        dtype: of these.
        folded: whether it has made a matrix of them instead.
        draws: how many gradients the rows come from.
        fourth: the sum of the squared norms of these gradients' own matrices, see :class:`egop.numerics.OuterProducts`.
    """

    seen: int
    pieces: list[tuple[int, ...]]
    dtype: torch.dtype | None
    folded: bool = False
    draws: int = 0
    fourth: float = 0.0

    @classmethod
    def of(
        cls, seen: int, rows: Sequence[Tensor], folded: bool = False, draws: int = 0, fourth: float = 0.0
    ) -> Holding:
        """What a process has that keeps these rows."""
        pieces, dtype = [tuple(tensor.shape) for tensor in rows], rows[0].dtype if rows else None
        return cls(seen, pieces, dtype, folded, draws, fourth)


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if world_size() > 1 else 0


def share_of(total: int) -> range:
    """This process's share of so many things: as many as any other has, give or take one."""
    here, world = rank(), world_size()
    return range(here * total // world, (here + 1) * total // world)


def exchanged(action: Callable[[], T]) -> list[T]:
    """What an action gave in each process, by rank; to be called by all of them.

    If it fails anywhere, the error of the first process where it did is raised everywhere. So nobody waits for a
    process that has given up.

    Args:
        action: what each process does; it returns plain values or small tensors on the CPU.
    """
    if world_size() == 1:
        return [action()]
    value, error, failure = None, None, None
    try:
        value = action()
    except Exception as raised:  # raised again below
        error = raised
        kind = next((place for place, error in enumerate(_KINDS) if isinstance(raised, error)), None)
        failure = kind, f"{type(raised).__name__}: {raised}"
    answers: list[Any] = [None] * world_size()
    dist.all_gather_object(answers, (failure, value))
    for place, (failure, _) in enumerate(answers):
        if failure is not None:
            if place == rank() and error is not None:
                raise error
            kind, text = failure
            raise (RuntimeError if kind is None else _KINDS[kind])(f"Process {place} failed. {text}") from error
    return [answer for _, answer in answers]


def agreed(action: Callable[[], T]) -> T:
    """The same where what the others' actions gave does not matter."""
    results: list[T] = []
    exchanged(lambda: results.append(action()))
    return results[0]


def owners_of(costs: Sequence[float], processes: int | None = None) -> list[int]:
    """Who does each of several pieces of work: the largest first, always to the process that has least to do."""
    loads = [0.0] * (processes or world_size())
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return owners


def broadcast(tensor: Tensor, owner: int) -> None:
    """Give a tensor the values that it has in the owner's process."""
    if world_size() > 1 and tensor.numel():
        wire = _wire(tensor)
        dist.broadcast(_bytes(wire), owner)
        _written(tensor, wire)


def sum_at(owner: int, tensor: Tensor) -> None:
    """Add up what the processes have in a tensor; in the owner's, which gets it, and nobody else's values count."""
    if world_size() > 1:
        wire = _wire(tensor)
        dist.reduce(wire, owner)
        _written(tensor, wire)


def rows_at(
    owner: int,
    rows: Sequence[Tensor],
    holdings: Sequence[Holding],
    device: torch.device,
    take: Callable[[Tensor], object],
) -> None:
    """Hand the rows of all processes to the owner, in the order of their ranks.

    Args:
        owner: who takes them.
        rows: what this process has.
        holdings: what each process has.
        device: where the owner wants them.
        take: is called in the owner's process, with one piece after the other. An error in it is raised when the
            others have sent all that they have to.
    """
    error: Exception | None = None
    for place, holding in enumerate(holdings):
        for index, shape in enumerate(holding.pieces):
            if rank() == owner:
                piece = rows[index] if place == owner else torch.empty(shape, dtype=holding.dtype, device=device)
                if place != owner:
                    wire = _wire(piece)
                    dist.recv(_bytes(wire), place)
                    _written(piece, wire)
                if error is None:
                    try:
                        take(piece)
                    except Exception as raised:  # raised again below
                        error = raised
            elif rank() == place:
                dist.send(_bytes(_wire(rows[index])), owner)
    if error is not None:
        raise error


def _wire(tensor: Tensor) -> Tensor:
    """The tensor where the processes' backend can send it from: itself if possible, else a copy."""
    backend, device = dist.get_backend(), tensor.device
    if backend == "gloo":
        device = torch.device("cpu")
    elif backend == "nccl" and device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return tensor.detach().to(device).contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: no backend knows all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _written(tensor: Tensor, wire: Tensor) -> None:
    if wire.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(wire)
