"""One file a structure: how its samples accumulate, and the change of basis they give."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.partition import Block
from egop.structures.base import Accumulator, ChangeOfBasis, Cost, Structure, Summary
from egop.structures.full import Full, FullChange
from egop.structures.identity import Identity, IdentityChange
from egop.structures.kronecker import Kronecker, KroneckerChange
from egop.structures.low_rank import Auxiliary, AuxiliaryChange, Reduced, ReducedChange
from egop.structures.rotation import RandomRotation
from egop.structures.shared import Shared, SharedChange

# How a saved basis finds its class again.
CHANGES: dict[str, type[ChangeOfBasis]] = {
    change.kind: change
    for change in (IdentityChange, FullChange, SharedChange, KroneckerChange, AuxiliaryChange, ReducedChange)
}


def rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
    """The reverse of :meth:`ChangeOfBasis.describe`."""
    if description["structure"] not in CHANGES:
        known = ", ".join(CHANGES)
        raise ValueError(f"Unknown structure {description['structure']!r}. This version of egop knows {known}.")
    block = Block(
        name=description["name"],
        parameters=tuple(description["parameters"]),
        shapes=tuple(torch.Size(shape) for shape in description["shapes"]),
        dtype=getattr(torch, description["dtype"]),
        transposed=tuple(description["transposed"]),
        stacked=tuple(description.get("stacked", ())),  # came later than the format: older files have no stacks
    )
    return CHANGES[description["structure"]](block, tensors, description["settings"])


__all__ = [
    "CHANGES",
    "Accumulator",
    "Auxiliary",
    "ChangeOfBasis",
    "Cost",
    "Full",
    "Identity",
    "Kronecker",
    "RandomRotation",
    "Reduced",
    "Shared",
    "Structure",
    "Summary",
    "rebuild",
]
