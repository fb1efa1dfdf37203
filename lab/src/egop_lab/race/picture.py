"""Draw validation losses of the race by the clock."""

from __future__ import annotations

import statistics

from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.race.results import Records
from egop_lab.race.tasks import TASKS
from egop_lab.race.times import StepTimes, Times
from egop_lab.race.tune import final_runs, plan_tuning, read_losses

_TITLES = {
    "gpt-6x384-400": "GPT 6×384",
    "gpt-12x768-400": "GPT 12×768",
    "resnet-34": "ResNet-34",
    "vit-6x384": "ViT 6×384",
}
_METHODS = ("AdamW", "Muon", "EGOP")
_FIRST = 1  # of the evaluations to show: the loss before it would set the scale


def make_picture(records: Records, times: Times) -> Picture:
    """Return the validation loss of tuned runs over time in CUDA graphs, medians of the rounds."""
    panels = []
    for name, title in _TITLES.items():
        lines = [_make_line(records, name, method, times[name, "CUDA graph", method]) for method in _METHODS]
        panels.append(Panel(title, "seconds", "validation loss", lines, yscale="linear"))
    return Picture("race", "Validation loss over time: mean and range over the seeds.", panels)


def _make_line(records: Records, name: str, method: str, times: StepTimes) -> Series:
    task = TASKS[name]
    choice = plan_tuning(task, [method], read_losses(records.values()))[1][method]
    curves = [records[run]["curve"][_FIRST:] for run in final_runs(task, choice) if run in records]
    losses = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
    return Series(
        method,
        [statistics.median(times.until(step)) for step, _ in curves[0]],
        list(map(statistics.fmean, losses)),
        low=list(map(min, losses)),
        high=list(map(max, losses)),
    )
