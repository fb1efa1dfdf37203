"""Write the tables of the README and the docs from the records of the race: ``python -m egop_lab.race.tables``.

A page marks the place of a table with two lines, ``<!-- race: NAME -->`` and ``<!-- end -->``. This command replaces
what is between them, so that measured numbers are never typed by hand; a test compares the pages with the records.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path

from egop_lab.plots.figures import draw_picture, save_figure
from egop_lab.race.picture import make_picture
from egop_lab.race.results import Records, interval, load_records
from egop_lab.race.tasks import TASKS, Run, Task
from egop_lab.race.times import StepTimes, Times, load_times
from egop_lab.race.tune import Losses, final_runs, median_loss, plan_longer, plan_tuning, read_losses

PAGES = ("README.md", "docs/results.md")
TITLES = {
    "gpt-4x144-400": "GPT 4×144, 400 steps",
    "gpt-6x384-400": "GPT 6×384, 400 steps",
    "gpt-6x384-1600": "GPT 6×384, 1,600 steps",
    "gpt-12x768-400": "GPT 12×768, 400 steps",
    "gpt-12x768-code": "GPT 12×768, Python code",
    "resnet-34": "ResNet-34, 10 epochs",
    "vit-6x384": "ViT 6×384, 16 epochs",
}
PARAMETERS = {
    "gpt-4x144-400": "1.1 M",
    "gpt-6x384-400": "11 M",
    "gpt-6x384-1600": "11 M",
    "gpt-12x768-400": "86 M",
    "gpt-12x768-code": "136 M",
}
# The columns. EGOP comes first, where a narrow screen shows it.
METHODS = ("EGOP", "AdamW", "Muon", "NorMuon", "SOAP", "SGD")
VARIANTS = {
    "PolarAdam": "no rotation (`rotate=False`)",
    "EGOP, random rotation": "random rotation",
    "EGOP, squared momentum": "second moments of the momentum, not of the gradient",
    "EGOP, momentum 0.95": "momentum 0.95 instead of 0.9",
    "EGOP, both sides": "both sides of a weight rotated",
    "EGOP, renewed every 20 steps": "renewed every 20 steps instead of 200",
}
CONTROLS = {"EGOP": "EGOP", "PolarAdam": "`rotate=False`", "EGOP, random rotation": "random rotation"}
_MISSING = "–"
_MARKED = re.compile(r"(<!-- race: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def choose_run(task: Task, method: str, losses: Losses) -> Run | None:
    """Return a run of a method as tuned; None while it is not."""
    return plan_tuning(task, [method], losses)[1].get(method) if method in task.guesses else None


def read_final(runs: Sequence[Run], records: Records, part: str = "test") -> dict[int, float]:
    """Return the losses of final runs by seed; empty if one diverged."""
    found = {run.seed: records[run][part] for run in runs if run in records}
    return {} if None in found.values() else found


def final_losses(records: Records, task: Task, method: str, part: str = "test") -> dict[int, float]:
    """Return the losses of a method as tuned, by seed."""
    choice = choose_run(task, method, read_losses(records.values()))
    return read_final(final_runs(task, choice), records, part) if choice else {}


def longer_losses(records: Records, task: Task, method: str = "AdamW") -> dict[float, dict[int, float]]:
    """Return the test losses of longer training runs, by how many times as long they are."""
    losses = read_losses(records.values())
    choice = choose_run(task, method, losses)
    found = {1.0: final_losses(records, task, method)}
    for multiple in task.multiples:
        longer = plan_longer(task, choice, multiple, losses) if choice else None
        if isinstance(longer, Run):
            found[multiple] = read_final(final_runs(task, longer, multiple), records)
    return {multiple: some for multiple, some in found.items() if some}


def steps_needed(means: Mapping[float, float], loss: float) -> str:
    """Say how many times as long a training run must be to end at a loss, given the mean losses of finished ones.

    Between two lengths the loss is taken to be linear in the number of steps.
    """
    lengths = sorted(means)
    if loss > means[lengths[0]]:
        return f"< {lengths[0]:g}×"
    for short, long in pairwise(lengths):
        if means[long] <= loss:
            part = (means[short] - loss) / (means[short] - means[long])
            return f"{short + part * (long - short):.2g}×"
    return f"> {lengths[-1]:g}×"


def format_losses(task: Task, losses: Mapping[int, float], digits: int = 3) -> str:
    """Format the mean with its 95 % interval, and the number of seeds if some are missing."""
    if not losses:
        return _MISSING
    mean, half = interval(list(losses.values()))
    if len(losses) == 1:
        return f"{mean:.{digits}f} (1 seed)"
    return f"{mean:.{digits}f} ± {half:.{digits}f}" + (f" ({len(losses)} seeds)" if len(losses) < task.seeds else "")


def format_difference(task: Task, losses: Mapping[int, float], others: Mapping[int, float]) -> str:
    """Format the mean difference at shared seeds with its 95 % interval, and their number if some are missing."""
    differences = [loss - others[seed] for seed, loss in losses.items() if seed in others]
    if len(differences) < 2:
        return f"{differences[0]:+.3f} (1 seed)" if differences else _MISSING
    fewer = f" ({len(differences)} seeds)" if len(differences) < task.seeds else ""
    return "{:+.3f} ± {:.3f}".format(*interval(differences)) + fewer


def make_summary_table(records: Records, times: Times) -> list[list[str]]:
    """Return the results of the methods that all tasks have, and how long AdamW must train to match EGOP."""
    header, *rows = make_results_table(records, times, methods=("EGOP", "AdamW", "Muon"))
    needed = [_format_steps_needed(records, task) for task in _list_tasks(records)]
    return [[*header, "steps AdamW needs to match EGOP"], *([*row, n] for row, n in zip(rows, needed, strict=True))]


def make_results_table(records: Records, times: Times, methods: Sequence[str] = METHODS) -> list[list[str]]:
    """Return the test loss of each method on each task."""
    rows = [["test loss", *methods]]
    for task in _list_tasks(records):
        losses = [format_losses(task, final_losses(records, task, method)) for method in methods]
        rows.append([TITLES[task.name], *losses])
    return _drop_empty_columns(rows)


def make_controls_table(records: Records, times: Times) -> list[list[str]]:
    """Return the test loss of EGOP and of its controls, and their paired differences."""
    rows = [["test loss", *CONTROLS.values(), "EGOP minus `rotate=False`, shared seeds"]]
    for task in _list_tasks(records):
        losses = {method: final_losses(records, task, method) for method in CONTROLS}
        gain = format_difference(task, losses["EGOP"], losses["PolarAdam"])
        rows.append([TITLES[task.name], *(format_losses(task, some) for some in losses.values()), gain])
    return rows


def make_variants_table(records: Records, times: Times) -> list[list[str]]:
    """Return how much higher the validation loss of variants is than EGOP's at the same seeds."""
    tasks = [task for task in _list_tasks(records) if final_losses(records, task, next(reversed(VARIANTS)))]
    ours = {task.name: final_losses(records, task, "EGOP", "validation") for task in tasks}
    rows = [["validation loss minus EGOP's", *(TITLES[task.name].partition(",")[0] for task in tasks)]]
    for method, title in VARIANTS.items():
        found = [final_losses(records, task, method, "validation") for task in tasks]
        if any(found):
            rows.append(
                [title, *(format_difference(t, losses, ours[t.name]) for t, losses in zip(tasks, found, strict=True))]
            )
    return rows


