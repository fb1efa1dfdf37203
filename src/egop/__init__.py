"""EGOP, an optimizer that replaces AdamW, and coordinate-wise optimizers in rotated coordinates."""

from importlib import metadata

from egop import extras, optim
from egop.basis.basis import Basis
from egop.basis.spectrum import Spectrum
from egop.basis.structures import Auxiliary, ChangeOfBasis, Full, Identity, Kronecker, Reduced, Shared, Structure
from egop.diagnose import diagnose, find_lr
from egop.estimation.estimator import estimate
from egop.estimation.objective import Objective
from egop.estimation.rho import Ball, Distribution, Gaussian, Initialization, Recentered
from egop.optimizer.reparameterized import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Aligned, Every, Online, Refresh

try:
    __version__ = metadata.version("egop")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"

__all__ = [
    "EGOP",
    "Aligned",
    "Auxiliary",
    "Ball",
    "Basis",
    "ChangeOfBasis",
    "Distribution",
    "Every",
    "Full",
    "Gaussian",
    "Identity",
    "Initialization",
    "Kronecker",
    "Objective",
    "Online",
    "Recentered",
    "Reduced",
    "Refresh",
    "ReparameterizedOptimizer",
    "Shared",
    "Spectrum",
    "Structure",
    "diagnose",
    "estimate",
    "extras",
    "find_lr",
    "optim",
]
