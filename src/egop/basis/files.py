"""Save a basis to one safetensors file, and load it without trusting what the file says."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from math import prod
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
# A block takes about a kilobyte of the header. Parsing takes up to twenty times the header's size in memory.
_MAX_HEADER_BYTES = 32 * 2**20
_MAX_ENTRIES = 2**60
_DTYPES = {"F32": torch.float32, "F64": torch.float64}  # as safetensors calls them
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
    """Load a file that :func:`save` wrote. Values are read only if all sizes fit.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, has another version, or does not hold a basis.
    """
    name, path = f"'{os.fspath(path)}'", Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {name}.")
    try:
        _check_header_size(path)
        # safetensors refuses sizes that do not add up to that of the file. It returns slices on the default device.
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            changes, spectra, unrotated = _read(file)
    except SafetensorError as error:
        raise ValueError(f"{name} is not a complete safetensors file: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        problem = f"its header is invalid ({type(error).__name__}: {error!s:.80})."
        raise ValueError(f"{name} cannot be loaded: {problem}") from error
    return [change.to(device) for change in changes], spectra, unrotated


def _check_header_size(path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if _MAX_HEADER_BYTES < size < path.stat().st_size:  # if it exceeds the file, this is no safetensors file at all
        raise ValueError(f"its header has {size:,} bytes. Must be at most {_MAX_HEADER_BYTES:,}.")


def _read(file: Any) -> Content:
    metadata, sizes = file.metadata() or {}, {}
    if "egop" not in metadata:
        raise ValueError("it is a safetensors file, but not one that egop saved.")
    header = json.loads(metadata["egop"])
    for name in file.keys():  # noqa: SIM118 - the file is not a mapping
        entry = file.get_slice(name)
        sizes[name] = torch.empty(entry.get_shape(), dtype=_DTYPES[entry.get_dtype()], device="meta")
    _parse(header, sizes)
    tensors = {name: file.get_tensor(name) for name in sizes}
    if metadata.get("crc32") != str(_checksum(metadata["egop"], tensors)):
        raise ValueError("its checksum is wrong: it was damaged after it was saved.")
    return _parse(header, tensors)


def _parse(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Content:
    """Check the header against the tensors, which may be on the meta device, and build the content."""
    if header["version"] != _VERSION:
        raise ValueError(f"it has format version {header['version']!r:.20}; this egop reads version {_VERSION}.")
    unrotated = dict(header["unrotated"])
    if not all(isinstance(reason, str) for reason in unrotated.values()):
        raise ValueError("A reason for not rotating a weight is not a string.")
    names = {f"{entry['name']}/{key}" for entry in header["blocks"] for key in entry["tensors"]}
    if unexpected := sorted(names ^ tensors.keys()):
        raise ValueError(f"The tensor '{unexpected[0]}' is missing, or belongs to no block.")
    changes, spectra = [], {}
    for entry in header["blocks"]:
        entries = {key: tensors[f"{entry['name']}/{key}"] for key in entry["tensors"]}
        if "spectrum" in entry:
            spectrum = Spectrum(entries.pop(_EIGENVALUES), entries.pop(_DENSITY), **entry["spectrum"])
            if not _is_valid(spectrum, sum(map(prod, entry["shapes"]))):
                raise ValueError(f"Block '{entry['name']}' has an invalid spectrum.")
            spectra[entry["name"]] = spectrum
        changes.append(build_change(entry, entries))
    check_disjoint([change.block for change in changes])
    return changes, spectra, unrotated


def build_change(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
    """Build a change of basis from what :meth:`ChangeOfBasis.describe` returned and its tensors, checking both."""
    if entry["structure"] not in CHANGE_TYPES:
        raise ValueError(
            f"Unknown structure {entry['structure']!r:.80}. This version of egop knows {', '.join(CHANGE_TYPES)}. "
            "Import your own structures before loading a basis."
        )
    sizes = tuple(map(torch.Size, entry["shapes"]))
    dtype = {"float32": torch.float32, "float64": torch.float64}[entry["dtype"]]
    parameters, transposed, stacked = (tuple(entry[key]) for key in ("parameters", "transposed", "stacked"))
    block = Block(entry["name"], parameters, sizes, dtype, transposed, stacked)
    _check_block(block)
    structure = CHANGE_TYPES[entry["structure"]](block, tensors, entry["settings"]).structure()
    structure.check(block)
    change, shapes = structure.change(block, tensors), structure.basis_shapes(block)
    described = change.describe()
    if described != {key: entry[key] for key in described} or shapes.keys() != tensors.keys():
        raise ValueError(f"Block '{block.name}' does not have the settings and tensors of {change.kind}.")
    for key, tensor in tensors.items():
        if tensor.shape != shapes[key] or not _is_orthonormal(tensor):
            raise ValueError(f"The {key} of block '{block.name}' is not orthonormal.")
    return change.to(dtype=block.dtype)


def _check_block(block: Block) -> None:
    if not all(isinstance(name, str) for name in (block.name, *block.parameters)):
        raise ValueError(f"Block {block.name!r:.80} has a name that is not a string.")
    if not len(block.parameters) == len(block.shapes) == len(block.transposed) == len(block.stacked) > 0:
        raise ValueError(f"Block '{block.name}' does not have one shape per parameter.")
    for shape, groups, stack in zip(block.shapes, block.transposed, block.stacked, strict=True):
        has_entries = all(size > 0 for size in shape) and prod(shape) < _MAX_ENTRIES
        is_stack = 0 <= stack <= max(0, len(shape) - 2)
        is_grouped = groups > 0 and len(shape[stack:]) >= 2 and shape[stack] % groups == 0
        if not has_entries or not is_stack or not (groups == 0 or is_grouped):
            raise ValueError(
                f"Block '{block.name}' cannot have shape {tuple(shape)}, stacked={stack!r}, transposed={groups!r}."
            )


def _is_orthonormal(basis: Tensor) -> bool:
    """Return True if Vᵀ V c = c for one random c, a cheap test, or if the tensor has no values."""
    if basis.is_meta or not basis.is_floating_point():
        return basis.is_meta
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(basis.shape[-1], 1, generator=generator, dtype=torch.float64, device="cpu")
    vector = (vector / torch.linalg.vector_norm(vector)).to(basis)
    return bool(torch.linalg.vector_norm(basis.mT @ (basis @ vector) - vector, dim=(-2, -1)).max() < 1e-3)


def _is_valid(spectrum: Spectrum, limit: int) -> bool:
    values, density = spectrum.eigenvalues, spectrum.density
    is_finite = all(part.is_meta or bool(part.isfinite().all()) for part in (values, density))
    is_known = type(spectrum.samples) is int and isinstance(spectrum.reliability, float | None)
    return is_finite and is_known and values.shape == density.shape == (len(values),) and len(values) <= limit


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum
