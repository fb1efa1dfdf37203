"""Tensors by name, and one JSON text, in the files of torch.distributed.checkpoint."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from egop.checkpoint.index import check_index
from egop.processes import world_size

T = TypeVar("T")

_TEXT = "text"  # its name among the tensors


def clearly(problem: str, action: Callable[..., T], *arguments: Any, advice: str = "") -> T:
    """Do it; an error becomes one line, which says what it means, and what to do about it."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        return action(*arguments)
    except CheckpointException as error:  # this is no Exception, and its text has all tracebacks in it
        cause, _ = next(iter(error.failures.values()))
    except Exception as error:
        cause = error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    raise ValueError(f"{problem} ({text[:200]}). {advice}".rstrip()) from cause


def with_text(tensors: dict[str, Tensor], content: Any) -> dict[str, Tensor]:
    """These tensors and what JSON can hold, as bytes."""
    return tensors | {_TEXT: torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)}


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write what this process has of the tensors; of what all have, the first process writes its own."""
    from torch.distributed import checkpoint

    with _quiet():
        checkpoint.save(
            tensors,
            storage_writer=checkpoint.FileSystemWriter(folder, sync_files=True),
            planner=checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            no_dist=world_size() == 1,
        )


class Saved:
    """What a checkpoint holds: the text is read at once, the tensors into places that are made for them.

    Each process reads for itself, so that an error is its own until all have heard of it.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        check_index(folder)
        self._folder = folder
        metadata = checkpoint.FileSystemReader(folder).read_metadata()
        self._entries: dict[str, Any] = metadata.state_dict_metadata  # all of them of tensors
        self._places: dict[str, Tensor] = {}
        text = self.place(_TEXT, torch.empty)
        self.read()
        written = text.numpy().tobytes()
        self.content: Any = json.loads(written)
        self.digest = hashlib.sha256(written).hexdigest()

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, all of it."""
        if name not in self._entries:
            raise ValueError(f"The checkpoint {self._folder} is incomplete or damaged: it lacks the tensor '{name}'.")
        size: torch.Size = self._entries[name].size
        return size

    def place(self, name: str, make: Callable[..., Tensor]) -> Tensor:
        """Where :meth:`read` is to write a tensor.

        Args:
            name: of the tensor.
            make: gives a place for a shape and ``dtype=``.
        """
        shape = self.shape(name)
        self._places[name] = make(shape, dtype=self._entries[name].properties.dtype)
        return self._places[name]

    def read(self) -> None:
        """Read all tensors that have got a place."""
        from torch.distributed import checkpoint

        with _quiet():
            checkpoint.load(self._places, storage_reader=checkpoint.FileSystemReader(self._folder), no_dist=True)
        self._places = {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that one process alone is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
