"""Accumulators that structures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure
from egop.numerics import OuterProducts


class NoAccumulator(Accumulator):
    """Accumulator of a structure that needs no gradients.

    Args:
        build: builds the change of basis.
    """

    def __init__(self, build: Callable[[], ChangeOfBasis]) -> None:
        self.build = build

    def add(self, gradients: Sequence[Tensor]) -> None:
        pass

    def merge(self, other: Self) -> None:
        pass

    def finish(self) -> tuple[None, ChangeOfBasis]:
        return None, self.build()


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

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        return [products.eigenbasis() for products in self.products.values()]

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        sums = list(self.products.values())
        draws = sums[0].draws
        check_count(draws, self.block)
        bases = self.eigenbases()
        (values, vectors), *others = bases
        densities = density(vectors)
        for other_values, other_vectors in others:
            trace = values.sum() * sums[0].count / draws  # the mean squared norm of a gradient
            scale = trace / (values.sum() * other_values.sum()).clamp_min(torch.finfo(torch.float64).tiny)
            product = (scale * torch.outer(values, other_values)).flatten()
            values, order = product.sort(descending=True, stable=True)
            densities = torch.outer(densities, density(other_vectors)).flatten()[order]
        reliability = compute_reliability([each.anisotropy(own) for each, (own, _) in zip(sums, bases, strict=True)])
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
        spectrum = Spectrum(values, densities, spectra[0].samples, _average_reliability(spectra))
        return spectrum, self.structure.change(self.block, tensors)

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        sides = zip(*(part.eigenbases() for part in self.parts), strict=True)
        return [(torch.stack([v for v, _ in side]), torch.stack([w for _, w in side])) for side in sides]


def check_count(count: int, block: Block) -> None:
    """Raise ValueError if no gradients were added."""
    if count == 0:
        raise ValueError(f"Block '{block.name}' has seen no gradients.")


def compute_reliability(sides: Sequence[tuple[float, float] | None]) -> float | None:
    """Compute the reliability of a spectrum from the anisotropy of each side; None if unknown."""
    known = [side for side in sides if side is not None]
    return sum(real for real, _ in known) / sum(whole for _, whole in known) if known else None


def _average_reliability(spectra: Sequence[Spectrum]) -> float | None:
    known = [spectrum.reliability for spectrum in spectra if spectrum.reliability is not None]
    return sum(known) / len(known) if known else None


def density(vectors: Tensor) -> Tensor:
    """Return β_k = ‖v_k‖₁² / d of each column, in float64."""
    # A few columns at a time: summing all at once would need a float64 copy of them.
    sums = [part.abs().sum(0, dtype=torch.float64) for part in vectors.split(64, dim=1)]
    return torch.cat(sums).square() / len(vectors)
