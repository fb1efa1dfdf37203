"""The interfaces of all structures: ChangeOfBasis and Structure."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.structures.accumulators import Accumulator, EigenAccumulator
from egop.basis.structures.views import Coordinates, flatten

# All classes of changes of basis, by kind: a saved basis finds its class here.
CHANGE_TYPES: dict[str, type[ChangeOfBasis]] = {}


class ChangeOfBasis(abc.ABC):
    """The linear change of coordinates of one block.

    ``decode`` maps coordinates to the block's tensors, ``encode`` is its adjoint, and ``decode(encode(x)) == x``.
    Gradients and starting points both go through ``encode``. Both methods accept extra leading dimensions, which index
    points. A stacked change of basis has a leading dimension of its own, which indexes bases.

    Args:
        block: the parameters it applies to.
        tensors: the bases, by name: everything that is saved, moved or stacked. Their shapes are checked here and
            nowhere else.
        settings: plain values that the structure adds, if any.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> change = egop.estimate(objective, rho=egop.Gaussian(), progress=False)["theta"]
        >>> point = torch.tensor([1.0, 2.0, 3.0])
        >>> (back,) = change.decode(change.encode(point))
        >>> torch.allclose(back, point)
        True
    """

    kind: ClassVar[str]
    # True if decode(encode(x)) == x for every x. Otherwise the optimizer keeps the remainder of the starting point or
    # drops it, as the structure says.
    is_complete: ClassVar[bool] = True
    # True if every row of a tensor is rotated independently, so that a shard of rows can be rotated locally.
    is_rowwise: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):  # an abstract intermediate class
            return
        known = CHANGE_TYPES.setdefault(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{cls.__qualname__} has the same kind, '{cls.kind}', as {known.__module__}.{known.__qualname__}: a "
                "saved basis could not tell them apart. Give it another kind."
            )
        CHANGE_TYPES[cls.kind] = cls  # a notebook may define the class again

    def __init__(self, block: Block, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None) -> None:
        self.block = block
        self.tensors = dict(tensors)
        self.settings = dict(settings or {})
        for name, shape in self.basis_shapes(block, self.settings).items():
            if self.tensors[name].shape[-len(shape) :] != shape:
                sizes = " and ".join(str(tuple(shape)) for shape in block.shapes)
                raise ValueError(
                    f"Block '{block.name}' of shape {sizes} needs a {name} of shape {shape}, "
                    f"got {tuple(self.tensors[name].shape)}."
                )

    def __repr__(self) -> str:
        shapes = " and ".join(" x ".join(map(str, shape)) for shape in self.block.shapes)
        return f"{type(self).__name__}({self.block.name}, {shapes})"

    @abc.abstractmethod
    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        """Return the coordinates of the block's tensors, given in the block's order (or as the single tensor)."""

    @abc.abstractmethod
    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        """Return the block's tensors at these coordinates."""

    @abc.abstractmethod
    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of what :meth:`encode` returns."""

    @classmethod
    @abc.abstractmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors for a block: matrices with orthonormal columns, or stacks of them."""

    @abc.abstractmethod
    def structure(self) -> Structure:
        """Return the structure that estimates changes of basis like this one."""

    @property
    def cost_per_step(self) -> int:
        """Floating-point operations of one encode and one decode: one product with each basis in each of them."""
        return 4 * self.block.size * sum(tensor.shape[-1] for tensor in self.tensors.values())

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """Return, for each basis, the rows of a gradient whose outer products it diagonalizes; None if there are none.

        The sum of their outer products, ``rows.mT @ rows``, is the Gram matrix that an online basis follows.
        """
        return None

    @classmethod
    def is_renewable(cls) -> bool:
        """Return True if the bases are eigenvectors of Gram matrices, which an online basis can follow."""
        return cls.rows is not ChangeOfBasis.rows

    @property
    def has_rotation(self) -> bool:
        """True if coordinates can be rotated from another basis of this kind to this one."""
        return type(self).rotate is not ChangeOfBasis.rotate

    def rotation_from(self, old: Self) -> dict[str, Tensor] | None:
        """Return the rotation from ``old``'s coordinates to these, one matrix per basis; None if there is none."""
        if not self.has_rotation:
            return None
        return {name: basis.mT @ old.tensors[name] for name, basis in self.tensors.items()}

    def rotate(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        """Apply the result of :meth:`rotation_from` to the coordinates in the other basis.

        If independent coordinates have variances s, those rotated by T have variances (T∘T) s. To rotate second
        moments, apply the same map with each rotation squared entry by entry.
        """
        raise TypeError(f"{self.kind} has no rotation of its coordinates.")

    def dense(self) -> Tensor:
        """Return the matrix of :meth:`decode` in float64; the columns of an orthonormal basis are the basis vectors."""
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
        """The device of the tensors."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return the change of basis on another device or in another precision."""
        return self.with_tensors({name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a copy with other tensors of the same shapes, which are not checked again."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, tensors=dict(tensors))
        return copy

    @classmethod
    def stack(cls, changes: Sequence[Self]) -> Self:
        """Stack changes of basis of one kind and shape along a new leading dimension. A single one is not copied."""
        first = changes[0]
        if len(changes) == 1:
            return first.with_tensors({name: tensor.unsqueeze(0) for name, tensor in first.tensors.items()})
        stacked = {key: torch.stack([change.tensors[key] for change in changes]) for key in first.tensors}
        return first.with_tensors(stacked)

    def part(self, members: slice | list[int]) -> Self:
        """Return some members of a stack."""
        if members == slice(None):
            return self
        return self.with_tensors({name: tensor[members] for name, tensor in self.tensors.items()})

    def describe(self) -> dict[str, Any]:
        """Return everything except the tensors as plain values, from which the change of basis can be rebuilt."""
        return {
            "name": self.block.name,
            "structure": self.kind,
            "parameters": list(self.block.parameters),
            "shapes": [list(shape) for shape in self.block.shapes],
            "transposed": list(self.block.transposed),
            "stacked": list(self.block.stacked),
            "dtype": str(self.block.dtype).removeprefix("torch."),
            "settings": self.settings,
        }

    def matches(self, other: ChangeOfBasis) -> bool:
        """Return True if ``other`` is of the same kind and for the same parameters."""
        return (
            type(self) is type(other)
            and self.settings == other.settings
            and (self.block.parameters, self.block.shapes) == (other.block.parameters, other.block.shapes)
        )

    def equals(self, other: Self) -> bool:
        """Return True if ``other`` has exactly the same tensors in this one's precision."""
        return all(torch.equal(tensor, other.tensors[name].to(tensor)) for name, tensor in self.tensors.items())

    @property
    def signature(self) -> tuple[Any, ...]:
        """The properties that changes of basis must share to be stacked."""
        parts = sorted((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items())
        settings = tuple(sorted(self.settings.items()))
        layout = self.block.shapes, self.block.transposed, self.block.stacked
        return type(self), layout, self.block.dtype, settings, tuple(parts)


class Cost(NamedTuple):
    """The cost of a structure for a block: bytes of its basis, and floating-point operations per step."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Structure(abc.ABC):
    """Configuration of how a block's basis is built.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> structures: dict[str, egop.Structure] = {"0.*": egop.Kronecker(), "1.*": egop.Full()}
        >>> basis = egop.estimate(objective, structure=structures, progress=False)
        >>> {name: change.kind for name, change in basis.items()}
        {'0.weight': 'Kronecker', '1.weight': 'Full'}
    """

    change_type: ClassVar[type[ChangeOfBasis]]
    # True if it handles a block of several tensors as one; otherwise such a block is split into its tensors.
    joint: ClassVar[bool] = True

    @abc.abstractmethod
    def samples(self, block: Block) -> int:
        """Return how many gradients this structure wants for a block."""

    def accumulator(self, block: Block) -> Accumulator:
        """Return an empty accumulator, by default of the outer products of :meth:`ChangeOfBasis.rows`."""
        return EigenAccumulator(block, self)

    def settings(self, block: Block) -> dict[str, Any]:
        """Return the plain values that its changes of basis store besides tensors."""
        return {}

    def change(self, block: Block, tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
        """Build the change of basis of a block from these tensors."""
        return self.change_type(block, tensors, self.settings(block))

    def basis_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors for a block."""
        return self.change_type.basis_shapes(block, self.settings(block))

    def check(self, block: Block) -> None:  # noqa: B027 - most structures fit every block
        """Raise ValueError if the structure does not apply to this block."""

    def cost(self, block: Block) -> Cost:
        """Return the cost for a block, without building anything."""
        change = self.empty_change(block)
        return Cost(bytes=change.nbytes, flops=change.cost_per_step)

    def empty_change(self, block: Block) -> ChangeOfBasis:
        """Return a change of basis without values, on the meta device."""
        shapes = self.basis_shapes(block)
        tensors = {name: torch.empty(shape, dtype=block.dtype, device="meta") for name, shape in shapes.items()}
        return self.change(block, tensors)
