"""Entry points of ``egop`` and ``egop-lab``. Ctrl-C ends them with one line, even while torch is being imported."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType


def egop() -> None:
    """Run the console script ``egop``."""
    _main("egop.cli")


def egop_lab() -> None:
    """Run the console script ``egop-lab``."""
    _main("egop_lab.cli")


def _main(module: str) -> None:
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as in a background job
    if is_handled:
        signal.signal(signal.SIGINT, _exit_now)
    import_module("torch")
    main = import_module(module).main
    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _exit_now(number: int, frame: FrameType | None) -> None:
    # A KeyboardInterrupt raised inside an import may be swallowed there.
    print("Interrupted.", file=sys.stderr, flush=True)
    os._exit(130)
