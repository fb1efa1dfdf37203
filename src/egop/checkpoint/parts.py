"""One file of pieces, in the format of safetensors: written piece by piece, and read where something is needed."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from egop.checkpoint.index import Piece
from egop.checkpoint.pieces import Region

# What safetensors calls the kinds of numbers. Complex ones are written as pairs of real ones.
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Wish(NamedTuple):
    """What is wanted of a piece.

    Attributes:
        name: of the tensor.
        dtype: of the tensor.
        piece: of it.
        into: where to.
        region: which part of the tensor belongs there; None if nothing of it does.
        check: whether to compare the piece with its checksum even if it has to be read for nothing else.
    """

    name: str
    dtype: torch.dtype
    piece: Piece
    into: Tensor
    region: Region | None
    check: bool


def write_part(path: Path, save: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write tensors, one after the other, so that there is no second copy of all of them; and their checksums."""
    # The largest numbers first, so that each tensor begins at a multiple of their size: its readers want that.
    names = sorted(tensors, key=lambda name: -_stored(tensors[name]).dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"save": save}}
    end = 0
    for name in names:
        stored = _stored(tensors[name])
        start, end = end, end + stored.numel() * stored.dtype.itemsize
        header[name] = {"dtype": _KINDS[stored.dtype], "shape": list(stored.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksums = {}
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = _bytes(_stored(tensors[name]))
            file.write(data)
            checksums[name] = zlib.crc32(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def read_part(path: Path, save: str, wishes: Iterable[Wish]) -> None:
    """Read what is wanted of a file, which must be of this save.

    Raises:
        ValueError: if it does not hold what the index says, or not as it was written.
    """
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("save") != save:
            raise ValueError(f"{path.name} is not a file of the save that its index is of")
        for wish in wishes:
            _read(file, wish)


def _read(file: Any, wish: Wish) -> None:
    place, stored = wish.piece.region, torch.empty(wish.piece.region.shape, dtype=wish.dtype, device="meta")
    piece, expected = file.get_slice(wish.name), _stored(stored)
    if (piece.get_dtype(), piece.get_shape()) != (_KINDS[expected.dtype], list(expected.shape)):
        raise ValueError(f"'{wish.name}' is not of the shape and kind of numbers in its file that the index says")
    common = None if wish.region is None else place.common(wish.region)
    if wish.check or common == place:
        values = file.get_tensor(wish.name)
        if zlib.crc32(_bytes(values)) != wish.piece.checksum:
            raise ValueError(f"'{wish.name}' is not what was written: its checksum differs")
        values = values[common.within(place)] if common is not None else values
    elif common is not None:
        values = piece[common.within(place)]
    if common is not None and wish.region is not None:
        if wish.dtype.is_complex:  # in memory of its own: the file's is aligned for the numbers, not for pairs of them
            values = torch.view_as_complex(values.clone(memory_format=torch.contiguous_format))
        wish.into[common.within(wish.region)].copy_(values)


def _stored(tensor: Tensor) -> Tensor:
    """A tensor as it is in a file."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its rows; those of one on the CPU that has this order are not copied."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
