"""Save a basis to one safetensors file, and load it without trusting what the file says."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from egop.basis.partition import Block, check_disjoint
from egop.basis.spectrum import Spectrum
from egop.basis.structures import CHANGE_TYPES, ChangeOfBasis

_VERSION = 3
# A block takes about a kilobyte of the header. Parsing takes up to twelve times the header's size in memory.
_MAX_HEADER_BYTES = 32 * 2**20
_MAX_DIMENSIONS, _MAX_ENTRIES = 64, 2**60
_DTYPES = {"F32": torch.float32, "F64": torch.float64}  # as safetensors calls them
_EIGENVALUES, _DENSITY = "spectrum/eigenvalues", "spectrum/density"


class Content(NamedTuple):
    """Changes of basis, spectra by block name, and reasons why weights are not rotated, by name."""

    changes: Sequence[ChangeOfBasis]
    spectra: Mapping[str, Spectrum]
    unrotated: Mapping[str, str]


def save(path: str | os.PathLike[str], content: Content) -> None:
    """Write a basis to a temporary file, then rename it. If the path is a symbolic link, replace its target."""
    tensors: dict[str, Tensor] = {}
    blocks = []
    for change in content.changes:
        entry, entries = change.describe(), dict(change.tensors)
        if (spectrum := content.spectra.get(change.block.name)) is not None:
            entry["spectrum"] = {"samples": spectrum.samples, "reliability": spectrum.reliability}
            entries |= {_EIGENVALUES: spectrum.eigenvalues, _DENSITY: spectrum.density}
        blocks.append(entry | {"tensors": list(entries)})
        tensors |= {f"{change.block.name}/{key}": tensor.detach().cpu() for key, tensor in entries.items()}
    tensors = _unshare(tensors)
    text = json.dumps({"version": _VERSION, "blocks": blocks, "unrotated": dict(content.unrotated)})
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        partial = Path(folder) / "partial"
        save_file(tensors, partial, metadata={"egop": text, "crc32": str(_checksum(text, tensors))})
        if problem := _find_header_problem(partial):
            raise ValueError(f"The basis cannot be saved: {problem}")
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Content:
    """Load a file that :func:`save` wrote. Values are read only if all sizes fit.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, has another version, or does not hold a basis.
    """
    name = f"'{os.fspath(path)}'"
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {name}.")
    if problem := _find_header_problem(Path(path)):
        raise ValueError(f"{name} cannot be loaded: {problem}")
    try:
        # safetensors refuses sizes that do not add up to that of the file. It returns slices on the default device.
        with torch.device("cpu"), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "egop" not in metadata:
                raise ValueError(f"{name} is a safetensors file, but not one that egop saved.")
            try:
                content = _read(file, metadata)
            except ValueError as error:
                raise ValueError(f"{name} cannot be loaded: {error}") from error
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
                problem = f"its header is invalid ({type(error).__name__}: {error!s:.80})."
                raise ValueError(f"{name} cannot be loaded: {problem}") from error
    except SafetensorError as error:
        raise ValueError(f"{name} is not a complete safetensors file: {error}") from error
    return content._replace(changes=[change.to(device) for change in content.changes])


def _find_header_problem(path: Path) -> str:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if _MAX_HEADER_BYTES < size < path.stat().st_size:  # if it exceeds the file, this is no safetensors file at all
        return f"its header has {size:,} bytes. Must be at most {_MAX_HEADER_BYTES:,}."
    return ""


def _read(file: Any, metadata: Mapping[str, str]) -> Content:
    text = metadata["egop"]
    if text.count("[") + text.count("{") > text.count('"'):  # empty lists take twenty times their text in memory
        raise ValueError("its header has more lists than names.")
    header = json.loads(text)
    names = list(file.keys())
    empty = _parse(header, {name: _read_size(file, name) for name in names})  # rejects most bad files by their sizes
    for change in empty.changes:
        for key, tensor in change.tensors.items():  # rejects large files without content
            row = file.get_slice(f"{change.block.name}/{key}")[(slice(0, 1),) * (tensor.dim() - 1)]
            length = float(torch.linalg.vector_norm(row.double()))
            if not length < 1.01 or (length < 0.99 and tensor.shape[-2] == tensor.shape[-1]):
                raise ValueError(f"The {key} of block '{change.block.name}' is not orthonormal.")
    tensors = {name: file.get_tensor(name) for name in names}
    if metadata.get("crc32") != str(_checksum(text, tensors)):
        raise ValueError("its checksum is wrong: it was damaged after it was saved.")
    return _parse(header, tensors)


def _read_size(file: Any, name: str) -> Tensor:
    """Return a tensor of the file without values, on the meta device."""
    entry = file.get_slice(name)
    return torch.empty(entry.get_shape(), dtype=_DTYPES[entry.get_dtype()], device="meta")


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
        values, density = entries.pop(_EIGENVALUES, None), entries.pop(_DENSITY, None)
        changes.append(build_change(entry, entries))
        if "spectrum" in entry:
            spectra[entry["name"]] = _parse_spectrum(changes[-1].block, entry["spectrum"], values, density)
        elif values is not None or density is not None:
            raise ValueError(f"Block '{entry['name']}' does not describe its spectrum.")
    check_disjoint([change.block for change in changes])
    return Content(changes, spectra, unrotated)


def build_change(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ChangeOfBasis:
    """Build a change of basis from what :meth:`ChangeOfBasis.describe` returned and its tensors, checking both."""
    block = _parse_block(entry)
    if entry["structure"] not in CHANGE_TYPES:
        raise ValueError(
            f"Unknown structure {entry['structure']!r:.80}. This version of egop knows {', '.join(CHANGE_TYPES)}. "
            "Import your own structures before loading a basis."
        )
    change = CHANGE_TYPES[entry["structure"]](block, tensors, entry["settings"])
    structure = change.structure()
    structure.check(block)
    shapes = structure.basis_shapes(block)
    if structure.change(block, tensors).settings != entry["settings"] or shapes.keys() != tensors.keys():
        raise ValueError(f"Block '{block.name}' does not have the settings and tensors of {change.kind}.")
    for key, tensor in tensors.items():
        if tensor.shape != shapes[key] or not _is_orthonormal(tensor):
            raise ValueError(f"The {key} of block '{block.name}' is not orthonormal.")
    return change.to(dtype=block.dtype)


def _parse_block(entry: Mapping[str, Any]) -> Block:
    name, *lists = (entry[key] for key in ("name", "parameters", "shapes", "transposed", "stacked"))
    parameters, shapes, transposed, stacked = lists
    if not all(isinstance(text, str) for text in (name, *parameters)) or entry["dtype"] not in ("float32", "float64"):
        raise ValueError(f"Block {name!r:.80} has an invalid name or dtype.")
    if not len(parameters) == len(shapes) == len(transposed) == len(stacked) > 0:
        raise ValueError(f"Block '{name}' does not have one shape per parameter.")
    for shape, groups, stack in zip(shapes, transposed, stacked, strict=True):
        if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and 0 < n < _MAX_ENTRIES for n in shape):
            raise ValueError(f"Block '{name}' has an invalid shape.")
        is_stack = type(stack) is int and 0 <= stack <= max(0, len(shape) - 2)
        is_grouped = is_stack and type(groups) is int and groups > 0 and len(shape) - stack >= 2
        if (
            not is_stack
            or prod(shape) >= _MAX_ENTRIES
            or not (groups == 0 or (is_grouped and shape[stack] % groups == 0))
        ):
            raise ValueError(f"Block '{name}' of shape {shape} cannot have stacked={stack!r}, transposed={groups!r}.")
    sizes = tuple(torch.Size(shape) for shape in shapes)
    return Block(name, tuple(parameters), sizes, getattr(torch, entry["dtype"]), tuple(transposed), tuple(stacked))


def _is_orthonormal(basis: Tensor) -> bool:
    """Return True if Vᵀ V c = c for one random c, a cheap test, or if the tensor has no values."""
    if basis.is_meta or not basis.is_floating_point():
        return basis.is_meta
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(basis.shape[-1], 1, generator=generator, dtype=torch.float64, device="cpu")
    vector = (vector / torch.linalg.vector_norm(vector)).to(basis)
    return bool(torch.linalg.vector_norm(basis.mT @ (basis @ vector) - vector, dim=(-2, -1)).max() < 1e-3)


def _parse_spectrum(block: Block, entry: Mapping[str, Any], values: Any, density: Any) -> Spectrum:
    samples, reliability = entry["samples"], entry["reliability"]
    is_valid = values.shape == density.shape and values.dim() == 1 and 0 < len(values) <= block.size
    is_valid = is_valid and all(part.is_meta or part.isfinite().all() for part in (values, density))
    is_valid = is_valid and type(samples) is int and samples >= 0
    if not is_valid or not (reliability is None or type(reliability) is float):
        raise ValueError(f"Block '{block.name}' has an invalid spectrum.")
    return Spectrum(values, density, samples, reliability)


def _unshare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous, and copy those that share memory with an earlier one: safetensors refuses them."""
    result: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum
