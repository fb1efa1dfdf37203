"""How good the rates of find_lr are on the problems of the study of prediction."""

from __future__ import annotations

import functools
import math

import egop
from egop_lab.experiments import prediction_rates
from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_found import HALVES, Found, half
from egop_lab.training.context import Context
from egop_lab.training.prediction import FIXED, FORMS, ORIGINAL
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING

EXPERIMENT = PredictionExperiment()
FULL = EXPERIMENT.settings("full")
COMMON = {key: FULL[key] for key in ("looks", "warm-up", "decay")}


def planted(problem, last=1.0):
    """A problem in which a fixed basis needs half of the steps, and the others never get there."""
    settings = FULL["problems"][problem]

    def record(result, **entries):
        return Record(EXPERIMENT.config("full", problem=problem, **COMMON, **entries), result)

    for form in FORMS:
        end = {ORIGINAL: last, FIXED: last}.get(form, 2 * last)
        curve = [4 * last, *[end] * 25] if form == FIXED else [4 * last, *[3 * last] * 24, end]
        for rate in (settings["rate"] / 2, settings["rate"], 2 * settings["rate"]):
            tuning = {"loss": [3.0, 1.0 if rate == settings["rate"] else 2.0]}
            yield record(tuning, method=form, lr=rate, steps=settings["steps"], seed=TUNING)
        for seed in range(3):
            yield record({"loss": curve}, method=form, lr=settings["rate"], steps=settings["steps"], seed=seed)
    yield record({form: {"step": 1e-3, "before": 0.0} for form in FORMS}, what="times", seed=TUNING)
    yield record({"guess": float(len(problem))}, what="predictors", seed=TUNING)
    yield record({form: [[3.0, 2.0, 2.0]] * 3 for form in FORMS}, what="probes", seed=TUNING)


def study(problems):
    return Found(FULL, {problem: list(planted(problem)) for problem in problems})


def test_proposed_rates_are_compared_with_tuned_ones(monkeypatch, tmp_path):
    problem = "quadratic-axes"
    assert half(problem) == HALVES[1]
    rates = dict(zip(FORMS, (0.1, 0.2, 0.3, 0.4, math.nan), strict=True))
    monkeypatch.setattr(prediction_rates, "_rate", lambda config: {"lr": rates[config["method"]]})
    ends = dict(zip(FORMS, (1.04, 1.06, 1.0, 9.0, 0.0), strict=True))
    monkeypatch.setattr(prediction_rates, "trained", lambda config: {"loss": [5.0, ends[config["method"]]]})
    found, store, said = study([problem, "quadratic-dense"]), Store(tmp_path / "rates.jsonl"), []
    prediction_rates.run(found, store, Context("full", progress=False, say=said.append), HALVES[1])
    assert len(store) == 2 * len(FORMS) - 1, "no training without a rate"
    every = prediction_rates.proposals(found, store, HALVES[1])
    assert [round(each.ratio, 6) for each in every] == [1.04, 1.06, 0.5, 4.5, math.inf]
    assert [each.is_within for each in every] == [True, False, True, False, False]
    assert said[0].startswith("quadratic-axes: original 1.04, fixed 1.06")
    prediction_rates.run(found, store, Context("full", progress=False), HALVES[1])
    assert len(store) == 2 * len(FORMS) - 1, "nothing is done twice"


def test_a_rate_comes_from_find_lr(monkeypatch):
    monkeypatch.setattr(prediction_rates.egop, "find_lr", functools.partial(egop.find_lr, steps=20, rates=(0.01, 0.1)))
    found = prediction_rates._rate({"problem": "quadratic-axes", "seed": TUNING, "method": ORIGINAL})
    assert found["lr"] in found["rates"] == [0.01, 0.1]
    assert len(found["losses"]) == 2
