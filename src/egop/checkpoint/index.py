"""The index of torch.distributed.checkpoint is a pickle, which may ask for anything: a look before torch reads it."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch

_HOLDERS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PATHS = ("Path", "PosixPath", "WindowsPath")


class _Reader(pickle.Unpickler):
    """Makes nothing but what such an index consists of: shapes, types of numbers, paths and plain records."""

    def find_class(self, module: str, name: str) -> Any:
        """What an index may name; a name with dots would lead anywhere."""
        if "." not in name:
            if module in _HOLDERS:
                found = super().find_class(module, name)
                own = isinstance(found, type) and found.__module__ in _HOLDERS
                if own and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                    return found
            elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            elif (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
                return super().find_class(module, name)
            elif module.partition(".")[0] == "pathlib" and name in _PATHS:
                return getattr(pathlib, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which no checkpoint needs")


def check_index(folder: Path) -> None:
    """Raise an error for an index that asks for more than a checkpoint needs: reading it might run someone's code."""
    import torch.distributed.checkpoint  # noqa: F401 - what the index names must be there

    with (folder / ".metadata").open("rb") as file:
        _Reader(file).load()
