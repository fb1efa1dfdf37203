"""The command line: ``egop diagnose`` and ``egop plan``, and what the lab's commands share with them.

Needs ``pip install 'egop[cli]'``; nothing else in egop uses it.
"""

from egop.cli.app import main
from egop.cli.commands import LARGEST_SEED, MOST_THREADS, application, device_of, fail, one_line_errors, typer

__all__ = [
    "LARGEST_SEED",
    "MOST_THREADS",
    "application",
    "device_of",
    "fail",
    "main",
    "one_line_errors",
    "typer",
]
