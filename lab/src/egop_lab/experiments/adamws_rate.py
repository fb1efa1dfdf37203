"""Train EGOP at AdamW's best learning rate on the problems of the study of advice.

``python -m egop_lab.experiments.adamws_rate DATA COMMIT`` adds the missing runs to ``docs/records/adamws-rate.jsonl``,
one line for each. It also holds EGOP without rotation, and a limit of 0.004. A test compares
``docs/reproduction/adamws-rate.md`` with the record.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from egop_lab.experiments.advice import AdviceExperiment, train
from egop_lab.experiments.advice_results import ADAMW
from egop_lab.experiments.base import Table
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Store

_RECORDS = Path(__file__).parents[4] / "docs" / "records"
RECORD = _RECORDS / "adamws-rate.jsonl"
LIMIT = 0.008  # the highest rate that we advise for EGOP
_SEEDS = 5
_SHOWN = ("mlp-digits", "cnn-digits", "encoder-digits")  # which also have a row of their own
_QUANTILE = 2.776  # of Student's t distribution with four degrees of freedom, for a 95 % interval

Losses = Mapping[tuple[str, str, float], Mapping[int, float]]  # by seed, for each problem, method and learning rate


def read_losses(path: Path) -> Losses:
    """Read the final losses; infinite if the run diverged."""
    found: dict[tuple[str, str, float], dict[int, float]] = {}
    for run in map(json.loads, path.read_text().splitlines()):
        key = (run["problem"], run["method"], run["rate"])
        found.setdefault(key, {})[run["seed"]] = math.inf if run["loss"] is None else run["loss"]
    return found


def compare(losses: Losses, limit: float = math.inf) -> dict[str, tuple[float, float]]:
    """Compare EGOP with AdamW, both at AdamW's best rate, but EGOP at no rate above a limit.

    Return the mean logarithm of EGOP's loss over AdamW's for each problem, and half its 95 % interval over seeds.
    """
    found = {}
    for (problem, method, rate), adamws in losses.items():
        if method == ADAMW:
            own = losses[problem, "EGOP", min(rate, limit)]
            logs = [math.log(own[seed] / adamws[seed]) for seed in range(_SEEDS)]
            spread = statistics.stdev(logs) if math.isfinite(max(logs)) else math.inf
            found[problem] = (statistics.mean(logs), _QUANTILE * spread / math.sqrt(_SEEDS))
    return found


def make_table(losses: Losses) -> Table:
    """Compare EGOP with AdamW by half and kind of the problems."""
    both = compare(losses), compare(losses, LIMIT)
    groups = {"all": list(PROBLEMS)}
    for name, problem in PROBLEMS.items():
        groups.setdefault(f"{problem.half} half", []).append(name)
    for name, problem in PROBLEMS.items():
        groups.setdefault(problem.kind, []).append(name)
    groups |= {f"`{name}`": [name] for name in _SHOWN}
    parts = ("lower", "clearly lower", "clearly higher", "median difference")
    header = ("problems", "number", *parts, *(f"{part}, at most {LIMIT:g}" for part in parts))
    rows = [
        (group, str(len(names)), *(cell for found in both for cell in _count([found[name] for name in names])))
        for group, names in groups.items()
    ]
    return Table("EGOP's final loss compared with AdamW's, both at AdamW's best rate", header, tuple(rows))


def _count(differences: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    middle = statistics.median(mean for mean, _ in differences)
    counts = (
        sum(mean < 0 for mean, _ in differences),
        sum(mean + half < 0 for mean, half in differences),
        sum(mean - half > 0 for mean, half in differences),
    )
    return (*map(str, counts), f"{math.expm1(middle):+.0%}".replace("-", "−"))


def main(data: str, commit: str) -> None:
    """Do the runs that the record does not have yet."""
    torch.set_num_threads(1)
    experiment = AdviceExperiment("full", Store(_RECORDS / "advice.jsonl"))
    results, settings = experiment.results(), experiment.settings
    known = read_losses(RECORD) if RECORD.exists() else {}
    for name, problem in PROBLEMS.items():
        best = results.tuned(name, ADAMW)[0].lr
        for seed in range(_SEEDS):
            task = problem.make(seed, data)
            for method, rate in dict.fromkeys([(ADAMW, best), ("EGOP", best), ("EGOP", min(best, LIMIT))]):
                if seed not in known.get((name, method, rate), {}):
                    losses = train(task, method, rate, problem.steps, settings["evaluations"], seed)["losses"]
                    loss = losses[-1] if math.isfinite(losses[-1]) else None
                    run = {"problem": name, "method": method, "rate": rate, "seed": seed, "loss": loss}
                    with RECORD.open("a") as file:
                        file.write(json.dumps({**run, "commit": commit}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
