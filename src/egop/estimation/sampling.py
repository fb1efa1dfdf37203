"""Sampling gradients at points drawn from rho, in chunks that fit into memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Generator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from egop.estimation.gradients import (
    Points,
    check_finite,
    get_tensors,
    loop_gradients,
    matches_loop,
    vmap_gradients,
)
from egop.estimation.objective import Objective
from egop.estimation.rho import Distribution
from egop.formatting import progress_interval
from egop.numerics import RandomStream, check_positive_int, full_precision, has_drawn_outside_torch

logger = logging.getLogger("egop")

SamplingMethod = Literal["auto", "loop", "vmap"]

# Points are drawn in blocks of at most this many points or values. Blocks do not depend on the chunks, so neither do
# the draws.
BLOCK_POINTS, BLOCK_VALUES = 1024, 2**22
# Values, gradients and activations of one chunk on the CPU. Larger chunks are slower there: their tensors are allocated
# from fresh pages every time and leave the cache.
CHUNK_BYTES = 128 * 2**20
# On a GPU, a chunk may take this share of the free memory, up to this many bytes.
GPU_SHARE, GPU_BYTES = 0.25, 16 * 2**30
# Larger chunks gain nothing: this many points keep any machine busy, and the loop needs only a few.
CHUNK_POINTS, LOOP_POINTS = 4096, 256
# With more activations than this, convolutions on the CPU are faster one point at a time.
CONVOLUTION_BYTES = 512 * 2**10
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def sample_gradients(
    objective: Objective,
    rho: Distribution,
    samples: int,
    *,
    names: Sequence[str] | None = None,
    generator: torch.Generator,
    method: SamplingMethod = "auto",
    progress: bool = False,
    chunk_bytes: int | None = None,
    share: range | None = None,
) -> Generator[dict[str, Tensor], None, None]:
    """Draw ``samples`` points from rho and yield the gradients there, one chunk of points at a time.

    Each point has its own seed and batch, so the result does not depend on the chunks. (Dropout masks do if points are
    vmapped, because torch draws them for a whole chunk at once.) The model is restored when the generator is closed.

    Args:
        objective: the loss and its batches.
        rho: the distribution of the points.
        samples: the number of points.
        names: the parameters to differentiate with respect to; all by default.
        generator: the source of all randomness.
        method: ``"loop"`` works for every model. ``"vmap"`` computes many points at once. ``"auto"`` uses vmap if it
            gives the same gradients and otherwise falls back to the loop with one log line. It also uses the loop for
            large convolutions on the CPU, where that is faster.
        progress: show a progress bar with the remaining time.
        chunk_bytes: memory limit for one chunk; by default chosen for the device.
        share: the draws to compute here if other processes compute the rest; all by default. The batches of all draws
            are iterated, so that every draw sees its own batch.

    Yields:
        The gradients of each parameter, stacked along a new first dimension and checked to be finite.
    """
    check_positive_int("samples", samples)
    if method not in ("auto", "loop", "vmap"):
        raise ValueError(f"Invalid sampling method: {method!r}. Must be 'auto', 'loop' or 'vmap'.")
    rho.check(objective)
    objective.check_unsharded()
    share = range(samples) if share is None else share
    wanted = list(objective.parameters) if names is None else list(names)
    base = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
    with contextlib.ExitStack() as stack:
        stack.enter_context(objective.preserve(seed=base))
        source = _PointSource(objective, rho, base, samples)
        # Every process looks at the very first draw, so all make the same choice.
        use_vmap, size = _choose_chunks(
            objective, wanted, source.take(0, 1), method, chunk_bytes or _get_chunk_bytes(objective)
        )
        size -= size % BLOCK_POINTS if size > BLOCK_POINTS else 0  # taking whole blocks needs no copy
        # Open the bar only now, so that log lines about the choice do not interrupt it.
        bar = stack.enter_context(
            tqdm(total=len(share), desc="Sampling gradients", disable=not progress, mininterval=progress_interval())
        )
        done = share.start
        while done < share.stop:
            points = source.take(done, min(size, share.stop - done))
            try:
                losses, gradients = (vmap_gradients if use_vmap else loop_gradients)(objective, wanted, points)
            except torch.OutOfMemoryError:
                if not use_vmap or len(points) == 1:
                    raise
                size = len(points) // 2
                continue
            except Exception as error:  # a later batch may need something that vmap cannot do
                if not use_vmap or method == "vmap":
                    raise
                _log_fallback(_summarize(error))
                use_vmap = False
                continue
            check_finite(wanted, losses, gradients, first_draw=done)
            yield dict(zip(wanted, gradients, strict=True))
            done += len(points)
            bar.update(len(points))
        source.skip_batches(samples)


class _PointSource:
    """The points of one run. Their values are drawn in blocks with seeds of their own; batches come in order."""

    def __init__(self, objective: Objective, rho: Distribution, base: int, samples: int) -> None:
        device = objective.device
        dimension = sum(parameter.numel() for parameter in objective.parameters.values())
        self.objective, self.rho, self.base, self.samples = objective, rho, base, samples
        self.generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
        self.block_size = max(1, min(BLOCK_POINTS, BLOCK_VALUES // dimension))
        if type(rho).draw_many is Distribution.draw_many:  # it draws point by point
            self.block_size = 1
        self.last_block: tuple[int, list[int], dict[str, Tensor]] | None = None
        self.batches = objective.batches()
        self.position = 0  # of the first point whose batch is in `fetched`
        self.fetched: list[Any] = []
        # Shuffling and augmentation have their own random stream, which neither rho nor the loss affects.
        self.batch_stream = RandomStream(self._draw_seeds(base, 1)[0])

    def take(self, start: int, count: int) -> Points:
        """Return points. They can be taken again until later ones are taken; then their batches are gone."""
        batches = self._fetch_batches(start, count)
        parts = []
        while count:
            block, offset = divmod(start, self.block_size)
            seeds, values = self._draw_block(block)
            part = slice(offset, offset + count)
            parts.append((seeds[part], {name: value[part] for name, value in values.items()}))
            start, count = start + len(parts[-1][0]), count - len(parts[-1][0])
        if len(parts) == 1:
            return Points(*parts[0], batches)
        values = {name: torch.cat([values[name] for _, values in parts]) for name in self.objective.parameters}
        return Points([seed for seeds, _ in parts for seed in seeds], values, batches)

    def skip_batches(self, stop: int) -> None:
        """Consume the batches of all points before this one, so that the loader ends up the same in every process."""
        self._fetch_batches(stop, 0)

    def _fetch_batches(self, start: int, count: int) -> list[Any]:
        with self.batch_stream:
            skipped = start - self.position - len(self.fetched)
            collections.deque(itertools.islice(self.batches, max(0, skipped)), maxlen=0)
            self.fetched, self.position = self.fetched[start - self.position :], start
            missing = max(0, count - len(self.fetched))
            self.fetched += self.objective.move_batches(itertools.islice(self.batches, missing))
        return self.fetched[:count]

    def _draw_block(self, block: int) -> tuple[list[int], dict[str, Tensor]]:
        if self.last_block is None or self.last_block[0] != block:
            count = min(self.block_size, self.samples - block * self.block_size)
            # With a common seed, dropout masks would be made of the same random numbers as the points.
            seeds = self._draw_seeds(self.base + block + 1, count)
            self.last_block = block, seeds, self.rho.draw_many(self.objective, self.generator, count)
        return self.last_block[1:]

    def _draw_seeds(self, seed: int, count: int) -> list[int]:
        self.generator.manual_seed(seed)
        return torch.randint(2**62, (count,), generator=self.generator, device=self.generator.device).tolist()


def _get_chunk_bytes(objective: Objective) -> int:
    device = objective.device
    if device.type != "cuda":
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(GPU_BYTES, int(GPU_SHARE * free))


def _choose_chunks(
    objective: Objective, names: Sequence[str], point: Points, method: SamplingMethod, chunk_bytes: int
) -> tuple[bool, int]:
    """Decide from one point whether to use vmap, and how many points to put into a chunk."""
    saved: dict[int, int] = {}

    def measure(tensor: Tensor) -> Tensor:
        # An expanded tensor takes less than its size, and a row of a large tensor less than its storage.
        size = min(tensor.nbytes, tensor.untyped_storage().nbytes())
        saved[tensor.data_ptr()] = max(size, saved.get(tensor.data_ptr(), 0))
        return tensor

    module = objective.module
    buffers = {} if module is None else {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    with torch.autograd.graph.saved_tensors_hooks(measure, lambda tensor: tensor):
        losses, gradients = loop_gradients(objective, names, point)
    check_finite(names, losses, gradients, first_draw=0)
    activations = sum(saved.values())
    values = sum(value.nbytes for value in point.values.values())
    batch = sum(tensor.nbytes for tensor in get_tensors(point.batches[0]))
    loop = False, min(LOOP_POINTS, _count_points(chunk_bytes, 2 * values + batch))
    if method == "loop" or (method == "auto" and _is_slow_convolution(objective, activations)):
        return loop
    reason = None
    if has_drawn_outside_torch(point.seeds[0]):
        reason = "the loss draws random numbers from Python or numpy, which all points would share"
    elif module is not None:
        reason = _find_written_buffer(module, buffers)
    if reason is None:
        try:
            with full_precision():  # TF32 has too few digits to tell rounding from an error
                is_right = matches_loop(objective, names, point)
            if is_right:
                return True, _count_points(chunk_bytes, 3 * values + batch + 2 * activations)
            reason = "it does not give this model's gradients"
        except Exception as error:  # vmap can fail in many ways; the loop shows whether the model is at fault
            if method == "vmap":
                raise
            reason = _summarize(error)
    if method == "vmap":
        raise RuntimeError(f"Gradients cannot be sampled with torch.func.vmap: {reason}. Use sampling='auto'.")
    _log_fallback(reason)
    return loop


def _count_points(available: int, per_point: int) -> int:
    return max(1, min(CHUNK_POINTS, available // (per_point + 1)))


def _is_slow_convolution(objective: Objective, activations: int) -> bool:
    """Return True for large convolutions on the CPU, where torch computes those with many kernels group by group."""
    if activations <= CONVOLUTION_BYTES or objective.module is None or objective.device.type != "cpu":
        return False
    return any(isinstance(part, _CONVOLUTIONS) for part in objective.module.modules())


def _find_written_buffer(module: nn.Module, before: dict[str, tuple[Tensor, int]]) -> str | None:
    """Return a sentence about a buffer that the forward pass writes to, as in BatchNorm; vmap cannot do that."""
    for name, buffer in module.named_buffers():
        if name not in before or before[name][0] is not buffer or before[name][1] != buffer._version:
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            return f"the forward pass writes '{name}', a buffer of {kind}"
    return None


def _log_fallback(reason: str) -> None:
    logger.warning("egop samples gradients one at a time: torch.func.vmap cannot be used here (%s).", reason)


def _summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
