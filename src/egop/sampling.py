"""Gradients at drawn points: one at a time (the reference) or many at once with ``torch.func``, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from egop.distributions import Distribution
from egop.objective import Objective, seed_everything

logger = logging.getLogger("egop")

Method = Literal["auto", "loop", "vmap"]

# What one chunk of points may hold in values, gradients and activations.
CHUNK_BYTES = 256 * 2**20
# Beyond this many points at once the products are large enough to fill any machine.
CHUNK_POINTS = 256


def sample_gradients(
    objective: Objective,
    rho: Distribution,
    samples: int,
    *,
    names: Sequence[str] | None = None,
    generator: torch.Generator,
    method: Method = "auto",
    progress: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[dict[str, Tensor]]:
    """Draw ``samples`` points from rho and yield the gradients there, a chunk of points at a time.

    Each point has seeds and a batch of its own, so the result does not depend on how the points are chunked (except for
    dropout masks where points are vmapped: torch draws those for a whole chunk at once).

    Args:
        objective: the loss and its batches.
        rho: where the points are drawn.
        samples: how many points.
        names: the parameters whose gradients are wanted; all by default.
        generator: the source of all randomness.
        method: ``"loop"`` works for every model, ``"vmap"`` takes many points at once, ``"auto"`` uses the second
            where it gives the same gradients and falls back to the first elsewhere, with one log line.
        progress: show a progress bar with the time left.
        chunk_bytes: the memory one chunk may take.

    Yields:
        For each name the gradients stacked along a new first dimension, all checked to be finite.
    """
    check_samples(samples)
    if method not in ("auto", "loop", "vmap"):
        raise ValueError(f"Invalid sampling method: {method!r}. Must be 'auto', 'loop' or 'vmap'.")
    rho.check(objective)
    wanted = list(objective.parameters) if names is None else list(names)
    base = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
    with contextlib.ExitStack() as stack:
        stack.enter_context(objective.preserved(seed=base))
        points = _draw(objective, rho, base)
        first = next(points)
        many, size = _choose(objective, wanted, first, method, chunk_bytes)
        points = itertools.chain([first], points)
        # Only now, so that what is said of the choice does not run into it.
        bar = stack.enter_context(tqdm(total=samples, desc="Sampling gradients", disable=not progress))
        done = 0
        while done < samples:
            chunk = list(itertools.islice(points, min(size, samples - done)))
            try:
                losses, gradients = (_vmapped if many else _looped)(objective, wanted, chunk)
            except Exception as error:  # as in _choose; other batches may bring what vmap refuses
                if not many or method == "vmap":
                    raise
                _say_why(_first_line(error))
                many = False
                losses, gradients = _looped(objective, wanted, chunk)
            _check_finite(wanted, losses, gradients, first_draw=done)
            yield dict(zip(wanted, gradients, strict=True))
            done += len(chunk)
            bar.update(len(chunk))


def check_samples(samples: int) -> None:
    """Raise an error when this is not a number of samples."""
    if not isinstance(samples, Integral) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"Invalid samples value: {samples!r}. Must be a whole number of at least 1.")


class _Point(NamedTuple):
    seed: int
    values: dict[str, Tensor]
    batch: Any


Gradients = tuple[Tensor, list[Tensor]]  # the losses of the points, and for each name the stacked gradients


def _draw(objective: Objective, rho: Distribution, base: int) -> Iterator[_Point]:
    device = next(iter(objective.parameters.values())).device
    generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
    batches = objective.batches()
    for first in itertools.count(base):
        generator.manual_seed(first)
        # Seeds of their own: with a common one, dropout masks would be made of the numbers that made the point.
        for_batch, for_loss = torch.randint(2**62, (2,), generator=generator, device=generator.device).tolist()
        seed_everything(for_batch)  # shuffling and augmentation
        batch = next(batches)
        yield _Point(for_loss, rho.draw(objective, generator), batch)


def _looped(objective: Objective, names: Sequence[str], points: Sequence[_Point]) -> Gradients:
    losses, gradients = [], []
    for point in points:
        seed_everything(point.seed)  # dropout and the like
        loss, found = objective.gradients(point.values, point.batch, names)
        losses.append(loss)
        gradients.append(found)
    return torch.stack(losses), [torch.stack(stack) for stack in zip(*gradients, strict=True)]


def _vmapped(objective: Objective, names: Sequence[str], points: Sequence[_Point]) -> Gradients:
    """The same as the loop; all points with batches of one shape go through one vmapped call."""
    flat: list[list[Tensor]] = []
    skeletons = [_skeleton(point.batch, flat) for point in points]
    alike: list[list[int]] = []
    for index, skeleton in enumerate(skeletons):
        group = next((group for group in alike if _equal(skeletons[group[0]], skeleton)), None)
        if group is None:
            alike.append([index])
        else:
            group.append(index)
    parts = [
        _vmapped_alike(objective, names, [points[i] for i in group], [flat[i] for i in group], skeletons[group[0]])
        for group in alike
    ]
    losses, gradients = zip(*parts, strict=True)
    place = torch.tensor([index for group in alike for index in group], device=losses[0].device).argsort()
    return torch.cat(losses)[place], [torch.cat(pieces)[place] for pieces in zip(*gradients, strict=True)]


def _vmapped_alike(
    objective: Objective, names: Sequence[str], points: Sequence[_Point], flat: list[list[Tensor]], skeleton: Any
) -> Gradients:
    def loss(moving: dict[str, Tensor], still: dict[str, Tensor], leaves: list[Tensor]) -> Tensor:
        return objective.loss(moving | still, _map(skeleton, _Slot, lambda slot: leaves[slot.index]))

    stacked = {name: torch.stack([point.values[name] for point in points]) for name in points[0].values}
    moving = {name: stacked.pop(name) for name in names}
    one_batch = all(point.batch is points[0].batch for point in points)
    leaves = flat[0] if one_batch else [torch.stack(group) for group in zip(*flat, strict=True)]
    in_dims = (0, 0, None if one_batch else 0)
    seed_everything(points[0].seed)
    function = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=in_dims, randomness="different")
    gradients, losses = function(moving, stacked, leaves)
    return losses.detach(), [gradients[name].detach() for name in names]


def _choose(
    objective: Objective, names: Sequence[str], point: _Point, method: Method, chunk_bytes: int
) -> tuple[bool, int]:
    """Whether to take points many at a time, and how many."""
    saved: dict[int, int] = {}

    def measure(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    buffers = _buffers(objective.module)
    with torch.autograd.graph.saved_tensors_hooks(measure, lambda tensor: tensor):
        plain = _looped(objective, names, [point])
    _check_finite(names, *plain, first_draw=0)
    held = sum(value.nbytes for value in point.values.values())
    looped = False, max(1, min(CHUNK_POINTS, chunk_bytes // (2 * held + 1)))
    if method == "loop":
        return looped
    reason = _random_outside_torch(point.seed) or _written(objective.module, buffers)
    if reason is None:
        try:
            if _vmap_is_right(objective, names, point, plain):
                return True, max(1, min(CHUNK_POINTS, chunk_bytes // (3 * held + 2 * sum(saved.values()) + 1)))
            reason = "it does not give this model's gradients"
        except Exception as error:  # vmap refuses in many ways; the loop then shows whether the model is at fault
            if method == "vmap":
                raise
            reason = _first_line(error)
    if method == "vmap":
        raise RuntimeError(f"Gradients cannot be sampled with torch.func.vmap: {reason}. Use sampling='auto'.")
    _say_why(reason)
    return looped


def _say_why(reason: str) -> None:
    logger.warning("egop samples gradients one at a time: torch.func.vmap cannot be used here (%s).", reason)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _vmap_is_right(objective: Objective, names: Sequence[str], point: _Point, plain: Gradients) -> bool:
    """Whether vmap gives the loop's gradients at a point."""
    if objective.module is not None:
        # What the loss reads past the model it is given keeps its own value under vmap, and must not look right.
        objective.write({name: torch.zeros_like(value) for name, value in point.values.items()})
    vmapped = _vmapped(objective, names, [point, point])
    if _agree(plain, vmapped):
        return True
    if _agree(plain, _looped(objective, names, [point._replace(seed=point.seed + 1)])):
        return False
    # A model that draws random numbers: loop and vmap share none, but two vmapped runs of one seed do. The second one
    # has the point's own values in the model, where the loop has just written them.
    return _agree(vmapped, _vmapped(objective, names, [point, point]))


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
    """Whether what ran since ``seed_everything(seed)`` has drawn random numbers that vmap knows nothing about."""
    after = random.random(), np.random.random()  # noqa: NPY002
    seed_everything(seed)
    if after == (random.random(), np.random.random()):  # noqa: NPY002
        return None
    return "the loss draws random numbers from Python or numpy, which all points would share"


