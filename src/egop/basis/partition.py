"""Which parameters form a block: parameters <-> blocks."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from egop.basis.roles import Layer

Partition = Literal["global", "layer", "parameter"] | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Block:
    """Some parameters that share one change of basis.

    Attributes:
        name: a block of one tensor has the tensor's name.
        parameters: the names of its parameters, in order.
        shapes: their shapes.
        dtype: the precision of its basis and coordinates, at least float32.
        transposed: for each parameter the number of groups of the transposed convolution it belongs to, 1 where a
            matrix is stored (inputs, outputs), else 0.
        stacked: for each parameter how many of its first dimensions count matrices, each with a basis of its own.
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
        """The number of entries of all its parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def has_outputs_first(self) -> bool:
        """Whether the first dimension of each tensor counts rows, so that some of them can be rotated by themselves."""
        return not any(self.transposed) and not any(self.stacked)

    @classmethod
    def of(
        cls,
        name: str,
        tensors: Mapping[str, Tensor],
        transposed: tuple[int, ...] = (),
        stacked: tuple[int, ...] = (),
    ) -> Block:
        """The block of these tensors, which must share one dtype and device."""
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
        if len(kinds) > 1:
            members = ", ".join(f"'{key}' is {tensor.dtype} on {tensor.device}" for key, tensor in tensors.items())
            raise ValueError(f"Block '{name}' mixes dtypes or devices: {members}. Put them into blocks of their own.")
        dtype = torch.promote_types(kinds.pop()[0], torch.float32)
        return cls(name, tuple(tensors), tuple(tensor.shape for tensor in tensors.values()), dtype, transposed, stacked)

    def divided(self) -> list[Block]:
        """Each of its tensors as a block of its own."""
        members = zip(self.parameters, self.shapes, self.transposed, self.stacked, strict=True)
        return [
            Block(name, (name,), (shape,), self.dtype, (groups,), (stack,)) for name, shape, groups, stack in members
        ]

    def split(self, names: Collection[str]) -> tuple[list[Block], list[Block]]:
        """Return what is left without these parameters, if anything, and each of them as a block of its own."""
        alone = {block.name: block for block in self.divided()}
        rest = [block for name, block in alone.items() if name not in names]
        if len(rest) > 1:
            fields: dict[str, Any] = {
                field: tuple(value for block in rest for value in getattr(block, field))
                for field in ("parameters", "shapes", "transposed", "stacked")
            }
            rest = [replace(self, **fields)]
        return rest, [block for name, block in alone.items() if name in names]

    def unstacked(self) -> Block:
        """What each matrix of a stack would be as a block of its own; for a block of one tensor."""
        (shape,), (stacked,) = self.shapes, self.stacked
        return replace(self, shapes=(shape[stacked:],), stacked=(0,))


def partition_parameters(
    parameters: Mapping[str, Tensor], layers: Mapping[str, Layer], partition: Partition
) -> list[Block]:
    """Divide parameters into blocks.

    Args:
        parameters: by name.
        layers: what each of them is.
        partition: ``"layer"``, the weights of each layer together; ``"parameter"``, each weight by itself;
            ``"global"``, all weights together; or a mapping of block names to name patterns (``*`` and ``?`` as in
            file names), which takes just what it names. The first three leave biases and norm layers alone. Parameters
            without entries are none.
    """
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
    if isinstance(partition, Mapping):
        groups = _by_patterns(partition, list(parameters))
    elif partition in ("global", "layer", "parameter"):
        weights = {name: layers[name] for name in parameters if layers[name].role not in ("bias", "norm")}
        if not weights:
            raise ValueError(
                "The model has no weights of two or more dimensions outside norm layers. "
                "Name what to reparameterise: partition={'all': ['*']}."
            )
        groups = _by_kind(partition, weights)
    else:
        raise ValueError(
            f"Invalid partition value: {partition!r}. Must be 'global', 'layer', 'parameter' or a mapping of block "
            "names to name patterns, such as {'first': ['0.*']}."
        )
    blocks = [
        Block.of(
            name if len(members) > 1 else members[0],
            {member: parameters[member] for member in members},
            tuple(layers[member].transposed for member in members),
            tuple(layers[member].stacked for member in members),
        )
        for name, members in groups.items()
    ]
    if twice := [name for name, count in Counter(block.name for block in blocks).items() if count > 1]:
        raise ValueError(
            f"Two blocks are named {', '.join(map(repr, sorted(twice)))}: a block of one tensor has the tensor's name. "
            "Give the other block another name."
        )
    return blocks


def match(patterns: Sequence[str], names: Sequence[str], what: str) -> list[str]:
    """The names that match any of the patterns, in their own order; a pattern without a match is an error."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"Pattern {pattern!r} matches no {what}. There are: {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _by_patterns(partition: Mapping[str, str | Sequence[str]], names: list[str]) -> dict[str, list[str]]:
    if not partition:
        raise ValueError("The partition is empty: name at least one block, such as {'all': ['*']}.")
    block_of: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    for block, patterns in partition.items():
        groups[block] = match([patterns] if isinstance(patterns, str) else list(patterns), names, "parameter")
        if not groups[block]:
            raise ValueError(f"Block '{block}' has no patterns.")
        for name in groups[block]:
            if name in block_of:
                raise ValueError(
                    f"Parameter '{name}' is in two blocks, '{block_of[name]}' and '{block}'. "
                    "Make their patterns disjoint."
                )
            block_of[name] = block
    return groups


def _by_kind(partition: str, weights: Mapping[str, Layer]) -> dict[str, list[str]]:
    if partition == "global":
        return {"global": list(weights)}
    groups: dict[str, list[str]] = {}
    for name, layer in weights.items():
        path, dot, _ = name.rpartition(".")
        # What has another role than its neighbours is chosen or left by itself.
        together = partition == "layer" and dot and layer.role == "weight"
        groups.setdefault(path if together else name, []).append(name)
    return groups


def check_disjoint(blocks: Sequence[Block]) -> None:
    """Raise an error when two blocks have one name, or share a parameter."""
    names = [block.name for block in blocks]
    if len(set(names)) < len(names):
        raise ValueError(f"Two blocks have one name among {names}.")
    block_of: dict[str, str] = {}
    for block in blocks:
        for parameter in block.parameters:
            if parameter in block_of:
                raise ValueError(
                    f"Parameter '{parameter}' is in two blocks, '{block_of[parameter]}' and '{block.name}'."
                )
            block_of[parameter] = block.name
