"""Locks on folders. The system gives them back when a process dies, so nobody waits for the dead."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

# How some file systems (NFS among them) say that a folder cannot be locked.
_CANNOT = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM}
_PATIENCE = 300.0  # seconds; what is done under a lock takes a moment


class Lock:
    """A lock on a folder, which one of all processes and threads can have at a time.

    Attributes:
        held: whether this is the one; None where folders cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self.held: bool | None = None
        self._descriptor: int | None = None
        if fcntl is not None:
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
