"""Folders that one process has for itself. The system takes note when it dies, so nobody waits for the dead."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

# How some file systems (NFS among them) say that a folder cannot be locked.
_CANNOT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM}
_PATIENCE = 300.0  # seconds; what is done under a lock takes a moment
_FORGOTTEN = 3600.0  # seconds


def new_name() -> str:
    """A name that nobody else has."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


class Lock:
    """A lock on a folder, which one of all processes and threads can have at a time.

    Attributes:
        held: whether this is the one; None where folders cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self.held: bool | None = None
        self._descriptor: int | None = None
        if fcntl is not None:
            with suppress(PermissionError):  # who may write there need not be allowed to look
                self._descriptor = os.open(folder, os.O_RDONLY)
                self.held = False

    def take(self, patience: float = 0.0) -> bool | None:
        """Try for some seconds to have it; what became of it, as in ``held``."""
        end = time.monotonic() + patience
        while self.held is False:
            assert self._descriptor is not None
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.held = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self.held = None
        return self.held

    def release(self) -> None:
        """Give it back."""
        if self._descriptor is not None:
            if self.held:  # a forked process may still have the descriptor, and with it the lock
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor, self.held = None, None


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Have the lock of a folder; False where folders cannot be locked.

    Raises:
        TimeoutError: if another process has it for minutes.
    """
    lock = Lock(folder)
    try:
        if lock.take(_PATIENCE) is False:
            raise TimeoutError(f"Another process has been busy in {folder} for {_PATIENCE:.0f} seconds. Does it hang?")
        yield bool(lock.held)
    finally:
        lock.release()


def claimed(path: Path) -> Lock:
    """Make a folder and lock it: as long as this process lives, or has not given it back, it is not left behind."""
    with locked(path.parent):  # or another process might find it before it is locked
        path.mkdir()
        lock = Lock(path)
        lock.take()
    return lock


def remove_if_left_behind(path: Path) -> None:
    """Remove a folder that was :func:`claimed` by a process that has died.

    Where there are no locks one to which nothing has happened for an hour counts as such.
    """
    with suppress(FileNotFoundError):  # another process has removed it
        lock = Lock(path)
        try:
            if lock.take() or (lock.held is None and is_forgotten(path, *path.iterdir())):
                shutil.rmtree(path)
        finally:
            lock.release()


def is_forgotten(*paths: Path) -> bool:
    """Whether nothing has happened to these for an hour; asked where locks do not say who is at work."""
    return time.time() - max(path.stat().st_ctime for path in paths) > _FORGOTTEN
