"""Pictures and tables of the comparison of coordinates: the grid, curves, steps and time to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from egop_lab.experiments.base import Table
from egop_lab.experiments.coordinates_found import ADAMW, CELL, CHOSEN, RIVALS, Found, control_of, final, unit
from egop_lab.experiments.coordinates_targets import accuracy, to_goal
from egop_lab.experiments.curves import quartiles
from egop_lab.experiments.timed_experiment import format_number
from egop_lab.methods import BASES, COLUMNS, cell
from egop_lab.plots.picture import Panel, Picture, Series

SHOWN = (ADAMW, *RIVALS, CHOSEN, CELL, control_of(CELL))  # few lines: all methods are in the tables


def pictures(found: Found) -> list[Picture]:
    """Return the grid, the curves of each task, and what each method takes to AdamW's final loss."""
    tasks = [task for task in found.tasks if found.has(task, ADAMW)]
    results = [Picture("coordinates-grid", _GRID.format(found.grid), [_grid(found)])] if tasks else []
    results += [_curves(found, task, place) for place, task in enumerate(tasks)]
    if tasks:
        results.append(Picture("coordinates-to-loss", _TO_LOSS, [_bars(found, task) for task in tasks]))
    return results


def tables(found: Found) -> list[Table]:
    """Return a table of every method for every task."""
    return [_table(found, task) for task in found.tasks if found.has(task, ADAMW)] + list(_longer(found))


_GRID = (
    "Last validation loss on {}: a row for each base optimizer, a column for the coordinates it runs in; pale is "
    "better. Every cell has its own learning rate; medians over trials. AdamW in original coordinates is AdamW. –: "
    "there is none, or it did not end well."
)
_TO_LOSS = (
    "Steps and time until the validation loss is at most AdamW's last one, as a share of AdamW's whole run; within "
    "schedules of the same length. No bar: not reached, or not timed."
)


def _grid(found: Found) -> Panel:
    names = list(COLUMNS)
    rows = [Series(base, names, [_or_nan(found, cell(base, column)) for column in names]) for base in BASES]
    rivals = ", ".join(f"{name} {_or_nan(found, name):.3f}" for name in RIVALS if found.has(found.grid, name))
    title = f"{found.grid}: last validation loss" + (f" ({rivals})" if rivals else "")
    return Panel(title, "coordinates", "base", rows, yscale="linear", kind="cells")


def _or_nan(found: Found, method: str) -> float:
    return found.loss(found.grid, method) if found.has(found.grid, method) else math.nan


def _curves(found: Found, task: str, place: int) -> Picture:
    """Return curves by steps, by seconds where steps were timed, and the accuracy of classifiers."""
    methods = [method for method in SHOWN if found.has(task, method)]
    words = unit(found.tasks[task])
    goal = found.loss(task, ADAMW)
    horizontal = {f"AdamW's last {goal:.3f}": goal}
    by_steps = [_line(found, task, method, "validation loss", lambda passes: passes) for method in methods]
    panels = [Panel(f"{task}, by {words}", words, "validation loss", by_steps, horizontal=horizontal)]
    timed = [method for method in methods if _is_timed(found, task, method)]
    if timed:
        by_seconds = [_line(found, task, method, "validation loss", _seconds(found, task, method)) for method in timed]
        panels.append(Panel("By seconds", "seconds", "validation loss", by_seconds, horizontal=horizontal))
    if words == "epochs":
        lines = [_line(found, task, method, "accuracy", lambda passes: passes) for method in methods]
        panels.append(Panel("Accuracy", words, "accuracy", lines, yscale="linear"))
    caption = (
        f"{task}: each method at its own learning rate, medians and quartiles over trials, without the first tenth. "
        "Seconds are steps times what a step takes, measured apart, and what is before the first step."
    )
    return Picture(f"coordinates-task-{place + 1}", caption, panels)


