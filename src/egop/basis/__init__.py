"""Bases and their parts: roles of parameters, blocks, structures, spectra, plans and files.

To add a structure, write a file in ``structures/`` or subclass ``Structure`` and ``ChangeOfBasis`` in your own code.
``__all__`` lists the public names; those imported ``as`` themselves are for the other packages of egop only.
"""

from egop.basis.basis import Basis
from egop.basis.display import format_blocks as format_blocks
from egop.basis.files import build_change as build_change
from egop.basis.partition import Block
from egop.basis.partition import Partition as Partition
from egop.basis.partition import check_disjoint as check_disjoint
from egop.basis.partition import partition_parameters as partition_parameters
from egop.basis.plan import ONLINE_CANDIDATES as ONLINE_CANDIDATES
from egop.basis.plan import Plan
from egop.basis.plan import StructureChoice as StructureChoice
from egop.basis.plan import call_hint as call_hint
from egop.basis.plan import check_structure as check_structure
from egop.basis.plan import make_plan as make_plan
from egop.basis.roles import DDP_PREFIX as DDP_PREFIX
from egop.basis.roles import ModuleIndex as ModuleIndex
from egop.basis.roles import Role as Role
from egop.basis.roles import find_roles as find_roles
from egop.basis.roles import has_norm_layers as has_norm_layers
from egop.basis.roles import rows_and_columns as rows_and_columns
from egop.basis.roles import strip_compile_prefix as strip_compile_prefix
from egop.basis.spectrum import Spectrum
from egop.basis.structures import CHANGE_TYPES as CHANGE_TYPES
from egop.basis.structures import (
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
    Structure,
)
from egop.basis.structures import Side as Side
from egop.basis.structures.views import as_matrix as as_matrix

__all__ = [
    "Accumulator",
    "Auxiliary",
    "Basis",
    "Block",
    "ChangeOfBasis",
    "Cost",
    "Full",
    "Identity",
    "Kronecker",
    "Plan",
    "RandomRotation",
    "Reduced",
    "Shared",
    "Spectrum",
    "Structure",
]
