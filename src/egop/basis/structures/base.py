"""The one small interface of all structures."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.views import Coordinates, flatten, unflatten
from egop.distributed import Holding

# How a saved basis finds its class again: every class that is defined is here, by its kind.
CHANGES: dict[str, type[ChangeOfBasis]] = {}


class ChangeOfBasis(abc.ABC):
    """The linear change of coordinates of one block.

    ``decode`` takes coordinates to the block's tensors, ``encode`` is its adjoint, and ``decode(encode(x)) == x``.
    Gradients and starting points both go through ``encode``. Both take extra leading dimensions, one point each; a
    stacked change of basis has such a dimension itself, one basis each.

    Args:
        block: the parameters it is for.
        tensors: what it consists of, by name: all there is to save, move or stack.
        settings: plain values beside them, where the structure has any.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> change = egop.estimate(objective, rho=egop.Gaussian(), progress=False)["theta"]
        >>> point = torch.tensor([1.0, 2.0, 3.0])
        >>> (back,) = change.decode(change.encode(point))
        >>> torch.allclose(back, point)
        True
    """

    kind: ClassVar[str]
    # Whether ``decode(encode(x)) == x`` for every x. If not, the optimizer keeps the rest of the starting point, or
    # drops it, as the structure says.
    complete: ClassVar[bool] = True
    # Whether it rotates every row of a tensor by itself, so that some of the rows can be rotated without the others.
    rowwise: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):  # one that only shares something with others
            return
        known = CHANGES.setdefault(cls.kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{cls.__qualname__} has the kind '{cls.kind}', which is that of {known.__module__}."
                f"{known.__qualname__}: a saved basis could not tell them apart. Give it another kind."
            )
        CHANGES[cls.kind] = cls  # defined again, as in a notebook

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

    @abc.abstractmethod
    def encode(self, tensors: Tensor | Sequence[Tensor]) -> Coordinates:
        """The coordinates of the block's tensors, given in the block's order (or the one tensor itself)."""

    @abc.abstractmethod
    def decode(self, coordinates: Tensor | Sequence[Tensor]) -> Coordinates:
        """The block's tensors at these coordinates."""

    @abc.abstractmethod
    def coordinate_shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of what :meth:`encode` returns."""

    @classmethod
    @abc.abstractmethod
    def basis_shapes(cls, block: Block, settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors on a block: matrices with orthonormal columns, or stacks of such."""

    @abc.abstractmethod
    def structure(self) -> Structure:
        """The structure that estimates another one of its kind."""

    def rows(self, gradients: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """For each of its tensors the rows of one gradient whose outer products it diagonalises; None if not so built.

        The sum of their outer products, ``rows.mT @ rows``, is the Gram matrix that an online basis follows.
        """
        return None

    @classmethod
    def is_renewable(cls) -> bool:
        """Whether it consists of eigenvectors of Gram matrices, which an online basis can follow."""
        return cls.rows is not ChangeOfBasis.rows

    def rotation_from(self, old: Self) -> dict[str, Tensor] | None:
        """The rotation from another one's coordinates to these, a matrix for each tensor; None if there is none."""
        return None

    @property
    def has_rotation(self) -> bool:
        """Whether :meth:`rotation_from` gives one."""
        return type(self).rotation_from is not ChangeOfBasis.rotation_from

    def rotated(self, coordinates: Coordinates, rotation: Mapping[str, Tensor]) -> Coordinates:
        """Coordinates of another one, rotated into these.

        If independent coordinates have variances s, those rotated by T have variances (T∘T) s: the same map with the
        rotation squared entry by entry carries squared moments.
        """
        raise TypeError(f"{self.kind} has no rotation of its coordinates.")

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
        return self.replaced({name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()})

    def replaced(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same kind of change with other tensors."""
        return type(self)(self.block, tensors, self.settings)

    @classmethod
    def stack(cls, changes: Sequence[Self]) -> Self:
        """Several of one kind and shape as one, with a new leading dimension; a single one is not copied."""
        first = changes[0]
        if len(changes) == 1:
            return first.replaced({name: tensor.unsqueeze(0) for name, tensor in first.tensors.items()})
        return first.replaced({key: torch.stack([change.tensors[key] for change in changes]) for key in first.tensors})

    def part(self, members: slice | list[int]) -> Self:
        """Some of several that were stacked."""
        return self.replaced({name: tensor[members] for name, tensor in self.tensors.items()})

    def describe(self) -> dict[str, Any]:
        """What it is for, in plain values; with :attr:`tensors` all that is needed to build it again."""
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

    def round_trip_error(self) -> float:
        """How far ``decode(encode(x))`` is from a random ``x`` of length one: a cheap test of orthonormality."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(self.block.size, generator=generator, dtype=torch.float64, device="cpu")
        vector = (vector / torch.linalg.vector_norm(vector)).to(self.device, self.block.dtype)
        back = flatten(self.decode(self.encode(unflatten(vector, self.block))), self.block)
        return float(torch.linalg.vector_norm(back - vector))

    def alike(self, other: ChangeOfBasis) -> bool:
        """Whether another one is of the same kind, for the same parameters."""
        return (
            type(self) is type(other)
            and self.settings == other.settings
            and (self.block.parameters, self.block.shapes) == (other.block.parameters, other.block.shapes)
        )

    def equal(self, other: Self) -> bool:
        """Whether another one has exactly the same tensors, in this one's precision."""
        return all(torch.equal(tensor, other.tensors[name].to(tensor)) for name, tensor in self.tensors.items())

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two changes of basis must share to be stacked."""
        parts = sorted((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in self.tensors.items())
        settings = tuple(sorted(self.settings.items()))
        layout = self.block.shapes, self.block.transposed, self.block.stacked
        return type(self), layout, self.block.dtype, settings, tuple(parts)


class Cost(NamedTuple):
    """What a structure costs on a block: the bytes of its basis, and the floating-point operations of one step."""

    bytes: int
    flops: int


class Summary(Protocol):
    """Rows that several processes have seen, each some of them, and that one can have all of."""

    def holding(self) -> Holding:
        """What this process has of them."""

    def prepare(self, holdings: Sequence[Holding], device: torch.device) -> None:
        """Make ready for :meth:`collect` all that may fail: there an error would leave the others waiting."""

    def collect(self, owner: int, holdings: Sequence[Holding], device: torch.device) -> None:
        """Bring them together in the owner's process, on its device; to be called by all of them."""


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

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        """Eigenvalues and eigenvectors (columns) of each matrix that it decomposes: what two halves are compared by."""
        return []

    def summaries(self) -> Sequence[Summary]:
        """All that it has seen, in parts that several processes can bring together."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how several processes bring together what they have seen. "
            "Write its method summaries(), or estimate in one process."
        )


@dataclass(frozen=True)
class Structure(abc.ABC):
    """How the basis of a block is built: configuration only.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> structures: dict[str, egop.Structure] = {"0.*": egop.Kronecker(), "1.*": egop.Full()}
        >>> basis = egop.estimate(objective, structure=structures, progress=False)
        >>> {name: change.kind for name, change in basis.items()}
        {'0.weight': 'Kronecker', '1.weight': 'Full'}
    """

    change_type: ClassVar[type[ChangeOfBasis]]
    # Whether it takes a block of several tensors as one; otherwise such a block is divided into its tensors.
    joint: ClassVar[bool] = True

    @abc.abstractmethod
    def samples(self, block: Block) -> int:
        """How many gradients this structure wants for a block."""

    @abc.abstractmethod
    def accumulator(self, block: Block) -> Accumulator:
        """An empty accumulator."""

    def settings(self) -> dict[str, Any]:
        """The plain values that its changes of basis carry beside their tensors."""
        return {}

    def change(self, block: Block, tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
        """The change of basis of a block with these tensors."""
        return self.change_type(block, tensors, self.settings())

    def basis_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors on a block."""
        return self.change_type.basis_shapes(block, self.settings())

    def check(self, block: Block) -> None:  # noqa: B027 - most structures fit every block
        """Raise ``ValueError`` when the structure cannot be had on this block."""

    def cost(self, block: Block) -> Cost:
        """What it costs on a block, without building it."""
        change = self.empty_change(block)
        return Cost(bytes=change.nbytes, flops=change.cost_per_step)

    def mixes_rows(self, block: Block) -> bool:
        """Return True if a change of basis of this structure mixes the rows of a block's tensors."""
        return not self.empty_change(block).rowwise

    def empty_change(self, block: Block) -> ChangeOfBasis:
        """Return a change of basis of a block without values, on the meta device."""
        shapes = self.basis_shapes(block)
        tensors = {name: torch.empty(shape, dtype=block.dtype, device="meta") for name, shape in shapes.items()}
        return self.change(block, tensors)