def _line(found: Found, task: str, method: str, name: str, places: Callable[[float], float]) -> Series:
    runs = found.reported(task, method)
    bands = quartiles([run.result[name] for run in runs])
    every = found.tasks[task].get("interval", 1)
    first = max(1, len(bands[1]) // 10)
    x = [places(float(every * look)) for look in range(len(bands[1]))][first:]
    low, middle, high = ([value if math.isfinite(value) else math.nan for value in band[first:]] for band in bands)
    return Series(method, x, middle, low, high, method, method in (CHOSEN, CELL))


def _seconds(found: Found, task: str, method: str) -> Callable[[float], float]:
    return lambda passes: found.seconds_to(task, method, passes)


def _is_timed(found: Found, task: str, method: str) -> bool:
    try:
        return bool(found.step(task, method))
    except LookupError:
        return False


def _bars(found: Found, task: str) -> Panel:
    methods = [method for method in SHOWN if found.has(task, method)]
    length = found.length(task)
    steps = [to_goal(found, task, method)[1] for method in methods]
    shares = [part / length for part in steps]
    times = [_time_share(found, task, method, part) for method, part in zip(methods, steps, strict=True)]
    series = [Series(unit(found.tasks[task]), methods, shares, method="steps"), Series("time", methods, times)]
    return Panel(task, "", "share of AdamW's", series, yscale="linear", kind="bar")


def _time_share(found: Found, task: str, method: str, steps: float) -> float:
    if not math.isfinite(steps) or not all(_is_timed(found, task, name) for name in (method, ADAMW)):
        return math.nan
    return found.seconds_to(task, method, steps) / found.seconds_to(task, ADAMW, found.length(task))


def _table(found: Found, task: str) -> Table:
    """Return one row per finished method, the best first."""
    words, images = unit(found.tasks[task]), unit(found.tasks[task]) == "epochs"
    goal = found.loss(task, ADAMW)
    header = [
        "method",
        "learning rate",
        "last validation loss",
        "lowest and highest",
        *(["accuracy"] if images else []),
    ]
    header += [f"{words} to {goal:.3f}", "milliseconds a step", f"seconds to {goal:.3f}"]
    names = sorted(_done(found, task), key=lambda name: found.loss(task, name))
    rows = [_row(found, task, name, images) for name in names]
    return Table(f"{task}, {found.length(task)} {words}", tuple(header), tuple(rows))


def _done(found: Found, task: str) -> list[str]:
    recorded = dict.fromkeys(run.config["method"] for run in found.records.get(task, ()))
    return [method for method in recorded if found.has(task, method)]


def _row(found: Found, task: str, method: str, images: bool) -> tuple[str, ...]:
    losses = [final(run.result) for run in found.reported(task, method)]
    steps = to_goal(found, task, method)[1]
    timed = _is_timed(found, task, method)
    seconds = found.seconds_to(task, method, steps) if timed else math.nan
    return (
        method,
        f"{found.rate(task, method):g}",
        f"{found.loss(task, method):.3f}",
        f"{min(losses):.3f} to {max(losses):.3f}",
        *([f"{accuracy(found, task, method):.3f}"] if images else []),
        format_number(steps, 4),
        f"{1000 * found.step(task, method)[1]:.2f}" if timed else "not timed",
        format_number(seconds, 3) if timed else "not timed",
    )


def _longer(found: Found) -> Iterator[Table]:
    """Compare AdamW's finished runs of several lengths with EGOP's."""
    multiples: Sequence[float] = (1.0, *found.settings["multiples"])
    rows = []
    for task in found.tasks:
        try:
            losses = [f"{found.loss(task, ADAMW, multiple):.3f}" for multiple in multiples]
            own = found.loss(task, CHOSEN)
            needed = found.multiple(task, own)
        except LookupError:
            continue
        most = f"more than {multiples[-1]:g}"
        rows.append((task, *losses, f"{own:.3f}", f"{needed:.2f}" if math.isfinite(needed) else most))
    if rows:
        header = (
            "task",
            *(f"AdamW × {multiple:g}" for multiple in multiples),
            CHOSEN,
            "AdamW's multiple for that loss",
        )
        yield Table("Finished runs: the last loss of AdamW with more steps", header, tuple(rows))
