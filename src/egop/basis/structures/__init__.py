"""One file a structure: how its samples accumulate, and the change of basis they give."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.base import CHANGES, Accumulator, ChangeOfBasis, Cost, Structure, Summary
from egop.basis.structures.full import Full
from egop.basis.structures.identity import Identity
from egop.basis.structures.kronecker import Kronecker
from egop.basis.structures.low_rank import Auxiliary, Reduced
from egop.basis.structures.rotation import RandomRotation
from egop.basis.structures.shared import Shared, Side


def rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
    """The reverse of :meth:`ChangeOfBasis.describe`."""
    if description["structure"] not in CHANGES:
        known = ", ".join(CHANGES)
        raise ValueError(
            f"Unknown structure {description['structure']!r}. This version of egop knows {known}. One of your own has "
            "to be imported before a basis is loaded."
        )
    dtype = getattr(torch, description["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"Block '{description['name']}' is of {description['dtype']!r}, which are no numbers.")
    block = Block(
        name=description["name"],
        parameters=tuple(description["parameters"]),
        shapes=tuple(torch.Size(shape) for shape in description["shapes"]),
        dtype=dtype,
        transposed=tuple(description["transposed"]),
        stacked=tuple(description.get("stacked", ())),  # came later than the format: older files have no stacks
    )
    return CHANGES[description["structure"]](block, tensors, description["settings"])


__all__ = [
    "CHANGES",
    "Accumulator",
    "Auxiliary",
    "Block",
    "ChangeOfBasis",
    "Cost",
    "Full",
    "Identity",
    "Kronecker",
    "RandomRotation",
    "Reduced",
    "Shared",
    "Side",
    "Structure",
    "Summary",
    "rebuild",
]
