"""How many points are taken at once: one, or as many as memory holds where ``torch.func`` gives the same gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from egop.estimation.gradients import Gradients, Points, looped, tensors_of, vmapped
from egop.estimation.objective import Objective
from egop.numerics import full_precision, has_drawn_outside_torch

logger = logging.getLogger("egop")

Sampling = Literal["auto", "loop", "vmap"]

# What one chunk of points may hold in values, gradients and activations on the CPU. More would be slower there: larger
# tensors come from fresh pages of memory every time, and leave the cache.
CHUNK_BYTES = 128 * 2**20
# On a GPU a chunk may take this share of the memory that is free, and no more than so many bytes.
GPU_SHARE, GPU_BYTES = 0.25, 16 * 2**30
# Beyond this many points at once the products are large enough to fill any machine; a loop gains nothing by many.
CHUNK_POINTS, LOOP_POINTS = 4096, 256

# From so many bytes of activations on, convolutions at one point after the other are faster on the CPU.
CONVOLVED_BYTES = 512 * 2**10
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def memory_for_chunks(objective: Objective) -> int:
    """What one chunk may take on the objective's device."""
    device = next(iter(objective.parameters.values())).device
    if device.type != "cuda":
        return CHUNK_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(GPU_BYTES, int(GPU_SHARE * free))


def choose(
    objective: Objective, names: Sequence[str], point: Points, method: Sampling, chunk_bytes: int
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
    check_finite(names, *plain, first_draw=0)
    held = sum(value.nbytes for value in point.values.values())
    batch = sum(tensor.nbytes for tensor in tensors_of(point.batches[0]))
    one_by_one = False, min(LOOP_POINTS, _chunk_points(chunk_bytes, 2 * held + batch))
    if method == "loop" or (method == "auto" and _convolves_slowly(objective, sum(saved.values()))):
        return one_by_one
    reason = _random_outside_torch(point.seeds[0]) or _written(objective.module, buffers)
    if reason is None:
        try:
            with full_precision():  # TF32 has too few digits to tell rounding from an error
                right = _vmap_is_right(objective, names, point)
            if right:
                return True, _chunk_points(chunk_bytes, 3 * held + batch + 2 * sum(saved.values()))
            reason = "it does not give this model's gradients"
        except Exception as error:  # vmap refuses in many ways; the loop then shows whether the model is at fault
            if method == "vmap":
                raise
            reason = first_line(error)
    if method == "vmap":
        raise RuntimeError(f"Gradients cannot be sampled with torch.func.vmap: {reason}. Use sampling='auto'.")
    say_why(reason)
    return one_by_one


def _convolves_slowly(objective: Objective, saved: int) -> bool:
    """Whether a point takes longer among many: torch does convolutions with many kernels group by group on the CPU."""
    parts = () if objective.module is None else objective.module.modules()
    on_cpu = next(iter(objective.parameters.values())).device.type == "cpu"
    return on_cpu and saved > CONVOLVED_BYTES and any(isinstance(part, _CONVOLUTIONS) for part in parts)


def _chunk_points(available: int, per_point: int) -> int:
    return max(1, min(CHUNK_POINTS, available // (per_point + 1)))


def say_why(reason: str) -> None:
    """Log why points are taken one at a time."""
    logger.warning("egop samples gradients one at a time: torch.func.vmap cannot be used here (%s).", reason)


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


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
    if has_drawn_outside_torch(seed):
        return "the loss draws random numbers from Python or numpy, which all points would share"
    return None


def check_finite(names: Sequence[str], losses: Tensor, gradients: Sequence[Tensor], first_draw: int) -> None:
    """Raise an error that names the first draw whose loss or gradient is not finite."""
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
