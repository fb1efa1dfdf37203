"""Times: methods take turns, round after round, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from egop_lab.gpu import synchronize

T = TypeVar("T")


class Marks:
    """Marks in a stream of work, and the seconds between them.

    On a GPU these are events: nobody waits for the device until the seconds are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        synchronize(device)

    def mark(self) -> None:
        """Put a mark after the work submitted so far."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive marks."""
        synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


def time_call(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of a piece of work."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def interleave(
    turns: Mapping[str, Callable[[], T]], rounds: int, limit: float | None = None
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Give every method its turn, for some rounds.

    Args:
        turns: the work of each method, by name.
        rounds: the number of turns.
        limit: seconds after which a method gets no further turn.

    Returns:
        What came back, by name and round, and why something failed, by name.
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    failed: dict[str, str] = {}
    spent = dict.fromkeys(turns, 0.0)
    for _ in range(rounds):
        for name, turn in turns.items():
            if name in failed or (limit is not None and spent[name] > limit):
                continue
            began = time.perf_counter()
            try:
                results[name].append(turn())
            except Exception as error:  # keep the other methods' results
                failed[name] = describe_error(error)
            spent[name] += time.perf_counter() - began
    return {name: values for name, values in results.items() if name not in failed}, failed


def describe_error(error: Exception) -> str:
    """Return why something failed, in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the smallest and the largest of several rounds, and their number."""
    known = list(values)
    return {"low": min(known), "high": max(known), "rounds": len(known)}
