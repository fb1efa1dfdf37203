"""Read the records of the race and print what they say so far."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from egop_lab.race.tasks import Run, Task
from egop_lab.race.tune import (
    final_runs,
    list_variants,
    plan_longer,
    plan_tuning,
    read_losses,
    read_run,
    start_tuning,
)

Records = dict[Run, Mapping[str, Any]]

# 97.5 % quantiles of Student's t, by degrees of freedom.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def load_records(*paths: Path) -> Records:
    """Load records by run; the first of several of one run counts. A line that a killed process cut off is skipped."""
    records: Records = {}
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                print(f"{path}, line {number}: not a whole record, skipped", flush=True)
                continue
            records.setdefault(read_run(record), record)
    return records


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, _T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def describe(task: Task, methods: Sequence[str], records: Records, baseline: str = "AdamW") -> list[str]:
    """Return lines for a terminal: the tuning of each method, and final test losses where all seeds are there."""
    losses = read_losses(records.values())
    lines = [f"== {task.name}"]
    for method in (each for each in methods if each not in task.controls):
        tuning = start_tuning(task, method, losses)
        tried = ", ".join(f"{1e-3 * 2 ** (rate / 2):.2e}: {loss:.4f}" for rate, loss in sorted(tuning.tried.items()))
        lines.append(f"{method:8} rates {tried or 'none yet'}")
        if tuning.tried:
            for name, value in list_variants(task, method).items():
                if not math.isnan(median := tuning.median(rate=tuning.best, **{name: value})):
                    lines.append(f"{'':8} {name} {value} instead of {getattr(tuning.base, name)}: {median:.4f}")
    _, choices = plan_tuning(task, methods, losses)
    reference = final_runs(task, choices[baseline]) if baseline in choices else []
    for method, choice in choices.items():
        lines.append(_describe_final(method, final_runs(task, choice), reference, records))
    for multiple in task.multiples if baseline in choices else ():
        longer = plan_longer(task, choices[baseline], multiple, losses)
        if isinstance(longer, Run):
            runs = final_runs(task, longer, multiple)
            lines.append(_describe_final(f"{baseline} x {multiple:g}", runs, reference, records))
    return lines


def _describe_final(name: str, runs: Sequence[Run], reference: Sequence[Run], records: Records) -> str:
    """Return the mean test loss and its difference to the reference at the seeds that both have, with intervals."""
    losses = {run.seed: records[run]["test"] for run in runs if run in records}
    others = {run.seed: records[run]["test"] for run in reference if run in records}
    run = runs[0]
    line = f"{name}: lr {run.lr:.2e}, beta {run.beta:g}, warm-up {run.warmup}, clip {run.clip}; "
    line += f"{len(losses)} of {len(runs)} seeds"
    if not losses or None in losses.values():
        return f"{line}{', some diverged' if losses else ''}"
    line += ", test loss {:.4f} +- {:.4f}".format(*interval(list(losses.values())))
    shared = [seed for seed in losses if others.get(seed) is not None]
    if shared and runs != reference:
        differences = [losses[seed] - others[seed] for seed in shared]
        line += ", minus the baseline {:+.4f} +- {:.4f} ({} seeds)".format(*interval(differences), len(shared))
    return line
