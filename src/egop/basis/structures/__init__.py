"""Structures: how gradients accumulate, and the change of basis they give."""

from egop.basis.structures.accumulators import Accumulator
from egop.basis.structures.base import CHANGE_TYPES, ChangeOfBasis, Cost, Structure
from egop.basis.structures.full import Full
from egop.basis.structures.kronecker import Kronecker
from egop.basis.structures.low_rank import Auxiliary, Reduced
from egop.basis.structures.shared import Shared, Side
from egop.basis.structures.unsampled import Identity, RandomRotation
