"""Helpers of the command line: one-line errors, the version option and devices by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

# typer is exported too, so that an import from here says what to install if it is missing.
__all__ = ["LARGEST_SEED", "MOST_THREADS", "application", "fail", "find_device", "one_line_errors", "typer"]

# The largest seed that torch accepts, and more threads than any machine has: torch aborts the process beyond that.
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
    """Create an application without commands, with a ``--version`` option.

    Args:
        name: name of the command.
        version: version of its package.
        words: first line of its help.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=words)(_version_option(f"{name} {version}"))
    return app


def _version_option(text: str) -> Callable[..., None]:
    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(text)
            raise typer.Exit

    option = typer.Option(False, "--version", callback=show, is_eager=True, help="Print the version and exit.")

    def options(version: bool = option) -> None:
        pass

    return options


@contextmanager
def one_line_errors(interrupted: str = "", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors that a user can fix into one line on standard error; let all others through.

    Args:
        interrupted: what to say about the work of an interrupted command.
        also: further errors whose message says what to do.
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
    """Print a line to standard error and end the command."""
    typer.echo(message, err=True)
    raise typer.Exit(status) from None


def find_device(name: str) -> torch.device:
    """Return the device with this name; end the command if there is none."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        fail(f"Invalid device value: {name}. Must be cpu or cuda.", status=2)
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        fail(f"There is no {name.upper()} device here. Use --device cpu.", status=2)
    return torch.device(name)
