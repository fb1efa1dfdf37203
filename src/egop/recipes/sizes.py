"""The size of EGOP's updates: their root mean square over the learning rate, for a square matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from egop.basis import has_norm_layers
from egop.distributed import to_full
from egop.recipes.adamw import MOMENTS

ADAM_FACTOR = 1.6  # of an update that is as large as Adam's direction (update_rms="adam")
_NORMALIZED_RMS = 0.4


def choose_update_rms(module: nn.Module | None) -> float | str:
    """Return the ``update_rms`` that suits a module: a number if it has normalization layers or is not known."""
    return _NORMALIZED_RMS if module is None or has_norm_layers(module) else "adam"


def size_settings(update_rms: Any, gain: float = 1.0) -> dict[str, Any]:
    """Return PolarAdam's settings for an ``update_rms`` of EGOP, and a gain."""
    if is_adams := update_rms == "adam":
        update_rms = ADAM_FACTOR
    return {"update_rms": gain * update_rms, "adam_sized": is_adams}


def measure_rms(group: Mapping[str, Any], state: Mapping[str, Tensor]) -> float:
    """Return the root mean square of an update over learning rate and gain; estimated, if it follows Adam's."""
    if group["update_rms"] != "adam":
        return float(group["update_rms"])
    mean, square = (to_full(state[name]).double() for name in MOMENTS)
    size = mean.div(square.sqrt().add(float(group["eps"]))).square().mean().sqrt()
    return ADAM_FACTOR * min(1.0, float(size))
