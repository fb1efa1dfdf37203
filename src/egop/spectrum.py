"""Spectrum: the eigenvalues of a block's EGOP matrix, and what they say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a block's EGOP matrix, descending, and what they say.

    Attributes:
        eigenvalues: λ₁ ≥ λ₂ ≥ … ≥ 0, in float64.
        density: β_k = ‖v_k‖₁² / d of each eigenvector, between 1/d (a coordinate axis) and 1 (all entries alike).
        samples: how many gradients they were estimated from.
    """

    eigenvalues: Tensor
    density: Tensor
    samples: int

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
