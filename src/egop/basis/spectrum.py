"""Spectrum: the eigenvalues of a block's EGOP matrix, and what they say."""

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

# The leading directions are those that hold this share of the trace, where nothing else is said.
LEADING = 0.9
# A spectrum of which less than this share is not chance is not supported by its draws.
SUPPORTED = 0.5


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The eigenvalues of a block's EGOP matrix, descending, and what they say.

    Attributes:
        eigenvalues: λ₁ ≥ λ₂ ≥ … ≥ 0, in float64.
        density: β_k = ‖v_k‖₁² / d of each eigenvector, between 1/d (a coordinate axis) and 1 (all entries alike).
        samples: how many gradients they were estimated from: draws, however many rows each of them has.
        stability: how far two bases, each from half of the draws, agree: what the leading directions of one half hold
            of the other half's squared gradients, over what they hold of their own; the mean of both ways, from 0 to
            1. None when it was not asked for, or there is nothing to compare. A basis of two sides has the product of
            both sides' agreements.
        chance: what the stability of unrelated bases would be, about k/d for k leading directions.
        reliability: which share of the difference from a flat spectrum is not chance, from how much one draw differs
            from another: about 0 for white noise, however many draws, and towards 1 with enough draws where there is
            something to find. None with one draw, and where only leading eigenvalues are known.
        surprise: how far the spectrum is from that of white noise, in the latter's standard deviations.

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
        """Whether it is more than chance, as far as that is known; if not, the true stable rank is higher."""
        return self.reliability is None or self.reliability >= SUPPORTED

    @property
    def decay(self) -> Tensor:
        """λ_k / λ₁; all zero when every gradient was zero."""
        top = self.eigenvalues[0]
        return self.eigenvalues / top if top > 0 else self.eigenvalues

    @property
    def stable_rank(self) -> float:
        """Σ √λ_k / √λ₁: about how many directions matter, from 1 to d (0 when all gradients were zero)."""
        roots = self.eigenvalues.sqrt()
        return float(roots.sum() / roots[0]) if roots[0] > 0 else 0.0

    def effective_dimension(self, fraction: float = LEADING) -> int:
        """The smallest k whose leading eigenvalues hold this fraction of the trace (0 when all gradients were zero).

        Where only some leading eigenvalues are known, the trace is the sum of those.
        """
        return effective_dimension(self.eigenvalues, fraction)

    def __repr__(self) -> str:
        """In a line, without the numbers themselves."""
        few = "" if self.is_supported else ": too few, the stable rank is a lower bound"
        return (
            f"Spectrum({pluralize(len(self.eigenvalues), 'eigenvalue')}, stable rank {self.stable_rank:.1f}, "
            f"{LEADING:.0%} in {self.effective_dimension()}, {pluralize(self.samples, 'draw')}{few})".replace("%", " %")
        )

    def plot(self) -> Figure:
        """Plot the eigenvalues relative to the largest one."""
        return plot_spectra({"spectrum": self.eigenvalues.tolist()})


def effective_dimension(eigenvalues: Tensor, fraction: float) -> int:
    """The smallest k for which the k first of these eigenvalues, descending, hold a fraction of their sum."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction!r}. Must be above 0 and at most 1.")
    held = eigenvalues.double().cumsum(0)
    if not held[-1] > 0:
        return 0
    # Rounding in the sums must not ask for one more direction.
    return int((held < fraction * held[-1] * (1 - 1e-12)).sum()) + 1


@dataclass(frozen=True)
class Halves:
    """What two estimates of one block, each from half of the draws, say of each other.

    Attributes:
        stability: see :attr:`Spectrum.stability`.
        chance: see :attr:`Spectrum.chance`.
        held_out: the squared gradients of one half along the eigenvectors of the other, the mean of both ways, in
            shares of the whole: a spectrum that chance does not make steeper. It descends, by averages of neighbours.
        one_norm: the 1-norm of the root-mean-square gradient in the new coordinates, held out, over that in the old
            ones. 1 in white noise, 1 or more where the axes are eigenvectors already. None where only leading
            directions are known.
    """

    stability: float
    chance: float
    held_out: Tensor
    one_norm: float | None

    @property
    def stable_rank(self) -> float:
        """Σ √λ_k / √λ₁ of what is held out."""
        roots = self.held_out.sqrt()
        return float(roots.sum() / roots[0])


def compare(
    one: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]], fraction: float = LEADING
) -> Halves | None:
    """Compare two estimates of one block.

    Args:
        one: eigenvalues, descending, and eigenvectors (columns) of each side; of a stack of matrices stacked.
        other: the same of the other estimate.
        fraction: the share of the trace that the leading directions hold.

    Returns:
        What they say of each other, over several sides that of their Kronecker product; None when there are no sides,
        or only zero gradients.
    """
    sides = []
    for pair in zip(one, other, strict=True):
        stacks = [
            (values.reshape(-1, values.shape[-1]), vectors.reshape(-1, *vectors.shape[-2:])) for values, vectors in pair
        ]
        sides.append([_compare(*matrices, fraction) for matrices in zip(*stacks[0], *stacks[1], strict=True)])
    known = [[side for side in each if side is not None] for each in zip(*sides, strict=True)]
    matrices = [_product(each) for each in known if len(each) == len(sides)]
    if not matrices:
        return None
    count = len(matrices)
    norms = [matrix.one_norm for matrix in matrices if matrix.one_norm is not None]
    return Halves(
        sum(matrix.stability for matrix in matrices) / count,
        sum(matrix.chance for matrix in matrices) / count,
        torch.cat([matrix.held_out for matrix in matrices]).sort(descending=True).values / count,
        sum(norms) / len(norms) if norms else None,
    )


def _product(sides: Sequence[Halves]) -> Halves:
    """The same of the Kronecker product of all sides."""
    first, *others = sides
    for side in others:
        norm = None if first.one_norm is None or side.one_norm is None else first.one_norm * side.one_norm
        held_out = torch.outer(first.held_out, side.held_out).flatten().sort(descending=True).values
        first = Halves(first.stability * side.stability, first.chance * side.chance, held_out, norm)
    return first


def _compare(
    values: Tensor, vectors: Tensor, other_values: Tensor, other_vectors: Tensor, fraction: float
) -> Halves | None:
    if not (values.sum() > 0 and other_values.sum() > 0):
        return None
    shares = [each.double() / each.sum() for each in (values, other_values)]
    bases = [each.double() for each in (vectors, other_vectors)]
    cosines = (bases[0].mT @ bases[1]).square()
    held = [cosines @ shares[1], shares[0] @ cosines]
    dimension = len(vectors)
    leading = [effective_dimension(share, fraction) for share in shares]
    own = [float(share[:k].sum()) for share, k in zip(shares, leading, strict=True)]
    found = [float(each[:k].sum()) / most for each, k, most in zip(held, leading, own, strict=True)]
    chances = [k / dimension / most for k, most in zip(leading, own, strict=True)]
    held_out = _descending((held[0] + held[1]) / 2)
    norm = None
    if vectors.shape[-1] == dimension:
        axes = (bases[0].square() @ shares[0] + bases[1].square() @ shares[1]) / 2
        norm = float(held_out.sqrt().sum() / axes.sqrt().sum())
    return Halves(min(1.0, sum(found) / 2), min(1.0, sum(chances) / 2), held_out, norm)


def _descending(values: Tensor) -> Tensor:
    """The nearest numbers that do not ascend: neighbours that do are replaced by their mean, until none do."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        total, count = value, 1
        while pools and pools[-1][0] * count < total * pools[-1][1]:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return torch.tensor(means, dtype=values.dtype, device=values.device)
