"""The size of EGOP's updates: their root mean square over the learning rate, for a square matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from egop.basis import has_norm_layers
from egop.distributed import to_full
from egop.numerics import check_nonnegative
from egop.optim import correct_bias
from egop.recipes.adamw import MOMENTS
from egop.recipes.choice import Matrix

# How these were chosen: docs/reproduction/adamws-rate.md.
_ADAM_FACTOR = 1.6  # of updates that are as large as Adam's direction (update_rms="adam")
_NORMALIZED_RMS = 0.4
_OVERLAPPING_GAIN = 3.0  # least factor of other updates of convolutions whose windows overlap


def choose_update_rms(module: nn.Module | None) -> float | str:
    """Return the ``update_rms`` that suits a module: a number if it has normalization layers or is not known."""
    return _NORMALIZED_RMS if module is None or has_norm_layers(module) else "adam"


def check_update_rms(update_rms: Any) -> None:
    """Raise an error unless this is a number that is not negative, or "adam"."""
    if not isinstance(update_rms, str):
        check_nonnegative("update_rms", update_rms)
    elif update_rms != "adam":
        raise ValueError(f"Invalid update_rms value: {update_rms!r}. Must be a number or 'adam'.")


def make_size_settings(update_rms: Any, matrix: Matrix) -> dict[str, Any]:
    """Return PolarAdam's settings for a matrix, given an ``update_rms`` of EGOP."""
    check_update_rms(update_rms)
    if update_rms == "adam":
        return {"update_rms": _ADAM_FACTOR * matrix.gain, "adam_sized": True}
    gain = max(_OVERLAPPING_GAIN, matrix.gain) if matrix.overlaps else matrix.gain
    return {"update_rms": update_rms * gain, "adam_sized": False}


def describe_sizes(found: Iterable[float | str]) -> str:
    """Describe the sizes of updates of some groups on one line."""
    kinds = list(dict.fromkeys(found))
    sizes = [
        f"{_ADAM_FACTOR} times as large as Adam's" if each == "adam" else f"a root mean square of {each:g} times lr"
        for each in kinds
    ]
    advice = "; if the model normalizes by functions, pass update_rms=0.4" if kinds == ["adam"] else ""
    return f"updates of square matrices: {' and '.join(sizes)}{advice}"


def measure_rms(group: Mapping[str, Any], matrix: Matrix, state: Mapping[str, Tensor]) -> float:
    """Return the root mean square of an update over the learning rate; estimated, if it follows Adam's."""
    settings = make_size_settings(group["update_rms"], matrix)
    rms = float(settings["update_rms"])
    if not settings["adam_sized"]:
        return rms
    mean, square = (to_full(state[name]).double() for name in MOMENTS)
    size = mean.div(square.sqrt().add(float(group["eps"]))).square().mean().sqrt()
    return rms * float(size) * correct_bias(max(1, int(state["step"])), group["betas"], nesterov=False)
