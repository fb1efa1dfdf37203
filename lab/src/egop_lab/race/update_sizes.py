"""Compare sizes of updates: constant or like Adam's, of convolutions, of what AdamW updates beside EGOP, of Muon.

``python -m egop_lab.race.update_sizes TASK DATA`` adds the missing runs of a small ViT and a small GPT with other rates
outside to ``docs/records/outside-rate.jsonl``; with ``muon`` for the task, those of Muon with EGOP's sizes on the small
GPT to ``docs/records/muon-sizes.jsonl``. A run takes a minute on a CPU core. ``docs/records/update-sizes.jsonl`` holds
tuning runs of the race on a GPU. A test compares ``docs/reproduction/adamws-rate.md`` and ``race.md`` with them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from egop_lab.race import tasks
from egop_lab.race.problems import make_problem
from egop_lab.race.results import interval
from egop_lab.race.run import append_record
from egop_lab.race.tables import TITLES
from egop_lab.race.train import train
from egop_lab.race.tune import Losses

_RECORDS = Path(__file__).parents[4] / "docs" / "records"
RECORD = _RECORDS / "outside-rate.jsonl"
MUON_RECORD = _RECORDS / "muon-sizes.jsonl"
TUNING_RECORDS = (_RECORDS / "race.jsonl", _RECORDS / "update-sizes.jsonl")
METHODS = {1: "EGOP", 2: "EGOP, outside rate x 2", 4: "EGOP, outside rate x 4"}  # by multiple
SEEDS = range(5)
_VIT = {"side": 48, "patch": 8, "layers": 4, "width": 96, "heads": 3, "hidden": 256, "classes": 10}
# The race's tasks, smaller. The rates are the best of four or five, a factor of √2 apart, for seeds 10000 and 10001.
_GPT = {"layers": 3, "width": 96, "heads": 3, "context": 128}
TASKS = {
    "vit-4x96": (dataclasses.replace(tasks.TASKS["vit-6x384"], model=_VIT, crop=48, batch=64, steps=600), 1),
    "gpt-3x96": (dataclasses.replace(tasks.TASKS["gpt-4x144-400"], model=_GPT, batch=32), 4),
}
# Rates of tuning runs with several rates outside: mostly those that AdamW and EGOP have chosen.
_RATES = {"vit-6x384": (-3, -1), "resnet-34": (-2, 5), "gpt-6x384-400": (1, 2), "gpt-12x768-400": (-1, 0)}
_CONVOLUTION_RATES = (-2, 0, 2, 4)
_ADAMS = "EGOP, Adam's size"  # as EGOP(update_rms="adam"), but with updates of convolutions three times as large
_ADAMS_RATES = {
    "gpt-4x144-400": (2, 4, 6),
    "gpt-6x384-400": (0, 1, 2),
    "gpt-12x768-400": (-1, 0, 1),
    "resnet-34": (-2, -1, 0, 1),
    "vit-6x384": (-3, -2, -1),
}


_MUON_RATES = {
    "Muon": range(5, 11),
    tasks.MUON_SIZED: range(5, 11),
    "PolarAdam": range(3, 7),
    "EGOP": range(3, 6),
}
_MUON_TITLES = {tasks.MUON_SIZED: "Muon with `EGOP`'s sizes", "PolarAdam": "`rotate=False`", "EGOP": "`EGOP`"}


def make_muon_table(records: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the mean validation loss of Muon with both sizes, and of EGOP, each at the rate with the best median."""
    losses = {(each["method"], each["rate"], each["seed"]): each["validation"] for each in records}
    rows = [["GPT 3×96", "best lr", "validation loss"]]
    for method, rates in _MUON_RATES.items():
        found = {rate: [losses[method, rate, seed] for seed in tasks.TUNING_SEEDS] for rate in rates}
        best = min(found, key=lambda rate: statistics.median(found[rate]))
        mean, half = interval(found[best])
        rows.append([_MUON_TITLES.get(method, method), _format_rate(best), f"{mean:.3f} ± {half:.3f}"])
    return rows


