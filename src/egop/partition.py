"""Which parameters form a block: parameters <-> blocks."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Partition = Literal["global", "layer", "parameter"] | Mapping[str, str | Sequence[str]]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Block:
    """Some parameters that share one change of basis.

    Attributes:
        name: a block of one tensor has the tensor's name.
        parameters: the names of its parameters, in order.
        shapes: their shapes.
        dtype: the precision of its basis and coordinates, at least float32.
        transposed: for each parameter the number of groups of the transposed convolution it belongs to, else 0.
    """

    name: str
    parameters: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    transposed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.transposed:
            object.__setattr__(self, "transposed", (0,) * len(self.shapes))

    @property
    def size(self) -> int:
        """The number of entries of all its parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], transposed: tuple[int, ...] = ()) -> Block:
        """The block of these tensors, which must share one dtype and device."""
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors.values()}
        if len(kinds) > 1:
            found = ", ".join(f"'{key}' is {tensor.dtype} on {tensor.device}" for key, tensor in tensors.items())
            raise ValueError(f"Block '{name}' mixes dtypes or devices: {found}. Put them into blocks of their own.")
        dtype = torch.promote_types(kinds.pop()[0], torch.float32)
        return cls(name, tuple(tensors), tuple(tensor.shape for tensor in tensors.values()), dtype, transposed)

    def divided(self) -> list[Block]:
        """Each of its tensors as a block of its own."""
        members = zip(self.parameters, self.shapes, self.transposed, strict=True)
        return [Block(name, (name,), (shape,), self.dtype, (groups,)) for name, shape, groups in members]


class Layer(NamedTuple):
    """What is known of a parameter from the layer it belongs to."""

    role: Literal["weight", "bias", "norm", "embedding", "head"]
    transposed: int = 0  # the number of groups of a transposed convolution's weight


def layers_of(parameters: Mapping[str, Tensor], module: nn.Module | None) -> dict[str, Layer]:
    """What each parameter is: read from the module, or by its dimensions where there is none.

    The head is the last linear layer of a module that has other weights before it; where a linear layer has the weight
    of an embedding (tied), that is the head, and there is no other.
    """
    if module is None:
        return {name: Layer("weight" if tensor.dim() >= 2 else "bias") for name, tensor in parameters.items()}
    owners: dict[int, nn.Module] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if isinstance(part, _EMBEDDINGS) or id(parameter) not in owners:
                owners[id(parameter)] = part
    tied = any(
        isinstance(part, nn.Linear) and isinstance(owners.get(id(part.weight)), _EMBEDDINGS)
        for part in module.modules()
    )
    layers = {name: _layer(tensor, owners.get(id(tensor))) for name, tensor in parameters.items()}
    weights = [name for name, layer in layers.items() if layer.role == "weight"]
    linear = [name for name in weights if isinstance(owners.get(id(parameters[name])), nn.Linear)]
    if len(weights) > 1 and linear and linear[-1] == weights[-1] and not tied:
        layers[linear[-1]] = Layer("head")
    return layers


def partition_parameters(
    parameters: Mapping[str, Tensor], layers: Mapping[str, Layer], partition: Partition
) -> list[Block]:
    """Divide parameters into blocks.

    Args:
        parameters: by name.
        layers: what each of them is.
        partition: ``"layer"``, the weights of each layer together; ``"parameter"``, each weight by itself;
            ``"global"``, all weights together; or a mapping of block names to name patterns (``*`` and ``?`` as in
            file names), which takes just what it names. The first three leave biases and norm layers alone.
    """
    if isinstance(partition, Mapping):
        groups = _by_patterns(partition, list(parameters))
    elif partition in ("global", "layer", "parameter"):
        weights = [name for name, layer in layers.items() if layer.role not in ("bias", "norm")]
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
        )
        for name, members in groups.items()
    ]
    names = [block.name for block in blocks]
    if twice := {name for name in names if names.count(name) > 1}:
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


def _by_kind(partition: str, weights: list[str]) -> dict[str, list[str]]:
    if partition == "global":
        return {"global": weights}
    groups: dict[str, list[str]] = {}
    for name in weights:
        layer, dot, _ = name.rpartition(".")
        groups.setdefault(layer if partition == "layer" and dot else name, []).append(name)
    return groups


def _layer(tensor: Tensor, owner: nn.Module | None) -> Layer:
    # LayerNorm, RMSNorm, BatchNorm2d, ... have no common base; custom ones are named alike.
    if owner is not None and "norm" in type(owner).__name__.lower():
        return Layer("norm")
    if tensor.dim() < 2:
        return Layer("bias")
    if isinstance(owner, _EMBEDDINGS):
        return Layer("embedding")
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return Layer("weight", owner.groups)
    return Layer("weight")
