"""What command lines share: one line for what a user can repair, a version, devices by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

# typer too: whoever takes it from here is told what to install where it is missing.
__all__ = ["LARGEST_SEED", "MOST_THREADS", "application", "device_of", "fail", "one_line_errors", "typer"]

# What torch takes for a seed, and more threads than any machine has: beyond that it would end the process.
LARGEST_SEED, MOST_THREADS = 2**63 - 1, 1024

_EXTRAS = ("matplotlib", "rich", "typer")
_MISSING = "This command needs the package {name!r}, which is not installed. Run: pip install 'egop[cli]'"

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(_MISSING.format(name=error.name))

if TYPE_CHECKING:
    import torch


def application(name: str, version: str, words: str) -> typer.Typer:
    """An application without commands as yet, whose ``--version`` prints its name and version.

    Args:
        name: of the command.
        version: of the package it belongs to.
        words: what its help says first.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=words)(_options(f"{name} {version}"))
    return app


def _options(said: str) -> Callable[..., None]:
    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(said)
            raise typer.Exit

    option = typer.Option(False, "--version", callback=show, is_eager=True, help="Print the version and exit.")

    def options(version: bool = option) -> None:
        pass

    return options


@contextmanager
def one_line_errors(interrupted: str = "", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what a user can cause or repair into one line on standard error; let everything else through.

    Args:
        interrupted: what is to be said of an interrupted command's work.
        also: errors of the command's own that say what to do.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail(f"Interrupted. {interrupted}".rstrip(), status=130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRAS:
            raise
        fail(_MISSING.format(name=error.name))
    except Exception as error:
        if not isinstance(error, (OSError, *also)):
            raise
        fail(str(error))


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with a line on standard error."""
    typer.echo(message, err=True)
    raise typer.Exit(status) from None


def device_of(name: str) -> torch.device:
    """The device of a name, where it is there."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        fail(f"Invalid device value: {name}. Must be cpu or cuda.", status=2)
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        fail(f"There is no {name.upper()} device here. Use --device cpu.", status=2)
    return torch.device(name)
