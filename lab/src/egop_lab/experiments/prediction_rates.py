"""How good the first rate is that ``egop.find_lr`` proposes, on the problems of the study of prediction.

The rate is looked for on the trial that the study tunes with; a training at it, on the first of the study's others, is
compared with that at the tuned rate. ``python -m egop_lab.experiments.prediction_rates RECORDS OUT HALF`` does what is
missing in OUT for one half, ``"chosen on"`` or ``"held out"``, and says what came out.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import egop
from egop_lab.experiments.curves import median
from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_found import Found, final, half
from egop_lab.training.context import Context
from egop_lab.training.prediction import FORMS, optimizer, started, trained
from egop_lab.training.records import Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials

__all__ = ["Proposal", "proposals", "run"]

WITHIN = 0.05
TRIALS = 1  # of the study's; seed by seed, since problems differ from seed to seed


@dataclass(frozen=True)
class Proposal:
    """A rate that was proposed for one form on one problem.

    Attributes:
        problem: its id.
        form: of the study.
        lr: the rate; not a number where none was found.
        tuned: the study's.
        ratio: the last loss at the proposed rate over that at the tuned one; infinite where none was found.
    """

    problem: str
    form: str
    lr: float
    tuned: float
    ratio: float

    @property
    def is_within(self) -> bool:
        """Whether the loss is higher by a twentieth at most."""
        return self.ratio <= 1 + WITHIN


def run(found: Found, store: Store, context: Context, part: str) -> None:
    """Do what the store does not have yet of the complete problems of a half."""
    settings = found.settings
    for problem in found.complete:
        if half(problem) != part:
            continue
        trials = _trials(store, context, found, problem)
        for form in FORMS:
            if not trials.do(what="rate", method=form, seed=TUNING):
                return
            lr = _proposed(trials, form)
            runs = [] if math.isnan(lr) else range(TRIALS)
            steps = settings["problems"][problem]["steps"]
            if not all(trials.do(method=form, lr=lr, steps=steps, seed=seed) for seed in runs):
                return
        context.say(f"{problem}: {', '.join(f'{each.form} {each.ratio:.2f}' for each in _of(found, store, problem))}")


def proposals(found: Found, store: Store, part: str) -> list[Proposal]:
    """What came out for the problems of a half that are done."""
    return [each for problem in found.complete if half(problem) == part for each in _of(found, store, problem)]


def _of(found: Found, store: Store, problem: str) -> list[Proposal]:
    trials = _trials(store, Context("full"), found, problem)
    done = []
    for form in FORMS:
        if trials.make_config(what="rate", method=form, seed=TUNING) not in store:
            continue
        lr, tuned = _proposed(trials, form), found.rate(problem, form)
        runs = [run for run in store if run.config.get("lr") == lr and _is_of(run.config, problem, form)]
        if runs or math.isnan(lr):
            tuned_runs = {run.config["seed"]: final(run.result) for run in found.reported(problem, form)}
            ratios = [final(run.result) / tuned_runs[run.config["seed"]] for run in runs]
            done.append(Proposal(problem, form, lr, tuned, median(ratios) if ratios else math.inf))
    return done


def _is_of(config: Mapping[str, Any], problem: str, form: str) -> bool:
    return "what" not in config and config["problem"] == problem and config["method"] == form


def _trials(store: Store, context: Context, found: Found, problem: str) -> Trials:
    same = {key: found.settings[key] for key in ("looks", "warm-up", "decay")}
    common = {"experiment": "prediction-rates", "problem": problem, **same}
    return Trials(store, context, lambda **entries: common | entries, _made, lambda config: None)


def _made(config: Mapping[str, Any]) -> Any:
    return lambda progress: _rate(config) if config.get("what") == "rate" else trained(config)


def _rate(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is proposed; not a number where no rate lowers the loss."""
    start = started(config["problem"], config["seed"])
    objective = egop.Objective(copy.deepcopy(start.task.model), start.task.loss, start.task.batches)
    try:
        proposal = egop.find_lr(
            objective, lambda model: optimizer(config["method"], start, model, 1e-3), progress=False
        )
    except ValueError as error:
        return {"lr": math.nan, "said": str(error)}
    tried = proposal.tried
    return {"lr": proposal.lr, "rates": list(tried), "losses": list(tried.values()), "said": str(proposal)}


def _proposed(trials: Trials, form: str) -> float:
    record = trials.store.get(trials.make_config(what="rate", method=form, seed=TUNING))
    assert record is not None
    return float(record.result["lr"])


def _main(records: str, out: str, part: str) -> None:
    found, store = PredictionExperiment().found(Store(Path(records)), "full"), Store(Path(out))
    run(found, store, Context("full", progress=False, say=lambda line: print(line, flush=True)), part)
    every = proposals(found, store, part)
    for form in FORMS:
        own = [each for each in every if each.form == form]
        print(f"{form}: {sum(each.is_within for each in own)} of {len(own)} within {WITHIN:.0%}")
    print(f"all: {sum(each.is_within for each in every)} of {len(every)}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
