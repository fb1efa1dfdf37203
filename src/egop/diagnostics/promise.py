"""The predictor that the lab's study of prediction chose, from the spectra of draws."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from egop.basis import Reparameterization, Spectrum

__all__ = ["promise"]


def promise(basis: Reparameterization | None) -> float | None:
    """log(density of the leading eigenvectors / share of the directions that matter), in proportion to entries.

    Large where few directions matter and these are not the axes. The eigenvalues are divided by those that white noise
    of as many draws has. None without a spectrum to look at.
    """
    spectra: Mapping[str, Spectrum] = {} if basis is None else basis.spectrum
    found = [(basis[name].block.size, _of(spectrum)) for name, spectrum in spectra.items()] if basis is not None else []
    known = [(size, value) for size, value in found if value is not None]
    total = sum(size for size, _ in known)
    return sum(size * value for size, value in known) / total if total else None


def _of(spectrum: Spectrum) -> float | None:
    values = spectrum.eigenvalues.double().cpu()
    leading = spectrum.effective_dimension()
    if leading == 0 or len(values) == 1:
        return None
    noise = _noise(spectrum.samples, len(values))
    roots = (values / noise.clamp_min(float(noise[0]) * 1e-6)).clamp_min(0).sqrt()
    share = float(roots.sum() / roots.max()) / len(values)
    return math.log(float(spectrum.density[:leading].mean()) / share)


def _noise(draws: int, width: int) -> Tensor:
    """The eigenvalues of a Gram matrix of white noise, descending."""
    rows = torch.randn(draws, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.zeros(width, dtype=torch.float64)
    values[: min(draws, width)] = torch.linalg.svdvals(rows).square() / draws
    return values
