"""Spectrum: the eigenvalues of a block's EGOP matrix, and how far they can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from egop.formatting import pluralize
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A spectrum is supported by its draws if at least this fraction of it is not chance.
_SUPPORTED = 0.5


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The eigenvalues of a block's EGOP matrix, in descending order.

    Attributes:
        eigenvalues: λ₁ ≥ λ₂ ≥ … ≥ 0, in float64.
        density: β_k = ‖v_k‖₁² / d of each eigenvector, from 1/d (a coordinate axis) to 1 (all entries equal in size).
        samples: the number of gradients they were estimated from, regardless of how many rows each has.
        reliability: the fraction of the difference from a flat spectrum that is signal, judged by how much the draws
            differ: about 0 for white noise with any number of draws, otherwise approaching 1 with enough draws. None
            with a single draw, or if only leading eigenvalues are known.

    Example:
        >>> loss = lambda theta: (torch.tensor([1.0, 0.1, 0.01]) * theta.square()).sum()
        >>> objective = egop.Objective.from_function(loss, {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), samples=1000, progress=False)
        >>> basis.spectrum["theta"]
        Spectrum(3 eigenvalues, stable rank 1.1, 1000 draws)
    """

    eigenvalues: Tensor
    density: Tensor
    samples: int
    reliability: float | None = None

    @property
    def is_supported(self) -> bool:
        """True unless the spectrum is known to be mostly chance, in which case the true stable rank is higher."""
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

    def __repr__(self) -> str:
        few = "" if self.is_supported else ": too few, the stable rank is a lower bound"
        return (
            f"Spectrum({pluralize(len(self.eigenvalues), 'eigenvalue')}, stable rank {self.stable_rank:.1f}, "
            f"{pluralize(self.samples, 'draw')}{few})"
        )

    def plot(self) -> Figure:
        """Plot the eigenvalues relative to the largest one."""
        return plot_spectra({"spectrum": self.eigenvalues})
