"""The one small interface of all structures."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from egop.partition import Block
from egop.spectrum import Spectrum

Coordinates = tuple[Tensor, ...]


class ChangeOfBasis(abc.ABC):
    """The linear change of coordinates of one block.

    ``decode`` takes coordinates to the block's tensors, ``encode`` is its adjoint, and ``decode(encode(x)) == x``.
    Gradients and starting points both go through ``encode``. Both take extra leading dimensions, one point each; a
    stacked change of basis has such a dimension itself, one basis each.

    Args:
        block: the parameters it is for.
        tensors: what it consists of, by name: all there is to save, move or stack.
    """

    kind: ClassVar[str]

    def __init__(self, block: Block, tensors: Mapping[str, Tensor]) -> None:
        self.block = block
        self.tensors = dict(tensors)
        self.check()

    @abc.abstractmethod
    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        """The coordinates of the block's tensors, given in the block's order (or the one tensor itself)."""

    @abc.abstractmethod
    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        """The block's tensors at these coordinates."""

    @abc.abstractmethod
    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of what :meth:`encode` returns."""

    def check(self) -> None:  # noqa: B027 - a structure without tensors has nothing to check
        """Raise ``ValueError`` when the tensors do not fit the block."""

    def dense(self) -> Tensor:
        """The matrix of :meth:`decode` in float64; for an orthonormal basis its columns are the basis vectors."""
        shapes = self.coordinate_shapes()
        sizes = [math.prod(shape) for shape in shapes]
        unit = torch.eye(sum(sizes), dtype=torch.float64, device=self.device)
        columns = [
            part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for part, shape in zip(unit.split(sizes, dim=-1), shapes, strict=True)
        ]
        return flatten(self.to(dtype=torch.float64).decode(columns), self.block).mT

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    @property
    @abc.abstractmethod
    def cost_per_step(self) -> int:
        """The floating-point operations of one encode and one decode."""

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same change of basis on another device or in another precision."""
        moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()}
        return type(self)(self.block, moved)

    @classmethod
    def stack(cls, changes: Sequence[Self]) -> Self:
        """Several of one kind and shape as one, with a new leading dimension."""
        names = changes[0].tensors
        return cls(changes[0].block, {n: torch.stack([change.tensors[n] for change in changes]) for n in names})

    def describe(self) -> dict[str, Any]:
        """What it is for, in plain values; with :attr:`tensors` all that is needed to build it again."""
        return {
            "name": self.block.name,
            "structure": self.kind,
            "parameters": list(self.block.parameters),
            "shapes": [list(shape) for shape in self.block.shapes],
            "dtype": str(self.block.dtype).removeprefix("torch."),
        }

    def round_trip_error(self) -> float:
        """How far ``decode(encode(x))`` is from a random ``x`` of length one: a cheap test of orthonormality."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(self.block.size, generator=generator, dtype=torch.float64)
        vector = (vector / torch.linalg.vector_norm(vector)).to(self.device, self.block.dtype)
        back = flatten(self.decode(self.encode(unflatten(vector, self.block))), self.block)
        return float(torch.linalg.vector_norm(back - vector))

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two changes of basis must share to be stacked."""
        parts = sorted((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items())
        return type(self), self.block.shapes, self.block.dtype, tuple(parts)


class Cost(NamedTuple):
    """What a structure costs on a block: the bytes of its basis, and the floating-point operations of one step."""

    bytes: int
    flops: int


class Accumulator(abc.ABC):
    """Takes in a block's gradients, in any order and chunking, and gives the basis."""

    @abc.abstractmethod
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Take in gradients: for each parameter of the block a stack of them, one sample each."""

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Take in all that another accumulator of the same block has seen."""

    @abc.abstractmethod
    def finish(self) -> tuple[Spectrum | None, ChangeOfBasis]:
        """The spectrum (where the structure has one) and the change of basis."""


@dataclass(frozen=True, kw_only=True)
class Structure(abc.ABC):
    """How the basis of a block is built: configuration only."""

    @abc.abstractmethod
    def samples(self, block: Block) -> int:
        """How many gradients this structure wants for a block."""

    @abc.abstractmethod
    def cost(self, block: Block) -> Cost:
        """What it costs on a block, without building it."""

    @abc.abstractmethod
    def accumulator(self, block: Block) -> Accumulator:
        """An empty accumulator."""


def as_tuple(tensors: Tensor | Sequence[Tensor]) -> Coordinates:
    """A block of one tensor may be given as that tensor."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def flatten(tensors: Tensor | Sequence[Tensor], block: Block) -> Tensor:
    """The block's tensors as one vector (with the leading dimensions they have beyond the block's shapes)."""
    tensors = as_tuple(tensors)
    if len(tensors) != len(block.shapes):
        raise ValueError(f"Block '{block.name}' has {len(block.shapes)} tensor(s), got {len(tensors)}.")
    parts = []
    for name, shape, tensor in zip(block.parameters, block.shapes, tensors, strict=True):
        leading = tensor.dim() - len(shape)
        if leading < 0 or tensor.shape[leading:] != shape:
            raise ValueError(
                f"Block '{block.name}': '{name}' has shape {tuple(shape)}, got a tensor of {tuple(tensor.shape)}."
            )
        parts.append(tensor.reshape(*tensor.shape[:leading], math.prod(shape)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unflatten(vector: Tensor, block: Block) -> Coordinates:
    """The reverse of :func:`flatten`."""
    parts = vector.split([math.prod(shape) for shape in block.shapes], dim=-1)
    return tuple(part.reshape(*vector.shape[:-1], *shape) for part, shape in zip(parts, block.shapes, strict=True))
