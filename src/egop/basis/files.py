"""A basis in one safetensors file: written whole or not at all, and read with nothing in it believed."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis, rebuild
from egop.basis.texts import read_json, record, strings, whole_numbers, write_json

FORMAT_VERSION = (
    2  # the first one is read too: it counted samples in another way, and its "stability" was another number
)

# What is known of how far the draws suffice, and under which names; many bases have none.
_SHARES = {"held": "stability", "chance": "chance", "reliability": "reliability", "surprise": "surprise"}
_EIGENVALUES, _DENSITY = "spectrum/eigenvalues", "spectrum/density"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64)}
_STORED = {"F32": torch.float32, "F64": torch.float64}  # as safetensors calls them
# A block takes about a kilobyte there. Parsed, a header takes up to twelve times as much memory.
_LARGEST_HEADER = 32 * 2**20


class Content(NamedTuple):
    """What such a file holds: changes of basis, spectra by block name, and why weights were left alone, by name."""

    changes: Sequence[ChangeOfBasis]
    spectra: Mapping[str, Spectrum]
    unrotated: Mapping[str, str]


def write(path: str | os.PathLike[str], content: Content) -> None:
    """Write a basis to a temporary file, then rename it. If the path is a symbolic link, replace its target."""
    tensors: dict[str, Tensor] = {}
    blocks = []
    for change in content.changes:
        name, description, entries = change.block.name, change.describe(), dict(change.tensors)
        if name in content.spectra:
            spectrum = content.spectra[name]
            description |= {"draws": spectrum.samples} | {key: getattr(spectrum, name) for key, name in _SHARES.items()}
            entries |= {_EIGENVALUES: spectrum.eigenvalues, _DENSITY: spectrum.density}
        description["tensors"] = list(entries)
        tensors |= {f"{name}/{key}": tensor.detach().cpu().contiguous() for key, tensor in entries.items()}
        blocks.append(description)
    _unshare(tensors)
    text = write_json({"version": FORMAT_VERSION, "blocks": blocks, "left": dict(content.unrotated)})
    target = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        partial = Path(beside) / "partial"
        save_file(tensors, partial, metadata={"egop": text, "crc32": str(_checksum(text, tensors))})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        if too_large := _describe_large_header(partial):
            raise ValueError(f"The basis cannot be saved: {too_large}")
        partial.replace(target)


def read(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Content:
    """Read what :func:`write` wrote.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, of another version, or of something else. Values are read only if all sizes fit.
    """
    shown = f"'{os.fspath(path)}'"
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {shown}.")
    if too_large := _describe_large_header(Path(path)):
        raise ValueError(f"{shown} cannot be read: {too_large}")
    try:
        with torch.device("cpu"), safe_open(path, framework="pt") as file:  # slices come on the default device
            metadata = file.metadata() or {}
            if "egop" not in metadata:
                raise ValueError(f"{shown} is a safetensors file, but not one that egop saved.")
            try:
                content = _read_content(file, metadata)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{shown} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"{shown} is not a whole safetensors file: {error}") from error
    return content._replace(changes=[change.to(device) for change in content.changes])


def _describe_large_header(path: Path) -> str:
    """Say that the header of a safetensors file is too large; return "" if it is not."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if not _LARGEST_HEADER < size < path.stat().st_size:  # what is larger than the file is no header at all
        return ""
    return f"its header has {size:,} bytes, more than {_LARGEST_HEADER:,}."


def _read_content(file: Any, metadata: Mapping[str, str]) -> Content:
    text = metadata["egop"]
    if text.count("[") + text.count("{") > text.count('"'):  # empty lists take twenty times their text in memory
        raise ValueError("its text has more lists than names.")
    header = read_json(text)
    names = list(file.keys())
    sized = _content(header, {name: _size_of(file, name) for name in names})  # refuses most before values are read
    _check_first_rows(file, sized.changes)
    tensors = {name: file.get_tensor(name) for name in names}
    # The checksum came later than the format: older files have none.
    if metadata.get("crc32", checksum := str(_checksum(text, tensors))) != checksum:
        raise ValueError("it is not what was written: its checksum differs.")
    return _content(header, tensors)


def _size_of(file: Any, name: str) -> Tensor:
    """Return a tensor of the file without its values, on the meta device."""
    stored = file.get_slice(name)
    if (dtype := _STORED.get(stored.get_dtype())) is None:
        raise ValueError(f"'{name}' is of numbers that no basis has.")
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")


def _check_first_rows(file: Any, changes: Sequence[ChangeOfBasis]) -> None:
    """Raise ValueError for matrices whose first row is too long, or of a square one too short, to be orthonormal."""
    for change in changes:
        for key, tensor in change.tensors.items():
            row = file.get_slice(f"{change.block.name}/{key}")[(slice(0, 1),) * (tensor.dim() - 1)]
            length = float(torch.linalg.vector_norm(row.double()))
            is_square = tensor.shape[-2] == tensor.shape[-1]
            if tensor.numel() and not (length < 1.01 and (length > 0.99 or not is_square)):
                raise ValueError(_not_orthonormal(change.block, key))


