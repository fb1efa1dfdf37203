"""What ``egop diagnose`` does: factory, diagnosis, race; the page is written anew after every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from egop.diagnostics import page
from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.factories import FactoryError, first_line, load_objective, parse_rho, parse_structure
from egop.diagnostics.measure import diagnose
from egop.diagnostics.racing import Race, race
from egop.runs import parse_bytes


@dataclass(frozen=True)
class Settings:
    """The options of the command, as they are documented there."""

    target: str
    steps: int | None
    probe: bool
    probe_steps: int
    samples: int | None
    budget: float
    structure: str
    rho: str | None
    memory: str
    out: Path
    seed: int
    threads: int | None
    device: torch.device | None
    debug: bool

    def shown(self) -> dict[str, object]:
        """Those that decide the outcome, for the page."""
        values = {"structure": self.structure, "rho": self.rho, "samples": self.samples, "memory": self.memory}
        values |= {"seed": self.seed, "steps": self.steps, "probe steps": self.probe_steps if self.probe else None}
        values |= {"device": None if self.device is None else str(self.device)}
        return {name: value for name, value in values.items() if value is not None}


def run(settings: Settings, *, echo: Callable[[str], object], progress: bool = True) -> bool:
    """Diagnose, and write and print what was found.

    Args:
        settings: the command's options.
        echo: prints a line.
        progress: show progress bars.

    Returns:
        Whether everything is done: False when the user interrupted it, and the page then says that it is partial.

    Raises:
        FactoryError: with one line, for whatever is wrong with the factory or the objective that it made.
    """
    structure, rho = parse_structure(settings.structure), parse_rho(settings.rho)
    with _one_line("", settings.debug):
        parse_bytes(settings.memory)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    objective = load_objective(settings.target)
    if settings.device is not None:
        if objective.module is None:
            raise FactoryError(f"{settings.target} has no model that could be moved to {settings.device}.")
        objective.module.to(settings.device)

    def save(diagnosis: Diagnosis, result: Race | None = None) -> Path:
        return page.write(settings.out, diagnosis, result, title=settings.target, settings=settings.shown())

    try:
        with _one_line(f"{settings.target} cannot be diagnosed: ", settings.debug):
            diagnosis = diagnose(
                objective,
                steps=settings.steps,
                rho=rho,
                structure=structure,
                samples=settings.samples,
                budget=settings.budget,
                memory=settings.memory,
                generator=torch.Generator().manual_seed(settings.seed),
                progress=progress,
                show=save,
            )
        path = save(diagnosis)
        echo(f"\n{diagnosis}\n")
        if diagnosis.partial:
            return False
        if settings.probe:
            with _one_line(f"The race of {settings.target} cannot be run: ", settings.debug):
                result = race(
                    objective,
                    diagnosis.basis,
                    form=diagnosis.nearest,
                    steps=settings.probe_steps,
                    seed=settings.seed,
                    progress=progress,
                    show=lambda so_far: save(diagnosis, so_far),
                )
            echo(f"\n{result.summary()}\n")
    except KeyboardInterrupt:
        return False
    echo(f"Saved {path} (the page) and {path.with_suffix('.json')} (the numbers).")
    return True


@contextmanager
def _one_line(opening: str, debug: bool) -> Iterator[None]:
    """Turn an error of the user's model, loss or data, which can be any, into one line."""
    try:
        yield
    except OSError:  # a full disk, say: not the objective's fault
        raise
    except Exception as error:
        if debug:
            raise
        ours = isinstance(error, (ValueError, TypeError, FloatingPointError, MemoryError))
        words = str(error).strip().splitlines()[0] if ours and str(error).strip() else first_line(error)
        raise FactoryError(f"{opening}{words}") from error
