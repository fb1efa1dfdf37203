"""Accumulators that structures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Statistic, Structure
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

    def statistics(self) -> Sequence[Statistic]:
        return []

    def finish(self) -> tuple[None, ChangeOfBasis]:
        return None, self.build()


class EigenAccumulator(Accumulator):
    """Accumulator for an eigenbasis of rows taken from each gradient.

    Args:
        block: the block.
        build: builds the change of basis from a block and its tensors.
        rows: returns the rows of stacked gradients of a block.
        products: the sum of the rows' outer products.
    """

    def __init__(
        self,
        block: Block,
        build: Callable[[Block, Mapping[str, Tensor]], ChangeOfBasis],
        rows: Callable[[Sequence[Tensor], Block], Tensor],
        products: OuterProducts,
    ) -> None:
        self.block, self.build, self.rows, self.products = block, build, rows, products

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.products.add(self.rows(gradients, self.block).detach().clone(), len(gradients[0]))

    def merge(self, other: Self) -> None:
        self.products.merge(other.products)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        check_count(self.products.count, self.block)
        values, vectors = self.products.eigenbasis()
        judgment = judge_spectrum([self.products.anisotropy(values)], [self.products.dimension])
        spectrum = Spectrum(values, density(vectors), self.products.draws, **judgment)
        return spectrum, self.build(self.block, {"basis": vectors.to(self.block.dtype)})

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        return [self.products.eigenbasis()]

    def statistics(self) -> Sequence[Statistic]:
        return [self.products]


class StackAccumulator(Accumulator):
    """Accumulator for a stack of matrices: one accumulator per matrix.

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
        spectrum = Spectrum(values, densities, spectra[0].samples, **_combine_judgments(spectra))
        return spectrum, self.structure.change(self.block, tensors)

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        sides = zip(*(part.eigenbases() for part in self.parts), strict=True)
        return [(torch.stack([v for v, _ in side]), torch.stack([w for _, w in side])) for side in sides]

    def statistics(self) -> Sequence[Statistic]:
        return [statistic for part in self.parts for statistic in part.statistics()]


def check_count(count: int, block: Block) -> None:
    """Raise ValueError if no gradients were added."""
    if count == 0:
        raise ValueError(f"Block '{block.name}' has seen no gradients.")


def judge_spectrum(sides: Sequence[tuple[float, float] | None], widths: Sequence[int]) -> dict[str, float]:
    """Return ``reliability`` and ``surprise`` of a spectrum, from the anisotropy of each side; nothing if unknown.

    The anisotropy of white noise is a sum of squares of d(d + 1)/2 − 1 roughly normal numbers.
    """
    known = [(real, whole, width) for pair, width in zip(sides, widths, strict=True) if pair for real, whole in [pair]]
    if not known:
        return {}
    share = sum(real for real, _, _ in known) / sum(whole for _, whole, _ in known)
    freedoms = [width * (width + 1) / 2 - 1 for _, _, width in known]
    surprises = [
        real / max(whole - real, 1e-12 * whole) * math.sqrt(freedom / 2)
        for (real, whole, _), freedom in zip(known, freedoms, strict=True)
    ]
    return {"reliability": share, "surprise": max(surprises)}


def _combine_judgments(spectra: Sequence[Spectrum]) -> dict[str, float]:
    """Return the mean reliability, and the sum of independent surprises."""
    shares = [spectrum.reliability for spectrum in spectra if spectrum.reliability is not None]
    surprises = [spectrum.surprise for spectrum in spectra if spectrum.surprise is not None]
    if not shares or not surprises:
        return {}
    return {
        "reliability": sum(shares) / len(shares),
        "surprise": sum(surprises) / math.sqrt(len(surprises)),
    }


def density(vectors: Tensor) -> Tensor:
    """Return β_k = ‖v_k‖₁² / d of each column, in float64."""
    # A few columns at a time: summing all at once would need a float64 copy of them.
    sums = [part.abs().sum(0, dtype=torch.float64) for part in vectors.split(64, dim=1)]
    return torch.cat(sums).square() / len(vectors)
