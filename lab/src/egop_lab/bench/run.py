"""The parts of the benchmark one after the other; what is measured is kept row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from egop_lab.bench import bases, epoch, growth, host, machine, sampling, steps, sweep, tables, targets
from egop_lab.bench.timing import describe_error
from egop_lab.files import write_json
from egop_lab.formatting import pluralize

PARTS: dict[str, Callable[[machine.Setting], Iterator[dict[str, Any]]]] = {
    "sampling": sampling.run,
    "bases": bases.run,
    "steps": steps.run,
    "host": host.run,
    "epoch": epoch.run,
    "growth": growth.run,
    "sweep": sweep.run,
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
    """Measure, print a table a part and the targets, and write everything to a file after every row.

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
        rates = machine.measure(device, smoke=smoke)
        about = machine.describe(device) | {"flops a second": rates.flops, "bytes a second": rates.bytes}
        kept: dict[str, Any] = {"smoke": smoke, "complete": False, "machine": about, "seconds": {}, "parts": {}}
        say(_heading(kept))
        setting = machine.Setting(device, smoke, rounds, rates)
        for name in [name for name in PARTS if not only or name in only]:
            began = time.perf_counter()
            rows: list[dict[str, Any]] = []
            kept["parts"][name] = rows
            try:
                for row in PARTS[name](setting):
                    rows.append(row)
                    kept["targets"] = targets.judge(kept["parts"], device.type)
                    write_json(out, kept)
            except Exception as error:  # go on with the other parts
                rows.append({"failed": describe_error(error)})
            machine.release(device)
            kept["seconds"][name] = time.perf_counter() - began
            say(f"\n{tables.format_rows(name, rows)}\n({kept['seconds'][name]:.0f} s)")
        kept |= {"complete": True, "targets": targets.judge(kept["parts"], device.type)}
        write_json(out, kept)
    say(f"\n{tables.format_targets(kept['targets'])}" if not smoke else "\nA smoke run: its numbers mean nothing.")
    return kept


def failures(kept: dict[str, Any]) -> list[str]:
    """Return one line for each row that failed."""
    return [f"{part}: {row['failed']}" for part, rows in kept["parts"].items() for row in rows if "failed" in row]


def _heading(kept: dict[str, Any]) -> str:
    about = kept["machine"]
    speed = f"{about['flops a second'] / 1e9:.0f} Gflop/s, {about['bytes a second'] / 1e9:.0f} GB/s"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return (
        f"{about['device']}: {pluralize(about['threads'], 'thread')}, float32 products at precision "
        f"{about['precision of float32 products']!r}, {speed} in the best of cases. {versions}."
    )