def make_growth_table(records: Records, times: Times) -> list[list[str]]:
    """Return how much lower EGOP's test loss is than that of AdamW and Muon, by size and length of the training."""
    rows = [["parameters", "steps", "EGOP minus AdamW", "EGOP minus Muon"]]
    for task in _list_tasks(records):
        if task.name in PARAMETERS:
            ours, *others = (final_losses(records, task, method) for method in ("EGOP", "AdamW", "Muon"))
            differences = [format_difference(task, ours, some) for some in others]
            rows.append([PARAMETERS[task.name], f"{task.steps:,}", *differences])
    return rows


def make_rates_table(records: Records, times: Times) -> list[list[str]]:
    """Return the tuned learning rates of AdamW and EGOP, and what EGOP loses at AdamW's, in tuning runs."""
    rows = [["learning rate", "AdamW's best", "EGOP's best", "EGOP's extra loss at AdamW's rate"]]
    losses = read_losses(records.values())
    for task in _list_tasks(records):
        adamw, ours = (choose_run(task, method, losses) for method in ("AdamW", "EGOP"))
        assert adamw is not None
        assert ours is not None
        medians = [median_loss(task, ours, rate, losses) for rate in (adamw.rate, ours.rate)]
        above = _MISSING if math.isnan(medians[0]) else f"{medians[0] - medians[1]:.3f}"
        rates = [f"{run.lr:.1e}".replace("e-0", "e-") for run in (adamw, ours)]
        rows.append([TITLES[task.name], *rates, above])
    return rows


