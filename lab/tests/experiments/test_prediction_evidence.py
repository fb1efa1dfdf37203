"""What the library knows of the study of prediction, and how good the rates of find_lr are on its problems."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

import pytest

import egop
from egop_lab.experiments import prediction_rates
from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_evidence import advice, evidence, summary
from egop_lab.experiments.prediction_found import HALVES, Found, half
from egop_lab.training.context import Context
from egop_lab.training.prediction import FIXED, FORMS, ORIGINAL
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING

EXPERIMENT = PredictionExperiment()
FULL = EXPERIMENT.settings("full")
COMMON = {key: FULL[key] for key in ("looks", "warm-up", "decay")}
RECORDS = Path(__file__).parents[3] / "docs" / "records" / "prediction.jsonl"


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


def study(problems=PROBLEMS):
    return Found(FULL, {problem: list(planted(problem)) for problem in problems})


def test_the_library_gets_the_first_half_and_nothing_else():
    found = evidence(study())
    assert set(found["problems"]) == {problem for problem in PROBLEMS if half(problem) == HALVES[0]}
    row = found["problems"]["quadratic-dense"]
    assert row["steps"].keys() == set(FORMS) - {ORIGINAL}
    assert row["steps"][FIXED] == 0.04
    assert math.isinf(row["steps"]["EGOP"])
    assert set(found) == {"source", "predictor", "threshold", "correlations", "problems"}


@pytest.mark.skipif(not RECORDS.exists(), reason="the study's records are not here")
def test_what_the_library_has_is_what_the_records_say():
    shipped = json.loads((resources.files("egop") / "diagnostics" / "evidence.json").read_text())
    found = evidence(EXPERIMENT.found(Store(RECORDS), "full"))
    for row in found["problems"].values():
        row["steps"] = {form: share if math.isfinite(share) else None for form, share in row["steps"].items()}
    assert shipped == found


def test_the_advice_counts_time():
    said = advice(study(), HALVES[1])
    assert {each.form for each in said} == {FIXED}
    assert {(each.expected, each.taken, each.least) for each in said} == {(0.04, 0.04, 0.04)}
    dear = advice(study(), HALVES[1], step=30.0)
    assert {(each.form, each.taken, each.least) for each in dear} == {(ORIGINAL, 1.0, 1.0)}
    held = len(dear)
    assert summary(said).startswith(f"advised for {held} of {held}, faster in {held} of these; left alone 0,")
    assert summary(dear).endswith(f"left alone {held}, of which 0 had a form that was faster by more than a tenth")


def test_the_predictor_is_the_one_that_diagnose_computes():
    """The names must agree; so must the numbers, as far as 16 random directions tell."""
    shipped = json.loads((resources.files("egop") / "diagnostics" / "evidence.json").read_text())
    assert shipped["predictor"] == "curvature, fixed basis"
    task = PROBLEMS["quadratic-dense"].make(0)
    objective = egop.Objective(task.model, task.loss, task.batches)
    basis = {"weight": egop.Shared()}
    found = egop.diagnose(objective, structure=basis, partition="parameter", samples=128, progress=False).curvature
    assert found.promise == pytest.approx(shipped["problems"]["quadratic-dense"]["value"], abs=1.2)


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
