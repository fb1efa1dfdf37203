"""Folders that are there whole or not at all: written beside, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from egop.processes import exchanged, rank

_UNFINISHED = ".unfinished"  # being written, or being removed
_REPLACED = ".replaced"  # stands in for a checkpoint in the moment between two renames
_STEP = re.compile(r"step-(\d+)")
_INDEX = ".metadata"  # of torch.distributed.checkpoint, written last


def unfinished(directory: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return directory.with_name(directory.name + _UNFINISHED)


def begin(directory: Path) -> None:
    """Clear away what killed writes have left, and make an empty folder to write to."""
    if directory.exists() and not _is_checkpoint(directory) and not (directory.is_dir() and _is_empty(directory)):
        raise ValueError(f"{directory} exists and is not a checkpoint: it would be replaced. Name another folder.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    for name in _names_of_this_run(directory):
        left, replaced, whole = (directory.with_name(name + ending) for ending in (_UNFINISHED, _REPLACED, ""))
        if replaced.exists() and not whole.exists():
            replaced.rename(whole)
        for folder in (left, replaced):
            if folder.exists():
                shutil.rmtree(folder)
    unfinished(directory).mkdir()


def finish(directory: Path, keep: int | None = None) -> None:
    """Give what was written its name, in place of what had it before; of the older steps keep only some."""
    written, replaced = unfinished(directory), directory.with_name(directory.name + _REPLACED)
    _sync(written)
    if directory.exists():
        directory.rename(replaced)
    written.rename(directory)
    _sync(directory.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
    own = _step(directory.name)
    if keep is not None and own is not None:
        older = sorted(step for step in _steps(directory.parent) if step < own)
        for step in older[: max(0, len(older) - (keep - 1))]:
            old = _steps(directory.parent)[step]
            old.rename(unfinished(old))  # first the name, so that half of it is never taken for a checkpoint
            shutil.rmtree(unfinished(old))


def found(directory: Path) -> Path:
    """Where a checkpoint is; its replacement may have been interrupted between two renames."""
    for place in (directory, directory.with_name(directory.name + _REPLACED)):
        if _is_checkpoint(place):
            return place
    raise ValueError(f"There is no checkpoint at {directory}. egop.checkpoint.latest finds the newest in a folder.")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of the name ``step-000123`` in a folder, or None; unfinished ones do not count.

    Inside a process group all processes call this together, and get what the first one has found.
    """
    # The name alone, since processes may see the folder under different paths.
    newest = exchanged(lambda: _newest(Path(folder)) if rank() == 0 else None)[0]
    return None if newest is None else Path(folder) / newest


def without(directory: Path) -> str:
    """What to do about a damaged checkpoint, if it is the newest and there are older ones beside it."""
    names = [path.name for _, path in sorted(_steps(directory.parent).items())]
    if len(names) < 2 or names[-1] != directory.name:
        return ""
    return f"If it stays so, remove that folder: {names[-2]} is then the newest."


def _newest(folder: Path) -> str | None:
    steps = _steps(folder)
    return steps[max(steps)].name if steps else None


def _steps(folder: Path) -> dict[int, Path]:
    """The whole checkpoints in a folder, by their step."""
    if not folder.is_dir():
        return {}
    whole = [path for path in folder.iterdir() if _is_checkpoint(path)]
    names = {path.name.removesuffix(_REPLACED) for path in whole}
    return {step: folder / name for name in names if (step := _step(name)) is not None}


def _step(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def _names_of_this_run(directory: Path) -> set[str]:
    """Its own name, and if that is one of a series, all in that series: other names beside it may be another run's."""
    if _step(directory.name) is None:
        return {directory.name}
    beside = {path.name.removesuffix(_UNFINISHED).removesuffix(_REPLACED) for path in directory.parent.iterdir()}
    return {name for name in beside if _step(name) is not None} | {directory.name}


def _is_checkpoint(path: Path) -> bool:
    return (path / _INDEX).is_file()


def _is_empty(path: Path) -> bool:
    return next(path.iterdir(), None) is None


def _sync(folder: Path) -> None:
    """Make the names in a folder last, as the contents of its files do."""
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