def make_longer_table(records: Records, times: Times) -> list[list[str]]:
    """Return AdamW's test loss by the length of the training, where there are several."""
    found = {task.name: longer_losses(records, task) for task in _list_tasks(records)}
    found = {name: losses for name, losses in found.items() if len(losses) > 1}
    multiples = sorted({multiple for losses in found.values() for multiple in losses})
    rows = [["AdamW's test loss", *(f"{multiple:g}× the steps" for multiple in multiples), "matches EGOP at"]]
    for name, losses in found.items():
        cells = [format_losses(TASKS[name], losses.get(multiple, {})) for multiple in multiples]
        rows.append([TITLES[name], *cells, _format_steps_needed(records, TASKS[name])])
    return rows


def make_reach_table(records: Records, times: Times) -> list[list[str]]:
    """Return when EGOP reaches the final loss of others during a run, as parts of their steps and of their time."""
    rivals = {"AdamW": "AdamW", "Muon": "Muon", "PolarAdam": "`rotate=False`"}
    rows = [["final loss of", *(cell for name in rivals.values() for cell in (f"{name}: steps", "time"))]]
    losses = read_losses(records.values())
    for task in _list_tasks(records):
        network = "compiled" if task.compiled else "CUDA graph"
        cells: list[str] = []
        for rival in rivals:
            choices = [choose_run(task, method, losses) for method in (rival, "EGOP")]
            pairs = zip(*(final_runs(task, choice) for choice in choices if choice), strict=True)
            curves = [[records[run]["curve"] for run in pair] for pair in pairs if all(run in records for run in pair)]
            reached = [find_crossing(ours, theirs[-1][1]) for theirs, ours in curves]
            base, own = (times.get((task.name, network, method)) for method in (rival, "EGOP"))
            cells += format_reached(task, reached, base, own)
        rows.append([TITLES[task.name], *cells])
    return rows


def format_reached(
    task: Task, reached: Sequence[float], base: StepTimes | None, own: StepTimes | None
) -> tuple[str, str]:
    """Format the steps at which a loss is reached, by seed, as parts of a run; and as a part of another's time."""
    if not reached:
        return _MISSING, _MISSING
    if missed := sum(map(math.isinf, reached)):
        return f"never with {missed} of {len(reached)} seeds", _MISSING
    parts = [100 * step / task.steps for step in reached]
    fewer = f"; {len(parts)} seeds" if len(parts) < task.seeds else ""
    steps = f"{statistics.fmean(parts):.0f} % ({min(parts):.0f} to {max(parts):.0f} %{fewer})"
    if base is None or own is None:
        return steps, _MISSING
    whole = base.until(task.steps)
    ratios = [statistics.median(_divide(own.until(step), whole)) for step in reached]
    return steps, f"{100 * statistics.fmean(ratios):.0f} %"


