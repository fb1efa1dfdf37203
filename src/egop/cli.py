"""The command line: ``egop diagnose`` and ``egop plan``.

Requires ``pip install 'egop[cli]'``. Imports that only one command needs are inside that command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from egop import __version__

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"This command needs the package {error.name!r}, which is not installed. Run: pip install 'egop[cli]'")

__all__ = ["load_model", "load_objective", "main"]

_DEBUG = typer.Option("--debug", help="Show the traceback of an error.")
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_TARGET = typer.Argument(
    metavar="MODULE:FACTORY",
    help="A module or the path of a .py file, and the name of a function in it. The function takes no arguments and "
    "returns an egop.Objective or a tuple (model, loss_fn, batches); for plan, the model alone is enough.",
)


def main() -> None:
    """Run the command ``egop``."""
    app(prog_name="egop")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"egop {__version__}")
        raise typer.Exit


@app.callback(help="Find out whether EGOP helps on your model, at which learning rate, and what it costs.")
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def diagnose(
    target: Annotated[str, _TARGET],
    steps: Annotated[int | None, typer.Option(min=1, help="Planned number of training steps.")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Time limit for the race, in seconds.")] = 150.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Random seed for the factory and the race.")] = 0,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Save a plot of the race to this file.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to use (default: leave the model where it is).")] = None,
    debug: Annotated[bool, _DEBUG] = False,
) -> None:
    """Race egop's optimizers against AdamW on copies of a model; recommend one and its learning rate."""
    with _report_errors(debug):
        import torch

        from egop.diagnose import diagnose as run

        torch.manual_seed(seed)
        if plot is not None and not plot.absolute().parent.is_dir():
            raise FileNotFoundError(f"There is no folder {plot.absolute().parent} for the plot.")
        objective = load_objective(target)
        if device is not None and objective.module is not None:
            objective.module.to(device)
        diagnosis = run(objective, steps=steps, budget=budget, seeds=(seed, seed + 1))
        typer.echo(str(diagnosis))
        if plot is not None:
            diagnosis.plot().savefig(plot)
        if diagnosis.race.ended == "it was interrupted":
            raise typer.Exit(130)


@app.command()
def plan(target: Annotated[str, _TARGET], debug: Annotated[bool, _DEBUG] = False) -> None:
    """Show which weights of a model EGOP would rotate and how much memory that takes."""
    with _report_errors(debug):
        typer.echo(_describe_plan(load_model(target)))


def _describe_plan(model: Any) -> str:
    from egop.formatting import format_bytes, pluralize
    from egop.recipes import EGOP

    if not any(tensor.numel() for tensor in model.parameters()):
        raise ValueError(f"The model has no parameters ({type(model).__name__}): there is nothing to plan.")
    chosen = EGOP(model).plan
    tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
    size, rotated = sum(tensor.numel() for tensor in tensors), sum(block.size for block in chosen.chosen)
    bases = format_bytes(sum(structure.cost(block).bytes for block, structure in chosen.chosen.items()))
    return (
        f"{size:,} parameters in {pluralize(len(tensors), 'tensor')}, {rotated / max(1, size):.0%} of them rotated.\n\n"
        f"{chosen}\n\n"
        f"Extra memory over AdamW: {bases} of bases."
    )


def load_objective(target: str) -> Any:
    """Call the factory ``MODULE:FACTORY`` and return the :class:`egop.Objective` that it describes."""
    from egop.estimation import Objective

    result = _load_factory(target)()
    if isinstance(result, tuple) and len(result) == 3:
        return Objective(*result)
    if not isinstance(result, Objective):
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(f"{target} must return an egop.Objective or a tuple (model, loss_fn, batches), got {kind}.")
    return result


def load_model(target: str) -> Any:
    """Call the factory ``MODULE:FACTORY``, if possible on the meta device, and return the model."""
    import torch

    from egop.estimation import Objective

    factory = _load_factory(target)
    try:
        with torch.device("meta"):
            result = factory()
    except Exception:  # it may compute with data, which the meta device does not hold; real errors come again
        result = factory()
    model = result[0] if isinstance(result, tuple) and result else result
    model = model.module if isinstance(model, Objective) else model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{target} must return a model, an egop.Objective or a tuple that starts with a model, "
            f"got {type(result).__name__}."
        )
    return model


def _load_factory(target: str) -> Callable[[], Any]:
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ValueError(f"Invalid target {target!r}. Must be MODULE:FACTORY or FILE.py:FACTORY.")
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    sys.path.insert(0, str(folder))  # as for a script: modules next to it can be imported
    module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise AttributeError(f"{where!r} has no function {name!r}. It has: {', '.join(names) or 'none'}.")
    return factory  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    loader = SourceFileLoader(f"egop_factory_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses and pickle look a module up by its name
    loader.exec_module(module)
    return module


@contextmanager
def _report_errors(debug: bool) -> Iterator[None]:
    """Turn errors, most of them in the user's own model, loss or data, into one line on standard error."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(130) from None
    except (Exception, SystemExit) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        words = next(iter(str(error).strip().splitlines()), "")
        typer.echo(f"{type(error).__name__}: {words} (--debug shows the traceback)", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    main()
