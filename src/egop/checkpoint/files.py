"""Tensors by name, and one JSON text: each process writes its pieces to a file of its own, the first one an index."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from egop.basis import read_json, write_json
from egop.checkpoint.index import INDEX, Entry, Index, Piece, from_text, name_of, part_name, to_text
from egop.checkpoint.parts import Wish, read_part, write_part
from egop.checkpoint.pieces import Region, is_first_with_it, is_plainly_sharded, region_here
from egop.distributed import agreed, exchanged, local, rank, whole, world_size
from egop.distributed import write as write_sharded

T = TypeVar("T")

_TEXT = "text"  # its name among the tensors


def clearly(
    problem: str,
    action: Callable[..., T],
    *arguments: Any,
    advice: str = "",
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> T:
    """Do it; an error of these kinds becomes one line, which says what it means, and what to do about it."""
    try:
        return action(*arguments)
    except kinds as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{problem} ({text[:200]}). {advice}".rstrip()) from error


def with_text(tensors: dict[str, Tensor], content: Any) -> dict[str, Tensor]:
    """These tensors and what JSON can hold, as bytes."""
    return tensors | {_TEXT: torch.frombuffer(bytearray(write_json(content).encode()), dtype=torch.uint8)}


def write(folder: Path, save: str, tensors: dict[str, Tensor]) -> None:
    """Write what this process has of the tensors; of what several have, the first of them writes its own.

    All processes call this together; an error in one is raised in all.

    Args:
        folder: an empty one.
        save: a name for this save that no other has, the same in all processes.
        tensors: plain, or sharded over the processes as ``DTensor``; those that only the first process has are plain.
    """
    gathered = _gathered(tensors)
    held = agreed(lambda: _held(tensors, gathered))

    def write_own() -> dict[str, tuple[Region, int]]:
        checksums = write_part(
            folder / part_name(save, rank()), save, {name: piece for name, (_, piece) in held.items()}
        )
        return {name: (held[name][0], checksum) for name, checksum in checksums.items()}

    written = exchanged(lambda: write_own() if held else {})
    agreed(lambda: _write_index(folder, save, tensors, written) if rank() == 0 else None)


class Saved:
    """What a checkpoint holds: the text is read at once, the tensors into places that are made for them.

    Each process reads for itself, so that an error is its own until all have heard of it. The index is read once, and
    never asks for more memory than the files have bytes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        written = (folder / INDEX).read_bytes()
        self._save, self._entries = from_text(written)
        self._check_sizes()
        self._places: dict[str, Tensor] = {}
        text = self.place(_TEXT, torch.empty)
        self.read()
        self.content: Any = read_json(text.numpy().tobytes())
        # The index has the checksums of all there is: those who have one digest have one checkpoint.
        self.digest = hashlib.sha256(written).hexdigest()

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, all of it."""
        return self._entry(name).shape

    def place(self, name: str, make: Callable[..., Tensor]) -> Tensor:
        """Where :meth:`read` is to write a tensor. It has one place only, or a small file could ask for many.

        Args:
            name: of the tensor.
            make: gives a place for a shape and ``dtype=``: a plain tensor or a ``DTensor``, with any strides.
        """
        entry = self._entry(name)
        if name in self._places:
            raise ValueError(f"The checkpoint {self._folder} is incomplete or damaged: it names '{name}' twice.")
        place = make(entry.shape, dtype=entry.dtype)
        if place.shape != entry.shape:
            raise ValueError(f"'{name}' has shape {tuple(entry.shape)} in the checkpoint, got {tuple(place.shape)}.")
        self._places[name] = place
        return place

    def read(self) -> None:
        """Read all tensors that have got a place."""
        places, self._places = self._places, {}
        wholes = {
            name: torch.empty(place.shape, dtype=self._entry(name).dtype)
            for name, place in places.items()
            if not is_plainly_sharded(place)
        }
        for part, wishes in sorted(self._wishes(places | wholes).items()):
            with torch.no_grad():
                read_part(self._folder / part_name(self._save, part), self._save, wishes)
        for name, values in wholes.items():
            write_sharded(places[name], values.to(places[name].device, places[name].dtype))

    def _wishes(self, places: dict[str, Tensor]) -> dict[int, list[Wish]]:
        """What this process needs for these places, by the number of the file.

        A piece is compared with its checksum by those who read all of it, and in any case by one process.
        """
        wishes: dict[int, list[Wish]] = {}
        count = 0
        for name, place in places.items():
            region, here = region_here(place), local(place)
            shape, dtype, pieces = self._entry(name)
            if region is not None and here.shape != region.shape:
                raise ValueError(f"'{name}' of shape {tuple(shape)} is not sharded as torch shards tensors.")
            for piece in pieces:
                count += 1
                check = count % world_size() == rank()
                if check or (region is not None and region.common(piece.region) is not None):
                    wishes.setdefault(piece.part, []).append(Wish(name, dtype, piece, here, region, check))
        return wishes

    def _entry(self, name: str) -> Entry:
        if not isinstance(name, str) or name not in self._entries:
            raise ValueError(
                f"The checkpoint {self._folder} is incomplete or damaged: it lacks the tensor '{str(name)[:80]}'."
            )
        return self._entries[name]

    def _check_sizes(self) -> None:
        """Compare what the index promises with the sizes of the files, before room is made for it."""
        sizes: dict[int, int] = {}
        for entry in self._entries.values():
            for piece in entry.pieces:
                sizes[piece.part] = sizes.get(piece.part, 0) + math.prod(piece.region.shape) * entry.dtype.itemsize
        for part, size in sorted(sizes.items()):
            path = self._folder / part_name(self._save, part)
            if path.stat().st_size < size:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes, its index promises {size}")


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """All of the tensors of which no process has a plain piece, in the process that writes them; None in the others."""
    odd = [name for name, tensor in tensors.items() if not is_plainly_sharded(tensor)]
    if any(names != odd for names in exchanged(lambda: odd)):  # to gather them would be to wait for ever
        raise ValueError("The processes have different tensors to save; what only one of them has must be plain.")
    gathered: dict[str, Tensor | None] = {}
    for name in odd:
        values = whole(tensors[name])
        gathered[name] = values.cpu() if is_first_with_it(tensors[name]) else None
    return gathered


def _held(tensors: dict[str, Tensor], gathered: dict[str, Tensor | None]) -> dict[str, tuple[Region, Tensor]]:
    """The pieces that this process writes, and where in the tensors they are."""
    held = {}
    for name, tensor in tensors.items():
        name_of(tensor.dtype)  # raises an error for a kind of numbers that cannot be written
        if name in gathered:
            piece = gathered[name]
            region = None if piece is None else region_here(piece)
        else:
            piece = local(tensor)
            region = region_here(tensor) if is_first_with_it(tensor) else None
        if region is None or piece is None or 0 in region.shape:
            continue
        if piece.shape != region.shape:
            raise ValueError(
                f"'{name}' is not sharded as torch shards tensors: of its shape {tuple(tensor.shape)} this process "
                f"should have {region.shape}, but has {tuple(piece.shape)}."
            )
        held[name] = region, piece
    return held


def _write_index(
    folder: Path, save: str, tensors: dict[str, Tensor], written: list[dict[str, tuple[Region, int]]]
) -> None:
    """Say where everything is. Checks that the processes have written all of every tensor."""
    entries = {name: Entry(tensor.shape, tensor.dtype, []) for name, tensor in tensors.items()}
    for part, pieces in enumerate(written):
        for name, (region, checksum) in pieces.items():
            entries[name].pieces.append(Piece(part, region, checksum))
    with (folder / INDEX).open("x", encoding="utf-8") as file:
        file.write(to_text(Index(save, entries)))
        file.flush()
        os.fsync(file.fileno())
