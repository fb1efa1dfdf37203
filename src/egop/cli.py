"""The command line, ``egop``. Heavy imports happen inside the commands, so that help and first words come quickly."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

_EXTRAS = ("matplotlib", "rich", "typer")
_MISSING = "The egop command needs the package {name!r}, which is not installed. Run: pip install 'egop[experiments]'"

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(_MISSING.format(name=error.name))

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from egop.experiments.demo import Demo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """What the console script ``egop`` calls."""
    app(prog_name="egop")


@contextmanager
def _one_line_errors(interrupted: str = "") -> Iterator[None]:
    """Turn what a user can cause or repair into one line on standard error; let everything else through.

    Args:
        interrupted: what is to be said of an interrupted command's work.
    """
    try:
        yield
    except KeyboardInterrupt:
        _fail(f"Interrupted. {interrupted}".rstrip(), status=130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRAS:
            raise
        _fail(_MISSING.format(name=error.name))
    except OSError as error:
        _fail(str(error))
    except ValueError as error:
        if type(error).__name__ != "RecordError":  # by its name: the class would bring torch along
            raise
        _fail(str(error))


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status) from None


def _device(name: str) -> torch.device:
    """The device that --device names, where it is there."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        _fail(f"Invalid device value: {name}. Must be cpu or cuda.", status=2)
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        _fail(f"There is no {name.upper()} device here. Use --device cpu.", status=2)
    return torch.device(name)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"egop {version('egop')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run any torch optimizer in the eigenbasis of the expected gradient outer product."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for demo.svg and demo.json.")] = Path("egop-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training set in each run.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the start, the batches and the sampled gradients.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; torch's own choice by default.")] = None,
) -> None:
    """Train the paper's digits network in original and in EGOP coordinates, and compare."""
    with _one_line_errors():
        passes = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        typer.echo(f"The 64-32-10 network on the 5,620 UCI digits: seed {seed}, {passes} a run, six runs.")
        import torch
        from rich.console import Console

        from egop import plotting
        from egop.experiments import demo as experiment
        from egop.experiments.records import write_json

        if threads is not None:
            torch.set_num_threads(threads)
        found = experiment.run(epochs=epochs, seed=seed, show=lambda basis: typer.echo(f"\n{basis}\n"))
        closing = experiment.summary(found)
        console = Console()
        console.print()
        console.print(_table(found))
        console.print(f"The basis took {found.estimation_seconds:.1f} s to estimate, once. {closing}", highlight=False)
        plotting.save(plotting.loss_and_spectra(found.runs, found.spectra), out / "demo.svg")
        write_json(out / "demo.json", {**asdict(found), "summary": closing})
        typer.echo(f"\nSaved {out / 'demo.svg'} (the picture) and {out / 'demo.json'} (the numbers).")


def _table(found: Demo) -> Table:
    from rich.table import Table

    from egop.units import counted

    table = Table(title=f"After {counted(found.epochs, 'epoch')}, from equivalent starts", title_justify="left")
    table.caption = "epochs to same loss: until as low as the final loss in original coordinates"
    table.caption_justify = "left"
    table.add_column("optimizer")
    table.add_column("coordinates")
    for heading in ("lr", "final loss", "test\naccuracy", "epochs to\nsame loss", "seconds"):
        table.add_column(heading, justify="right")
    for original, reparameterized in found.pairs():
        for run in (original, reparameterized):
            curve = run.curve
            reached = curve.epochs_to(original.curve.final)
            table.add_row(
                run.optimizer,
                run.coordinates,
                f"{run.lr:g}",
                "diverged" if curve.diverged else f"{curve.final:.2e}",
                f"{curve.metrics['test accuracy'][-1]:.1%}",
                "not reached" if reached is None else str(reached),
                f"{curve.seconds:.1f}",
                end_section=run is reparameterized,
            )
    return table


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
    probe: Annotated[bool, typer.Option("--probe", help="Also run a short race in both coordinates.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of each run of the race.")] = 300,
    samples: Annotated[int | None, typer.Option(min=1, help="Points to draw; by default what is needed.")] = None,
    structure: Annotated[
        str, typer.Option(help="auto, full, shared, kronecker, auxiliary:RANK or reduced:RANK.")
    ] = "auto",
    rho: Annotated[str | None, typer.Option(help="initialization, gaussian:SCALE or recentered:SCALE.")] = None,
    memory: Annotated[str, typer.Option(help="What all bases together may take.")] = "2GiB",
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the page and the numbers.")] = Path(
        "egop-diagnosis"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the factory, the sampled gradients and the race.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch threads; torch's own choice by default.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Say whether a change of basis would help a model, what it would cost, and how sure that is."""
    with _one_line_errors():
        typer.echo(f"Diagnosing {target}")
        from egop.diagnosis_run import Settings, run
        from egop.experiments.factories import FactoryError

        settings = Settings(target, probe, steps, samples, structure, rho, memory, out, seed, threads, debug)
        try:
            complete = run(settings, echo=typer.echo)
        except FactoryError as error:
            if debug:
                raise
            _fail(str(error), status=2)
        if not complete:
            _fail(f"Interrupted. {out / 'diagnosis.html'} holds what is known so far, and says so.", status=130)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="As for diagnose; the factory may also return the model alone. It is called on the meta device, where "
            "no weights are allocated. Built in: egop.scaling:resnet50, :gpt2, :llama_1b and :llama_8b.",
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Devices that share the work.")] = 8,
    structure: Annotated[
        str | None, typer.Option(help="auto, full, shared, kronecker, auxiliary:RANK or reduced:RANK; several if none.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What all bases together may take; no limit by default.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of a language model, on each device in a step.")] = None,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the numbers to this file.")] = None,
) -> None:
    """Say what memory and communication a model would take under each structure, AdamW, SOAP and Muon."""
    with _one_line_errors():
        from egop.experiments.factories import FactoryError, parse_structure
        from egop.experiments.records import write_json
        from egop.experiments.shapes import load_model
        from egop.scaling.report import STRUCTURES, report
        from egop.units import parse_bytes

        try:
            structures = STRUCTURES if structure is None else (parse_structure(structure),)
            limit = None if memory is None else parse_bytes(memory)
            found = report(load_model(target), structures, ranks=ranks, memory=limit, tokens=tokens)
        except (FactoryError, ValueError) as error:
            _fail(str(error), status=2)
        typer.echo(str(found))
        if json is not None:
            write_json(json, asdict(found))
            typer.echo(f"\nSaved {json}.")


