"""A basis as a value: blocks of parameters, structures (one file each), the plan that chooses, the file.

A new structure is a file in ``structures/``, or one of your own: it is registered by being defined.
"""

from egop.basis.files import orthonormality_error
from egop.basis.partition import Block, Partition, check_disjoint, partition_parameters
from egop.basis.plan import ONLINE, UP_FRONT, Plan, StructureChoice, call_it, check_structure, make_plan
from egop.basis.reparameterization import Reparameterization
from egop.basis.roles import WRAPPER, Known, Layer, layers_of, plain_name
from egop.basis.spectrum import LEADING, Halves, Spectrum, compare
from egop.basis.structures import (
    CHANGES,
    Accumulator,
    Auxiliary,
    ChangeOfBasis,
    Cost,
    Full,
    Identity,
    Kronecker,
    RandomRotation,
    Reduced,
    Shared,
    Side,
    Structure,
    Summary,
    rebuild,
)
from egop.basis.structures.accumulators import density
from egop.basis.structures.views import as_matrix
from egop.basis.texts import read_json, record, whole_numbers, write_json

__all__ = [
    "CHANGES",
    "LEADING",
    "ONLINE",
    "UP_FRONT",
    "WRAPPER",
    "Accumulator",
    "Auxiliary",
    "Block",
    "ChangeOfBasis",
    "Cost",
    "Full",
    "Halves",
    "Identity",
    "Known",
    "Kronecker",
    "Layer",
    "Partition",
    "Plan",
    "RandomRotation",
    "Reduced",
    "Reparameterization",
    "Shared",
    "Side",
    "Spectrum",
    "Structure",
    "StructureChoice",
    "Summary",
    "as_matrix",
    "call_it",
    "check_disjoint",
    "check_structure",
    "compare",
    "density",
    "layers_of",
    "make_plan",
    "orthonormality_error",
    "partition_parameters",
    "plain_name",
    "read_json",
    "rebuild",
    "record",
    "whole_numbers",
    "write_json",
]
