"""Spectrum: the eigenvalues of a block's EGOP matrix, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from egop.formatting import pluralize
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By default, the leading directions are those that hold this fraction of the trace.
LEADING = 0.9
# A spectrum is supported by its draws if at least this fraction of it is not chance.
_SUPPORTED = 0.5


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The eigenvalues of a block's EGOP matrix, in descending order.

    Attributes:
        eigenvalues: λ₁ ≥ λ₂ ≥ … ≥ 0, in float64.
        density: β_k = ‖v_k‖₁² / d of each eigenvector, from 1/d (a coordinate axis) to 1 (all entries equal in size).
        samples: the number of gradients they were estimated from, regardless of how many rows each has.
        stability: how well two bases agree that are each estimated from half of the draws, from 0 to 1: the fraction
            of one half's squared gradients that the leading directions of the other hold, relative to their own, in the
            mean of both directions. For a basis with two sides, the product of both. None if it was not requested or
            there is nothing to compare.
        chance: the stability of unrelated bases, about k/d for k leading directions.
        reliability: the fraction of the difference from a flat spectrum that is not chance, judged by how much the
            draws differ: about 0 for white noise with any number of draws, towards 1 with enough draws otherwise.
            None with a single draw, or if only leading eigenvalues are known.
        surprise: how far the spectrum is from that of white noise, in standard deviations of the latter.

    Example:
        >>> loss = lambda theta: (torch.tensor([1.0, 0.1, 0.01]) * theta.square()).sum()
        >>> objective = egop.Objective.from_function(loss, {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), samples=1000, progress=False)
        >>> spectrum = basis.spectrum["theta"]
        >>> round(spectrum.stable_rank, 1), spectrum.effective_dimension(0.9)
        (1.1, 1)
        >>> spectrum
        Spectrum(3 eigenvalues, stable rank 1.1, 90 % in 1, 1000 draws)
    """

    eigenvalues: Tensor
    density: Tensor
    samples: int
    stability: float | None = None
    chance: float | None = None
    reliability: float | None = None
    surprise: float | None = None

    @property
    def is_supported(self) -> bool:
        """True unless the spectrum is known to be mostly chance; then the true stable rank is higher."""
        return self.reliability is None or self.reliability >= _SUPPORTED

    @property
    def decay(self) -> Tensor:
        """λ_k / λ₁; all zero if every gradient was zero."""
        top = self.eigenvalues[0]
        return self.eigenvalues / top if top > 0 else self.eigenvalues

    @property
    def stable_rank(self) -> float:
        """Σ √λ_k / √λ₁: about how many directions matter, from 1 to d (0 if all gradients were zero)."""
        roots = self.eigenvalues.sqrt()
        return float(roots.sum() / roots[0]) if roots[0] > 0 else 0.0

    def effective_dimension(self, fraction: float = LEADING) -> int:
        """Return the smallest k whose leading eigenvalues hold this fraction of the trace (0 without gradients).

        If only leading eigenvalues are known, their sum counts as the trace.
        """
        return effective_dimension(self.eigenvalues, fraction)

    def __repr__(self) -> str:
        few = "" if self.is_supported else ": too few, the stable rank is a lower bound"
        return (
            f"Spectrum({pluralize(len(self.eigenvalues), 'eigenvalue')}, stable rank {self.stable_rank:.1f}, "
            f"{LEADING:.0%} in {self.effective_dimension()}, {pluralize(self.samples, 'draw')}{few})".replace("%", " %")
        )

    def plot(self) -> Figure:
        """Plot the eigenvalues relative to the largest one."""
        return plot_spectra({"spectrum": self.eigenvalues.tolist()})


