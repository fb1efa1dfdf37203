"""Findings of the comparison of coordinates: rates, reported runs, the best cells of the grid, times."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from egop_lab.experiments.curves import first_below, median
from egop_lab.experiments.timed_experiment import is_tuning, search_rates
from egop_lab.methods import BASES, COLUMNS, COORDINATES, cell, get_methods
from egop_lab.training.records import Record
from egop_lab.training.timed_runs import shared_config

# The tasks of the full preset.
SMALL_GPT, LARGE_GPT, RESNET, VIT = "GPT 6×384", "GPT 12×768", "ResNet-34", "ViT 6×384"

CHOSEN = "EGOP"
CELL = cell("PolarAdam", "online smaller")  # what it is made of: a cell of the grid, with bases renewed as all others
ADAMW, MUON, NORMUON, SOAP = "AdamW", "Muon", "NorMuon", "SOAP"
RIVALS = (MUON, NORMUON, SOAP)

GRID = [name for base in BASES for column in COLUMNS if (name := cell(base, column)) in get_methods(COORDINATES)]


class Found:
    """The records of some tasks.

    Args:
        settings: of the experiment.
        records: of each task, all on the same data and with the same settings.
    """

    def __init__(self, settings: Mapping[str, Any], records: Mapping[str, Sequence[Record]]) -> None:
        self.settings, self.records = settings, records
        self.tasks: Mapping[str, Mapping[str, Any]] = settings["tasks"]

    def length(self, task: str, multiple: float = 1.0) -> int:
        """Return the length of a run in steps or epochs."""
        return round(multiple * self.tasks[task][unit(self.tasks[task])])

    def seeds(self, task: str, multiple: float = 1.0) -> int:
        """Return the number of reported runs: longer ones have a single seed on all tasks but the first."""
        return int(self.settings["trials"]) if multiple == 1 or task == self.grid else 1

    def trainings(self, task: str, method: str, multiple: float) -> list[Record]:
        """Return the runs of a method at some length."""
        wanted = (method, self.length(task, multiple))
        where = unit(self.tasks[task])
        runs = (run for run in self.records.get(task, ()) if "rounds" not in run.config)
        return [run for run in runs if (run.config["method"], run.config[where]) == wanted]

    def scouted(self, method: str) -> tuple[float, list[float]]:
        """Return a method's learning rate on the first task by short runs, and the rates still to try."""
        return search_rates(self.settings["ladder"], self.tasks[self.grid]["rates"], self._scouting(method), final)

    def search(self, task: str, method: str) -> tuple[float, list[float]]:
        """Return a method's learning rate, and the rates still to try.

        Finalists are tuned by whole runs around the rate that is known already: that of short runs, or of the first
        task. The other cells have that of the short runs.
        """
        if task == self.grid and method not in self.finalists:
            return self.scouted(method)
        scouted = CELL if method == CHOSEN else method
        known = self.scouted(scouted)[0] if task == self.grid else self.rate(self.grid, method)
        ladder = self.settings["ladder"]
        place = ladder.index(known) + self.tasks[task].get("begin", 0)
        first = ladder[max(0, place - 1) : place + 2]
        runs = [run for run in self.trainings(task, method, 1.0) if is_tuning(run)]
        return search_rates(ladder, first, runs, final)

    def _scouting(self, method: str) -> list[Record]:
        runs = self.trainings(self.grid, method, self.settings["scouting length"])
        return [run for run in runs if is_tuning(run)]

    def rate(self, task: str, method: str) -> float:
        """Return a method's learning rate; raise LookupError while it is open."""
        best, left = self.search(task, method)
        if left:
            raise LookupError(f"{task}: {method} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def reported(self, task: str, method: str, multiple: float = 1.0) -> list[Record]:
        """Return the runs at a method's learning rate, one per seed; raise LookupError while some are missing."""
        rate, count = self.rate(task, method), self.seeds(task, multiple)
        runs = [
            run for run in self.trainings(task, method, multiple) if run.config["lr"] == rate and not is_tuning(run)
        ]
        if len(runs) < count:
            raise LookupError(f"{task}: {method} has {len(runs)} of {count} runs of {self.length(task, multiple)}")
        return sorted(runs, key=lambda run: int(run.config["seed"]))

    def has(self, task: str, method: str) -> bool:
        """Return True if a method's reported runs are there."""
        try:
            return bool(self.reported(task, method))
        except LookupError:
            return False

    def loss(self, task: str, method: str, multiple: float = 1.0) -> float:
        """Return the median final validation loss."""
        return median([final(run.result) for run in self.reported(task, method, multiple)])

    @property
    def grid(self) -> str:
        """The task on which every cell is run: the first."""
        return next(iter(self.tasks))

    @functools.cached_property
    def best(self) -> list[str]:
        """Return the best cells of the grid by short runs, without those that others are compared with.

        Those runs have a seed of their own: what is reported later is not what was chosen by.
        """
        scores = {}
        for name in self.settings["methods"]:
            if left := self.scouted(name)[1]:
                raise LookupError(f"{self.grid}: {name} has no short run with rate {', '.join(map(str, left))}")
            if name in GRID and column(name) not in ("original", "random rotation"):
                scores[name] = min(final(run.result) for run in self._scouting(name))
        return sorted(scores, key=lambda name: scores[name])[: self.settings["best"]]

    @functools.cached_property
    def finalists(self) -> list[str]:
        """Return the methods that run on all tasks: AdamW, EGOP, the rivals, the best cells, their controls."""
        rivals = [name for name in RIVALS if name in self.settings["methods"]]
        cells = [CELL, *self.best]
        return list(
            dict.fromkeys([ADAMW, CHOSEN, *rivals, *map(control_of, cells[:1]), *cells, *map(control_of, cells)])
        )

    def methods(self, task: str) -> list[str]:
        """Return the methods that run on a task: finalists first; on the first task the whole grid."""
        return list(dict.fromkeys([*self.finalists, *(self.settings["methods"] if task == self.grid else ())]))

    def step(self, task: str, method: str, eager: bool = False) -> tuple[float, float]:
        """Return the seconds before the first step and of a step, as last measured; raise LookupError if never.

        Of rounds the shortest: what else a machine does, or sets up once, only ever adds to a time.
        """
        for run in reversed(self.records.get(task, ())):
            timed = "rounds" in run.config and run.config.get("eager", False) == eager
            if timed and run.config["method"] == method:
                return min(run.result["before"]), min(run.result["step"])
        raise LookupError(f"{task}: no step of {method} was timed")

    def steps_to(self, task: str, method: str, goal: float) -> float:
        """Return the median number of steps or epochs until the validation loss is at most the goal; maybe infinite."""
        every = self.tasks[task].get("interval", 1)
        places = [first_below(run.result["validation loss"], goal) for run in self.reported(task, method)]
        return median([math.inf if place is None else float(every * place) for place in places])

    def seconds_to(self, task: str, method: str, steps: float) -> float:
        """Return the seconds that some steps or epochs take, with what comes before them."""
        before, step = self.step(task, method)
        return before + step * steps * self.pass_steps(task)

    def pass_steps(self, task: str) -> int:
        """Return the number of steps of a unit of length: one, or those of an epoch."""
        if unit(self.tasks[task]) == "steps":
            return 1
        config = self.records[task][-1].config
        return int(config["data"]["train"]) // int(config["batch"])

    def multiple(self, task: str, goal: float) -> float:
        """Return how many times its steps AdamW needs for a loss, interpolated between its finished runs."""
        points = [(multiple, self.loss(task, ADAMW, multiple)) for multiple in (1.0, *self.settings["multiples"])]
        if points[0][1] <= goal:
            return 1.0
        for (few, high), (more, low) in itertools.pairwise(points):
            if low <= goal:
                return few + (more - few) * (high - goal) / (high - low)
        return math.inf


def as_last(records: Sequence[Record], tasks: Sequence[str]) -> dict[str, list[Record]]:
    """Group the records by task; keep those with the same settings as the last training of the task."""
    by_task = {}
    for task in tasks:
        own = [run for run in records if run.config["task"] == task]
        trainings = [run for run in own if "rounds" not in run.config]
        if trainings:
            common = shared_config(trainings[-1])
            by_task[task] = [run for run in own if common.items() <= shared_config(run).items()]
    return by_task


def unit(task: Mapping[str, Any]) -> str:
    """Return the unit of a task's length."""
    return "steps" if "steps" in task else "epochs"


def final(result: Mapping[str, Any]) -> float:
    """Return the final validation loss; infinite if it is not finite."""
    last = float(result["validation loss"][-1])
    return last if math.isfinite(last) else math.inf


def column(name: str) -> str:
    """Return the coordinates of a cell."""
    return name.partition(", ")[2] or "original"


def control_of(name: str) -> str:
    """Return the same base in original coordinates."""
    return cell(name.partition(", ")[0], "original")
