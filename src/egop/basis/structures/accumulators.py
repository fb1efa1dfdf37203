"""What structures accumulate by: eigenbases of rows, and stacks of matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures.base import Accumulator, ChangeOfBasis, Structure, Summary
from egop.numerics import OuterProducts


class EigenAccumulator(Accumulator):
    """For structures whose basis is the eigenbasis of rows made from each gradient."""

    def __init__(
        self,
        block: Block,
        build: Callable[[Block, Mapping[str, Tensor]], ChangeOfBasis],
        rows: Callable[[Sequence[Tensor], Block], Tensor],
        products: OuterProducts,
    ) -> None:
        self.block, self.build, self.rows, self.products = block, build, rows, products

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Take in a stack of gradients."""
        self.products.add(self.rows(gradients, self.block).detach().clone(), len(gradients[0]))

    def merge(self, other: Self) -> None:
        """Take in all that another accumulator has seen."""
        self.products.merge(other.products)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        """The spectrum and the change of basis."""
        if self.products.count == 0:
            raise ValueError(f"Block '{self.block.name}' has seen no gradients.")
        values, vectors = self.products.eigenbasis()
        judged = reliability([self.products.anisotropy(values)], [self.products.dimension])
        spectrum = Spectrum(values, density(vectors), self.products.draws, **judged)
        return spectrum, self.build(self.block, {"basis": vectors.to(self.block.dtype)})

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        """Those of the one matrix."""
        return [self.products.eigenbasis()]

    def summaries(self) -> Sequence[Summary]:
        """The outer products."""
        return [self.products]


class StackAccumulator(Accumulator):
    """For a stack of matrices: an accumulator for each of them, as if it were a block of its own.

    The spectrum is that of all of them side by side: a direction is one of one matrix.

    Args:
        block: of one tensor.
        structure: what it is for.
    """

    def __init__(self, block: Block, structure: Structure) -> None:
        self.block, self.structure = block, structure
        count = math.prod(block.shapes[0][: block.stacked[0]])
        self.parts = [structure.accumulator(block.unstacked()) for _ in range(count)]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Take in a stack of gradients."""
        matrices = gradients[0].flatten(1, self.block.stacked[0]).unbind(1)
        for part, matrix in zip(self.parts, matrices, strict=True):
            part.add([matrix])

    def merge(self, other: Self) -> None:
        """Take in all that another accumulator has seen."""
        for part, its in zip(self.parts, other.parts, strict=True):
            part.merge(its)

    def finish(self) -> tuple[Spectrum, ChangeOfBasis]:
        """The spectrum and the change of basis."""
        spectra, changes = zip(*(part.finish() for part in self.parts), strict=True)
        shapes = self.structure.basis_shapes(self.block)
        tensors = {
            name: torch.stack([each.tensors[name] for each in changes]).reshape(shape) for name, shape in shapes.items()
        }
        values = torch.cat([spectrum.eigenvalues for spectrum in spectra])
        values, order = values.sort(descending=True, stable=True)
        densities = torch.cat([spectrum.density for spectrum in spectra])[order] / len(spectra)
        spectrum = Spectrum(values, densities, spectra[0].samples, **_together(spectra))
        return spectrum, self.structure.change(self.block, tensors)

    def eigenbases(self) -> list[tuple[Tensor, Tensor]]:
        """Those of each side, stacked."""
        sides = zip(*(part.eigenbases() for part in self.parts), strict=True)
        return [(torch.stack([v for v, _ in side]), torch.stack([w for _, w in side])) for side in sides]

    def summaries(self) -> Sequence[Summary]:
        """Those of all matrices."""
        return [summary for part in self.parts for summary in part.summaries()]


def reliability(sides: Sequence[tuple[float, float] | None], widths: Sequence[int]) -> dict[str, float]:
    """What :class:`Spectrum` says of its draws, from the anisotropy of each side; nothing where nothing is known.

    The anisotropy of white noise is a sum of squares of d(d + 1)/2 − 1 numbers that are about normal.
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


def _together(spectra: Sequence[Spectrum]) -> dict[str, float]:
    """Of several matrices side by side: the mean, and independent surprises added up."""
    shares = [spectrum.reliability for spectrum in spectra if spectrum.reliability is not None]
    surprises = [spectrum.surprise for spectrum in spectra if spectrum.surprise is not None]
    if not shares or not surprises:
        return {}
    return {
        "reliability": sum(shares) / len(shares),
        "surprise": sum(surprises) / math.sqrt(len(surprises)),
    }


def density(vectors: Tensor) -> Tensor:
    """β_k = ‖v_k‖₁² / d of each column, in float64."""
    # Some columns at a time: the sum of all at once would take a float64 copy of them.
    sums = [part.abs().sum(0, dtype=torch.float64) for part in vectors.split(64, dim=1)]
    return torch.cat(sums).square() / len(vectors)
