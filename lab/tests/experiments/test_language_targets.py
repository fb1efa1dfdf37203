"""The targets of the language-model experiment: they can be met and missed, and say what the records say."""

from __future__ import annotations

import math

import pytest

from egop_lab.experiments.language_model import LanguageModelExperiment
from egop_lab.methods import LANGUAGE, get_methods
from egop_lab.training.language import COMMON
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING

EXPERIMENT = LanguageModelExperiment()
METHODS = get_methods(LANGUAGE)
ADAMW, FIXED, PERIODIC, ONLINE, BOTH_SIDES, SOAP, MUON = METHODS

# What the methods look like when all targets are met: the loss falls by this much in twenty steps, a step takes so many
# milliseconds.
MET = {
    ADAMW: (0.01, 10.0),
    FIXED: (0.012, 11.0),
    PERIODIC: (0.012, 12.0),
    ONLINE: (0.02, 11.0),
    BOTH_SIDES: (0.02, 12.0),
    SOAP: (0.02, 20.0),
    MUON: (0.02, 10.0),
}


def fake_store(path, methods):
    settings, records = EXPERIMENT.settings("full"), []
    common = {key: settings[key] for key in COMMON}
    looks = range(settings["steps"] // settings["interval"] + 1)
    for method, (fall, step) in methods.items():
        own = common | {"method": method}
        for lr in settings["rates"]:
            config = EXPERIMENT.config("full", lr=lr, seed=TUNING, steps=settings["tuning steps"], **own)
            records.append(Record(config, {"validation loss": [3.0, 2.0 if lr == 2e-3 else 2.5]}))
        for seed in range(settings["trials"]):
            result = {
                "validation loss": [3 - fall * look + 0.001 * seed for look in looks],
                "training loss": [math.nan, *(3 - fall * look for look in looks[1:])],
                "seconds": [step * settings["interval"] * look / 1000 for look in looks],
            }
            config = EXPERIMENT.config("full", lr=2e-3, seed=seed, steps=settings["steps"], **own)
            records.append(Record(config, result))
    store = Store(path)
    store.add(*records)
    return store


def verdicts(store):
    return {each.id.removeprefix("language-model/"): each.verdict for each in EXPERIMENT.judge(store, "full")}


def test_all_targets_can_be_met(tmp_path):
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", MET)).values()) == {"holds"}


def test_they_are_targets_and_no_claims_of_the_paper(tmp_path):
    found = EXPERIMENT.judge(fake_store(tmp_path / "r.jsonl", MET), "full")
    assert {each.kind for each in found} == {"target"}
    assert all(each.statement.startswith("Target: ") for each in found)


def test_all_targets_can_be_missed(tmp_path):
    missed = MET | {ONLINE: (0.015, 25.0), BOTH_SIDES: (0.0101, 40.0), SOAP: (0.02, 10.0)}
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", missed)).values()) == {"does not hold"}


def test_each_side_is_judged_by_itself(tmp_path):
    found = verdicts(fake_store(tmp_path / "r.jsonl", MET | {BOTH_SIDES: (0.02, 30.0)}))
    assert found == {
        "online-steps": "holds",
        "online-time": "holds",
        "online-soap-time": "holds",
        "two-sided-steps": "holds",
        "two-sided-time": "does not hold",
        "two-sided-soap-time": "does not hold",
    }


def test_numbers_come_from_the_records(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", MET)
    found = {each.id: each.finding for each in EXPERIMENT.judge(store, "full")}
    # AdamW's median ends at 2.601; the middle seed of a method that falls twice as fast gets there in half the steps.
    assert found["language-model/online-steps"] == (
        "Steps to a validation loss of 2.601: AdamW 800, EGOP online 400, 0.50 of that."
    )
    assert found["language-model/two-sided-soap-time"] == (
        "Seconds to a validation loss of 2.601: SOAP 8, EGOP online, two-sided 4.8, 0.60 of that."
    )


def test_a_method_that_never_gets_there_is_said_so(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", MET | {ONLINE: (0.001, 1.0), SOAP: (0.001, 1.0)})
    judged = {each.id.removeprefix("language-model/"): each for each in EXPERIMENT.judge(store, "full")}
    assert judged["online-time"].verdict == "does not hold"
    assert "EGOP online never." in judged["online-time"].finding
    assert judged["online-soap-time"].verdict == "cannot be judged", "neither got there"
    assert judged["two-sided-soap-time"].verdict == "holds"
    bars = EXPERIMENT.pictures(store, "full")[1].panels[0].series[0]
    assert math.isinf(bars.median[list(bars.x).index(ONLINE)])


def test_runs_that_are_still_to_come_are_named(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", {name: MET[name] for name in (ADAMW, FIXED)})
    with pytest.raises(LookupError, match="EGOP periodic has no tuning run"):
        EXPERIMENT.judge(store, "full")
