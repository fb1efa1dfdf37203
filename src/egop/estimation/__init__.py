"""Estimation of a basis: draw points from rho, sample gradients there and decompose them (the paper's Algorithm 1).

The model is left exactly as it was. A new rho is a subclass of ``Distribution``.
"""

from egop.estimation.estimator import (
    NoGradientError,
    count_draws,
    estimate,
    estimate_plan,
    partition_objective,
    require_gradient,
    resolve_arguments,
    warn_if_identical,
)
from egop.estimation.objective import Objective
from egop.estimation.rho import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.estimation.sampling import SamplingMethod, sample_gradients

__all__ = [
    "Ball",
    "Distribution",
    "Gaussian",
    "Initialization",
    "NoGradientError",
    "Objective",
    "Recentered",
    "SamplingMethod",
    "count_draws",
    "estimate",
    "estimate_plan",
    "partition_objective",
    "require_gradient",
    "resolve_arguments",
    "sample_gradients",
    "warn_if_identical",
]
