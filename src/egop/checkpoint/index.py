"""The index of a checkpoint: which tensors it has, and which piece of each is in which file.

It is JSON, and nothing in it is believed before it is checked. Files are named by numbers, so an index cannot point
elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from egop.basis import read_json, record, whole_numbers, write_json
from egop.checkpoint.pieces import Region

INDEX = "index.json"
_FORMAT = "egop checkpoint"
_VERSION = 2  # 1 was torch.distributed.checkpoint's, with a pickle for an index
_SAVE = r"[0-9]+-[0-9a-f]{8}"
_PART = re.compile(rf"part-({_SAVE})-[0-9]{{5,}}\.safetensors")
_FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"
_OTHERS = "complex128 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in f"{_FLOATS} {_OTHERS}".split()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """A part of a tensor in a file, under the tensor's name."""

    part: int  # the number of the file
    region: Region
    checksum: int  # the CRC-32 of its bytes


class Entry(NamedTuple):
    """A tensor: all of it, and its pieces. An empty one has none."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Piece]


class Index(NamedTuple):
    """All tensors of one save."""

    save: str
    entries: dict[str, Entry]


def part_name(save: str, number: int) -> str:
    """The name of a file of pieces: two saves to one folder have different files."""
    return f"part-{save}-{number:05d}.safetensors"


def save_of(name: str) -> str | None:
    """The save that a file of this name belongs to; None if it is not a file of pieces."""
    match = _PART.fullmatch(name)
    return None if match is None else match[1]


def name_of(dtype: torch.dtype) -> str:
    """The name of a kind of numbers."""
    if dtype not in _NAMES:
        raise TypeError(f"A checkpoint cannot hold tensors of {dtype}; it can of {', '.join(DTYPES)}.")
    return _NAMES[dtype]


def to_text(index: Index) -> str:
    """The text of an index, which is checked as it will be when it is read."""
    for name, entry in index.entries.items():
        _check_cover(name, entry)
    tensors = {name: _described(entry) for name, entry in index.entries.items()}
    return write_json({"format": _FORMAT, "version": _VERSION, "save": index.save, "tensors": tensors})


def from_text(text: bytes) -> Index:
    """The index of a text.

    Raises:
        ValueError: for everything that is not one.
    """
    content = record(read_json(text), "its index", "format", "version", "save", "tensors")
    if content["format"] != _FORMAT:
        raise ValueError(f"its index is not one of an {_FORMAT}")
    if content["version"] != _VERSION:
        raise ValueError(f"its format has version {str(content['version'])[:20]}; this egop reads {_VERSION}")
    if not isinstance(content["save"], str) or not re.fullmatch(_SAVE, content["save"]):
        raise ValueError("its index does not say of which save it is")
    tensors = record(content["tensors"], "its list of tensors")
    return Index(content["save"], {name: _entry(name, value) for name, value in tensors.items()})


def _described(entry: Entry) -> dict[str, Any]:
    pieces = [
        {"part": part, "offset": region.offset, "shape": region.shape, "crc32": checksum}
        for part, region, checksum in entry.pieces
    ]
    return {"shape": list(entry.shape), "dtype": name_of(entry.dtype), "pieces": pieces}


def _entry(name: str, value: Any) -> Entry:
    record(value, f"tensor '{name}'", "shape", "dtype", "pieces")
    shape = whole_numbers(value["shape"], f"the shape of '{name}'")
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        raise ValueError(f"tensor '{name}' is of no kind of numbers that this egop knows")
    if not isinstance(value["pieces"], list):
        raise ValueError(f"tensor '{name}' has no list of pieces")
    pieces = []
    for piece in value["pieces"]:
        record(piece, f"a piece of '{name}'", "part", "offset", "shape", "crc32")
        offset, size = (tuple(whole_numbers(piece[key], f"a piece of '{name}'")) for key in ("offset", "shape"))
        (part,) = whole_numbers([piece["part"]], f"the part of a piece of '{name}'")
        (checksum,) = whole_numbers([piece["crc32"]], f"the checksum of a piece of '{name}'")
        pieces.append(Piece(part, Region(offset, size), checksum))
    entry = Entry(torch.Size(shape), DTYPES[value["dtype"]], pieces)
    _check_cover(name, entry)
    return entry


def _check_cover(name: str, entry: Entry) -> None:
    """Every element of a tensor must be in one piece, and no file has two pieces of it."""
    regions = [piece.region for piece in entry.pieces]
    if len({piece.part for piece in entry.pieces}) < len(regions) or not _cover(entry.shape, regions):
        raise ValueError(f"the pieces of tensor '{name}' do not make up its shape {tuple(entry.shape)}")


def _cover(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Whether these regions are the cells of a grid, all of them, which is how tensors are sharded."""
    if 0 in shape:
        return not regions
    if any(len(part) != len(shape) for region in regions for part in region):
        return False
    spans = [sorted({(region.offset[axis], region.shape[axis]) for region in regions}) for axis in range(len(shape))]
    for size, cells in zip(shape, spans, strict=True):
        end = 0
        for start, length in cells:
            if start != end or length == 0:
                return False
            end += length
        if end != size:
            return False
    return len({region.offset for region in regions}) == len(regions) == math.prod(map(len, spans))
