"""The command line, ``egop-lab``. Each command imports what it needs, so that the first output comes quickly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from egop_lab import __version__
from egop_lab.training.records import RecordError

if TYPE_CHECKING:
    import torch

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command ``egop-lab``."""
    app(prog_name="egop-lab")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"egop-lab {__version__}")
        raise typer.Exit


@app.callback(help="Run the demo, the paper's experiments and the benchmarks of egop.")
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextmanager
def one_line_errors(interrupted: str = "", also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors that a user can fix, and those in ``also``, into one line on standard error; let others through."""
    shown: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except KeyboardInterrupt:
        fail(f"Interrupted. {interrupted}".rstrip(), status=130)
    except shown as error:
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for demo.svg and demo.json.")] = Path("egop-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each of the six runs on the digits.")] = 100,
    steps: Annotated[int, typer.Option(min=0, help="Steps for each run of the language model; 0 skips it.")] = 200,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Random seed for initial weights, batches and sampled gradients."),
    ] = 0,
) -> None:
    """Compare optimizers with and without a rotation on the digits, and EGOP with AdamW on a small language model."""
    with one_line_errors():
        passes = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        typer.echo(f"The 64-32-10 network on the 5,620 UCI digits: seed {seed}, six runs of {passes}.")
        from egop_lab.experiments import demo as experiment
        from egop_lab.experiments import demo_language
        from egop_lab.files import write_json
        from egop_lab.plots.figures import draw_picture, save_figure

        result = experiment.run(epochs=epochs, seed=seed, show=lambda basis: typer.echo(f"\n{basis}\n"))
        closing = experiment.summary(result)
        typer.echo(f"\n{experiment.format_runs(result)}\n")
        typer.echo(f"The basis took {result.estimation_seconds:.1f} s to estimate, once. {closing}")
        numbers = {**asdict(result), "summary": closing}
        language = None
        if steps:
            typer.echo(f"\nA language model on egop's own source: {steps} steps each of AdamW and EGOP, alternating.")
            language = demo_language.run(steps=steps, seed=seed)
            closing = demo_language.summary(language)
            typer.echo(f"\n{demo_language.format_runs(language)}\n\n{demo_language.RATES} {closing}")
            numbers["language model"] = {**asdict(language), "summary": closing}
        save_figure(draw_picture(experiment.picture(result, language)), out / "demo.svg")
        write_json(out / "demo.json", numbers)
        typer.echo(f"\nSaved {out / 'demo.svg'} (picture) and {out / 'demo.json'} (numbers).")


@app.command()
def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Experiments to run. Without any, they are listed.")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    preset: Annotated[str, typer.Option(help="quick (small sizes, few trials) or full (the paper's sizes).")] = "quick",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    records: Annotated[Path, typer.Option(file_okay=False, help="Folder with the records.")] = Path("egop-records"),
    data: Annotated[Path | None, typer.Option(help="Folder with data sets that are not included.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes for runs that cannot be batched.")] = 2,
) -> None:
    """Run the paper's experiments and judge its claims; finished runs are never repeated."""
    with one_line_errors("Run the same command again to resume.", also=(RecordError,)):
        from egop_lab.experiments.registry import IDS, find_experiment

        if all_of_them and ids:
            fail(f"Name experiments ({', '.join(ids)}) or pass --all, not both.", status=2)
        wanted = list(IDS) if all_of_them else list(ids or [])
        if unknown := [id for id in wanted if id not in IDS]:
            fail(f"There is no experiment {', '.join(unknown)}. There are: {', '.join(IDS)}.", status=2)
        if preset not in ("quick", "full"):
            fail(f"Invalid preset value: {preset}. Must be quick or full.", status=2)
        if data is not None and not data.exists():
            fail(f"There is no {data}: --data must name an existing folder or file.", status=2)
        if not wanted:
            for id in IDS:
                typer.echo(f"{id:22}{find_experiment(id)().title}")
            typer.echo("\nRun some with: egop-lab reproduce ID ..., or all with: egop-lab reproduce --all")
            return
        records.mkdir(parents=True, exist_ok=True)  # fail before anything is trained
        from egop_lab.experiments.reproduce import reproduce as run
        from egop_lab.training.context import Context

        context = Context(find_device(device), data=None if data is None else str(data), workers=workers)
        complete = run(wanted, records, preset, context, say=typer.echo)  # type: ignore[arg-type]  # checked above
        if any(records.glob("*.jsonl")):
            typer.echo(f"\nRecords are in {records}. For the report: egop-lab report --records {records}")
        if not complete:
            raise typer.Exit(1)


@app.command()
def report(
    records: Annotated[Path, typer.Option(file_okay=False, help="Folder with the records.")] = Path("egop-records"),
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the report.")] = Path("egop-report"),
) -> None:
    """Write pages about all experiments run so far: figures, claims, numbers, verdicts."""
    with one_line_errors(also=(RecordError,)):
        from egop_lab.report import index, reproduction

        if not any(records.glob("*.jsonl")):
            fail(f"There are no records in {records}. Create some with: egop-lab reproduce --all", status=2)
        sections = reproduction.load_sections(records)
        reproduction.write_markdown(sections, out / "reproduction.md")
        index.write_markdown(sections, out / "paper-index.md")
        typer.echo(f"{reproduction.format_counts(sections)}\nSaved {out / 'reproduction.md'}.")
        typer.echo(f"Index of the paper's statements: {out / 'paper-index.md'}.")


@app.command()
def bench(
    smoke: Annotated[bool, typer.Option("--smoke", help="Take only a few steps, to see that it works.")] = False,
) -> None:
    """Measure what a step costs on a CPU, compared with AdamW."""
    with one_line_errors():
        typer.echo(
            "A smoke run: its numbers mean nothing." if smoke else "Measuring; close other programs for reliable times."
        )
        from egop_lab.bench import measure_batches, measure_steps

        typer.echo(f"Host time of a step on seven small linear layers, one CPU thread\n\n{measure_steps(smoke)}\n")
        typer.echo(f"A training step with two square weights, one CPU thread\n\n{measure_batches(smoke)}")


@app.command()
def scaling(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="resnet50, gpt2, llama_1b, llama_8b, or MODULE:FACTORY, a function without arguments that returns a "
            "model. It is called on the meta device, where no weights are allocated.",
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of devices.")] = 8,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per device and step, for a language model.")] = None,
) -> None:
    """Compare the memory and communication of AdamW, Muon, SOAP, EGOP and each structure for a model."""
    with one_line_errors(also=(AttributeError, ImportError, TypeError, ValueError)):
        from egop_lab.scaling.costs import compare_methods
        from egop_lab.scaling.models import build_model

        typer.echo(str(compare_methods(build_model(target), ranks=ranks, tokens=tokens)))


if __name__ == "__main__":
    main()
