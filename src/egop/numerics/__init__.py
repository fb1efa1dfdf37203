"""Numerical tools: decompositions in float64, sketches, precision of products, random states, CUDA graphs.

All decompositions and orthonormalizations are here. The other packages of egop may use everything imported below.
"""

from egop.numerics.checks import check_fraction, check_nonnegative, check_number, check_positive_int
from egop.numerics.cuda_graphs import (
    SMALL_NETWORK_BYTES,
    GraphedFunction,
    InPlaceGraph,
    Recorder,
    SideStream,
    copy_all,
    run_in_branches,
    stack_tensors,
)
from egop.numerics.eigen import ROUNDING, eigenbasis, leading_eigenbasis, noise_floor
from egop.numerics.iteration import is_sound, power_iteration
from egop.numerics.orthonormal import (
    identity_matrices,
    orthonormality_error,
    orthonormalize,
    random_orthonormal,
    scale_near_one,
)
from egop.numerics.outer_products import OuterProducts
from egop.numerics.precision import exact_products, full_precision, outside_inference_mode, without_autocast
from egop.numerics.randomness import (
    RandomStream,
    get_random_state,
    has_drawn_outside_torch,
    seed_everything,
    set_random_state,
)
from egop.numerics.sketch import RowSketch
