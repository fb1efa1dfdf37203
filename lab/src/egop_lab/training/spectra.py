"""Spectra as they are recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def subsample(eigenvalues: Sequence[float], leading: int = 100, spaced: int = 200) -> dict[str, Any]:
    """Select few enough eigenvalues to record: the leading ones, one more, and evenly spaced ones, indexed from 1."""
    size = len(eigenvalues)
    even = np.linspace(1, size, min(spaced, size)).round().astype(int).tolist()
    index = sorted({*range(1, min(leading + 1, size) + 1), *even})
    return {"dimension": size, "index": index, "eigenvalues": [eigenvalues[k - 1] for k in index], "even": even}


def decay(result: Mapping[str, Any], index: Sequence[int]) -> list[float]:
    """Return λ_k/λ₁ for those of the indices that were recorded."""
    by_index = dict(zip(result["index"], result["eigenvalues"], strict=True))
    return [by_index[k] / by_index[1] for k in index if k in by_index]