def _check_finite(names: Sequence[str], losses: Tensor, gradients: Sequence[Tensor], first_draw: int) -> None:
    checks = [("The loss", losses)] + [
        (f"The gradient of '{name}'", gradient) for name, gradient in zip(names, gradients, strict=True)
    ]
    for what, stacked in checks:
        finite = torch.isfinite(stacked).flatten(1).all(1) if stacked.dim() > 1 else torch.isfinite(stacked)
        if not finite.all():
            draw = first_draw + int(finite.logical_not().nonzero()[0])
            raise FloatingPointError(
                f"{what} is not finite at draw {draw}. The points may lie too far out: use a rho of smaller scale, "
                "or check the loss for overflow, log(0) and division by zero."
            )


@dataclass(frozen=True)
class _Slot:
    """The place of one tensor in a batch."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _skeleton(batch: Any, flat: list[list[Tensor]]) -> Any:
    """The batch with its tensors replaced by slots; the tensors are appended to ``flat`` as one list."""
    leaves: list[Tensor] = []
    flat.append(leaves)

    def take(tensor: Tensor) -> _Slot:
        leaves.append(tensor)
        return _Slot(len(leaves) - 1, tensor.shape, tensor.dtype, tensor.device)

    return _map(batch, Tensor, take)


def _map(structure: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything of one kind in nested lists, tuples and mappings."""
    if isinstance(structure, kind):
        return function(structure)
    if isinstance(structure, Mapping):
        return type(structure)({key: _map(value, kind, function) for key, value in structure.items()})  # type: ignore[call-arg]
    if isinstance(structure, (list, tuple)):
        items = [_map(value, kind, function) for value in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
    return structure


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays and the like have no single answer
        return False
