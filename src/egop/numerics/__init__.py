"""Numbers: precision of products, random states, decompositions in float64, sketches, recordings for GPUs.

Whoever decomposes or orthonormalises does so here. Above ``distributed``: outer products add up over processes.
"""

from egop.numerics import linalg, precision
from egop.numerics.checks import check_fraction, check_not_negative, check_not_text, check_positive
from egop.numerics.linalg import (
    OuterProducts,
    eigenbasis,
    fix_signs,
    identity,
    near_one,
    noise_floor,
    random_orthonormal,
)
from egop.numerics.precision import exact_products, full_precision, in_normal_mode, without_autocast
from egop.numerics.randomness import RandomStream, drawn_outside_torch, random_state, seed_everything, set_random_state
from egop.numerics.recordings import SMALL, Aside, InPlace, Recorder, Replayed, copy_all, in_branches, side_by_side
from egop.numerics.sketch import RowSketch

__all__ = [
    "SMALL",
    "Aside",
    "InPlace",
    "OuterProducts",
    "RandomStream",
    "Recorder",
    "Replayed",
    "RowSketch",
    "check_fraction",
    "check_not_negative",
    "check_not_text",
    "check_positive",
    "copy_all",
    "drawn_outside_torch",
    "eigenbasis",
    "exact_products",
    "fix_signs",
    "full_precision",
    "identity",
    "in_branches",
    "in_normal_mode",
    "linalg",
    "near_one",
    "noise_floor",
    "precision",
    "random_orthonormal",
    "random_state",
    "seed_everything",
    "set_random_state",
    "side_by_side",
    "without_autocast",
]
