"""Methods: how a basis follows a Gram matrix, for many at once and without a word to the host.

All functions take matrices with any leading dimensions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.distributed import processes
from egop.numerics import (
    ROUNDING,
    SMALL_NETWORK_BYTES,
    eigenbasis,
    exact_products,
    leading_eigenbasis,
    noise_floor,
    orthonormalize,
    scale_near_one,
)

_PROBES = 4  # vectors that a new basis is tried on
_SHIFT = 1e-6  # how much of the old basis, relative to the mean eigenvalue, keeps directions without gradient in place

# A first basis that is wider has no more than so many eigenvectors: all of them would take minutes (see `first`).
WIDE, LEADING = 2048, 256

# What is over sooner is not announced.
_PATIENCE = 5.0
# Seconds for a matrix of n columns, roughly: a full decomposition takes so many times n³, a partial one n² times rank.
_FULL, _PARTIAL = 1e-10, 3e-10
_FASTER = 10  # than two cores is a GPU

Done = Callable[[], object]  # called after each decomposition, for a progress bar
Renewal = Callable[..., Any]  # of Gram matrices and bases: new bases, and which are sound


@dataclass(frozen=True)
class Method:
    """How bases follow Gram matrices.

    Args:
        first: makes the first basis of a block.
        renewed: makes each that follows.
        anew: makes one from the statistic alone, when someone asks for that.
        beside: whether that may be recorded, and go on beside the training until the next step takes it.
        wide: of Gram matrices wider than this the first basis is of the strongest directions only.
    """

    first: Renewal
    renewed: Renewal
    anew: Renewal
    beside: bool
    wide: float = math.inf

    def seconds(self, matrices: Sequence[Tensor]) -> float:
        """Roughly how long the first bases for these Gram matrices take."""

        def of(matrix: Tensor) -> float:
            width = matrix.shape[-1]
            on_cores = _FULL * width**3 if width <= self.wide else _PARTIAL * width**2 * LEADING
            return on_cores / (_FASTER if matrix.device.type == "cuda" else 1)

        return sum(map(of, matrices))


def power_iteration(gram: Tensor, basis: Tensor) -> Tensor:
    """Take one step of orthogonal iteration towards the eigenvectors of a Gram matrix, strongest first.

    The shift keeps weak directions near the old ones. Directions whose gradient is nothing but rounding stay exactly
    where they are: they are orthonormalized first, so that no error of the others reaches them, and come last.
    """
    with exact_products():  # with fewer digits the weak directions would be drawn anew every time
        image = gram @ basis
        held = (basis * image).sum(-2, keepdim=True)
        noise = ROUNDING * torch.finfo(held.dtype).eps * held.amax(-1, keepdim=True)
        null = (held <= noise) & noise.isfinite()
        shift = _SHIFT * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        columns = torch.where(null, basis, image + shift * basis)
        order = torch.where(null, torch.inf, held).argsort(dim=-1, descending=True, stable=True)
        fresh = orthonormalize(columns.gather(-1, order.expand_as(columns)))
        null_last = null.gather(-1, order).int().argsort(dim=-1, stable=True)
        return fresh.gather(-1, null_last.expand_as(fresh))


def clear_null_space(basis: Tensor, gram: Tensor) -> Tensor:
    """Make the directions without gradient exactly orthogonal to all gradients.

    Args:
        basis: eigenvectors of a Gram matrix, as accurate as that matrix is.
        gram: the Gram matrix of the gradients in this basis, computed from these themselves. Its small entries are
            accurate; in the Gram matrix that the basis comes from they were lost beside the large ones.
    """
    held = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    real = held > ROUNDING * torch.finfo(gram.dtype).eps * held.amax(-2, keepdim=True)
    traces = torch.where(real & ~real.mT, gram / torch.where(real, held, 1), 0)
    with exact_products():
        return orthonormalize((basis - basis @ traces).flip(-1)).flip(-1)


def decomposed(
    gram: Tensor, basis: Tensor, eigenvectors: Callable[[Tensor], Tensor], done: Done | None = None
) -> Tensor:
    """Eigenvectors from scratch, strongest first, matrix by matrix; not finite where that fails."""
    if gram.dim() > 2:
        return torch.stack([decomposed(*pair, eigenvectors, done) for pair in zip(gram, basis, strict=True)])
    try:
        return eigenvectors(gram).to(basis)
    except torch.linalg.LinAlgError:
        return torch.full_like(basis, torch.nan)
    finally:
        if done is not None:
            done()


def renewed(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration and whether it went well; where it did not, the old basis."""
    return checked(power_iteration(gram, basis), basis, gram)


def from_scratch(gram: Tensor, basis: Tensor, done: Done | None = None) -> tuple[Tensor, Tensor]:
    """The eigenvectors and whether they could be found; where not, the old basis."""
    return checked(decomposed(gram, basis, lambda part: eigenbasis(part)[1], done), basis, gram)


