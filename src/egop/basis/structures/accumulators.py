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
from egop.numerics import OuterProducts, stack_tensors

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

    With two bases, the spectrum is that of their Kronecker product, scaled to the mean squared gradient. The spectrum
    of a stack is that of all matrices side by side.
    """

    def __init__(self, block: Block, structure: Structure) -> None:
        self.block, self.structure = block, structure
        shapes = structure.basis_shapes(block)
        (count,) = {math.prod(shape[:-2]) for shape in shapes.values()}  # matrices with bases of their own
        self.products = [{name: OuterProducts(shape[-1]) for name, shape in shapes.items()} for _ in range(count)]

    def add(self, gradients: Sequence[Tensor]) -> None:
        draws = len(gradients[0])
        by_basis = self.structure.empty_change(self.block).rows(gradients) or {}
        for name, rows in by_basis.items():
            matrices = rows.reshape(draws, len(self.products), -1, rows.shape[-1]).unbind(1)
            for products, matrix in zip(self.products, matrices, strict=True):
                products[name].add(matrix.flatten(0, 1).detach().clone(), draws)

    def merge(self, other: Self) -> None:
        for products, others in zip(self.products, other.products, strict=True):
            for name, own in products.items():
                own.merge(others[name])

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        spectra, bases = zip(*(self._decompose(products) for products in self.products), strict=True)
        values, order = torch.cat([each.eigenvalues for each in spectra]).sort(descending=True, stable=True)
        densities = torch.cat([each.density for each in spectra])[order] / len(spectra)
        known = [each.reliability for each in spectra if each.reliability is not None]
        spectrum = Spectrum(values, densities, spectra[0].samples, sum(known) / len(known) if known else None)
        shapes = self.structure.basis_shapes(self.block)
        tensors = {name: stack_tensors([each[name] for each in bases]).reshape(shapes[name]) for name in shapes}
        return spectrum, self.structure.change(self.block, tensors)

    def _decompose(self, products: dict[str, OuterProducts]) -> tuple[Spectrum, dict[str, Tensor]]:
        """Return the spectrum and the bases of one matrix."""
        sums = list(products.values())
        draws = sums[0].draws
        bases = [each.eigenbasis() for each in sums]
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
        tensors = {name: basis.to(self.block.dtype) for name, (_, basis) in zip(products, bases, strict=True)}
        return Spectrum(values, densities, draws, reliability), tensors


def density(vectors: Tensor) -> Tensor:
    """Return β_k = ‖v_k‖₁² / d of each column, in float64."""
    # A few columns at a time: summing all at once would need a float64 copy of them.
    sums = [part.abs().sum(0, dtype=torch.float64) for part in vectors.split(64, dim=1)]
    return torch.cat(sums).square() / len(vectors)
