"""Give what AdamW updates beside EGOP a multiple of EGOP's learning rate, on a small ViT and a small GPT.

``python -m egop_lab.race.outside_rate TASK DATA`` adds the missing runs to ``docs/records/outside-rate.jsonl``.
A run takes a minute on a CPU core. A test compares ``docs/reproduction/adamws-rate.md`` with the record.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from egop_lab.race import tasks
from egop_lab.race.problems import make_problem
from egop_lab.race.results import interval
from egop_lab.race.run import append_record
from egop_lab.race.train import train

RECORD = Path(__file__).parents[4] / "docs" / "records" / "outside-rate.jsonl"
METHODS = {1: "EGOP", 2: "EGOP, outside rate x 2", 4: "EGOP, outside rate x 4"}  # by multiple
SEEDS = range(5)
_VIT = {"side": 48, "patch": 8, "layers": 4, "width": 96, "heads": 3, "hidden": 256, "classes": 10}
# The race's tasks, smaller. The rates are the best of four or five, a factor of √2 apart, for seeds 10000 and 10001.
_GPT = {"layers": 3, "width": 96, "heads": 3, "context": 128}
TASKS = {
    "vit-4x96": (dataclasses.replace(tasks.TASKS["vit-6x384"], model=_VIT, crop=48, batch=64, steps=600), 1),
    "gpt-3x96": (dataclasses.replace(tasks.TASKS["gpt-4x144-400"], model=_GPT, batch=32), 4),
}


def make_table(records: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the test loss of each multiple, and its paired difference to the single rate, with 95 % intervals."""
    losses = {(each["task"], each["multiple"], each["seed"]): each["test"] for each in records}
    rows = [["test loss", "lr", "1 × lr", "2 × lr", "difference", "4 × lr", "difference"]]
    for name, (task, rate) in TASKS.items():
        lr = f"{tasks.Run(**_settings(task, rate), method='EGOP', seed=0).lr:.1e}".replace("e-0", "e-")
        cells = []
        for multiple in METHODS:
            own = [losses[name, multiple, seed] for seed in SEEDS]
            cells.append("{:.3f} ± {:.3f}".format(*interval(own)))
            if multiple > 1:
                gains = [loss - losses[name, 1, seed] for loss, seed in zip(own, SEEDS, strict=True)]
                cells.append("{:+.3f} ± {:.3f}".format(*interval(gains)).replace("-", "−"))
        rows.append([name, lr, *cells])
    return rows


def _settings(task: tasks.Task, rate: int) -> dict[str, Any]:
    own = {"task": task.name, "steps": task.steps, "warmup": task.warmups[0], "clip": task.clips[0]}
    return own | {"rate": rate, "beta": task.betas["EGOP"][0]}


def main(name: str, data: str) -> None:
    """Do the runs of a task that the record does not have yet."""
    torch.set_num_threads(1)
    task, rate = TASKS[name]
    problem = make_problem(task, data, torch.device("cpu"))
    for seed in SEEDS:
        for multiple, method in METHODS.items():
            lines = RECORD.read_text().splitlines() if RECORD.exists() else []
            done = [(each["task"], each["multiple"], each["seed"]) for each in map(json.loads, lines)]
            if (name, multiple, seed) not in done:
                run = tasks.Run(**_settings(task, rate), method=method, seed=seed)
                results = train(problem, task, run)
                losses = {part: results[part] for part in ("validation", "test")}
                append_record(RECORD, {"task": name, "multiple": multiple, "seed": seed, "lr": run.lr, **losses})


if __name__ == "__main__":
    main(*sys.argv[1:])
