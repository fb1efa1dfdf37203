"""Spectrum: the eigenvalues of a block's EGOP matrix, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The leading directions are those that hold this share of the trace, where nothing else is said.
LEADING = 0.9


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a block's EGOP matrix, descending, and what they say.

    Attributes:
        eigenvalues: λ₁ ≥ λ₂ ≥ … ≥ 0, in float64.
        density: β_k = ‖v_k‖₁² / d of each eigenvector, between 1/d (a coordinate axis) and 1 (all entries alike).
        samples: how many gradients they were estimated from.
        stability: how far two bases, each from half of the samples, agree: the mean squared cosine between their
            leading subspaces of k = ``effective_dimension(0.9)`` directions (the smaller k of both halves), from 0 to
            1. Independent subspaces would agree to about k/d. None when it was not asked for, or there is nothing to
            compare. A basis of two sides has the product of both sides' agreements.

    Example:
        >>> loss = lambda theta: (torch.tensor([1.0, 0.1, 0.01]) * theta.square()).sum()
        >>> objective = egop.Objective.from_function(loss, {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), samples=1000, progress=False)
        >>> spectrum = basis.spectrum["theta"]
        >>> round(spectrum.stable_rank, 1), spectrum.effective_dimension(0.9)
        (1.1, 1)
    """

    eigenvalues: Tensor
    density: Tensor
    samples: int
    stability: float | None = None

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


def effective_dimension(eigenvalues: Tensor, fraction: float) -> int:
    """The smallest k for which the k first of these eigenvalues, descending, hold a fraction of their sum."""
    if not 0 < fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction!r}. Must be above 0 and at most 1.")
    held = eigenvalues.double().cumsum(0)
    if not held[-1] > 0:
        return 0
    # Rounding in the sums must not ask for one more direction.
    return int((held < fraction * held[-1] * (1 - 1e-12)).sum()) + 1


def agreement(
    one: Sequence[tuple[Tensor, Tensor]], other: Sequence[tuple[Tensor, Tensor]], fraction: float = LEADING
) -> float | None:
    """How far the leading subspaces of two estimates agree, see :attr:`Spectrum.stability`.

    Args:
        one: eigenvalues, descending, and eigenvectors (columns) of each side; of a stack of matrices stacked.
        other: the same of the other estimate.
        fraction: the share of the trace that the leading directions hold.

    Returns:
        The mean squared cosine, over several sides their product (which is that of the product of the subspaces), over
        a stack the mean; None when there are no sides, or only zero gradients.
    """
    result = 1.0
    for side in zip(one, other, strict=True):
        stacks = [
            (values.reshape(-1, values.shape[-1]), vectors.reshape(-1, *vectors.shape[-2:])) for values, vectors in side
        ]
        agreements = [_agreement(*pair, fraction) for pair in zip(*stacks[0], *stacks[1], strict=True)]
        known = [value for value in agreements if value is not None]
        if not known:
            return None
        result *= sum(known) / len(known)
    return result if one else None


def _agreement(
    values: Tensor, vectors: Tensor, other_values: Tensor, other_vectors: Tensor, fraction: float
) -> float | None:
    k = min(effective_dimension(values, fraction), effective_dimension(other_values, fraction))
    if k == 0:
        return None
    cosines = vectors[:, :k].double().mT @ other_vectors[:, :k].double()
    return float(torch.clamp(cosines.square().sum() / k, 0, 1))
