"""The command line, ``egop``. What only a command needs is imported inside it, so that first words come quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from egop import __version__
from egop.cli.commands import LARGEST_SEED, MOST_THREADS, application, device_of, fail, one_line_errors, typer

app = application(
    "egop", __version__, "Run any torch optimizer in the eigenbasis of the expected gradient outer product."
)


def main() -> None:
    """The command ``egop``."""
    app(prog_name="egop")


@app.command()
def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A module, or the path of a .py file, and a function in it that returns an egop.Objective or a tuple "
            "(model, loss_fn, loader).",
        ),
    ],
    steps: Annotated[int | None, typer.Option(min=1, help="Of the training that is planned, if known.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Also run a short race in both coordinates.")] = False,
    probe_steps: Annotated[int, typer.Option(min=1, help="Of each run of the race.")] = 300,
    samples: Annotated[int | None, typer.Option(min=1, help="Points to draw; by default what is needed.")] = None,
    budget: Annotated[float, typer.Option(min=0, help="Seconds for draws, and for a learning rate.")] = 60.0,
    structure: Annotated[
        str,
        typer.Option(
            help="auto, full, shared (or shared:output, shared:smaller), kronecker, auxiliary:RANK or reduced:RANK."
        ),
    ] = "auto",
    rho: Annotated[str | None, typer.Option(help="initialization, gaussian:SCALE or recentered:SCALE.")] = None,
    memory: Annotated[str, typer.Option(help="What all bases together may take.")] = "2GiB",
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for diagnosis.json.")] = Path("egop-diagnosis"),
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the factory, the sampled gradients and the race.")
    ] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="Torch threads; torch's own choice by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda: where the model is moved; by default not.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Say what to use for a model, what to expect of it, what it takes, and at which learning rate."""
    with one_line_errors():
        typer.echo(f"Diagnosing {target}")
        from egop.diagnostics import factories, stages

        place = device_of(device) if device is not None else None
        settings = stages.Settings(
            target, steps, probe, probe_steps, samples, budget, structure, rho, memory, out, seed, threads, place, debug
        )
        try:
            complete = stages.run(settings, echo=typer.echo)
        except factories.FactoryError as error:
            if debug:
                raise
            fail(str(error), status=2)
        if not complete:
            fail(f"Interrupted. {out / 'diagnosis.json'} has what is known so far.", status=130)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="As for diagnose; the factory may also return the model alone. It is called on the meta device, where "
            "no weights are allocated.",
        ),
    ],
    structure: Annotated[
        str | None,
        typer.Option(help="auto, full, shared (or shared:SIDE) or kronecker, kept current by Online (default: EGOP)."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Limit for all bases together.")] = "2GiB",
) -> None:
    """Show which weights of a model would be rotated, and what that costs, without allocating them."""
    with one_line_errors():
        from egop.diagnostics import factories, stages

        try:
            text = stages.describe_plan(target, structure, memory)
        except (factories.FactoryError, MemoryError, ValueError) as error:
            fail(str(error), status=2)
        typer.echo(text)
