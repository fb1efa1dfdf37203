"""Accumulators: they collect the gradients of a block and turn them into a basis."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.numerics import OuterProducts

if TYPE_CHECKING:
    from egop.basis.structures.base import ChangeOfBasis, Structure


class Accumulator(abc.ABC):
    """A collector of a block's gradients, in any order and chunking, that turns them into a basis.

    It must be possible to pickle it: processes that share the work send theirs to each other.
    """

    @abc.abstractmethod
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients: for each parameter of the block, a stack with one entry per sample."""

    @abc.abstractmethod
    def merge(self, other: Self) -> None:
        """Add everything that another accumulator of the same block has seen."""

    @abc.abstractmethod
    def finish(self) -> tuple[Spectrum | None, ChangeOfBasis]:
        """Return the spectrum (None if the structure has none) and the change of basis."""


class EigenAccumulator(Accumulator):
    """Accumulator of the outer products that each basis of a block diagonalizes, see :meth:`ChangeOfBasis.rows`.

    With two bases, the spectrum is that of their Kronecker product, scaled to the mean squared gradient.
    """

    def __init__(self, block: Block, structure: Structure) -> None:
        self.block, self.structure = block, structure
        self.products = {name: OuterProducts(shape[-1]) for name, shape in structure.basis_shapes(block).items()}

    def add(self, gradients: Sequence[Tensor]) -> None:
        by_basis = self.structure.empty_change(self.block).rows(gradients) or {}
        for name, rows in by_basis.items():
            self.products[name].add(rows.flatten(0, -2).detach().clone(), len(gradients[0]))

    def merge(self, other: Self) -> None:
        for name, products in self.products.items():
            products.merge(other.products[name])

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        sums = list(self.products.values())
        draws = sums[0].draws
        check_count(draws, self.block)
        bases = [products.eigenbasis() for products in sums]
        (values, vectors), *others = bases
        densities = density(vectors)
        for other_values, other_vectors in others:
            trace = values.sum() * sums[0].count / draws  # the mean squared norm of a gradient
            scale = trace / (values.sum() * other_values.sum()).clamp_min(torch.finfo(torch.float64).tiny)
            product = (scale * torch.outer(values, other_values)).flatten()
            values, order = product.sort(descending=True, stable=True)
            densities = torch.outer(densities, density(other_vectors)).flatten()[order]
        sides = [each.anisotropy(own) for each, (own, _) in zip(sums, bases, strict=True)]
        known = [side for side in sides if side is not None]
        reliability = sum(real for real, _ in known) / sum(whole for _, whole in known) if known else None
        tensors = {name: basis.to(self.block.dtype) for name, (_, basis) in zip(self.products, bases, strict=True)}
        return Spectrum(values, densities, draws, reliability), self.structure.change(self.block, tensors)


class StackAccumulator(Accumulator):
    """Accumulator for a stack of matrices, with one accumulator per matrix.

    The spectrum is that of all matrices side by side.

    Args:
        block: a block of one stacked tensor.
        structure: the structure of each matrix.
    """

    def __init__(self, block: Block, structure: Structure) -> None:
        self.block, self.structure = block, structure
        count = math.prod(block.shapes[0][: block.stacked[0]])
        self.parts = [structure.accumulator(block.unstack()) for _ in range(count)]

    def add(self, gradients: Sequence[Tensor]) -> None:
        matrices = gradients[0].flatten(1, self.block.stacked[0]).unbind(1)
        for part, matrix in zip(self.parts, matrices, strict=True):
            part.add([matrix])

    def merge(self, other: Self) -> None:
        for part, its in zip(self.parts, other.parts, strict=True):
            part.merge(its)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        spectra, changes = zip(*(part.finish() for part in self.parts), strict=True)
        shapes = self.structure.basis_shapes(self.block)
        tensors = {
            name: torch.stack([each.tensors[name] for each in changes]).reshape(shape) for name, shape in shapes.items()
        }
        values = torch.cat([spectrum.eigenvalues for spectrum in spectra])
        values, order = values.sort(descending=True, stable=True)
        densities = torch.cat([spectrum.density for spectrum in spectra])[order] / len(spectra)
        known = [spectrum.reliability for spectrum in spectra if spectrum.reliability is not None]
        reliability = sum(known) / len(known) if known else None
        spectrum = Spectrum(values, densities, spectra[0].samples, reliability)
        return spectrum, self.structure.change(self.block, tensors)


def check_count(count: int, block: Block) -> None:
    """Raise ValueError if no gradients were added."""
    if count == 0:
        raise ValueError(f"Block '{block.name}' has seen no gradients.")


def density(vectors: Tensor) -> Tensor:
    """Return β_k = ‖v_k‖₁² / d of each column, in float64."""
    # A few columns at a time: summing all at once would need a float64 copy of them.
    sums = [part.abs().sum(0, dtype=torch.float64) for part in vectors.split(64, dim=1)]
    return torch.cat(sums).square() / len(vectors)
