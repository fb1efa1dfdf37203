"""Eigenbases of Gram matrices: decompositions, power iteration, and renewing many bases at once.

All functions accept matrices with leading batch dimensions. On a GPU only the full decompositions wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.numerics import (
    ROUNDING,
    SMALL_NETWORK_BYTES,
    eigenbasis,
    exact_products,
    is_sound,
    leading_eigenbasis,
    noise_floor,
    orthonormalize,
    power_iteration,
    scale_near_one,
)

_SHIFT = 1e-6  # weight of the old basis in `align`

# For matrices wider than WIDE, `decompose_leading` computes LEADING eigenvectors: all of them would take minutes.
WIDE, LEADING = 2048, 256

Renewal = Callable[..., Any]  # maps Gram matrices and bases to new bases and flags that say which of them are sound


def clear_null_space(basis: Tensor, gram: Tensor) -> Tensor:
    """Make the directions without gradient exactly orthogonal to all gradients.

    Args:
        basis: eigenvectors of a Gram matrix, as accurate as that matrix.
        gram: the Gram matrix of the gradients in this basis, computed from the gradients themselves. Its small entries
            are accurate; in the Gram matrix that was decomposed they were lost next to the large ones.
    """
    held = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    real = held > ROUNDING * torch.finfo(gram.dtype).eps * held.amax(-2, keepdim=True)
    traces = torch.where(real & ~real.mT, gram / torch.where(real, held, 1), 0)
    with exact_products():
        return orthonormalize((basis - basis @ traces).flip(-1)).flip(-1)


def iterate(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Take one power iteration; return the new bases, or the old ones where they are not sound, and which are sound."""
    return _keep_sound(power_iteration(gram, basis), basis, gram)


def decompose(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all eigenvectors from scratch; return the same as :func:`iterate`."""
    return _keep_sound(_decompose_each(gram, basis, lambda part: eigenbasis(part)[1]), basis, gram)


def decompose_leading(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the (for wide matrices: leading) eigenvectors of a first basis; return the same as :func:`iterate`.

    Power iterations find the others later. A layer with fewer rows has no others: directions without any gradient come
    last, in arbitrary order.
    """
    if gram.shape[-1] <= WIDE:
        return decompose(gram, basis)
    leading = _decompose_each(gram, basis, lambda part: leading_eigenbasis(part, LEADING))
    return _keep_sound(leading, basis, gram)


def align(image: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the orthonormal factor of ``basis @ image``; return the same as :func:`iterate`.

    A small multiple of the old basis is added. If the image does not have full rank, the other directions then stay as
    close to the old ones as possible instead of being determined by rounding.
    """
    with exact_products():
        lengths = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        largest = lengths.amax(-1, keepdim=True)
        some = lengths > noise_floor(image.dtype) * largest
        columns = torch.where(some, image / torch.where(some, lengths, 1), 0)
        columns.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
        fresh = orthonormalize(basis @ columns)
    largest = largest.squeeze((-2, -1))
    is_zero, sound = largest == 0, is_sound(fresh, basis) & largest.isfinite()
    return torch.where((sound & ~is_zero)[..., None, None], fresh, basis), sound | is_zero


def off_diagonal_share(gram: Tensor, basis: Tensor) -> Tensor:
    """Return the Frobenius norm of a Gram matrix off the diagonal in this basis, relative to its whole norm."""
    inside = scale_near_one(basis.mT @ gram @ basis)
    total = torch.linalg.matrix_norm(inside)
    rest = torch.linalg.matrix_norm(inside - inside.diagonal(dim1=-2, dim2=-1).diag_embed())
    return torch.where(total == 0, 0, rest / total)


def find_runs(indices: Sequence[int], kinds: Sequence[Any] | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield runs of consecutive indices (of one kind): their places in the sequence, and the indices themselves."""

    def key(pair: tuple[int, int]) -> tuple[int, Any]:
        place, index = pair
        return index - place, None if kinds is None else kinds[place]

    for _, run in groupby(enumerate(indices), key):
        places, members = zip(*run, strict=True)
        yield slice(places[0], places[-1] + 1), slice(members[0], members[-1] + 1)


def renew_in_batches(renewal: Renewal, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Renew bases, with one call for all matrices of the same width.

    Args:
        renewal: computes new bases and which are sound; if it raises ``LinAlgError``, the old bases are kept.
        pairs: stacked Gram matrices and bases.
    """
    by_shape: dict[Any, list[int]] = {}
    for index, (gram, _) in enumerate(pairs):
        by_shape.setdefault((gram.shape[1:], gram.dtype, gram.device), []).append(index)
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for indices in by_shape.values():
        small = sum(pairs[index][0].nbytes for index in indices) <= SMALL_NETWORK_BYTES
        for group in [indices] if small else [[index] for index in indices]:
            grams, bases = (_concatenate(side) for side in zip(*(pairs[index] for index in group), strict=True))
            most = max(1, SMALL_NETWORK_BYTES // grams[0].nbytes)  # larger batches are no faster and take more memory
            parts = [_renew_or_keep(renewal, *part) for part in zip(grams.split(most), bases.split(most), strict=True)]
            sizes = [len(pairs[index][0]) for index in group]
            fresh, sound = (_concatenate(side).split(sizes) for side in zip(*parts, strict=True))
            results |= zip(group, zip(fresh, sound, strict=True), strict=True)
    return [results[index] for index in range(len(pairs))]


def _decompose_each(gram: Tensor, basis: Tensor, eigenvectors: Callable[[Tensor], Tensor]) -> Tensor:
    """Decompose matrix by matrix; the result is NaN where that fails."""
    if gram.dim() > 2:
        return torch.stack([_decompose_each(*pair, eigenvectors) for pair in zip(gram, basis, strict=True)])
    try:
        return eigenvectors(gram).to(basis)
    except torch.linalg.LinAlgError:
        return torch.full_like(basis, torch.nan)


def _keep_sound(fresh: Tensor, old: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return each new basis if it is sound, else the old one, and which are sound.

    If a Gram matrix is zero there is nothing to follow: the old basis stays, and that is not a failure.
    """
    is_zero = gram.diagonal(dim1=-2, dim2=-1).eq(0).all(-1)
    sound = is_sound(fresh, old)
    return torch.where((sound & ~is_zero)[..., None, None], fresh, old), sound | is_zero


def _renew_or_keep(renewal: Renewal, gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    try:
        pair: tuple[Tensor, Tensor] = renewal(gram, basis)
        return pair
    except torch.linalg.LinAlgError:
        if len(gram) == 1:
            return basis.clone(), gram.new_zeros(gram.shape[:-2], dtype=torch.bool)
        parts = [_renew_or_keep(renewal, *pair) for pair in zip(gram.split(1), basis.split(1), strict=True)]
        return torch.cat([fresh for fresh, _ in parts]), torch.cat([sound for _, sound in parts])


def _concatenate(stacks: Sequence[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))  # a single one is not copied
