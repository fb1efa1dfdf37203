"""Run the parts of the benchmark one after the other; keep what is measured row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from egop_lab.bench import bases, host, machine, steps, tables
from egop_lab.bench.timing import describe_error
from egop_lab.files import write_json

PARTS: dict[str, Callable[[machine.Setting], Iterator[machine.Row]]] = {
    "bases": bases.run,
    "steps": steps.run,
    "host": host.run,
}


def run(
    device: torch.device,
    out: Path,
    *,
    only: Sequence[str] = (),
    smoke: bool = False,
    rounds: int | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure, print a table for each part, and write everything to a file after every row.

    Args:
        device: the device to measure on.
        out: the JSON file; it is replaced.
        only: the parts to measure; all by default.
        smoke: use tiny sizes, only to see that everything works.
        rounds: turns of each method; by default what the part says.
        say: called with each piece of text.

    Returns:
        What was written.
    """
    with machine.measurement_mode(device):
        about = machine.describe(device)
        kept: dict[str, Any] = {"smoke": smoke, "complete": False, "machine": about, "seconds": {}, "parts": {}}
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        say(f"{about['device']}, float32 products at precision {about['precision of float32 products']!r}. {versions}.")
        setting = machine.Setting(device, smoke, rounds)
        for name in [name for name in PARTS if not only or name in only]:
            began = time.perf_counter()
            rows: list[machine.Row] = []
            kept["parts"][name] = rows
            try:
                for row in PARTS[name](setting):
                    rows.append(row)
                    write_json(out, kept)
            except Exception as error:  # go on with the other parts
                rows.append({"failed": describe_error(error)})
            machine.release(device)
            kept["seconds"][name] = time.perf_counter() - began
            say(f"\n{tables.format_rows(name, rows)}\n({kept['seconds'][name]:.0f} s)")
        kept["complete"] = True
        write_json(out, kept)
    if smoke:
        say("\nA smoke run: its numbers mean nothing.")
    return kept


def failures(kept: dict[str, Any]) -> list[str]:
    """Return one line for each row that failed."""
    return [f"{part}: {row['failed']}" for part, rows in kept["parts"].items() for row in rows if "failed" in row]
