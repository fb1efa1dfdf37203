"""Base optimizers that treat a weight as a matrix: ``Sign``, ``Sinkhorn`` and ``PolarAdam``.

They are ordinary torch optimizers, to be used with or without a rotation. A new one subclasses ``MatrixOptimizer`` and
defines ``transform``.
"""

from egop.optim.elementwise import MatrixStack
from egop.optim.matrix_optimizer import MatrixOptimizer, rms_scales
from egop.optim.polar_adam import PolarAdam, polar
from egop.optim.polar_adam import correct_bias as correct_bias
from egop.optim.rotated import RotatedPolarAdam
from egop.optim.rotated import measure_rotation as measure_rotation
from egop.optim.sign import Sign
from egop.optim.sinkhorn import Sinkhorn

__all__ = [
    "MatrixOptimizer",
    "MatrixStack",
    "PolarAdam",
    "RotatedPolarAdam",
    "Sign",
    "Sinkhorn",
    "polar",
    "rms_scales",
]
