"""All blocks together: encode, decode, save, load, print."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from egop import processes
from egop.spectrum import Spectrum
from egop.structures import ChangeOfBasis, rebuild
from egop.structures.views import Coordinates, as_tuple
from egop.units import format_bytes, format_count, format_table

FORMAT_VERSION = 1

Finished = tuple[Spectrum | None, ChangeOfBasis]


class Reparameterization(Mapping[str, ChangeOfBasis]):
    """One change of basis per block, by block name.

    Args:
        changes: the changes of basis; each knows its block.
        spectrum: the spectra of the blocks that have one, by block name.
        left: why weights were left in original coordinates, by name.
        owners: of a basis that is kept in parts, the process that has each block, by block name.

    Example:
        >>> basis = egop.estimate(objective)                                  # doctest: +SKIP
        >>> coordinates = basis.encode(dict(model.named_parameters()))        # doctest: +SKIP
        >>> basis.save("basis.safetensors")                                   # doctest: +SKIP
    """

    def __init__(
        self,
        changes: Sequence[ChangeOfBasis],
        spectrum: Mapping[str, Spectrum] | None = None,
        left: Mapping[str, str] | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self._changes = {change.block.name: change for change in changes}
        self.spectrum = dict(spectrum or {})
        self.left = dict(left or {})
        self.owners = None if owners is None else dict(owners)
        if len(self._changes) < len(changes):
            raise ValueError(f"Two blocks have one name among {[change.block.name for change in changes]}.")
        owner: dict[str, str] = {}
        for change in changes:
            for parameter in change.block.parameters:
                if parameter in owner:
                    raise ValueError(
                        f"Parameter '{parameter}' is in two blocks, '{owner[parameter]}' and '{change.block.name}'."
                    )
                owner[parameter] = change.block.name

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
            encoded[name] = change.encode([tensors[each].to(change.block.dtype) for each in change.block.parameters])
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

    def to(self, device: torch.device | str) -> Reparameterization:
        """The same on another device."""
        changes = [change.to(device) for change in self.values()]
        return Reparameterization(changes, self.spectrum, self.left, self.owners)

    def gathered(self) -> Reparameterization:
        """All blocks, from a basis of which each process has some (``shard_bases=True``); the same bits everywhere.

        All processes call this together. A basis that is not in parts is returned as it is.
        """
        if self.owners is None:
            return self
        outlines = processes.exchanged(lambda: {name: self._outline(name) for name in self})
        owners = self.owners.items()
        found = processes.agreed(
            lambda: {name: self._finished(name) or _room(*outlines[owner][name]) for name, owner in owners}
        )
        for name, owner in owners:
            spectrum, change = found[name]
            described = [spectrum.eigenvalues, spectrum.density] if spectrum is not None else []
            for tensor in [*change.tensors.values(), *described]:
                processes.spread(tensor, owner)
        spectra = {name: spectrum for name, (spectrum, _) in found.items() if spectrum is not None}
        left = {name: why for name, why in self.left.items() if name not in self.owners}
        return Reparameterization([change for _, change in found.values()], spectra, left)

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

    def __str__(self) -> str:
        """A table of the blocks: what they are, what they cost, what their spectra say."""
        rows = [self._row(name, change) for name, change in self.items()]
        rows += [[name, reason, "", "", "", "", ""] for name, reason in self.left.items()]
        flops = sum(change.cost_per_step for change in self.values())
        total = format_bytes(sum(change.nbytes for change in self.values()))
        rows.append(["total", "", "", total, f"{format_count(flops)}flop", "", ""])
        header = ["block", "structure", "size", "bytes", "cost per step", "stable rank", "stability"]
        if all(spectrum.stability is None for spectrum in self.spectrum.values()):  # the last column would be empty
            header, rows = header[:-1], [row[:-1] for row in rows]
        return format_table(header, rows)

    def _row(self, name: str, change: ChangeOfBasis) -> list[str]:
        spectrum = self.spectrum.get(name)
        return [
            name,
            change.kind,
            " + ".join(" x ".join(map(str, shape)) or "1" for shape in change.block.shapes),
            format_bytes(change.nbytes),
            f"{format_count(change.cost_per_step)}flop",
            f"{spectrum.stable_rank:.1f} of {len(spectrum.eigenvalues)}" if spectrum else "",
            f"{spectrum.stability:.2f}" if spectrum and spectrum.stability is not None else "",
        ]

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file; written beside and renamed, so never half."""
        if self.owners is not None:
            raise ValueError("This process has only some blocks of the basis. Save basis.gathered() in one process.")
        tensors: dict[str, Tensor] = {}
        blocks = []
        for name, change in self.items():
            description = change.describe()
            own = dict(change.tensors)
            if name in self.spectrum:
                spectrum = self.spectrum[name]
                description |= {"samples": spectrum.samples, "stability": spectrum.stability}
                own |= {"spectrum/eigenvalues": spectrum.eigenvalues, "spectrum/density": spectrum.density}
            description["tensors"] = list(own)
            tensors |= {f"{name}/{key}": tensor.detach().cpu().contiguous() for key, tensor in own.items()}
            blocks.append(description)
        _unshare(tensors)
        metadata = {"egop": json.dumps({"version": FORMAT_VERSION, "blocks": blocks, "left": self.left})}
        target = Path(path)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
            part = Path(beside) / "part"
            save_file(tensors, part, metadata=metadata)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Reparameterization:
        """Read what :meth:`save` wrote."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file '{os.fspath(path)}'.")
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                header = (file.metadata() or {}).get("egop")
                tensors = {name: file.get_tensor(name) for name in file.keys()} if header else {}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"'{os.fspath(path)}' is not a whole safetensors file: {error}") from error
        if header is None:
            raise ValueError(f"'{os.fspath(path)}' is a safetensors file, but not one that egop saved.")
        content = json.loads(header)
        if content["version"] != FORMAT_VERSION:
            raise ValueError(
                f"'{os.fspath(path)}' has format version {content['version']}; this egop reads {FORMAT_VERSION}."
            )
        changes, spectra = [], {}
        for description in content["blocks"]:
            name = description["name"]
            if missing := [key for key in description["tensors"] if f"{name}/{key}" not in tensors]:
                raise ValueError(f"'{os.fspath(path)}' lacks {missing} of block '{name}'.")
            own = {key: tensors[f"{name}/{key}"] for key in description["tensors"]}
            values, density = own.pop("spectrum/eigenvalues", None), own.pop("spectrum/density", None)
            if values is not None and density is not None:
                # The stability came later than the format: older files, and many bases, have none.
                spectra[name] = Spectrum(values, density, description["samples"], description.get("stability"))
            changes.append(rebuild(description, own))
            if not changes[-1].round_trip_error() < 1e-3:
                raise ValueError(f"'{os.fspath(path)}': the basis of block '{name}' is not orthonormal.")
        return cls(changes, spectra, content["left"])


def _unshare(tensors: dict[str, Tensor]) -> None:
    """Copy those that share their memory with one before, as two blocks with one basis do: safetensors refuses them."""
    seen = set()
    for name, tensor in tensors.items():
        if (place := tensor.untyped_storage().data_ptr()) in seen:
            tensors[name] = tensor.clone()
        seen.add(place)


def _room(spectrum: Spectrum | None, change: ChangeOfBasis, device: str) -> Finished:
    """Room for the values of what another process has outlined."""
    if spectrum is not None:
        eigenvalues, density = (
            torch.empty_like(each, device=device) for each in (spectrum.eigenvalues, spectrum.density)
        )
        spectrum = replace(spectrum, eigenvalues=eigenvalues, density=density)
    tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in change.tensors.items()}
    return spectrum, change.replaced(tensors)
