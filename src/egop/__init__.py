"""Optimization in the right coordinates: run any torch optimizer in the EGOP eigenbasis."""

from importlib import metadata

from egop import optim
from egop.basis.basis import Basis
from egop.basis.spectrum import Spectrum
from egop.basis.structures import (
    Auxiliary,
    ChangeOfBasis,
    Full,
    Identity,
    Kronecker,
    RandomRotation,
    Reduced,
    Shared,
    Structure,
)
from egop.diagnose import Diagnosis, FoundRates, diagnose, find_lr
from egop.estimation.algorithm import estimate
from egop.estimation.objective import Objective
from egop.estimation.rho import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.extras.inputs import rotate_inputs
from egop.extras.parametrization import merge, parametrize
from egop.optimizer.reparameterized import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Aligned, Every, Online, Refresh, WhenDrifted

try:
    __version__ = metadata.version("egop")
except metadata.PackageNotFoundError:  # run from its sources, without having been installed
    __version__ = "unknown"

__all__ = [
    "EGOP",
    "Aligned",
    "Auxiliary",
    "Ball",
    "Basis",
    "ChangeOfBasis",
    "Diagnosis",
    "Distribution",
    "Every",
    "FoundRates",
    "Full",
    "Gaussian",
    "Identity",
    "Initialization",
    "Kronecker",
    "Objective",
    "Online",
    "RandomRotation",
    "Recentered",
    "Reduced",
    "Refresh",
    "ReparameterizedOptimizer",
    "Shared",
    "Spectrum",
    "Structure",
    "WhenDrifted",
    "diagnose",
    "estimate",
    "find_lr",
    "merge",
    "optim",
    "parametrize",
    "rotate_inputs",
]