def effective_dimension(eigenvalues: Tensor, fraction: float) -> int:
    """Return the smallest k for which the first k of these descending eigenvalues hold a fraction of their sum."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction!r}. Must be above 0 and at most 1.")
    held = eigenvalues.double().cumsum(0)
    if not held[-1] > 0:
        return 0
    # The tolerance keeps rounding in the sums from adding a direction.
    return int((held < fraction * held[-1] * (1 - 1e-12)).sum()) + 1


@dataclass(frozen=True)
class HalfComparison:
    """A comparison of two estimates of one block, each from half of the draws.

    Attributes:
        stability: see :attr:`Spectrum.stability`.
        chance: see :attr:`Spectrum.chance`.
        held_out: the squared gradients of one half along the eigenvectors of the other, as fractions of the total and
            in the mean of both directions: a spectrum that chance does not make steeper. Made to descend by averaging
            neighbors.
        one_norm: the 1-norm of the held-out root-mean-square gradient in the new coordinates, relative to the original
            ones: 1 for white noise, at least 1 if the axes already are eigenvectors. None if only leading directions
            are known.
    """

    stability: float
    chance: float
    held_out: Tensor
    one_norm: float | None


def compare_halves(
    one: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]], fraction: float = LEADING
) -> HalfComparison | None:
    """Compare two estimates of one block; several sides are compared as their Kronecker product.

    Args:
        one: descending eigenvalues and eigenvectors (columns) of each side, stacked for a stack of matrices.
        other: the same from the other half.
        fraction: the fraction of the trace that the leading directions hold.

    Returns:
        The comparison, or None if there are no sides or all gradients were zero.
    """
    sides = []
    for pair in zip(one, other, strict=True):
        stacks = [
            (values.reshape(-1, values.shape[-1]), vectors.reshape(-1, *vectors.shape[-2:])) for values, vectors in pair
        ]
        sides.append([_compare_side(*matrices, fraction) for matrices in zip(*stacks[0], *stacks[1], strict=True)])
    known = [[side for side in each if side is not None] for each in zip(*sides, strict=True)]
    matrices = [_combine_sides(each) for each in known if len(each) == len(sides)]
    if not matrices:
        return None
    count = len(matrices)
    norms = [matrix.one_norm for matrix in matrices if matrix.one_norm is not None]
    return HalfComparison(
        sum(matrix.stability for matrix in matrices) / count,
        sum(matrix.chance for matrix in matrices) / count,
        torch.cat([matrix.held_out for matrix in matrices]).sort(descending=True).values / count,
        sum(norms) / len(norms) if norms else None,
    )


def _combine_sides(sides: Sequence[HalfComparison]) -> HalfComparison:
    product, *others = sides
    for side in others:
        norm = None if product.one_norm is None or side.one_norm is None else product.one_norm * side.one_norm
        held_out = torch.outer(product.held_out, side.held_out).flatten().sort(descending=True).values
        product = HalfComparison(product.stability * side.stability, product.chance * side.chance, held_out, norm)
    return product


def _compare_side(
    values: Tensor, vectors: Tensor, other_values: Tensor, other_vectors: Tensor, fraction: float
) -> HalfComparison | None:
    if not (values.sum() > 0 and other_values.sum() > 0):
        return None
    shares = [each.double() / each.sum() for each in (values, other_values)]
    bases = [each.double() for each in (vectors, other_vectors)]
    cosines = (bases[0].mT @ bases[1]).square()
    held = [cosines @ shares[1], shares[0] @ cosines]
    dimension = len(vectors)
    leading = [effective_dimension(share, fraction) for share in shares]
    own = [float(share[:k].sum()) for share, k in zip(shares, leading, strict=True)]
    agreement = [float(each[:k].sum()) / most for each, k, most in zip(held, leading, own, strict=True)]
    chances = [k / dimension / most for k, most in zip(leading, own, strict=True)]
    held_out = _make_descending((held[0] + held[1]) / 2)
    norm = None
    if vectors.shape[-1] == dimension:
        axes = (bases[0].square() @ shares[0] + bases[1].square() @ shares[1]) / 2
        norm = float(held_out.sqrt().sum() / axes.sqrt().sum())
    return HalfComparison(min(1.0, sum(agreement) / 2), min(1.0, sum(chances) / 2), held_out, norm)


def _make_descending(values: Tensor) -> Tensor:
    """Return the nearest descending values: average ascending neighbors until none are left."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        total, count = value, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            previous, size = pools.pop()
            total, count = total + previous, count + size
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return torch.tensor(means, dtype=values.dtype, device=values.device)
