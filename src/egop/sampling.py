"""Gradients at drawn points: one at a time (the reference) or many at once with ``torch.func``, in bounded memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from egop.distributions import Distribution, stacked
from egop.gradients import Gradients, Points, looped, tensors_of, vmapped
from egop.objective import Objective
from egop.precision import without_tf32
from egop.randomness import RandomStream, drawn_outside_torch

logger = logging.getLogger("egop")

Method = Literal["auto", "loop", "vmap"]

# What one chunk of points may hold in values, gradients and activations on the CPU. More would be slower there: larger
# tensors come from fresh pages of memory every time, and leave the cache.
CHUNK_BYTES = 128 * 2**20
# On a GPU a chunk may take this share of the memory that is free, and no more than so many bytes.
GPU_SHARE, GPU_BYTES = 0.25, 16 * 2**30
# Beyond this many points at once the products are large enough to fill any machine; a loop gains nothing by many.
CHUNK_POINTS, LOOP_POINTS = 4096, 256

# Points are drawn in blocks of this many, or of so many values. Chunks have no say in it, or they would in the draws.
BLOCK_POINTS, BLOCK_VALUES = 1024, 2**22


def sample_gradients(
    objective: Objective,
    rho: Distribution,
    samples: int,
    *,
    names: Sequence[str] | None = None,
    generator: torch.Generator,
    method: Method = "auto",
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
            where it gives the same gradients and falls back to the first elsewhere, with one log line.
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
        many, size = _choose(objective, wanted, source.first(), method, chunk_bytes or _memory_for_chunks(objective))
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
            except Exception as error:  # as in _choose; other batches may bring what vmap refuses
                if not many or method == "vmap":
                    raise
                _say_why(_first_line(error))
                source.give_back(points)
                many = False
                continue
            _check_finite(wanted, losses, gradients, first_draw=done)
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
        self.base, self.left, self.drawn = base, samples, 0
        self.block = max(1, min(BLOCK_POINTS, BLOCK_VALUES // dimension))
        drawer = rho.drawer(objective)
        if drawer is None:
            self.block, drawer = 1, lambda generator, _: stacked([rho.draw(objective, generator)])
        self.drawer = drawer
        self.ready: list[tuple[list[int], dict[str, Tensor]]] = []  # drawn and not taken yet
        self.batches = objective.batches()
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
            batches = list(itertools.islice(self.batches, count))
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
            size = min(self.block, self.left)
            if self.ready or size > count:
                count -= len(self._part(count)[0])
            else:
                count -= size
                self.left -= size
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
        count = min(self.block, self.left)
        self.left -= count
        self.drawn += 1
        # Seeds of their own: with a common one, dropout masks would be made of the numbers that made the points.
        seeds = self._seeds(self.base + self.drawn, count)
        return seeds, self.drawer(self.generator, count)

    def _seeds(self, seed: int, count: int) -> list[int]:
        self.generator.manual_seed(seed)
        return torch.randint(2**62, (count,), generator=self.generator, device=self.generator.device).tolist()


def _memory_for_chunks(objective: Objective) -> int:
    device = next(iter(objective.parameters.values())).device
    if device.type != "cuda":
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(GPU_BYTES, int(GPU_SHARE * free))


def _choose(
    objective: Objective, names: Sequence[str], point: Points, method: Method, chunk_bytes: int
) -> tuple[bool, int]:
    """Whether to take points many at a time, and how many."""
    saved: dict[int, int] = {}

    def measure(tensor: Tensor) -> Tensor:
        # An expanded tensor takes less than its size, and a row of a large one does not take all of that.
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        saved[tensor.data_ptr()] = max(size, saved.get(tensor.data_ptr(), 0))
        return tensor

    buffers = _buffers(objective.module)
    with torch.autograd.graph.saved_tensors_hooks(measure, lambda tensor: tensor):
        plain = looped(objective, names, point)
    _check_finite(names, *plain, first_draw=0)
    held = sum(value.nbytes for value in point.values.values())
    batch = sum(tensor.nbytes for tensor in tensors_of(point.batches[0]))
    one_by_one = False, min(LOOP_POINTS, _chunk_points(chunk_bytes, 2 * held + batch))
    if method == "loop":
        return one_by_one
    reason = _random_outside_torch(point.seeds[0]) or _written(objective.module, buffers)
    if reason is None:
        try:
            with _full_precision():
                right = _vmap_is_right(objective, names, point)
            if right:
                return True, _chunk_points(chunk_bytes, 3 * held + batch + 2 * sum(saved.values()))
            reason = "it does not give this model's gradients"
        except Exception as error:  # vmap refuses in many ways; the loop then shows whether the model is at fault
            if method == "vmap":
                raise
            reason = _first_line(error)
    if method == "vmap":
        raise RuntimeError(f"Gradients cannot be sampled with torch.func.vmap: {reason}. Use sampling='auto'.")
    _say_why(reason)
    return one_by_one


def _chunk_points(available: int, each: int) -> int:
    points = max(1, min(CHUNK_POINTS, available // (each + 1)))
    return points - points % BLOCK_POINTS if points > BLOCK_POINTS else points  # whole blocks need no copy


def _say_why(reason: str) -> None:
    logger.warning("egop samples gradients one at a time: torch.func.vmap cannot be used here (%s).", reason)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Without TF32, which has too few digits to tell rounding from an error; cuDNN convolves in it by default."""
    kept = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with without_tf32():
            yield
    finally:
        torch.backends.cudnn.enabled = kept