def _content(header: Any, tensors: Mapping[str, Tensor]) -> Content:
    """Build what a file holds; of tensors on the meta device only the sizes are checked."""
    record(header, "its text", "version", "blocks", "left")
    if header["version"] not in (1, FORMAT_VERSION):
        raise ValueError(
            f"it has format version {str(header['version'])[:20]}; this egop reads 1 and {FORMAT_VERSION}."
        )
    unrotated = record(header["left"], "the list of weights that were left alone")
    strings(list(unrotated.values()), "the list of weights that were left alone")
    if not isinstance(header["blocks"], list):
        raise ValueError("it has no list of blocks.")
    changes, spectra = [], {}
    listed: set[str] = set()
    for description in header["blocks"]:
        block = _block(description)
        keys = strings(description["tensors"], f"the list of tensors of block '{block.name}'")
        if missing := [key for key in keys if f"{block.name}/{key}" not in tensors]:
            raise ValueError(f"it lacks {missing} of block '{block.name}'.")
        entries = {key: tensors[f"{block.name}/{key}"] for key in keys}
        listed |= {f"{block.name}/{key}" for key in keys}
        if _EIGENVALUES in entries or _DENSITY in entries:
            values, density = entries.pop(_EIGENVALUES), entries.pop(_DENSITY)
            changes.append(_change(block, entries, description))
            spectra[block.name] = _spectrum(changes[-1], values, density, description)
        else:
            changes.append(_change(block, entries, description))
    if others := sorted(tensors.keys() - listed):
        raise ValueError(f"its tensor '{others[0]}' belongs to no block.")
    names = [change.block.name for change in changes]
    parameters = [name for change in changes for name in change.block.parameters]
    if len(set(names)) < len(names) or len(set(parameters)) < len(parameters):
        raise ValueError("it has one block twice, or one parameter in two blocks.")
    return Content(changes, spectra, unrotated)


def _block(description: Any) -> Block:
    record(description, "a block", "name", "structure", "parameters", "shapes", "transposed", "dtype", "tensors")
    name = description["name"]
    if not isinstance(name, str) or not isinstance(description["shapes"], list):
        raise ValueError("a block has no name, or no shapes.")
    parameters = strings(description["parameters"], f"the parameters of block '{name}'")
    shapes = [whole_numbers(shape, f"a shape of block '{name}'") for shape in description["shapes"]]
    groups = whole_numbers(description["transposed"], f"the groups of block '{name}'")
    # The stacks came later than the format: older files have none.
    stacks = whole_numbers(description.get("stacked", [0] * len(shapes)), f"the stacks of block '{name}'")
    if not len(parameters) == len(shapes) == len(groups) == len(stacks) > 0:
        raise ValueError(f"block '{name}' does not have a shape for each parameter.")
    for shape, group, stack in zip(shapes, groups, stacks, strict=True):
        if stack > max(0, len(shape) - 2):
            raise ValueError(f"block '{name}' has a shape {shape} that is no stack in {stack} dimensions.")
        if group and (len(shape) - stack < 2 or shape[stack] % group):
            raise ValueError(f"block '{name}' has a shape {shape} that {group} groups do not divide.")
    if (dtype := _DTYPES.get(str(description["dtype"]))) is None:
        raise ValueError(f"block '{name}' is of numbers that no basis has.")
    return Block(name, tuple(parameters), tuple(map(torch.Size, shapes)), dtype, tuple(groups), tuple(stacks))


def _change(block: Block, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> ChangeOfBasis:
    """The change of basis of a block, if its tensors are what the structure needs there: orthonormal columns."""
    settings = record(description, f"block '{block.name}'", "settings")["settings"]
    change = rebuild(description, tensors)
    structure = change.structure()
    structure.check(block)
    if structure.change(block, tensors).settings != settings or set(tensors) != set(structure.basis_shapes(block)):
        raise ValueError(f"block '{block.name}' has other settings or tensors than {change.kind} has.")
    for key, tensor in tensors.items():
        if tensor.dim() != len(structure.basis_shapes(block)[key]) or tensor.dtype != block.dtype:
            raise ValueError(
                f"the {key} of block '{block.name}' is not a matrix, or a stack of them, of {block.dtype}."
            )
        if not tensor.is_meta and not orthonormality_error(tensor) < 1e-3:
            raise ValueError(_not_orthonormal(block, key))
    return change


def _not_orthonormal(block: Block, key: str) -> str:
    return f"the {key} of block '{block.name}' is not orthonormal."


def orthonormality_error(basis: Tensor) -> float:
    """How far Vᵀ V c is from a random c of length one. The room this takes is known from the file, not from a text."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(basis.shape[-1], 1, generator=generator, dtype=torch.float64, device="cpu")
    vector = (vector / torch.linalg.vector_norm(vector)).to(basis)
    return float(torch.linalg.vector_norm(basis.mT @ (basis @ vector) - vector, dim=(-2, -1)).max())


def _spectrum(change: ChangeOfBasis, values: Tensor, density: Tensor, description: Mapping[str, Any]) -> Spectrum:
    block = change.block
    if "draws" in description:
        samples = description["draws"]
    else:  # older files count the rows of all gradients where rows share a basis
        samples = record(description, f"block '{block.name}'", "samples")["samples"]
        if type(samples) is int and change.kind == "Shared":
            basis = change.tensors["basis"]
            samples //= block.size // (basis.numel() // basis.shape[-1])
    shares = {name: description.get(key) for key, name in _SHARES.items()}
    fine = all(part.dim() == 1 and part.is_floating_point() for part in (values, density))
    fine = fine and all(part.is_meta or part.isfinite().all() for part in (values, density))
    fine = fine and 0 < len(values) == len(density) <= block.size and type(samples) is int and samples >= 0
    if not fine or not all(share is None or type(share) is float for share in shares.values()):
        raise ValueError(f"the spectrum of block '{block.name}' is not one.")
    return Spectrum(values, density, samples, **shares)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> int:
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _unshare(tensors: dict[str, Tensor]) -> None:
    """Copy those that share their memory with one before, as two blocks with one basis do: safetensors refuses them."""
    seen = set()
    for name, tensor in tensors.items():
        if (place := tensor.untyped_storage().data_ptr()) in seen:
            tensors[name] = tensor.clone()
        seen.add(place)
