"""Checkpoints of a model and its optimizer.

A checkpoint is a folder to which every process writes its part, and from which any number of processes can go on. It
holds tensors in safetensors files (one of them is a JSON text, as bytes) and an index in JSON, so that nothing in it
can run. All of it is checked: sizes against the files before room is made, and bytes against checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from egop.checkpoint import folders
from egop.checkpoint.contents import check_kind, check_same, extra_of, fitted, give, sum_parts, taken_apart, trust
from egop.checkpoint.files import Saved, clearly, write
from egop.checkpoint.folders import latest
from egop.distributed import agreed, exchanged, new_name, rank
from egop.optimizer import ReparameterizedOptimizer

__all__ = ["extra", "latest", "load", "save"]

T = TypeVar("T")

# What comes of values that are not what they should be. A ValueError says itself what does not fit.
_NOT_UNDERSTOOD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ReparameterizedOptimizer,
    *,
    keep: int | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint, whole or not at all.

    It is written beside, synced to the disk and renamed; an old one of that name is replaced only then. What a killed
    write has left is cleared away by the next one. All processes call this together, and see the same folder. Of
    several runs that save to one name at the same time the last one's checkpoint stays, whole.

    Args:
        directory: its name. In a folder of them, ``step-000123`` is a name that :func:`latest` knows. A link stays
            one: what it leads to is replaced.
        model: plain, ``DistributedDataParallel``, or sharded by ``fully_shard``.
        optimizer: its optimizer.
        keep: how many of the checkpoints with names such as ``step-000123`` to keep in that folder, this one among
            them; the oldest are removed (of links, what they lead to is left).
        **extra: what else is needed to go on, such as the step: numbers, strings, None, tensors, and lists, tuples and
            dictionaries of them. Those of the first process are saved.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr=1e-3)
        >>> egop.checkpoint.save(folder / "step-000100", model, optimizer, keep=3, step=100)
    """
    if keep is not None and keep < 1:
        raise ValueError(f"Invalid keep value: {keep}. Must be at least 1, or None to keep all.")
    tensors = taken_apart(model, optimizer, extra)
    name = exchanged(lambda: new_name() if rank() == 0 else "")[0]
    unfinished = folders.Unfinished(Path(directory), name)
    trouble = f"The checkpoint {directory} could not be written"
    try:
        agreed(lambda: unfinished.begin() if rank() == 0 else None)
        clearly(trouble, write, unfinished.path, name, tensors)
        # A look at it before it replaces anything: all parts are there, as large as they should be.
        agreed(lambda: clearly(trouble, Saved, unfinished.path) if rank() == 0 else None)
        agreed(lambda: clearly(trouble, unfinished.finish, keep) if rank() == 0 else None)
    finally:
        if rank() == 0:
            unfinished.close()


def load(directory: str | os.PathLike[str], model: nn.Module, optimizer: ReparameterizedOptimizer) -> dict[str, Any]:
    """Go on from a checkpoint, on as many processes as there are now. Nothing changes when it does not fit.

    All processes call this together, with the same checkpoint. On as many processes as have saved it, training goes on
    bit for bit.

    Args:
        directory: what :func:`save` was given, or :func:`latest` has found.
        model: of the same architecture, wrapped in any way.
        optimizer: of the same class over the same parameters; its bases are taken from the checkpoint.

    Returns:
        What ``save`` was given as ``extra``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr=1e-3)
        >>> egop.checkpoint.save(folder / "step-000100", model, optimizer, step=100)
        >>> egop.checkpoint.load(egop.checkpoint.latest(folder), model, optimizer)
        {'step': 100}
    """
    agreed(lambda: check_kind(optimizer))
    saved = _opened(Path(directory))
    values = agreed(lambda: _understood(Path(directory), fitted, saved, model, optimizer))
    agreed(lambda: _reading(Path(directory), saved.read))
    agreed(lambda: _understood(Path(directory), sum_parts, saved, values))
    # The optimizer first, since it may still refuse; the names and shapes of the model have been compared.
    agreed(lambda: _understood(Path(directory), optimizer.load_state_dict, values["optimizer"]))
    agreed(lambda: give(values, model))
    agreed(lambda: trust(values, optimizer))
    extra: dict[str, Any] = values["extra"]
    return extra


def extra(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``save`` was given as ``extra``, without a model: to see what a checkpoint is of before one is built.

    All processes call this together, with the same checkpoint.

    Args:
        directory: what :func:`save` was given, or :func:`latest` has found.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> egop.checkpoint.save(folder / "step-000100", model, optimizer, width=2)
        >>> egop.checkpoint.extra(folder / "step-000100")
        {'width': 2}
    """
    saved = _opened(Path(directory))
    return agreed(lambda: _reading(Path(directory), extra_of, saved))


def _opened(directory: Path) -> Saved:
    """A checkpoint whose text has been read, the same in all processes."""
    place = agreed(lambda: folders.found(directory))
    saved = agreed(lambda: _reading(directory, Saved, place))
    check_same(directory, saved)
    return saved


def _understood(directory: Path, action: Callable[..., T], *arguments: Any) -> T:
    """Do it with values from a checkpoint: what is no value of one gives the same error as a damaged file."""
    return _reading(directory, action, *arguments, kinds=_NOT_UNDERSTOOD)


def _reading(
    directory: Path, action: Callable[..., T], *arguments: Any, kinds: tuple[type[Exception], ...] = (Exception,)
) -> T:
    damaged = f"The checkpoint {directory} is incomplete or damaged"
    return clearly(damaged, action, *arguments, advice=folders.without(directory), kinds=kinds)
