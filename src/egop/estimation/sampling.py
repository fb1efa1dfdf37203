"""Gradients at drawn points: one at a time (the reference) or many at once with ``torch.func``, in bounded memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.estimation.chunks import Sampling, check_finite, choose, first_line, memory_for_chunks, say_why
from egop.estimation.gradients import Points, looped, vmapped
from egop.estimation.initialisers import stacked
from egop.estimation.objective import Objective
from egop.estimation.rho import Distribution
from egop.numerics import RandomStream

# Points are drawn in blocks of this many, or of so many values. Chunks have no say in it, or they would in the draws.
BLOCK_POINTS, BLOCK_VALUES = 1024, 2**22


def sample_gradients(
    objective: Objective,
    rho: Distribution,
    samples: int,
    *,
    names: Sequence[str] | None = None,
    generator: torch.Generator,
    method: Sampling = "auto",
    progress: bool = False,
    chunk_bytes: int | None = None,
    share: range | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Draw ``samples`` points from rho and yield the gradients there, a chunk of points at a time.

    Each point has a seed and a batch of its own, so the result does not depend on how the points are chunked (except
    for dropout masks where points are vmapped: torch draws those for a whole chunk at once).

    Args:
        objective: the loss and its batches.
        rho: where the points are drawn.
        samples: how many points.
        names: the parameters whose gradients are wanted; all by default.
        generator: the source of all randomness.
        method: ``"loop"`` works for every model, ``"vmap"`` takes many points at once, ``"auto"`` uses the second
            where it gives the same gradients and falls back to the first elsewhere, with one log line, and for
            convolutions of some size on the CPU, where the first is faster.
        progress: show a progress bar with the time left.
        chunk_bytes: the memory one chunk may take; by default what suits the device.
        share: which of the draws are wanted here, where others take the rest; all by default. The batches of all draws
            are gone through, so that whoever takes a draw sees the batch that belongs to it.

    Yields:
        For each name the gradients stacked along a new first dimension, all checked to be finite.
    """
    check_samples(samples)
    _check_method(method)
    rho.check(objective)
    objective.check_whole()
    share = range(samples) if share is None else share
    wanted = list(objective.parameters) if names is None else list(names)
    base = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
    with contextlib.ExitStack() as stack:
        stack.enter_context(objective.preserved(seed=base))
        source = _Source(objective, rho, base, samples)
        # By the first of all draws, also where others take it: so everyone chooses alike.
        many, size = choose(objective, wanted, source.first(), method, chunk_bytes or memory_for_chunks(objective))
        size -= size % BLOCK_POINTS if size > BLOCK_POINTS else 0  # whole blocks need no copy
        # Only now, so that what is said of the choice does not run into it.
        bar = stack.enter_context(tqdm(total=len(share), desc="Sampling gradients", disable=not progress))
        source.skip(done := share.start)
        while done < share.stop:
            points = source.take(min(size, share.stop - done))
            try:
                losses, gradients = (vmapped if many else looped)(objective, wanted, points)
            except torch.OutOfMemoryError:
                if not many or len(points) == 1:
                    raise
                source.give_back(points)
                size = len(points) // 2
                continue
            except Exception as error:  # as in the choice; other batches may bring what vmap refuses
                if not many or method == "vmap":
                    raise
                say_why(first_line(error))
                source.give_back(points)
                many = False
                continue
            check_finite(wanted, losses, gradients, first_draw=done)
            yield dict(zip(wanted, gradients, strict=True))
            done += len(points)
            bar.update(len(points))
        source.skip(samples - done)


def check_samples(samples: int) -> None:
    """Raise an error when this is not a number of samples."""
    if not isinstance(samples, Integral) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"Invalid samples value: {samples!r}. Must be a whole number of at least 1.")


def _check_method(method: str) -> None:
    if method not in ("auto", "loop", "vmap"):
        raise ValueError(f"Invalid sampling method: {method!r}. Must be 'auto', 'loop' or 'vmap'.")


class _Source:
    """The points of one run, in order: values drawn in blocks, batches fetched when their points are taken."""

    def __init__(self, objective: Objective, rho: Distribution, base: int, samples: int) -> None:
        device = next(iter(objective.parameters.values())).device
        dimension = sum(parameter.numel() for parameter in objective.parameters.values())
        self.generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
        self.base, self.remaining, self.drawn = base, samples, 0
        self.block = max(1, min(BLOCK_POINTS, BLOCK_VALUES // dimension))
        drawer = rho.drawer(objective)
        if drawer is None:
            self.block, drawer = 1, lambda generator, _: stacked([rho.draw(objective, generator)])
        self.drawer = drawer
        self.ready: list[tuple[list[int], dict[str, Tensor]]] = []  # drawn and not taken yet
        self.objective, self.batches = objective, objective.batches()
        # Shuffling and augmentation have random numbers of their own, which neither rho nor the loss disturbs.
        self.stream = RandomStream(self._seeds(base, 1)[0])

    def first(self) -> Points:
        """The first point, which is not taken by this."""
        points = self.take(1)
        self.give_back(points)
        return points

    def take(self, count: int) -> Points:
        """The next points."""
        with self.stream:
            batches = self.objective.placed(itertools.islice(self.batches, count))
        taken = []
        while count:
            taken.append(self._part(count))
            count -= len(taken[-1][0])
        if len(taken) == 1:
            return Points(*taken[0], batches)
        values = {name: torch.cat([part[name] for _, part in taken]) for name in taken[0][1]}
        return Points([seed for seeds, _ in taken for seed in seeds], values, batches)

    def skip(self, count: int) -> None:
        """Go past the next points, whose batches are seen and whose values are not drawn if possible."""
        with self.stream:
            collections.deque(itertools.islice(self.batches, count), maxlen=0)
        while count:
            size = min(self.block, self.remaining)
            if self.ready or size > count:
                count -= len(self._part(count)[0])
            else:
                count -= size
                self.remaining -= size
                self.drawn += 1

    def give_back(self, points: Points) -> None:
        """Undo :meth:`take`."""
        self.batches = itertools.chain(points.batches, self.batches)
        self.ready.insert(0, (points.seeds, points.values))

    def _part(self, count: int) -> tuple[list[int], dict[str, Tensor]]:
        """The next points of one block, at most so many."""
        seeds, values = self.ready.pop(0) if self.ready else self._draw()
        if len(seeds) > count:
            self.ready.insert(0, (seeds[count:], {name: value[count:] for name, value in values.items()}))
        return seeds[:count], {name: value[:count] for name, value in values.items()}

    def _draw(self) -> tuple[list[int], dict[str, Tensor]]:
        count = min(self.block, self.remaining)
        self.remaining -= count
        self.drawn += 1
        # Seeds of their own: with a common one, dropout masks would be made of the numbers that made the points.
        seeds = self._seeds(self.base + self.drawn, count)
        return seeds, self.drawer(self.generator, count)

    def _seeds(self, seed: int, count: int) -> list[int]:
        self.generator.manual_seed(seed)
        return torch.randint(2**62, (count,), generator=self.generator, device=self.generator.device).tolist()
