"""The paper's Algorithm 1: an objective, points that rho draws, their gradients, and the basis they give.

The model is left exactly as it was. A new rho is a subclass of ``Distribution``.
"""

from egop.estimation.algorithm import (
    MORE,
    Gathering,
    NoGradientError,
    blocks_of,
    check_reached,
    checked,
    estimate,
    estimate_plan,
    gradients_for,
    samples_wanted,
)
from egop.estimation.chunks import Sampling
from egop.estimation.objective import Objective
from egop.estimation.rho import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.estimation.sampling import sample_gradients

__all__ = [
    "MORE",
    "Ball",
    "Distribution",
    "Gathering",
    "Gaussian",
    "Initialization",
    "NoGradientError",
    "Objective",
    "Recentered",
    "Sampling",
    "blocks_of",
    "check_reached",
    "checked",
    "estimate",
    "estimate_plan",
    "gradients_for",
    "sample_gradients",
    "samples_wanted",
]
