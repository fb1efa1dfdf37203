"""Basis: one change of basis per block."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from egop.basis import files
from egop.basis.display import format_blocks
from egop.basis.partition import check_disjoint
from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis
from egop.basis.structures.views import Coordinates
from egop.formatting import format_bytes, pluralize
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Basis(Mapping[str, ChangeOfBasis]):
    """A mapping from the name of each block to its change of basis.

    Args:
        changes: the changes of basis.
        spectrum: the spectra, by block name; blocks may have none.
        unrotated: reasons why weights are left in original coordinates, by name.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(3)})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), progress=False)
        >>> list(basis), basis.spectrum["theta"].samples
        (['theta'], 3)
        >>> basis.save(folder / "basis.safetensors")
        >>> coordinates = egop.Basis.load(folder / "basis.safetensors").encode({"theta": torch.ones(3)})
    """

    def __init__(
        self,
        changes: Sequence[ChangeOfBasis],
        spectrum: Mapping[str, Spectrum] | None = None,
        unrotated: Mapping[str, str] | None = None,
    ) -> None:
        check_disjoint([change.block for change in changes])
        self._changes = {change.block.name: change for change in changes}
        self.spectrum = dict(spectrum or {})
        self.unrotated = dict(unrotated or {})

    def __getitem__(self, block: str) -> ChangeOfBasis:
        return self._changes[block]

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def __eq__(self, other: object) -> bool:
        """Return True if both have the same changes of basis, entry by entry. Spectra may differ."""
        if not isinstance(other, Basis):
            return NotImplemented
        return self.keys() == other.keys() and all(_are_equal(change, other[name]) for name, change in self.items())

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Coordinates]:
        """Return the coordinates of parameters or gradients, by block. Tensors outside every block are ignored."""
        encoded = {}
        for name, change in self.items():
            # As in the optimizer, half-precision tensors have single-precision coordinates.
            encoded[name] = change.encode([tensors[key].to(change.block.dtype) for key in change.block.parameters])
        return encoded

    def decode(self, coordinates: Mapping[str, Tensor | Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return the parameters, by name, for coordinates given by block."""
        decoded: dict[str, Tensor] = {}
        for name, values in coordinates.items():
            change = self[name]
            decoded |= zip(change.block.parameters, change.decode(values), strict=True)
        return decoded

    def to(self, device: torch.device | str) -> Basis:
        """Return the basis on another device."""
        return Basis([change.to(device) for change in self.values()], self.spectrum, self.unrotated)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the basis to one safetensors file. An existing file is replaced only once the new one is complete."""
        files.save(path, (list(self.values()), self.spectrum, self.unrotated))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Basis:
        """Load a file that :meth:`save` wrote. No code from the file is executed.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is damaged or does not hold a basis.
        """
        return cls(*files.load(path, device))

    def plot(self) -> Figure:
        """Plot the spectrum of every block; ``basis.plot().savefig("spectra.png")`` writes a file."""
        return plot_spectra({name: each.eigenvalues for name, each in self.spectrum.items()})

    def __repr__(self) -> str:
        kinds = Counter(change.kind for change in self.values())
        blocks = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        size = format_bytes(sum(change.nbytes for change in self.values()))
        unrotated = f", {len(self.unrotated)} not rotated" if self.unrotated else ""
        return f"Basis({pluralize(len(self), 'block')}{f': {blocks}' if blocks else ''}{unrotated}, {size})"

    def __str__(self) -> str:
        return format_blocks(list(self.values()), self.spectrum, self.unrotated)


def _are_equal(one: ChangeOfBasis, other: ChangeOfBasis) -> bool:
    return (one.describe(), one.tensors.keys()) == (other.describe(), other.tensors.keys()) and all(
        tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name].to(tensor.device))
        for name, tensor in one.tensors.items()
    )
