"""Where the commands ``egop`` and ``egop-lab`` start: Ctrl-C ends them in a line, also while torch is imported."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType


def egop() -> None:
    """What the console script ``egop`` calls."""
    _main("egop.cli")


def egop_lab() -> None:
    """What the console script ``egop-lab`` calls."""
    _main("egop_lab.cli")


def _main(module: str) -> None:
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else ignored: a job in the background
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    main = import_module(module).main
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _leave(number: int, frame: FrameType | None) -> None:
    # At once: a KeyboardInterrupt that is raised inside an import of others may be lost there.
    print("Interrupted.", file=sys.stderr, flush=True)
    os._exit(130)
