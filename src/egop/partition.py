"""Which parameters form a block: parameters <-> blocks."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from egop.objective import Objective

Partition = Literal["global", "layer", "parameter"] | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Block:
    """Some parameters that share one change of basis.

    Attributes:
        name: a block of one tensor has the tensor's name.
        parameters: the names of its parameters, in order.
        shapes: their shapes.
        dtype: the precision of its basis and coordinates, at least float32.
    """

    name: str
    parameters: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of entries of all its parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor]) -> Block:
        """The block of these tensors, which must share one dtype and device."""
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
        if len(kinds) > 1:
            found = ", ".join(f"'{key}' is {tensor.dtype} on {tensor.device}" for key, tensor in tensors.items())
            raise ValueError(f"Block '{name}' mixes dtypes or devices: {found}. Put them into blocks of their own.")
        dtype = torch.promote_types(kinds.pop()[0], torch.float32)
        return cls(name, tuple(tensors), tuple(tensor.shape for tensor in tensors.values()), dtype)


def partition_parameters(objective: Objective, partition: Partition) -> list[Block]:
    """Divide an objective's parameters into blocks.

    Args:
        objective: its parameters and, where it has a module, the layers they belong to.
        partition: ``"layer"``, the weights of each layer together; ``"parameter"``, each weight by itself;
            ``"global"``, all weights together; or a mapping of block names to name patterns (``*`` and ``?`` as in
            file names), which takes just what it names. In the first three, biases and norm layers are left alone: only
            tensors of two or more dimensions outside norm layers are weights. (Of a function, every tensor is.)
    """
    parameters = objective.parameters
    if isinstance(partition, Mapping):
        groups = _by_patterns(partition, list(parameters))
    elif partition in ("global", "layer", "parameter"):
        weights = _weights(objective)
        if not weights:
            raise ValueError(
                "The model has no weights of two or more dimensions outside norm layers. "
                "Name what to reparameterise: partition={'all': ['*']}."
            )
        groups = _by_kind(partition, weights, objective.module is not None)
    else:
        raise ValueError(
            f"Invalid partition value: {partition!r}. Must be 'global', 'layer', 'parameter' or a mapping of block "
            "names to name patterns, such as {'first': ['0.*']}."
        )
    return [
        Block.of(name if len(members) > 1 else members[0], {member: parameters[member] for member in members})
        for name, members in groups.items()
    ]


def match(patterns: Sequence[str], names: Sequence[str], what: str) -> list[str]:
    """The names that match any of the patterns, in their own order; a pattern without a match is an error."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"Pattern {pattern!r} matches no {what}. There are: {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _by_patterns(partition: Mapping[str, str | Sequence[str]], names: list[str]) -> dict[str, list[str]]:
    if not partition:
        raise ValueError("The partition is empty: name at least one block, such as {'all': ['*']}.")
    owner: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for block, patterns in partition.items():
        groups[block] = match([patterns] if isinstance(patterns, str) else list(patterns), names, "parameter")
        if not groups[block]:
            raise ValueError(f"Block '{block}' has no patterns.")
        for name in groups[block]:
            if name in owner:
                raise ValueError(
                    f"Parameter '{name}' is in two blocks, '{owner[name]}' and '{block}'. Make their patterns disjoint."
                )
            owner[name] = block
    return groups


def _by_kind(partition: str, weights: list[str], has_layers: bool) -> dict[str, list[str]]:
    if partition == "global":
        return {"global": weights}
    groups: dict[str, list[str]] = {}
    for name in weights:
        layer = name.rpartition(".")[0] or "root"
        groups.setdefault(layer if partition == "layer" and has_layers else name, []).append(name)
    return groups


def _weights(objective: Objective) -> list[str]:
    if objective.module is None:
        return list(objective.parameters)
    norms = {
        id(parameter)
        for part in objective.module.modules()
        if _is_norm(part)
        for parameter in part.parameters(recurse=False)
    }
    return [name for name, p in objective.parameters.items() if p.dim() >= 2 and id(p) not in norms]


def _is_norm(part: nn.Module) -> bool:
    # LayerNorm, RMSNorm, BatchNorm2d, ... have no common base; custom ones are named alike.
    return "norm" in type(part).__name__.lower()