def first(gram: Tensor, basis: Tensor, done: Done | None = None) -> tuple[Tensor, Tensor]:
    """The same for a basis to start from: of wide matrices the strongest directions, the others follow by iteration.

    Those that no gradient has had yet come last in any order, so for a layer with few rows nothing is missing.
    """
    if gram.shape[-1] <= WIDE:
        return from_scratch(gram, basis, done)
    return checked(decomposed(gram, basis, lambda part: leading_eigenbasis(part, LEADING), done), basis, gram)


def aligned(image: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The orthonormal factor of ``basis @ image`` and whether it could be found; where not, the old basis.

    A small multiple of the old basis is added: where the rank is smaller than the width, and for dead rows, directions
    stay as near to the old ones as they can, and are not chosen by rounding.
    """
    with exact_products():
        lengths = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
        largest = lengths.amax(-1, keepdim=True)
        some = lengths > noise_floor(image.dtype) * largest
        columns = torch.where(some, image / torch.where(some, lengths, 1), 0)
        columns.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
        fresh = orthonormalize(basis @ columns)
    largest = largest.squeeze((-2, -1))
    nothing, sound = largest == 0, is_sound(fresh, basis) & largest.isfinite()
    return torch.where((sound & ~nothing)[..., None, None], fresh, basis), sound | nothing


def checked(fresh: Tensor, old: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """A new basis where it is sound, else the old one; and whether it is.

    Without any gradient there is nothing to follow: the old basis stays, and that is no failure.
    """
    nothing = gram.diagonal(dim1=-2, dim2=-1).eq(0).all(-1)
    sound = is_sound(fresh, old)
    return torch.where((sound & ~nothing)[..., None, None], fresh, old), sound | nothing


def is_sound(fresh: Tensor, old: Tensor) -> Tensor:
    """Whether a new basis takes a few vectors, the first of the old one, there and back; not if it is not finite."""
    probes = old[..., :_PROBES]
    with exact_products():
        error = fresh @ (fresh.mT @ probes) - probes
    sound: Tensor = torch.linalg.vector_norm(error, dim=(-2, -1)) < torch.finfo(fresh.dtype).eps ** 0.5
    return sound


def off_diagonal(gram: Tensor, basis: Tensor) -> Tensor:
    """How much of a Gram matrix is off the diagonal in this basis, relative to all of it."""
    inside = scale_near_one(basis.mT @ gram @ basis)
    total = torch.linalg.matrix_norm(inside)
    rest = torch.linalg.matrix_norm(inside - inside.diagonal(dim1=-2, dim2=-1).diag_embed())
    return torch.where(total == 0, 0, rest / total)


def together(renewal: Renewal, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Renew bases, those of one width by one call, whatever weights they are of; where that fails, the old ones.

    Args:
        renewal: of Gram matrices and bases.
        pairs: both, stacked.
    """
    alike: dict[Any, list[int]] = {}
    for index, (gram, _) in enumerate(pairs):
        alike.setdefault((gram.shape[1:], gram.dtype, gram.device), []).append(index)
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for indices in alike.values():
        small = sum(pairs[index][0].nbytes for index in indices) <= SMALL_NETWORK_BYTES
        for group in [indices] if small else [[index] for index in indices]:
            grams, bases = (joined(side) for side in zip(*(pairs[index] for index in group), strict=True))
            most = max(1, SMALL_NETWORK_BYTES // grams[0].nbytes)  # more at once would be no faster, and take memory
            parts = [_attempted(renewal, *part) for part in zip(grams.split(most), bases.split(most), strict=True)]
            sizes = [len(pairs[index][0]) for index in group]
            fresh, sound = (joined(side).split(sizes) for side in zip(*parts, strict=True))
            results |= zip(group, zip(fresh, sound, strict=True), strict=True)
    return [results[index] for index in range(len(pairs))]


def joined(stacks: Sequence[Tensor]) -> Tensor:
    """Stacks of matrices as one; a single one is not copied."""
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))


def _attempted(renewal: Renewal, gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """New bases and which are sound; where decompositions raise an error, the old ones."""
    try:
        pair: tuple[Tensor, Tensor] = renewal(gram, basis)
        return pair
    except torch.linalg.LinAlgError:
        if len(gram) == 1:
            return basis.clone(), gram.new_zeros(gram.shape[:-2], dtype=torch.bool)
        parts = [_attempted(renewal, *pair) for pair in zip(gram.split(1), basis.split(1), strict=True)]
        return torch.cat([fresh for fresh, _ in parts]), torch.cat([sound for _, sound in parts])


@contextlib.contextmanager
def announced(widths: Sequence[int], seconds: float) -> Iterator[Done]:
    """Show a progress bar, before the work begins, if it takes long; what is called after each matrix.

    Args:
        widths: of the matrices to decompose.
        seconds: how many all of them take, roughly.
    """
    text = f"First bases: {len(widths)} up to {max(widths, default=0)} wide, about {seconds:.0f} s"
    with tqdm(total=len(widths), desc=text, disable=seconds < _PATIENCE or processes.rank() > 0) as bar:
        yield bar.update


# One step of orthogonal iteration; or all eigenvectors every time, also the first: a basis with some of them would be
# taken for one that has drifted.
ITERATION = Method(first, renewed, from_scratch, beside=True, wide=WIDE)
FROM_SCRATCH = Method(from_scratch, from_scratch, from_scratch, beside=False)
