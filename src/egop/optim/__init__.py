"""Base optimizers that see a weight as a matrix: ordinary torch optimizers, to be used with a rotation or without.

``Sign``, ``Sinkhorn`` and ``PolarAdam``. A new one is a subclass of ``MatrixOptimizer``: a map of matrices.
"""

from egop.optim.matrices import MatrixOptimizer, recorded_settings, rms_scales
from egop.optim.polar_adam import PolarAdam, polar
from egop.optim.signs import Sign
from egop.optim.sinkhorn import Sinkhorn

__all__ = ["MatrixOptimizer", "PolarAdam", "Sign", "Sinkhorn", "polar", "recorded_settings", "rms_scales"]
