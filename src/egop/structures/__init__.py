"""One file a structure: how its samples accumulate, and the change of basis they give."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.partition import Block
from egop.structures.base import Accumulator, ChangeOfBasis, Cost, Structure
from egop.structures.full import Full, FullChange
from egop.structures.identity import Identity, IdentityChange

# How a saved basis finds its class again.
CHANGES: dict[str, type[ChangeOfBasis]] = {change.kind: change for change in (IdentityChange, FullChange)}


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
    )
    return CHANGES[description["structure"]](block, tensors)


__all__ = ["CHANGES", "Accumulator", "ChangeOfBasis", "Cost", "Full", "Identity", "Structure", "rebuild"]
