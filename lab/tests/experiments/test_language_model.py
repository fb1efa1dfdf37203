"""The language-model experiment: a run at toy size, targets that come out both ways, slices of time, its text."""

from __future__ import annotations

import math
import sys
import time
from typing import ClassVar

import pytest
import torch

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.language_model import LanguageModelExperiment
from egop_lab.methods import LANGUAGE, get_methods
from egop_lab.training.context import Context
from egop_lab.training.language import COMMON
from egop_lab.training.records import Store
from egop_lab.training.sweeps import TUNING
from fakes import TINY_LANGUAGE, text_folder

EXPERIMENT = LanguageModelExperiment()
METHODS = get_methods(LANGUAGE)
ADAMW, FIXED, PERIODIC, ONLINE, BOTH_SIDES, SOAP, MUON = METHODS
CPU = torch.device("cpu")


class Toy(LanguageModelExperiment):
    """So small that all methods run in seconds."""

    def settings(self, preset):
        return super().settings("quick") | TINY_LANGUAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("data"))


def context(folder, **options):
    return Context(data=folder, progress=False, **options)


@pytest.fixture(scope="module")
def toy(folder, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("records") / "language-model.jsonl")
    Toy().run(store, context(folder))
    return store


def reported(store, seed=0):
    return {run.config["method"]: run.result for run in store if run.config["seed"] == seed}


def test_every_method_is_tuned_and_reported(toy):
    for method in METHODS:
        runs = [run for run in toy if run.config["method"] == method]
        assert [run.config["lr"] for run in runs if run.config["seed"] == TUNING] == [2e-3, 8e-3]
        (run,) = (run for run in runs if run.config["seed"] < TUNING)
        for name in ("validation loss", "training loss", "seconds"):
            assert len(run.result[name]) == 7, "before the first step and after every fourth"
        assert all(math.isfinite(loss) for loss in run.result["validation loss"])
        assert run.result["validation loss"][0] == pytest.approx(math.log(256), rel=0.01)
        assert run.result["validation loss"][-1] < run.result["validation loss"][0]
        assert sorted(run.result["seconds"]) == run.result["seconds"]
        assert set(COMMON) | {"data", "precision", "method", "lr", "steps", "seed"} < set(run.config)


def test_methods_start_at_the_same_point_and_differ_later(toy):
    runs = reported(toy).values()
    assert len({run["validation loss"][0] for run in runs}) == 1
    assert len({run["validation loss"][-1] for run in runs}) == len(METHODS)


def test_a_finished_experiment_does_nothing_again(toy, folder, monkeypatch):
    before = len(list(toy))
    monkeypatch.setattr(Toy, "training", lambda *_: pytest.fail("done again"))
    Toy().run(toy, context(folder))
    assert len(list(toy)) == before


def test_a_toy_run_gives_claims_and_pictures(toy):
    judged = Toy().judge(toy, "quick")
    assert {each.verdict for each in judged} == {"cannot be judged"}
    assert len({each.id for each in judged}) == len(judged) == 6
    pictures = Toy().pictures(toy, "quick")
    assert [picture.name for picture in pictures] == ["language-model", "language-model-time"]
    by_step, by_time, rates = pictures[0].panels
    assert [series.label for series in by_step.series] == list(METHODS)
    assert list(by_step.series[0].x) == [4, 8, 12, 16, 20, 24]
    assert [series.egop for series in rates.series] == ["EGOP" in name for name in METHODS]
    assert all(series.chosen in series.x for series in rates.series)
    assert len(by_time.series[0].x) == 6
    assert f"may be tried: {', '.join(METHODS)})" in pictures[0].caption, "of two rates each is an end"


class Fake:
    """A run that takes ten seconds of a clock and has its lowest loss at one learning rate."""

    clock = 0.0
    best = 2e-3
    done: ClassVar[list] = []

    def __init__(self, text, config, device):
        self.config = config

    def __call__(self, progress):
        if self.config["period"] == Toy().settings("quick")["period"]:  # not to warm up
            Fake.done.append((self.config["method"], self.config["lr"], self.config["seed"]))
            Fake.clock += 10
        return {"validation loss": [abs(math.log(self.config["lr"] / Fake.best))]}