def _vmap_is_right(objective: Objective, names: Sequence[str], point: Points) -> bool:
    """Whether vmap gives the loop's gradients at a point."""
    plain = looped(objective, names, point)
    if objective.module is not None:
        # What the loss reads past the model it is given keeps its own value under vmap, and must not look right.
        objective.write({name: torch.zeros_like(value[0]) for name, value in point.values.items()})
    twice = point.some([0, 0])
    at_once = vmapped(objective, names, twice)
    if _agree(plain, at_once):
        return True
    if _agree(plain, looped(objective, names, replace(point, seeds=[point.seeds[0] + 1]))):
        return False
    # A model that draws random numbers: loop and vmap share none, but two vmapped runs of one seed do. The second one
    # has the point's own values in the model, where the loop has just written them.
    return _agree(at_once, vmapped(objective, names, twice))


def _agree(one: Gradients, other: Gradients) -> bool:
    """Whether the first point's loss and gradients are the same up to rounding."""
    pairs = [(a[0], b[0]) for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True)]
    norms = [torch.linalg.vector_norm(a).item() for a, _ in pairs]
    return all(
        # Rounding is relative to the whole: a gradient that should be zero is nothing but rounding.
        torch.linalg.vector_norm(a - b).item() <= epsilon**0.5 * norm + 100 * epsilon * max(norms)
        for (a, b), norm, epsilon in zip(pairs, norms, [torch.finfo(a.dtype).eps for a, _ in pairs], strict=True)
    )


def _buffers(module: nn.Module | None) -> dict[str, tuple[Tensor, int]]:
    named = module.named_buffers() if module is not None else ()
    return {name: (buffer, buffer._version) for name, buffer in named}


def _written(module: nn.Module | None, before: dict[str, tuple[Tensor, int]]) -> str | None:
    """BatchNorm in training mode, for one, updates its statistics, which vmap cannot do for many points at once."""
    for name, (buffer, version) in _buffers(module).items():
        if name not in before or before[name][0] is not buffer or before[name][1] != version:
            assert module is not None
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            return f"the forward pass writes '{name}', a buffer of {kind}"
    return None


def _random_outside_torch(seed: int) -> str | None:
    if drawn_outside_torch(seed):
        return "the loss draws random numbers from Python or numpy, which all points would share"
    return None


def _check_finite(names: Sequence[str], losses: Tensor, gradients: Sequence[Tensor], first_draw: int) -> None:
    # One look at the device for all of them. Finite numbers whose sum is not are sorted out below.
    sums = [each.sum(dtype=torch.promote_types(each.dtype, torch.float32)).double() for each in (losses, *gradients)]
    if torch.isfinite(torch.stack(sums)).all():
        return
    checks = [("The loss", losses)] + [
        (f"The gradient of '{name}'", gradient) for name, gradient in zip(names, gradients, strict=True)
    ]
    for what, values in checks:
        finite = torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else torch.isfinite(values)
        if not finite.all():
            draw = first_draw + int(finite.logical_not().nonzero()[0])
            raise FloatingPointError(
                f"{what} is not finite at draw {draw}. The points may lie too far out: use a rho of smaller scale, "
                "or check the loss for overflow, log(0) and division by zero."
            )
