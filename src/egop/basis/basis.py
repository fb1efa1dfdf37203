"""All blocks together: encode, decode, save, load, print."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from egop.basis import files, showing
from egop.basis.partition import check_disjoint
from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis
from egop.basis.structures.views import Coordinates, as_tuple
from egop.distributed import processes
from egop.formatting import format_bytes, pluralize
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Finished = tuple[Spectrum | None, ChangeOfBasis]


class Basis(Mapping[str, ChangeOfBasis]):
    """One change of basis per block, by block name.

    Args:
        changes: the changes of basis; each knows its block.
        spectrum: the spectra of the blocks that have one, by block name.
        unrotated: why weights were left in original coordinates, by name.
        owners: of a basis that is kept in parts, the process that has each block, by block name.

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
        owners: Mapping[str, int] | None = None,
    ) -> None:
        check_disjoint([change.block for change in changes])
        self._changes = {change.block.name: change for change in changes}
        self.spectrum = dict(spectrum or {})
        self.unrotated = dict(unrotated or {})
        self.owners = None if owners is None else dict(owners)

    def __getitem__(self, block: str) -> ChangeOfBasis:
        """The change of basis of one block."""
        if block not in self._changes:
            raise KeyError(f"There is no block '{block}'. There are: {', '.join(self._changes)}.")
        return self._changes[block]

    def __iter__(self) -> Iterator[str]:
        """The names of the blocks."""
        return iter(self._changes)

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._changes)

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Coordinates]:
        """Parameters (or gradients) by name to coordinates by block; names outside every block are not looked at."""
        encoded = {}
        for name, change in self.items():
            if missing := [parameter for parameter in change.block.parameters if parameter not in tensors]:
                raise KeyError(f"Block '{name}' needs {missing}, which are not among the given tensors.")
            # half-precision tensors have single-precision coordinates, as in the optimizer
            encoded[name] = change.encode([tensors[key].to(change.block.dtype) for key in change.block.parameters])
        return encoded

    def decode(self, coordinates: Mapping[str, Tensor | Sequence[Tensor]]) -> dict[str, Tensor]:
        """Coordinates by block to parameters by name."""
        decoded: dict[str, Tensor] = {}
        for name, values in coordinates.items():
            change, given = self[name], as_tuple(values)
            wanted = change.coordinate_shapes()
            if len(given) != len(wanted) or any(
                value.shape[value.dim() - len(shape) :] != shape for value, shape in zip(given, wanted, strict=True)
            ):
                raise ValueError(
                    f"Block '{name}' has coordinates of shape {' and '.join(str(tuple(shape)) for shape in wanted)}, "
                    f"got {' and '.join(str(tuple(value.shape)) for value in given)}."
                )
            decoded |= zip(change.block.parameters, change.decode(given), strict=True)
        return decoded

    def to(self, device: torch.device | str) -> Basis:
        """The same on another device."""
        changes = [change.to(device) for change in self.values()]
        return Basis(changes, self.spectrum, self.unrotated, self.owners)

    def gathered(self) -> Basis:
        """All blocks, from a basis of which each process has some (``shard_bases=True``); the same bits everywhere.

        All processes call this together. A basis that is not in parts is returned as it is.
        """
        if self.owners is None:
            return self
        outlines = processes.gather_results(lambda: {name: self._outline(name) for name in self})
        owners = self.owners.items()
        finished = processes.run_collectively(
            lambda: {name: self._finished(name) or _room(*outlines[owner][name]) for name, owner in owners}
        )
        for name, owner in owners:
            spectrum, change = finished[name]
            described = [spectrum.eigenvalues, spectrum.density] if spectrum is not None else []
            for tensor in [*change.tensors.values(), *described]:
                processes.broadcast(tensor, owner)
        spectra = {name: spectrum for name, (spectrum, _) in finished.items() if spectrum is not None}
        unrotated = {name: why for name, why in self.unrotated.items() if name not in self.owners}
        return Basis([change for _, change in finished.values()], spectra, unrotated)

    def _finished(self, name: str) -> Finished | None:
        return (self.spectrum.get(name), self[name]) if name in self else None

    def _outline(self, name: str) -> tuple[Spectrum | None, ChangeOfBasis, str]:
        """All of a block but the values, and on which kind of device they are."""
        spectrum, change = self.spectrum.get(name), self[name]
        if spectrum is not None:
            spectrum = replace(
                spectrum, eigenvalues=spectrum.eigenvalues.to("meta"), density=spectrum.density.to("meta")
            )
        return spectrum, change.to("meta"), change.device.type

    def cost(self, rows: int = showing.ROWS) -> float:
        """The work of the basis products of a step, over that of a forward and backward pass of the same weights.

        Args:
            rows: what a step sees: tokens, examples, or places of a convolution.
        """
        if rows < 1:
            raise ValueError(f"Invalid rows value: {rows}. Must be at least 1.")
        changes = self.values()
        flops, size = sum(change.cost_per_step for change in changes), sum(change.block.size for change in changes)
        return showing.cost_of(flops, size, rows)

    def plot(self) -> Figure:
        """Plot the spectrum of every block; ``basis.plot().savefig("spectra.png")`` writes a file."""
        if not self.spectrum:
            raise ValueError(
                "This basis has no spectra: they come with egop.estimate. Of a basis that follows the training, "
                "optimizer.plot_spectra() shows them."
            )
        return plot_spectra({name: each.eigenvalues.tolist() for name, each in self.spectrum.items()})

    def __repr__(self) -> str:
        """In a line: how many blocks of which structures, and what they take."""
        kinds = Counter(change.kind for change in self.values())
        blocks = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        taken = format_bytes(sum(change.nbytes for change in self.values()))
        left = f", {len(self.unrotated)} left as they are" if self.unrotated else ""
        return f"Basis({pluralize(len(self), 'block')}{f': {blocks}' if blocks else ''}{left}, {taken})"

    def __str__(self) -> str:
        """A table of the blocks: what they are, what they cost, what their spectra say."""
        return showing.as_text(self._shown(), self.unrotated)

    def _repr_html_(self) -> str:
        """The table, for a notebook."""
        return f"<p>{escape(repr(self))}</p>{showing.as_html(self._shown(), self.unrotated)}"

    def _shown(self) -> list[showing.Shown]:
        return [showing.of_change(change, self.spectrum.get(name)) for name, change in self.items()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; written beside and renamed, so never half. A link stays one."""
        if self.owners is not None:
            raise ValueError("This process has only some blocks of the basis. Save basis.gathered() in one process.")
        files.write(path, files.Content(list(self.values()), self.spectrum, self.unrotated))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Basis:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is damaged, or of something else.
        """
        changes, spectra, unrotated = files.read(path, device)
        return cls(changes, spectra, unrotated)


def _room(spectrum: Spectrum | None, change: ChangeOfBasis, device: str) -> Finished:
    """Room for the values of what another process has outlined."""
    if spectrum is not None:
        eigenvalues, density = (
            torch.empty_like(tensor, device=device) for tensor in (spectrum.eigenvalues, spectrum.density)
        )
        spectrum = replace(spectrum, eigenvalues=eigenvalues, density=density)
    tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in change.tensors.items()}
    return spectrum, change.replaced(tensors)
