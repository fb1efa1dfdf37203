"""Train EGOP at AdamW's best learning rate on the problems of the study of advice.

``python -m egop_lab.experiments.adamws_rate DATA COMMIT`` adds the missing runs to ``docs/records/adamws-rate.jsonl``,
one line for each: at AdamW's best rate, at limits of 0.008 and 0.004, and at 1e-3. Where a network has convolutions
whose windows overlap, EGOP also ran with updates of constant size, of several factors for convolutions. A test compares
``docs/reproduction/adamws-rate.md`` with the record.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import egop
from egop_lab.experiments.advice import AdviceExperiment, build_optimizer, train
from egop_lab.experiments.advice_results import ADAMW
from egop_lab.experiments.base import Table
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Store

_RECORDS = Path(__file__).parents[4] / "docs" / "records"
RECORD = _RECORDS / "adamws-rate.jsonl"
LIMIT, LOWER_LIMIT = 0.008, 0.004  # the highest rate that we advise for EGOP, and one that is worse
DEFAULT = 1e-3  # the default rate of both
_SEEDS = 5
_FACTORS = {factor: f"EGOP, convolutions x {factor}" for factor in (1, 2, 3, 4)}
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


def compare(losses: Losses, limit: float = math.inf, *, default: bool = False) -> dict[str, tuple[float, float]]:
    """Compare EGOP with AdamW, both at AdamW's best rate, but EGOP at no rate above a limit; or both at the default.

    Return the mean logarithm of EGOP's loss over AdamW's for each problem, and half its 95 % interval over seeds.
    """
    found = {}
    for (problem, method, rate), adamws in losses.items():
        if method == ADAMW and (rate == DEFAULT) == default:
            own = losses[problem, "EGOP", min(rate, limit)]
            logs = [math.log(own[seed] / adamws[seed]) for seed in range(_SEEDS)]
            spread = statistics.stdev(logs) if math.isfinite(max(logs)) else math.inf
            found[problem] = (statistics.mean(logs), _QUANTILE * spread / math.sqrt(_SEEDS))
    return found


def make_table(losses: Losses) -> Table:
    """Compare EGOP with AdamW at AdamW's best rate, by half and kind of the problems."""
    title = "EGOP's final loss compared with AdamW's, both at AdamW's best rate"
    return _tabulate(title, {"": compare(losses), f", at most {LIMIT:g}": compare(losses, LIMIT)})


def make_default_table(losses: Losses) -> Table:
    """Compare EGOP with AdamW at the default rate."""
    title = f"EGOP's final loss compared with AdamW's, both at the default rate, {DEFAULT:g}"
    return _tabulate(title, {"": compare(losses, default=True)})


def _tabulate(title: str, comparisons: Mapping[str, Mapping[str, tuple[float, float]]]) -> Table:
    """Summarize comparisons, by what is added to the titles of their columns."""
    groups = {"all": list(PROBLEMS)}
    for name, problem in PROBLEMS.items():
        groups.setdefault(f"{problem.half} half", []).append(name)
    for name, problem in PROBLEMS.items():
        groups.setdefault(problem.kind, []).append(name)
    groups |= {f"`{name}`": [name] for name in _SHOWN}
    parts = ("lower", "clearly lower", "clearly higher", "median difference")
    header = ("problems", "number", *(part + added for added in comparisons for part in parts))
    rows = []
    for group, names in groups.items():
        counts = [_count([found[name] for name in names]) for found in comparisons.values()]
        rows.append((group, str(len(names)), *(cell for count in counts for cell in count)))
    return Table(title, header, tuple(rows))


def _count(differences: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    middle = statistics.median(mean for mean, _ in differences)
    counts = (
        sum(mean < 0 for mean, _ in differences),
        sum(mean + half < 0 for mean, half in differences),
        sum(mean - half > 0 for mean, half in differences),
    )
    return (*map(str, counts), _format_change(middle))


def _format_change(log: float) -> str:
    return f"{math.expm1(log):+.0%}".replace("-", "−")


def make_convolutions_table(losses: Losses) -> Table:
    """Compare sizes of the updates of convolutions at AdamW's best rate, at most 0.008, and at a quarter of that."""
    best = {problem: rate for problem, method, rate in losses if method == ADAMW and rate != DEFAULT}
    rates = {
        problem: (rate, min(rate, LIMIT), min(rate, LIMIT) / 4)
        for problem, rate in best.items()
        if (problem, _FACTORS[1], rate) in losses
    }
    rows = []
    for factor, method in _FACTORS.items():
        cells: list[str] = []
        for place in range(3):
            logs = []
            for name, own_rates in rates.items():
                own, base = (losses[name, each, own_rates[place]] for each in (method, _FACTORS[1]))
                logs.append(statistics.mean(math.log(own[seed] / base[seed]) for seed in range(_SEEDS)))
            cells += [_format_change(statistics.median(logs)), str(sum(log < 0 for log in logs))]
        rows.append((f"{factor} ×", *cells))
    titles = ("AdamW's best rate", f"at most {LIMIT:g}", "a quarter of that")
    header = ("updates of convolutions", *(part for title in titles for part in (title, "lower")))
    return Table(f"EGOP's final loss on {len(rates)} networks with convolutions", header, tuple(rows))


def main(data: str, commit: str) -> None:
    """Do the runs that the record does not have yet."""
    torch.set_num_threads(1)
    experiment = AdviceExperiment("full", Store(_RECORDS / "advice.jsonl"))
    results, settings = experiment.results(), experiment.settings
    known = read_losses(RECORD) if RECORD.exists() else {}
    for name, problem in PROBLEMS.items():
        best = results.tuned(name, ADAMW)[0].lr
        limited = min(best, LIMIT)
        for seed in range(_SEEDS):
            task = problem.make(seed, data)
            wanted = [(ADAMW, best), (ADAMW, DEFAULT)]
            wanted += [("EGOP", rate) for rate in (best, limited, min(best, LOWER_LIMIT), DEFAULT)]
            if find_convolutions(task.model):
                wanted += [(method, rate) for rate in (best, limited, limited / 4) for method in _FACTORS.values()]
            for method, rate in dict.fromkeys(wanted):
                if seed not in known.get((name, method, rate), {}):
                    build = functools.partial(_build, method)
                    losses = train(task, build, rate, problem.steps, settings["evaluations"], seed)["losses"]
                    loss = losses[-1] if math.isfinite(losses[-1]) else None
                    run = {"problem": name, "method": method, "rate": rate, "seed": seed, "loss": loss}
                    with RECORD.open("a") as file:
                        file.write(json.dumps({**run, "commit": commit}) + "\n")


def find_convolutions(model: nn.Module) -> list[str]:
    """Return the names of the weights of convolutions whose windows overlap."""
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d)]
    return [f"{name}.weight" for name, part in layers if part.kernel_size > part.stride]


def _build(method: str, model: nn.Module) -> torch.optim.Optimizer:
    if method not in _FACTORS.values():
        return build_optimizer(method, model)
    (factor,) = (factor for factor, name in _FACTORS.items() if name == method)
    size = 0.4 if egop.EGOP(model).defaults["update_rms"] == 0.4 else 0.2  # the latter without normalization layers
    names = find_convolutions(model)
    groups: list[dict[str, Any]] = [{"params": [], "update_rms": size * own} for own in (1, factor / 3)]
    for name, weight in model.named_parameters():
        groups[name in names]["params"].append((name, weight))
    return egop.EGOP(groups, model=model)


if __name__ == "__main__":
    main(*sys.argv[1:])
