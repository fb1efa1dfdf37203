"""Which parameter is which after the groups of an optimizer were edited by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from egop.basis import ModuleIndex
from egop.optimizer import BoundParameters


class Change(NamedTuple):
    """A parameter in the groups, and the one that had its name before."""

    name: str
    parameter: Tensor
    before: Tensor | None
    kind: tuple[Any, ...] | None  # dtype, device and shape that the one before had


def find_changes(
    groups: Sequence[Mapping[str, Any]], bound: BoundParameters, index: ModuleIndex | None
) -> list[list[Change]]:
    """Return the parameters of each group with their names.

    A new parameter has its name in the model, or takes the name of the one whose place it takes.

    Args:
        groups: the parameter groups; their names may be out of date.
        bound: the parameters before, with their names.
        index: the model's parameters, if it is known.
    """
    known = dict(zip(map(id, bound.tensors), bound.names, strict=True))
    before = {name: (tensor, kind) for name, tensor, kind in zip(bound.names, bound.tensors, bound.kinds, strict=True)}
    taken: set[str] = set()
    found = []
    for group in groups:
        parameters, names = group["params"], group.get("param_names", [])
        places = names if len(names) == len(parameters) else [""] * len(parameters)
        own = []
        for parameter, place in zip(parameters, places, strict=True):
            in_model = index.names(parameter) if index is not None and id(parameter) not in known else []
            name = known.get(id(parameter)) or (place if place in in_model else next(iter(in_model), place))
            if not name or name in taken:
                raise ValueError(
                    f"egop.EGOP cannot tell which parameter the one of shape {tuple(parameter.shape)} in param_groups "
                    "is. Add parameters with optimizer.add_param_group."
                )
            taken.add(name)
            own.append(Change(name, parameter, *before.get(name, (None, None))))
        found.append(own)
    return found
