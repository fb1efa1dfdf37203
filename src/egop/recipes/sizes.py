"""The size of EGOP's updates: their root mean square over the learning rate, for a square matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from egop.basis import has_norm_layers
from egop.distributed import to_full
from egop.recipes.adamw import MOMENTS
from egop.recipes.choice import Matrix

# How these were chosen: docs/reproduction/adamws-rate.md.
ADAM_FACTOR = 1.6  # of updates that are as large as Adam's direction (update_rms="adam")
_NORMALIZED_RMS = 0.4
_OVERLAPPING_GAIN = 3.0  # least factor of other updates of convolutions whose windows overlap


def choose_update_rms(module: nn.Module | None) -> float | str:
    """Return the ``update_rms`` that suits a module: a number if it has normalization layers or is not known."""
    return _NORMALIZED_RMS if module is None or has_norm_layers(module) else "adam"


def size_settings(update_rms: Any, matrix: Matrix) -> dict[str, Any]:
    """Return PolarAdam's settings for a matrix, given an ``update_rms`` of EGOP."""
    if update_rms == "adam":
        return {"update_rms": ADAM_FACTOR * matrix.gain, "adam_sized": True}
    gain = max(_OVERLAPPING_GAIN, matrix.gain) if matrix.overlaps else matrix.gain
    return {"update_rms": update_rms * gain, "adam_sized": False}


def measure_rms(group: Mapping[str, Any], matrix: Matrix, state: Mapping[str, Tensor]) -> float:
    """Return the root mean square of an update over the learning rate; estimated, if it follows Adam's."""
    settings = size_settings(group["update_rms"], matrix)
    rms = float(settings["update_rms"])
    if not settings["adam_sized"]:
        return rms
    mean, square = (to_full(state[name]).double() for name in MOMENTS)
    size = mean.div(square.sqrt().add(float(group["eps"]))).square().mean().sqrt()
    return rms * min(1.0, float(size))
