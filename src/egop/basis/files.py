"""Save a basis to one safetensors file, and load it after checking what the file says."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from egop.basis.partition import Block, check_disjoint
from egop.basis.spectrum import Spectrum
from egop.basis.structures import CHANGE_TYPES, ChangeOfBasis

_VERSION = 3
_EIGENVALUES, _DENSITY = "spectrum/eigenvalues", "spectrum/density"

# Changes of basis, spectra by block name, and reasons why weights are not rotated, by name.
Content = tuple[Sequence[ChangeOfBasis], Mapping[str, Spectrum], Mapping[str, str]]


def save(path: str | os.PathLike[str], content: Content) -> None:
    """Write a basis to a temporary file, then rename it. If the path is a symbolic link, replace its target."""
    changes, spectra, unrotated = content
    tensors: dict[str, Tensor] = {}
    blocks = []
    for change in changes:
        entry, entries = change.describe(), dict(change.tensors)
        if (spectrum := spectra.get(change.block.name)) is not None:
            entry["spectrum"] = {"samples": spectrum.samples, "reliability": spectrum.reliability}
            entries |= {_EIGENVALUES: spectrum.eigenvalues, _DENSITY: spectrum.density}
        blocks.append(entry | {"tensors": list(entries)})
        for key, tensor in entries.items():  # copies, because safetensors refuses tensors that share memory
            tensors[f"{change.block.name}/{key}"] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    text = json.dumps({"version": _VERSION, "blocks": blocks, "unrotated": dict(unrotated)})
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        partial = Path(folder) / "partial"
        save_file(tensors, partial, metadata={"egop": text, "crc32": str(_checksum(text, tensors))})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Content:
    """Load a file that :func:`save` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, has another version, or does not hold a basis.
    """
    name = f"'{os.fspath(path)}'"
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {name}.")
    try:
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is not a mapping
            changes, spectra, unrotated = _parse(file.metadata() or {}, tensors)
    except SafetensorError as error:
        raise ValueError(f"{name} is not a complete safetensors file: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        problem = f"its header is invalid ({type(error).__name__}: {error!s:.80})."
        raise ValueError(f"{name} cannot be loaded: {problem}") from error
    return [change.to(device) for change in changes], spectra, unrotated


def _parse(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Content:
    if "egop" not in metadata:
        raise ValueError("it is a safetensors file, but not one that egop saved.")
    if metadata.get("crc32") != str(_checksum(metadata["egop"], tensors)):
        raise ValueError("its checksum is wrong: it was damaged after it was saved.")
    header = json.loads(metadata["egop"])
    if header["version"] != _VERSION:
        raise ValueError(f"it has format version {header['version']!r:.20}; this egop reads version {_VERSION}.")
    changes, spectra = [], {}
    for entry in header["blocks"]:
        name = entry["name"]
        entries = {key: tensors[f"{name}/{key}"] for key in entry["tensors"]}
        if "spectrum" in entry:
            spectra[name] = Spectrum(entries.pop(_EIGENVALUES), entries.pop(_DENSITY), **entry["spectrum"])
            values, density = spectra[name].eigenvalues, spectra[name].density
            is_vector = values.dim() == 1 and values.shape == density.shape and (values + density).isfinite().all()
            is_real = values.is_floating_point() and density.is_floating_point()
            if not is_vector or not is_real or not isinstance(spectra[name].reliability, float | None):
                raise ValueError(f"Block '{name}' has an invalid spectrum.")
        changes.append(build_change(entry, entries))
    check_disjoint([change.block for change in changes])
    return changes, spectra, dict(header["unrotated"])


def build_change(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
    """Build a change of basis from what :meth:`ChangeOfBasis.describe` returned and its tensors, checking both."""
    if entry["structure"] not in CHANGE_TYPES:
        raise ValueError(
            f"Unknown structure {entry['structure']!r:.80}. This version of egop knows {', '.join(CHANGE_TYPES)}. "
            "Import your own structures before loading a basis."
        )
    dtype = {"float32": torch.float32, "float64": torch.float64}[entry["dtype"]]
    parameters, transposed, stacked = (tuple(entry[key]) for key in ("parameters", "transposed", "stacked"))
    block = Block(entry["name"], parameters, tuple(map(torch.Size, entry["shapes"])), dtype, transposed, stacked)
    if not _is_possible(block):
        raise ValueError(f"Block {block.name!r:.80} has invalid parameter shapes.")
    structure = CHANGE_TYPES[entry["structure"]](block, tensors, entry["settings"]).structure()
    structure.check(block)
    change, shapes = structure.change(block, tensors), structure.basis_shapes(block)
    described = change.describe()
    if described != {key: entry[key] for key in described} or shapes.keys() != tensors.keys():
        raise ValueError(f"Block '{block.name}' does not have the settings and tensors of {change.kind}.")
    for key, tensor in tensors.items():
        if tensor.shape != shapes[key] or not tensor.is_floating_point() or not _is_orthonormal(tensor):
            raise ValueError(f"The {key} of block '{block.name}' is not orthonormal.")
    return change.to(dtype=block.dtype)


def _is_possible(block: Block) -> bool:
    members = list(zip(block.parameters, block.shapes, block.transposed, block.stacked, strict=True))
    return bool(members) and all(
        isinstance(block.name, str)
        and isinstance(name, str)
        and all(size > 0 for size in shape)
        and 0 <= stack <= max(0, len(shape) - 2)
        and (groups == 0 or (groups > 0 and len(shape[stack:]) >= 2 and shape[stack] % groups == 0))
        for name, shape, groups, stack in members
    )


def _is_orthonormal(basis: Tensor) -> bool:
    """Return True if Vᵀ V c = c for one random c, which is a cheap test."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(basis.shape[-1], 1, generator=generator, dtype=torch.float64, device="cpu")
    vector = (vector / torch.linalg.vector_norm(vector)).to(basis)
    return bool(torch.linalg.vector_norm(basis.mT @ (basis @ vector) - vector, dim=(-2, -1)).max() < 1e-3)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum
