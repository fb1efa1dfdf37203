r"""The paper's theory as functions: what a spectrum promises, and the constants and bounds that the proofs use.

The docstring of each function names the statement of *Faster Adaptive Optimization via Expected Gradient Outer Product
Reparameterization* that it computes. ``docs/theory.md`` shows how they fit together, and links where a printed one
differs from its proof. ``BallConstrainedAdagrad`` is the optimizer that the guarantees are about.

Arguments have the same meaning everywhere:

====================== =================================================================================================
``egop``               the EGOP matrix :math:`P = \mathbb{E}[\nabla f \nabla f^\top]`; ``egop_norm`` is its norm
``spectrum``           the spectrum of P; ``eigenvalues`` are all d of them, in the order of the coordinates
``dimension``          d; required if a spectrum holds only the leading eigenvalues
``scale``              c, the standard deviation of rho in every direction
``hessian_lipschitz``  H, the Lipschitz constant of the Hessian; 0 for a quadratic
``hessian``            a symmetric matrix; for ``smoothness`` a stack of them may share one set of constants
``hessian_norm``       the largest eigenvalue of the Hessian at the minimum
``gamma``              the error of the quadratic, see :func:`egop_error`; 0 for a quadratic
``diameter``           D, the diameter of the set that contains rho and all iterates
``lr``, ``steps``      the step size :math:`\eta` and the number of steps T
====================== =================================================================================================
"""

from egop_lab.theory.ball_adagrad import BallConstrainedAdagrad
from egop_lab.theory.bounds import (
    density_lower_bound,
    egop_error,
    hessian_upper_bound,
    reparameterized_constants,
    reparameterized_upper_bound,
    smoothness_lower_bound,
    square_root,
)
from egop_lab.theory.closed_forms import (
    data_decay_bound,
    least_squares_egop,
    least_squares_interlacing,
    matrix_factorization_blocks,
    matrix_factorization_curvature,
    matrix_factorization_lipschitz,
    quadratic_egop,
)
from egop_lab.theory.convergence import box_extent, gradient_norm_bound, regret_bound
from egop_lab.theory.kronecker import (
    kronecker_residual,
    kronecker_rotation,
    nearest_kronecker,
    rotation_beyond_kronecker,
)
from egop_lab.theory.ratio import (
    compute_spectrum,
    densities,
    largest_hessian_lipschitz,
    leading_ratio,
    needed_delta,
    smoothness_ratio_bound,
)
from egop_lab.theory.smoothness import SmoothnessSum, smoothness_constants, smoothness_sum_bounds

__all__ = [
    "BallConstrainedAdagrad",
    "SmoothnessSum",
    "box_extent",
    "compute_spectrum",
    "data_decay_bound",
    "densities",
    "density_lower_bound",
    "egop_error",
    "gradient_norm_bound",
    "hessian_upper_bound",
    "kronecker_residual",
    "kronecker_rotation",
    "largest_hessian_lipschitz",
    "leading_ratio",
    "least_squares_egop",
    "least_squares_interlacing",
    "matrix_factorization_blocks",
    "matrix_factorization_curvature",
    "matrix_factorization_lipschitz",
    "nearest_kronecker",
    "needed_delta",
    "quadratic_egop",
    "regret_bound",
    "reparameterized_constants",
    "reparameterized_upper_bound",
    "rotation_beyond_kronecker",
    "smoothness_constants",
    "smoothness_lower_bound",
    "smoothness_ratio_bound",
    "smoothness_sum_bounds",
    "square_root",
]
