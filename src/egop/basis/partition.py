"""Blocks: the parameters that share one change of basis."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from egop.basis.roles import Role

Partition = Literal["global", "layer", "parameter"] | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Block:
    """One or more parameters that share a change of basis.

    Attributes:
        name: the block's name; for a single tensor, the tensor's name.
        parameters: the parameter names, in order.
        shapes: the parameter shapes.
        dtype: the precision of basis and coordinates, at least float32.
        transposed: for each parameter the number of groups of its transposed convolution, 1 for a matrix stored as
            (inputs, outputs), otherwise 0.
        stacked: for each parameter the number of leading dimensions that count matrices, each with its own basis.
    """

    name: str
    parameters: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    transposed: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("transposed", "stacked"):
            object.__setattr__(self, name, getattr(self, name) or (0,) * len(self.shapes))

    @property
    def size(self) -> int:
        """Total number of entries."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def has_outputs_first(self) -> bool:
        """True if the first dimension of each tensor counts rows, so that a shard of them can be rotated locally."""
        return not any(self.transposed) and not any(self.stacked)

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tensors: Mapping[str, Tensor],
        transposed: tuple[int, ...] = (),
        stacked: tuple[int, ...] = (),
    ) -> Block:
        """Build a block from these tensors, which must share one dtype and device."""
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
        if len(kinds) > 1:
            members = ", ".join(f"'{key}' is {tensor.dtype} on {tensor.device}" for key, tensor in tensors.items())
            raise ValueError(f"Block '{name}' mixes dtypes or devices: {members}. Put them into separate blocks.")
        dtype = torch.promote_types(kinds.pop()[0], torch.float32)
        return cls(name, tuple(tensors), tuple(tensor.shape for tensor in tensors.values()), dtype, transposed, stacked)

    def per_tensor(self) -> list[Block]:
        """Return one block per tensor."""
        members = zip(self.parameters, self.shapes, self.transposed, self.stacked, strict=True)
        return [
            Block(name, (name,), (shape,), self.dtype, (groups,), (stack,)) for name, shape, groups, stack in members
        ]


def partition_parameters(
    parameters: Mapping[str, Tensor], roles: Mapping[str, Role], partition: Partition
) -> list[Block]:
    """Divide parameters into blocks. Parameters without entries are ignored.

    Args:
        parameters: the parameters, by name.
        roles: their roles, by name.
        partition: ``"layer"``, one block for the weights of each layer; ``"parameter"``, one block per weight;
            ``"global"``, one block for all weights; or a mapping of block names to name patterns (``*`` and ``?`` as in
            file names), which includes only the parameters it names. The first three leave out biases and norm layers.
    """
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
    if isinstance(partition, Mapping):
        patterns = {name: [own] if isinstance(own, str) else list(own) for name, own in partition.items()}
        groups = {name: match(own, list(parameters), "parameter") for name, own in patterns.items()}
        if not groups or not all(groups.values()):
            raise ValueError("A partition needs at least one block, and each block a pattern: {'all': ['*']}.")
    elif partition in ("global", "layer", "parameter"):
        weights = {name: roles[name] for name in parameters if roles[name].kind not in ("bias", "norm")}
        if not weights:
            raise ValueError(
                "The model has no weights of two or more dimensions outside norm layers. "
                "Name what to reparameterize: partition={'all': ['*']}."
            )
        groups = _group_weights(partition, weights)
    else:
        raise ValueError(
            f"Invalid partition value: {partition!r}. Must be 'global', 'layer', 'parameter' or a mapping of block "
            "names to name patterns, such as {'first': ['0.*']}."
        )
    blocks = [
        Block.from_tensors(
            name if len(members) > 1 else members[0],
            {member: parameters[member] for member in members},
            tuple(roles[member].transposed for member in members),
            tuple(roles[member].stacked for member in members),
        )
        for name, members in _separate_padding(groups, roles)
    ]
    check_disjoint(blocks)
    return blocks


def match(patterns: Sequence[str], names: Sequence[str], noun: str) -> list[str]:
    """Return the names that match any pattern, in input order. Raise ValueError for a pattern that matches nothing."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"Pattern {pattern!r} matches no {noun}. Available: {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _group_weights(partition: str, weights: Mapping[str, Role]) -> dict[str, list[str]]:
    if partition == "global":
        return {"global": list(weights)}
    groups: dict[str, list[str]] = {}
    for name, role in weights.items():
        layer, dot, _ = name.rpartition(".")
        # A tensor that is not a plain weight gets its own block, so that it can be left out alone.
        is_grouped = partition == "layer" and dot and role.kind == "weight"
        groups.setdefault(layer if is_grouped else name, []).append(name)
    return groups


def _separate_padding(groups: Mapping[str, list[str]], roles: Mapping[str, Role]) -> Iterator[tuple[str, list[str]]]:
    """Give each embedding with a padding row a block of its own: that row must not mix with other tensors."""
    for name, members in groups.items():
        alone = [member for member in members if roles[member].has_padding_row]
        if rest := [member for member in members if member not in alone]:
            yield name, rest
        yield from ((member, [member]) for member in alone)


def check_disjoint(blocks: Sequence[Block]) -> None:
    """Raise ValueError if two blocks have the same name or share a parameter."""
    names = [block.name for block in blocks]
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ValueError(f"Two blocks are named {', '.join(map(repr, repeated))}. Give one of them another name.")
    block_of: dict[str, str] = {}
    for block in blocks:
        for parameter in block.parameters:
            if parameter in block_of:
                raise ValueError(
                    f"Parameter '{parameter}' is in two blocks, '{block_of[parameter]}' and '{block.name}'. Each "
                    "parameter may be in one block only."
                )
            block_of[parameter] = block.name
