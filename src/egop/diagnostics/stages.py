"""The commands ``egop diagnose``, which writes its numbers again after every stage, and ``egop plan``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from egop import __version__
from egop.basis import Structure
from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.factories import (
    FactoryError,
    first_line,
    load_model,
    load_objective,
    parse_rho,
    parse_structure,
)
from egop.diagnostics.measure import diagnose
from egop.diagnostics.racing import Race, race
from egop.formatting import format_bytes, parse_bytes, pluralize
from egop.optimizer import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Online


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
        """Return those that decide the outcome."""
        values = {"structure": self.structure, "rho": self.rho, "samples": self.samples, "memory": self.memory}
        values |= {"seed": self.seed, "steps": self.steps, "probe steps": self.probe_steps if self.probe else None}
        values |= {"device": None if self.device is None else str(self.device)}
        return {name: value for name, value in values.items() if value is not None}


def run(settings: Settings, *, echo: Callable[[str], object], progress: bool = True) -> bool:
    """Diagnose, print what was found and write it to ``diagnosis.json``.

    Args:
        settings: the command's options.
        echo: prints a line.
        progress: show progress bars.

    Returns:
        True if everything is done; False if the user interrupted it, which the file then says.

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

    path = settings.out / "diagnosis.json"

    def save(diagnosis: Diagnosis, result: Race | None = None) -> None:
        heading = {"title": settings.target, "egop": __version__, "settings": settings.shown()}
        numbers = {"diagnosis": diagnosis.to_dict(), "race": result.to_dict() if result is not None else None}
        _write_json(path, heading | numbers)

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
        save(diagnosis)
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
    echo(f"Saved {path}.")
    return True


def describe_plan(target: str, structure: str | None, memory: str) -> str:
    """Return a table of the weights that EGOP, or AdamW with Online in a given structure, would rotate.

    Args:
        target: ``MODULE:FACTORY``, called on the meta device.
        structure: the structure of Online; None for EGOP.
        memory: limit for all bases together.
    """
    model, limit = load_model(target), parse_bytes(memory)
    if not any(tensor.numel() for tensor in model.parameters()):
        raise ValueError(f"The model has no parameters ({type(model).__name__}): there is nothing to plan.")
    if structure is None:
        plan = EGOP(model, memory=limit).plan
    else:
        chosen = parse_structure(structure)
        if isinstance(chosen, Structure) and not chosen.change_type.is_renewable():
            raise ValueError(f"Online cannot renew the structure {structure}. Use auto, full, shared or kronecker.")
        refresh = Online(structure=chosen, memory=limit)
        plan = ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh).plan
    tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
    size, rotated = sum(tensor.numel() for tensor in tensors), sum(block.size for block in plan.chosen)
    bases = format_bytes(sum(structure.cost(block).bytes for block, structure in plan.chosen.items()))
    coordinates = format_bytes(sum(block.size * block.dtype.itemsize for block in plan.chosen))
    return (
        f"{size:,} parameters in {pluralize(len(tensors), 'tensor')}, {rotated / max(1, size):.0%} of them rotated.\n\n"
        f"{plan}\n\n"
        f"Memory beyond AdamW's: {bases} for bases, {bases} for Gram matrices, {coordinates} for coordinates."
    )


def _write_json(path: Path, value: Any) -> None:
    """Write a value as JSON to a temporary file and rename it, so that the file is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_replace_nonfinite(value), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _replace_nonfinite(value: Any) -> Any:
    """Replace numbers that are not finite by None, since JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(entry) for key, entry in value.items()}
    return [_replace_nonfinite(entry) for entry in value] if isinstance(value, list | tuple) else value


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
