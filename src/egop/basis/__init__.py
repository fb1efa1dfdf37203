"""A basis as a value: blocks of parameters, structures (one file each), the plan that chooses, the file.

A new structure is a file in ``structures/``, or one of your own: it is registered by being defined.
"""

from egop.basis.basis import Basis
from egop.basis.files import orthonormality_error
from egop.basis.partition import Block, Partition, check_disjoint, partition_parameters
from egop.basis.plan import ONLINE, UP_FRONT, Plan, StructureChoice, call_it, check_structure, make_plan
from egop.basis.roles import WRAPPER, Known, Layer, layers_of, plain_name
from egop.basis.showing import Shown
from egop.basis.showing import as_html as blocks_as_html
from egop.basis.showing import as_text as blocks_as_text
from egop.basis.showing import of_change as shown_block
from egop.basis.showing import of_plan as shown_plan
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

__all__ = [
    "CHANGES",
    "LEADING",
    "ONLINE",
    "UP_FRONT",
    "WRAPPER",
    "Accumulator",
    "Auxiliary",
    "Basis",
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
    "Shared",
    "Shown",
    "Side",
    "Spectrum",
    "Structure",
    "StructureChoice",
    "Summary",
    "as_matrix",
    "blocks_as_html",
    "blocks_as_text",
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
    "rebuild",
    "shown_block",
    "shown_plan",
]
