"""Run the parts of the benchmark one after the other; print their tables and keep what is measured row by row."""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import egop
from egop_lab.bench import bases, host
from egop_lab.files import write_json
from egop_lab.formatting import format_bytes, format_table
from egop_lab.gpu import describe_device, fast_math

Row = dict[str, Any]

PARTS: dict[str, Callable[[torch.device, bool, int | None], Iterator[Row]]] = {"bases": bases.run, "host": host.run}


def format_duration(seconds: float) -> str:
    """Format ``0.00123`` as ``"1.23 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


# Title of each part, and the heading, key and formatter of each column.
COLUMNS: dict[str, tuple[str, list[tuple[str, str, Callable[[Any], str]]]]] = {
    "bases": (
        "Time and memory to a basis",
        [
            *((key, key, str) for key in ("network", "structure", "samples")),
            ("time", "seconds", format_duration),
            ("basis", "basis bytes", format_bytes),
            ("peak", "peak bytes", format_bytes),
        ],
    ),
    "host": (
        "Host time of a step on seven small linear layers, one CPU thread",
        [
            ("method", "method", str),
            ("step", "step", format_duration),
            ("/ AdamW", "step over AdamW", lambda ratio: f"{ratio:.2f}x"),
            ("over the rounds", "range", str),
            ("target", "target", str),
            ("own calls", "calls", str),
            *((key, key, str) for key in ("files", "frames")),
        ],
    ),
}


def format_rows(part: str, rows: Sequence[Row]) -> str:
    """Format the rows of one part, with failures below."""
    title, columns = COLUMNS[part]
    good = [row for row in rows if "failed" not in row]
    cells = [["" if row.get(key) is None else write(row[key]) for _, key, write in columns] for row in good]
    lines = [title, "", format_table([heading for heading, _, _ in columns], cells)] if cells else [title]
    for row in rows:
        if "failed" in row:
            names = [str(row[key]) for key in ("network", "structure") if key in row]
            lines.append(f"failed: {', '.join([*names, row['failed']])}")
    return "\n".join(lines)


def run(
    device: torch.device,
    out: Path,
    *,
    only: Sequence[str] = (),
    smoke: bool = False,
    rounds: int | None = None,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure, print a table for each part, and write everything to a file after every row; return what was written.

    Args:
        device: the device to measure on.
        out: the JSON file; it is replaced.
        only: the parts to measure; all by default.
        smoke: use tiny sizes, only to see that everything works.
        rounds: turns of each method; by default what the part says.
        say: called with each piece of text.
    """
    with fast_math(device):
        versions = {"egop": egop.__version__, "torch": torch.__version__, "python": platform.python_version()}
        machine = {"device": describe_device(device), "threads": torch.get_num_threads(), "versions": versions}
        kept: dict[str, Any] = {"smoke": smoke, "complete": False, "machine": machine, "seconds": {}, "parts": {}}
        say(f"{machine['device']}. {', '.join(f'{name} {version}' for name, version in versions.items())}.")
        for name in [name for name in PARTS if not only or name in only]:
            began = time.perf_counter()
            rows: list[Row] = []
            kept["parts"][name] = rows
            try:
                for row in PARTS[name](device, smoke, rounds):
                    rows.append(row)
                    write_json(out, kept)
            except Exception as error:  # go on with the other parts
                rows.append({"failed": f"{type(error).__name__}: {error}"})
            kept["seconds"][name] = time.perf_counter() - began
            say(f"\n{format_rows(name, rows)}\n({kept['seconds'][name]:.0f} s)")
        kept["complete"] = True
        write_json(out, kept)
    if smoke:
        say("\nA smoke run: its numbers mean nothing.")
    return kept


def list_failures(kept: dict[str, Any]) -> list[str]:
    """Return one line for each row that failed."""
    return [f"{part}: {row['failed']}" for part, rows in kept["parts"].items() for row in rows if "failed" in row]
