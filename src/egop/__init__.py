"""Optimization in the right coordinates: run any torch optimizer in the EGOP eigenbasis."""

from importlib import metadata

from egop import checkpoint, theory
from egop.constrained import BallConstrainedAdagrad
from egop.diagnostics import BlockDiagnosis, Diagnosis, diagnose
from egop.distributions import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.estimate import estimate
from egop.objective import Objective
from egop.optimizer import ReparameterizedOptimizer
from egop.parametrize import merge, parametrize
from egop.refresh import Every, Online, Refresh, WhenDrifted
from egop.reparameterization import Reparameterization
from egop.rotate import rotate_inputs
from egop.spectrum import Spectrum
from egop.structures import (
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

try:
    __version__ = metadata.version("egop")
except metadata.PackageNotFoundError:  # run from its sources, without having been installed
    __version__ = "unknown"

__all__ = [
    "Auxiliary",
    "Ball",
    "BallConstrainedAdagrad",
    "BlockDiagnosis",
    "ChangeOfBasis",
    "Diagnosis",
    "Distribution",
    "Every",
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
    "Reparameterization",
    "ReparameterizedOptimizer",
    "Shared",
    "Spectrum",
    "Structure",
    "WhenDrifted",
    "checkpoint",
    "diagnose",
    "estimate",
    "merge",
    "parametrize",
    "rotate_inputs",
    "theory",
]