@app.command()
def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Which experiments; none lists them.")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    preset: Annotated[str, typer.Option(help="quick (small sizes, few trials) or full (the paper's).")] = "quick",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    records: Annotated[Path, typer.Option(file_okay=False, help="Folder of the records.")] = Path("egop-records"),
    data: Annotated[Path | None, typer.Option(help="Folder of data sets that do not ship with the package.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes for runs that cannot be batched.")] = 2,
    time_budget: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no new long run starts.")
    ] = None,
) -> None:
    """Run the paper's experiments and judge its claims; what is finished is never done again."""
    with _one_line_errors("The same command goes on from there."):
        from egop.experiments.registry import IDS, experiment

        if all_of_them and ids:
            _fail(f"Name experiments ({', '.join(ids)}) or give --all, not both.", status=2)
        wanted = list(IDS) if all_of_them else list(ids or [])
        if unknown := [id for id in wanted if id not in IDS]:
            _fail(f"There is no experiment {', '.join(unknown)}. There are: {', '.join(IDS)}.", status=2)
        if preset not in ("quick", "full"):
            _fail(f"Invalid preset value: {preset}. Must be quick or full.", status=2)
        if data is not None and not data.exists():
            _fail(f"There is no {data}: --data must name a folder or a file that is there.", status=2)
        if not wanted:
            for id in IDS:
                typer.echo(f"{id:22}{experiment(id).title}")
            typer.echo("\nRun some with: egop reproduce ID ..., or all with: egop reproduce --all")
            return
        from egop.experiments.base import Context
        from egop.experiments.reproduce import reproduce as run

        context = Context(
            preset,  # type: ignore[arg-type]  # checked above
            _device(device),
            data=None if data is None else str(data),
            workers=workers,
            time_budget=time_budget,
        )
        outcomes = run(wanted, records, context, say=typer.echo)
        typer.echo(f"\nRecords are in {records}. For the report: egop report --records {records}")
        if any(outcome.problem for outcome in outcomes):
            raise typer.Exit(1)


@app.command()
def report(
    records: Annotated[Path, typer.Option(file_okay=False, help="Folder of the records.")] = Path("egop-records"),
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the report.")] = Path("egop-report"),
) -> None:
    """Make a page of everything that has been reproduced: figures, claims, numbers, verdicts."""
    with _one_line_errors():
        from egop import reproduction

        if not any(records.glob("*.jsonl")):
            _fail(f"There are no records in {records}. Make some with: egop reproduce --all", status=2)
        found = reproduction.sections(records)
        reproduction.write_markdown(found, out / "reproduction.md")
        reproduction.write_html(found, out / "reproduction.html")
        typer.echo(f"{reproduction.counts(found)}\nSaved {out / 'reproduction.html'} and {out / 'reproduction.md'}.")


@app.command()
def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="One of the parts; several times for several. All by default."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The JSON file; it is replaced.")] = Path("egop-bench.json"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each method; by default what suits it.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes: only to see that everything works.")] = False,
) -> None:
    """Measure what a basis and a step cost, beside AdamW, SOAP, Shampoo and Muon."""
    with _one_line_errors(f"Finished rows are in {out}, which is written after every one."):
        typer.echo("A smoke run: its numbers mean nothing." if smoke else "Measuring; other programmes disturb it.")
        import torch

        from egop.bench.run import PARTS, failures, run
        from egop.units import counted

        if unknown := [part for part in only or [] if part not in PARTS]:
            _fail(f"There is no part {', '.join(unknown)}. There are: {', '.join(PARTS)}.", status=2)
        chosen = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kept = run(chosen, out, only=only or (), smoke=smoke, rounds=rounds, say=typer.echo)
        typer.echo(f"\nSaved {out}.")
        if found := failures(kept):
            _fail(f"{counted(len(found), 'row')} failed, see above.")


if __name__ == "__main__":
    main()
