"""Elementwise GPU kernels in Triton, which comes with torch for GPUs.

Only :mod:`egop.optim.elementwise` imports this; it has the same operations in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["addresses", "apply_updates", "check", "stack", "update_moments"]

_BLOCK = 1024  # entries for each program


@triton.jit
def _at(addresses, number):
    """Return the float32 tensor at a position of the list of addresses, which are multiples of 16."""
    return tl.multiple_of(tl.load(addresses + number), 16).to(tl.pointer_type(tl.float32))


@triton.jit
def _update_moments(
    addresses, stack, out, count, size, fresh, fresh_squares, second, eps, NESTEROV: tl.constexpr, ADAM: tl.constexpr,
    STACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < size
    if STACKED:
        gradient = tl.load(stack + number.to(tl.int64) * size + entries, inside, 0.0).to(tl.float32)
    else:
        gradient = tl.load(_at(addresses, (2 * count if ADAM else count) + number) + entries, inside, 0.0)
    means = _at(addresses, number) + entries
    mean = tl.load(means, inside, 0.0)
    mean += fresh * (gradient - mean)
    tl.store(means, mean, inside)
    result = mean + fresh * (gradient - mean) if NESTEROV else mean
    if ADAM:
        squares = _at(addresses, count + number) + entries
        square = second * tl.load(squares, inside, 0.0) + fresh_squares * gradient * gradient
        tl.store(squares, square, inside)
        result = result / (tl.sqrt_rn(square) + eps)
    tl.store(out + number.to(tl.int64) * size + entries, result, inside)


@triton.jit
def _stack(addresses, out, size, BLOCK: tl.constexpr):
    number = tl.program_id(1)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < size
    tl.store(out + number.to(tl.int64) * size + entries, tl.load(_at(addresses, number) + entries, inside, 0.0), inside)


@triton.jit
def _apply_updates(addresses, updates, scales, kept, size, matrices, area, BLOCK: tl.constexpr):
    number = tl.program_id(1)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < size
    weights = _at(addresses, number) + entries
    update = tl.load(updates + number.to(tl.int64) * size + entries, inside, 0.0).to(tl.float32)
    weight = tl.load(weights, inside, 0.0)
    scale = tl.load(scales + number * matrices + entries // area, inside, 0.0)
    tl.store(weights, tl.load(kept) * weight - scale * update, inside)


def update_moments(
    addresses: Tensor,
    stack: Tensor | None,
    out: Tensor,
    momentum: float,
    second: float | None,
    *,
    nesterov: bool,
    eps: float,
) -> None:
    """Update running means of gradients and write the resulting directions to ``out``, stacked.

    The addresses are those of the means, unless ``second`` is None of the means of squares, and unless the gradients
    are given as a contiguous stack of those too. For the other arguments see
    :meth:`egop.optim.elementwise.MatrixStack.update_moments`.
    """
    count, size = len(out), out[0].numel()
    squares = 0.0 if second is None else second
    numbers = (1 - momentum, 1 - squares, squares, eps)
    with torch.cuda.device_of(out):
        _update_moments[_grid(count, size)](
            addresses, out if stack is None else stack, out, count, size, *numbers,
            nesterov, second is not None, stack is not None, _BLOCK,
        )  # fmt: skip


def stack(addresses: Tensor, out: Tensor) -> None:
    """Write the tensors at these addresses to ``out``, stacked, in its dtype."""
    count, size = len(out), out[0].numel()
    with torch.cuda.device_of(out):
        _stack[_grid(count, size)](addresses, out, size, _BLOCK)


def apply_updates(addresses: Tensor, updates: Tensor, scales: Tensor, kept: Tensor) -> None:
    """Multiply the weights at these addresses by ``kept``, then subtract the updates, matrix by matrix, times scales.

    Updates and scales are contiguous, and every weight has equally many matrices.
    """
    count, size = len(updates), updates[0].numel()
    with torch.cuda.device_of(updates):
        matrices = scales.numel() // count
        _apply_updates[_grid(count, size)](addresses, updates, scales, kept, size, matrices, size // matrices, _BLOCK)


def check(device: torch.device) -> None:
    """Raise an error if the kernels do not work on a device: there may be no compiler, or the GPU may be too old."""
    gradient, mean, square, weight = torch.ones(4, 1, 16, device=device).unbind()
    out = torch.empty_like(gradient).unsqueeze(0)
    update_moments(addresses([mean, square, gradient]), None, out, 0.5, 0.5, nesterov=True, eps=1.0)
    apply_updates(addresses([weight]), out, torch.full((1,), 2.0, device=device), torch.ones((), device=device))
    if not bool((weight == 0).all()):  # 1 - 2 · 1 / (1 + 1)
        raise RuntimeError(f"a kernel returned {weight.tolist()} instead of zeros")


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the addresses of tensors, on their device."""
    pointers = torch.tensor([tensor.data_ptr() for tensor in tensors], device="cpu")
    return pointers.to(tensors[0].device, non_blocking=True)


def _grid(count: int, size: int) -> tuple[int, int]:
    return triton.cdiv(size, _BLOCK), count