def make_table(records: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the test loss of each multiple, and its paired difference to the single rate, with 95 % intervals."""
    losses = {(each["task"], each["multiple"], each["seed"]): each["test"] for each in records}
    rows = [["test loss", "lr", "1 × lr", "2 × lr", "difference", "4 × lr", "difference"]]
    for name, (_, rate) in TASKS.items():
        cells = []
        for multiple in METHODS:
            own = [losses[name, multiple, seed] for seed in SEEDS]
            cells.append("{:.3f} ± {:.3f}".format(*interval(own)))
            if multiple > 1:
                gains = [loss - losses[name, 1, seed] for loss, seed in zip(own, SEEDS, strict=True)]
                cells.append("{:+.3f} ± {:.3f}".format(*interval(gains)).replace("-", "−"))
        rows.append([name, _format_rate(rate), *cells])
    return rows


def make_outside_table(losses: Losses) -> list[list[str]]:
    """Return the median validation loss of the race's tuning runs by multiple of the rate outside."""
    rows = [["median validation loss", "lr", "1 × lr", "2 × lr", "4 × lr"]]
    for name, rates in _RATES.items():
        for rate in rates:
            methods = list(METHODS.values())
            if name == "resnet-34":  # these runs are older than the factor 3
                methods[0] = "EGOP, convolutions x 1"
            medians = [_find_median(losses, name, method, rate) for method in methods]
            rows.append([TITLES[name].partition(",")[0], _format_rate(rate), *medians])
    return rows


def make_adams_table(losses: Losses) -> list[list[str]]:
    """Return the median validation loss of tuning runs with updates of constant size, and as large as Adam's."""
    rows = [["median validation loss", "lr", "constant size", "Adam's size"]]
    for name, rates in _ADAMS_RATES.items():
        for rate in rates:
            medians = [_find_median(losses, name, method, rate) for method in ("EGOP", _ADAMS)]
            rows.append([TITLES[name].partition(",")[0], _format_rate(rate), *medians])
    return rows


def make_convolutions_table(losses: Losses) -> list[list[str]]:
    """Return the median validation loss of tuning runs on ResNet-34 by size of the updates of convolutions and rate."""
    methods = {factor: "EGOP" if factor == 3 else f"EGOP, convolutions x {factor}" for factor in (1, 2, 3, 4)}
    rows = [["median validation loss", *(f"lr {_format_rate(rate)}" for rate in _CONVOLUTION_RATES)]]
    for factor, method in methods.items():
        medians = [_find_median(losses, "resnet-34", method, rate) for rate in _CONVOLUTION_RATES]
        rows.append([f"{factor} ×", *medians])
    return rows


def _find_median(losses: Losses, name: str, method: str, rate: int) -> str:
    settings = _settings(tasks.TASKS[name], rate)
    runs = [tasks.Run(**settings, method=method, seed=seed) for seed in tasks.TUNING_SEEDS]
    found = [losses[run] for run in runs if run in losses]
    return f"{statistics.median(found):.3f}" if len(found) == len(runs) else "–"


def _format_rate(rate: int) -> str:
    return f"{1e-3 * 2 ** (rate / 2):.1e}".replace("e-0", "e-")


def _settings(task: tasks.Task, rate: int) -> dict[str, Any]:
    own = {"task": task.name, "steps": task.steps, "warmup": task.warmups["EGOP"][0], "clip": task.clips[-1]}
    return own | {"rate": rate, "beta": task.betas["EGOP"][0]}


def _read(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def run_muon(data: str) -> None:
    """Do the runs with other sizes of Muon that the record does not have yet."""
    task, _ = TASKS["gpt-3x96"]
    problem = make_problem(task, data, torch.device("cpu"))
    for method, rates in _MUON_RATES.items():
        for rate, seed in itertools.product(rates, tasks.TUNING_SEEDS):
            done = [(each["method"], each["rate"], each["seed"]) for each in _read(MUON_RECORD)]
            if (method, rate, seed) not in done:
                settings = _settings(task, rate) | {"beta": task.betas[method][0]}
                run = tasks.Run(**settings, method=method, seed=seed)
                loss = train(problem, task, run)["validation"]
                record = {"method": method, "rate": rate, "lr": run.lr, "seed": seed, "validation": loss}
                append_record(MUON_RECORD, record)


def main(name: str, data: str) -> None:
    """Do the runs of a study that the record does not have yet."""
    torch.set_num_threads(1)
    if name == "muon":
        run_muon(data)
        return
    task, rate = TASKS[name]
    problem = make_problem(task, data, torch.device("cpu"))
    for seed in SEEDS:
        for multiple, method in METHODS.items():
            done = [(each["task"], each["multiple"], each["seed"]) for each in _read(RECORD)]
            if (name, multiple, seed) not in done:
                run = tasks.Run(**_settings(task, rate), method=method, seed=seed)
                results = train(problem, task, run)
                losses = {part: results[part] for part in ("validation", "test")}
                append_record(RECORD, {"task": name, "multiple": multiple, "seed": seed, "lr": run.lr, **losses})


if __name__ == "__main__":
    main(*sys.argv[1:])
