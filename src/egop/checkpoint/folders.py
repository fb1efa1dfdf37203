"""Folders that hold a whole checkpoint or none: written beside, then renamed.

A new checkpoint gets its name by one rename. In an old one of that name the files of pieces, which have other names in
every save, are put beside the old ones, then the index is replaced by one rename; so at every moment there is one whole
checkpoint. Saves that come at the same time do this one after the other, and the last one is what stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from egop.checkpoint.index import INDEX, from_text, save_of
from egop.distributed import Lock, claimed, exchanged, is_forgotten, locked, rank, remove_if_left_behind

_OLD_INDEX = ".metadata"  # of egop 0.1.0: a pickle, which is never read
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"(.+?)(\.\d+-[0-9a-f]{8})?\.unfinished")  # being written, or being removed


class Unfinished:
    """A save that is being written; all but its ``path`` is for the first process only.

    Args:
        directory: the name that the checkpoint shall have. If it is a link, what it leads to is replaced.
        save: a name that no other save has, from :func:`egop.distributed.locks.new_name`.
    """

    def __init__(self, directory: Path, save: str) -> None:
        self._directory, self._save = Path(os.path.realpath(directory.parent)) / directory.name, save
        self._target = Path(os.path.realpath(directory))
        self.path = _beside(self._target, save)
        self._lock: Lock | None = None

    def begin(self) -> None:
        """Clear away what killed saves have left, and make an empty folder to write to."""
        target = self._target
        if target.exists() and not _is_readable(target) and not (target.is_dir() and _is_empty(target)):
            raise ValueError(
                f"{self._directory} exists and is not a checkpoint of this egop: it would be replaced. "
                "Name another folder."
            )
        for folder in {self._directory, target}:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _clear(folder)
        self._lock = claimed(self.path)

    def finish(self, keep: int | None = None) -> None:
        """Give what was written its name, in place of what had it before; of the older steps keep only some."""
        _sync(self.path)
        with locked(self._target.parent) as alone:
            try:
                self.path.rename(self._target)
            except OSError:
                if not _is_readable(self._target):
                    raise
                self._replace(alone)
            _sync(self._target.parent)
        current = _step(self._directory.name)
        if keep is not None and current is not None:
            older = sorted((step, path) for step, path in _steps(self._directory.parent).items() if step < current)
            for _, path in older[: max(0, len(older) - (keep - 1))]:
                self._remove(path)

    def close(self) -> None:
        """Let go of it; what was not finished is removed."""
        if self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()

    def _replace(self, alone: bool) -> None:
        """Put the new files into the old folder, then the index, then remove the old files."""
        before = None if alone else _current(self._target)
        for part in sorted(_parts(self.path)):
            part.rename(self._target / part.name)
        _sync(self._target)
        (self.path / INDEX).replace(self._target / INDEX)
        _sync(self._target)
        # Without a lock others may be putting their files here, so only those of the index that was replaced go.
        for part in _parts(self._target):
            if (save_of(part.name) != self._save) if alone else (save_of(part.name) == before):
                part.unlink(missing_ok=True)
        self.path.rmdir()

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: first its name, so that half of it is never taken for one."""
        removed = _beside(path, self._save)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            with locked(path.parent):
                if path.is_symlink():
                    path.unlink()  # what it leads to may be someone else's
                    return
                path.rename(removed)
            shutil.rmtree(removed)


def found(directory: Path) -> Path:
    """Where a checkpoint is."""
    if _is_readable(directory):
        return directory
    if _is_old(directory):
        raise ValueError(
            f"The checkpoint {directory} is of egop 0.1.0. Its index is a pickle, which could run anything: this egop "
            "does not read it. Go on with egop 0.1.0, or begin again in another folder."
        )
    raise ValueError(f"There is no checkpoint at {directory}. egop.checkpoint.latest finds the newest in a folder.")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of the name ``step-000123`` in a folder, or None; unfinished ones do not count.

    Inside a process group all processes call this together, and get what the first one has found.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        >>> for step in (100, 200):
        ...     egop.checkpoint.save(folder / f"step-{step:06d}", model, optimizer)
        >>> egop.checkpoint.latest(folder).name
        'step-000200'
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
    """The whole checkpoints in a folder, by their step; old ones too, so that nobody begins again without a word."""
    if not folder.is_dir():
        return {}
    steps = {_step(path.name): path for path in folder.iterdir() if _is_readable(path) or _is_old(path)}
    return {step: path for step, path in steps.items() if step is not None}


def _step(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def _beside(directory: Path, save: str) -> Path:
    return directory.with_name(f"{directory.name}.{save}.unfinished")


def _clear(directory: Path) -> None:
    """Remove what killed saves have left of this name, and if that is one of a series, of all in the series.

    Other names beside it may be another run's.
    """
    with locked(directory.parent) as alone:
        series = _step(directory.name) is not None
        for path in sorted(directory.parent.iterdir()):
            match = _UNFINISHED.fullmatch(path.name)
            name = path.name if match is None else match[1]
            if name != directory.name and not (series and _step(name) is not None):
                continue
            if match is not None and path.is_dir():
                remove_if_left_behind(path)
            elif _is_readable(path):
                _clear_parts(path, alone)


def _clear_parts(path: Path, alone: bool) -> None:
    """Remove files that a save has put into an old checkpoint before it was killed, or has not removed any more."""
    with contextlib.suppress(FileNotFoundError):  # another process has removed them
        parts = _parts(path)
        if len({save_of(part.name) for part in parts}) > 1 and (current := _current(path)) is not None:
            for part in parts:
                if save_of(part.name) != current and (alone or is_forgotten(part)):
                    part.unlink()


def _parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if save_of(path.name) is not None]


def _current(directory: Path) -> str | None:
    """The save that a checkpoint is of; None if its index cannot be read."""
    try:
        return from_text((directory / INDEX).read_bytes()).save
    except (OSError, ValueError):
        return None


def _is_readable(path: Path) -> bool:
    return (path / INDEX).is_file()


def _is_old(path: Path) -> bool:
    return (path / _OLD_INDEX).is_file() and not _is_readable(path)


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