@pytest.fixture
def fake(monkeypatch):
    Fake.clock, Fake.best, Fake.done = 0.0, 2e-3, []
    monkeypatch.setattr(Toy, "training", Fake)
    monkeypatch.setattr(time, "monotonic", lambda: Fake.clock)
    return Fake


def test_no_time_no_new_run_and_the_next_slice_goes_on(folder, tmp_path, fake):
    path = tmp_path / "language-model.jsonl"
    Toy().run(Store(path), context(folder, time_budget=0.0))
    assert fake.done == [(ADAMW, 2e-3, TUNING)], "the first run starts at second 0"
    Toy().run(Store(path), context(folder, time_budget=35.0))
    assert len(fake.done) == 5
    Toy().run(Store(path), context(folder))
    assert len(fake.done) == len(set(fake.done)) == 3 * len(METHODS)
    assert fake.done[-7:] == [(method, 2e-3, 0) for method in METHODS], "reported runs come last"


def test_processes_can_tune_a_method_each(folder, tmp_path, fake):
    whole = Store(tmp_path / "whole.jsonl")
    for method in METHODS:
        own = Store(tmp_path / f"{method}.jsonl")
        assert Toy().tune(Toy().trials(own, context(folder)), [method])
        whole.add(*own)
    assert Toy().run_reported(Toy().trials(whole, context(folder)), list(METHODS))
    assert len(fake.done) == len(set(fake.done)) == 3 * len(METHODS)


def test_tuning_is_done_again_for_another_text(folder, tmp_path, fake):
    path = tmp_path / "language-model.jsonl"
    Toy().run(Store(path), context(folder))
    (tmp_path / "text.txt").write_text("something else " * 200)
    Toy().run(Store(path), context(str(tmp_path / "text.txt")))
    assert len(fake.done) == 2 * 3 * len(METHODS)
    assert len(Toy().reported_runs(Store(path), "quick")[ADAMW]) == 1, "only those on the last text"


@pytest.mark.parametrize(
    ("best", "tried", "chosen"),
    [
        (2e-3, {1e-3, 2e-3, 4e-3, 8e-3}, 2e-3),
        (1e-3, {5e-4, 1e-3, 2e-3, 4e-3, 8e-3}, 1e-3),
        (1e-5, {2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3}, 2.5e-4),
        (1.6e-2, {1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2}, 1.6e-2),
    ],
)
def test_a_choice_at_the_edge_of_the_grid_is_followed(folder, tmp_path, fake, best, tried, chosen):
    class Full(Toy):
        def settings(self, preset):
            own = EXPERIMENT.settings("full")
            return super().settings(preset) | {key: own[key] for key in ("rates", "further rates")}

    fake.best = best
    store = Store(tmp_path / "language-model.jsonl")
    Full().run(store, context(folder))
    runs = [run for run in store if run.config["method"] == SOAP]
    assert {run.config["lr"] for run in runs if run.config["seed"] == TUNING} == tried
    assert {run.config["lr"] for run in runs if run.config["seed"] == 0} == {chosen}


@pytest.mark.parametrize("content", [None, b"too short"])
def test_missing_text_is_said_in_one_line(tmp_path, content):
    if content:
        (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(MissingDataError, match=r"train\.txt and valid\.txt .* with --data PATH") as error:
        EXPERIMENT.run(Store(tmp_path / "r.jsonl"), context(str(tmp_path)))
    assert "\n" not in str(error.value)
    with pytest.raises(MissingDataError, match=r"There is no text\. Name a text file"):
        EXPERIMENT.run(Store(tmp_path / "r.jsonl"), context(None))


def test_a_missing_package_is_said_in_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MissingDataError, match="pip install pytorch-optimizer"):
        Toy().run(Store(tmp_path / "r.jsonl"), context(folder))
