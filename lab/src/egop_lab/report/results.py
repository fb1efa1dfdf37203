"""The table of results in the README and on other pages, from the records of the comparison of coordinates."""

from __future__ import annotations

import math
from pathlib import Path

from egop_lab.experiments.coordinates import CoordinatesExperiment
from egop_lab.experiments.coordinates_found import ADAMW, CELL, CHOSEN, MUON, NORMUON, SOAP, Found, control_of, unit
from egop_lab.experiments.coordinates_targets import to_goal
from egop_lab.training.records import Store

# These lines enclose the table in a page; a test compares it with the records.
BEGIN, END = "<!-- results of egop-lab report -->", "<!-- end of results -->"
SHOWN = {
    ADAMW: ADAMW,
    SOAP: SOAP,
    MUON: MUON,
    NORMUON: NORMUON,
    control_of(CELL): "EGOP without rotation",
    CHOSEN: CHOSEN,
}
_MISSING = "–"


def make_table(records: Path) -> str:
    """Return the final loss of each method on each task, and when EGOP reaches AdamW's; in Markdown."""
    experiment = CoordinatesExperiment()
    found = experiment.found(Store(records / f"{experiment.id}.jsonl"), "full")
    rows = [["", *SHOWN.values(), f"{CHOSEN} is at AdamW's loss after"]]
    rows.append(["---"] * len(rows[0]))
    rows += [_row(found, task) for task in found.tasks if found.has(task, ADAMW)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_markdown(records: Path, page: Path) -> bool:
    """Write the table to a file, between the lines that mark it in pages; return False if it has no row."""
    if make_table(records).count("\n") < 2:
        return False
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{BEGIN}\n{make_table(records)}\n{END}\n", encoding="utf-8")
    return True


def _row(found: Found, task: str) -> list[str]:
    losses = {name: found.loss(task, name) for name in SHOWN if found.has(task, name)}
    least = min(losses.values())

    def format_loss(name: str) -> str:
        if name not in losses:
            return _MISSING
        return f"**{losses[name]:.3f}**" if losses[name] == least else f"{losses[name]:.3f}"

    return [task, *map(format_loss, SHOWN), _describe_reached(found, task)]


def _describe_reached(found: Found, task: str) -> str:
    """Say how many of AdamW's steps EGOP takes to AdamW's final loss, and what share of its time if that was timed."""
    if not found.has(task, CHOSEN):
        return _MISSING
    steps, length = to_goal(found, task, CHOSEN)[1], found.length(task)
    if not math.isfinite(steps):
        return "never"
    words = f"{steps:g} of {length} {unit(found.tasks[task])}"
    try:
        share = found.seconds_to(task, CHOSEN, steps) / found.seconds_to(task, ADAMW, length)
    except LookupError:
        return words
    return f"{words}, {share:.2f} of the time"