def make_accuracy_table(records: Records, times: Times) -> list[list[str]]:
    """Return the test accuracy of each method on images, in percent."""
    rows = [["test accuracy, %", *METHODS]]
    for task in _list_tasks(records):
        if task.data == "imagenette":
            found = [final_losses(records, task, method, "test accuracy") for method in METHODS]
            percent = [{seed: 100 * value for seed, value in some.items()} for some in found]
            rows.append([TITLES[task.name], *(format_losses(task, some, digits=1) for some in percent)])
    return _drop_empty_columns(rows)


def find_crossing(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Return the step at which a curve of steps and losses first falls to a loss; infinity if it never does."""
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss:
            return step + (later - step) * (before - loss) / (before - after)
    return math.inf


def make_times_table(records: Records, times: Times) -> list[list[str]]:
    """Return the mean time of a training step over AdamW's, with and without a CUDA graph; medians of the rounds."""
    shown = {"EGOP": "EGOP", "PolarAdam": "`rotate=False`", "Muon": "Muon", "NorMuon": "NorMuon", "SOAP": "SOAP"}
    rows = [["step time (AdamW = 1)", *shown.values(), "AdamW, ms"]]
    networks = list(dict.fromkeys(network for _, network, _ in times))
    for name, network in product(TITLES, networks):
        base = times.get((name, network, "AdamW"))
        if base:
            ratios = [_format_ratio(TASKS[name], times.get((name, network, method)), base) for method in shown]
            rows.append([f"{TITLES[name]}, {network}", *ratios, f"{1e3 * statistics.median(base.steps):.1f}"])
    return _drop_empty_columns(rows)


TABLES: Mapping[str, Callable[[Records, Times], list[list[str]]]] = {
    "summary": make_summary_table,
    "results": make_results_table,
    "controls": make_controls_table,
    "variants": make_variants_table,
    "rates": make_rates_table,
    "growth": make_growth_table,
    "longer": make_longer_table,
    "reach": make_reach_table,
    "accuracy": make_accuracy_table,
    "times": make_times_table,
}


def fill_tables(text: str, records: Records, times: Times) -> str:
    """Return a page with every marked table replaced by that of the records."""

    def fill(match: re.Match[str]) -> str:
        header, *rows = TABLES[match[2]](records, times)
        lines = [header, ["---"] * len(header), *rows]
        return match[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + match[3]

    return _MARKED.sub(fill, text)


def _list_tasks(records: Records) -> list[Task]:
    """Return the tasks with a final run of both AdamW and EGOP, in the order of the titles."""
    return [
        TASKS[name]
        for name in TITLES
        if all(final_losses(records, TASKS[name], method) for method in ("AdamW", "EGOP"))
    ]


def _format_steps_needed(records: Records, task: Task) -> str:
    """Say how many times as long AdamW must train to end where EGOP ends."""
    means = {multiple: statistics.fmean(some.values()) for multiple, some in longer_losses(records, task).items()}
    ours = statistics.fmean(final_losses(records, task, "EGOP").values())
    return steps_needed(means, ours) if len(means) > 1 else _MISSING


def _format_ratio(task: Task, own: StepTimes | None, base: StepTimes) -> str:
    if own is None:
        return _MISSING
    ratios = _divide(own.until(task.steps), base.until(task.steps))
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _divide(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(seconds, base, strict=True)]


def _drop_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    """Drop the columns of methods that no task has."""
    kept = [index for index, cells in enumerate(zip(*rows, strict=True)) if set(cells[1:]) != {_MISSING}]
    return [[row[index] for index in kept] for row in rows]


def main() -> int:
    """Rewrite the tables of all pages below the current folder, and the picture."""
    folder = Path("docs/records")
    records, times = load_records(folder / "race.jsonl"), load_times(folder / "race-times.jsonl")
    for page in map(Path, PAGES):
        page.write_text(fill_tables(page.read_text(encoding="utf-8"), records, times), encoding="utf-8")
    save_figure(draw_picture(make_picture(records, times)), Path("docs/images/race.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
