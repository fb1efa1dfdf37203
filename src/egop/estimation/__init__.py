"""Estimation of a basis: draw points from rho, sample gradients there and decompose them (the paper's Algorithm 1).

To add a distribution of points, subclass ``Distribution``. ``__all__`` lists the public names; those imported ``as``
themselves are for the other packages of egop only.
"""

from egop.estimation.estimator import NoGradientError as NoGradientError
from egop.estimation.estimator import estimate
from egop.estimation.estimator import estimate_plan as estimate_plan
from egop.estimation.estimator import partition_objective as partition_objective
from egop.estimation.objective import Objective
from egop.estimation.rho import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.estimation.sampling import sample_gradients

__all__ = [
    "Ball",
    "Distribution",
    "Gaussian",
    "Initialization",
    "Objective",
    "Recentered",
    "estimate",
    "sample_gradients",
]
