"""The comparison of coordinates: planted records decide what is chosen and judged; slices, several stores."""

from __future__ import annotations

import math
import time

import pytest

from egop_lab.experiments import coordinates
from egop_lab.experiments.coordinates import CoordinatesExperiment
from egop_lab.experiments.coordinates_found import (
    ADAMW,
    CELL,
    CHOSEN,
    GRID,
    LARGE_GPT,
    RESNET,
    SMALL_GPT,
    VIT,
    Found,
    unit,
)
from egop_lab.methods import COORDINATES, get_methods
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store, merge
from egop_lab.training.sweeps import TUNING
from fakes import text_folder

EXPERIMENT = CoordinatesExperiment()
FULL = EXPERIMENT.settings("full")
LADDER = FULL["ladder"]
RATE = 2e-3  # the best of every method, on the language models
# What each method ends at; others end where AdamW does.
LOSSES = {
    CELL: 1.2,
    CHOSEN: 1.2,
    "Sinkhorn, aligned": 1.21,
    "PolarAdam, online both": 1.22,
    "PolarAdam, online input": 1.23,
}
LOSSES |= {"Sinkhorn, online both": 1.24, "Sign, online both": 1.25, "PolarAdam, EGOP up front": 1.26, "Muon": 1.23}
LOSSES |= {"PolarAdam, original": 1.1, "PolarAdam, random rotation": 1.15, "NorMuon": 1.22, "SOAP": 1.3, "AdamW": 1.5}


def planted(task, method, lr, seed, length, **result):
    own = {key: value for key, value in FULL["tasks"][task].items() if key not in ("rates", "begin", "steps", "epochs")}
    data = {"data": {"train": 1280}} if unit(FULL["tasks"][task]) == "epochs" else {"data": {"train": 1}}
    config = EXPERIMENT.config("full", task=task, **own, **data, method=method, lr=lr, seed=seed)
    return Record(config | {unit(FULL["tasks"][task]): length}, result)


def whole(task):
    return FULL["tasks"][task][unit(FULL["tasks"][task])]


def curve(task, length, last):
    looks = length // FULL["tasks"][task].get("interval", 1)
    return [last + 2 * (1 - look / looks) for look in range(looks + 1)]


def records(task, methods, losses=LOSSES):
    """Tuned and reported trainings of each method, on the first task short ones too, and its step times."""
    length, best = whole(task), RATE / (2 if task in (RESNET, VIT) else 1)
    for method in methods:
        last = losses.get(method, 1.5)
        for rate in [best / 2, best, 2 * best]:
            tuned = {"validation loss": [3.0, last if rate == best else 2.0]}
            for whole_or_half in (length, length // 2) if task == SMALL_GPT else (length,):
                yield planted(task, method, rate, TUNING, whole_or_half, **tuned)
        for multiple in (1, 1.5, 2, 3) if method == ADAMW else (1,):
            for seed in range(3):
                loss = curve(task, length, last / multiple)
                right = {"accuracy": [0.5, 2 - last]}
                yield planted(task, method, best, seed, round(multiple * length), **{"validation loss": loss} | right)
        timing = planted(task, method, 1e-3, 0, length, step=[0.010, 0.012], before=[1.0, 2.0])
        yield Record(timing.config | FULL["timing"], timing.result)


def found(store):
    return EXPERIMENT.found(store, "full")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "coordinates.jsonl")
    store.add(*records(SMALL_GPT, [*FULL["methods"], CHOSEN]))
    return store


def test_the_grid_and_the_rivals_are_run_on_the_first_task():
    assert len(GRID) == 27
    assert set(FULL["methods"]) == set(GRID) | {"Muon", "NorMuon", "SOAP"}
    assert {LADDER[4], LADDER[5], LADDER[6]} == {1e-3, 2e-3, 4e-3}
    assert (LADDER[0], LADDER[-1]) == (6.25e-5, 6.4e-2)


def test_the_six_best_are_found_without_those_they_are_compared_with(store):
    names = found(store).best
    assert names == [name for name, _ in sorted(LOSSES.items(), key=lambda pair: pair[1]) if name in names]
    assert set(names) == set(list(LOSSES)[:7]) - {CHOSEN}


def test_other_tasks_have_the_finalists_their_controls_and_rivals(store):
    methods = found(store).methods(VIT)
    assert methods[:6] == ["AdamW", "EGOP", "Muon", "NorMuon", "SOAP", "PolarAdam, original"]
    assert set(methods[6:]) == {*found(store).best, "Sinkhorn, original", "Sign, original"}
    assert set(methods) <= set(get_methods(COORDINATES))
    assert methods == found(store).methods(SMALL_GPT)[: len(methods)]


def test_without_the_whole_grid_nothing_is_chosen(tmp_path):
    store = Store(tmp_path / "part.jsonl")
    store.add(*records(SMALL_GPT, [CHOSEN]))
    with pytest.raises(LookupError, match="no short run"):
        found(store).methods(VIT)


@pytest.mark.parametrize(("best", "tried"), [(2e-3, 3), (5e-4, 5), (3.2e-2, 7), (1e-6, 7), (1.0, 7)])
def test_the_search_goes_on_at_both_ends(best, tried):
    runs, left = [], [0.0]
    while left:
        rate, left = Found(FULL, {SMALL_GPT: runs}).scouted(ADAMW)
        losses = {each: abs(math.log(each / best)) for each in left}
        runs += [planted(SMALL_GPT, ADAMW, each, TUNING, 200, **{"validation loss": [losses[each]]}) for each in left]
    assert rate == min(max(best, LADDER[0]), LADDER[-1])
    assert len(runs) == tried


def test_a_rate_that_is_not_finite_is_the_worst():
    runs = [
        planted(SMALL_GPT, ADAMW, rate, TUNING, 200, **{"validation loss": [1.0, loss]})
        for rate, loss in [(1e-3, 3.0), (2e-3, 2.0), (4e-3, math.nan)]
    ]
    assert Found(FULL, {SMALL_GPT: runs}).scouted(ADAMW) == (2e-3, [])


@pytest.mark.parametrize("task", [SMALL_GPT, LARGE_GPT, VIT])
def test_finalists_are_tuned_by_whole_runs_around_the_rate_that_is_known(task, store, tmp_path):
    kept = Store(tmp_path / "kept.jsonl")
    kept.add(*(run for run in store if task != SMALL_GPT or run.config["steps"] == 200))
    known = found(kept)
    middle = RATE / (2 if task == VIT else 1)
    assert known.search(task, "Muon")[1] == known.search(task, CHOSEN)[1] == [middle / 2, middle, 2 * middle]
    assert found(store).rate(SMALL_GPT, "Sign, random rotation") == RATE, "others by the short runs alone"


def verdicts(store):
    return {each.id.partition("/")[2]: each for each in EXPERIMENT.judge(store, "full")}


def test_targets_are_judged_where_there_are_records(store):
    judged = verdicts(store)
    assert all(each.kind == "target" for each in judged.values())
    # EGOP falls by 2 in 400 steps to 1.2: to 1.5 after 340 of them.
    assert judged["steps"].verdict == "does not hold"
    assert "there after 340 (0.85)" in judged["steps"].finding
    # AdamW ends at 1.5, 1.0, ...: 1.2 lies at 0.6 of the way from once to one and a half times.
    assert "AdamW needs 1.30 times the steps" in judged["steps"].finding
    assert judged["time"].finding == "AdamW 5 seconds, EGOP 4.4 (0.88)."  # by the shorter round
    assert judged["small-muon"].verdict == judged["small-normuon"].verdict == "holds"
    assert judged["small-step"].verdict == judged["small-step-muon"].verdict == "holds"
    for name in ("large-muon", "resnet-soap", "vit-muon", "large-step-muon", "resnet-step", "rule"):
        assert judged[name].verdict == "cannot be judged"


def test_targets_come_out_both_ways(store, tmp_path):
    for task in (LARGE_GPT, RESNET, VIT):
        store.add(*records(task, found(store).methods(task)))
    for task, settings in FULL["tasks"].items():
        best = RATE if "steps" in settings else RATE / 2  # is there
        for rate in {RATE / 4, RATE / 2, RATE, RATE * 2} - {best}:
            store.add(planted(task, CHOSEN, rate, 0, whole(task), **{"validation loss": [1.22]}))
    judged = verdicts(store)
    missed = {name for name, each in judged.items() if each.verdict == "does not hold"}
    assert missed == {"steps", "time"}
    assert judged["rule"].finding == "With 1 times AdamW's rate it is at most 0.000 worse."
    assert judged["rule"].verdict == "holds"
    worse = Store(tmp_path / "worse.jsonl")
    for task in FULL["tasks"]:
        names = [*FULL["methods"], CHOSEN] if task == SMALL_GPT else found(worse).methods(task)
        worse.add(*records(task, names, LOSSES | {CHOSEN: 1.4}))
    missed = {name for name, each in verdicts(worse).items() if each.verdict == "does not hold"}
    assert missed == {"steps", "time", "small-muon", "small-normuon", "large-muon", "large-normuon", "resnet-soap",
                      "vit-muon", "vit-soap"}  # fmt: skip


def test_pictures_and_tables_show_what_is_there(store):
    grid, curves, bars = EXPERIMENT.pictures(store, "full")
    assert [series.label for series in grid.panels[0].series] == ["AdamW", "Sign", "Sinkhorn", "PolarAdam"]
    assert math.isnan(grid.panels[0].series[3].median[-1]), "no aligned PolarAdam"
    assert len(curves.panels) == 2
    assert [series.label for series in bars.panels[0].series] == ["steps", "time"]
    methods, longer = EXPERIMENT.tables(store, "full")
    assert len(methods.rows) == len(FULL["methods"]) + 1
    assert methods.rows[0][0] == "PolarAdam, original"
    assert longer.rows == ((SMALL_GPT, "1.500", "1.000", "0.750", "0.500", "1.200", "1.30"),)


class Fake:
    """A run that takes ten seconds of a clock."""

    clock = 0.0

    def __init__(self, data, config, device):
        self.config = config

    def __call__(self, progress):
        Fake.clock += 10
        return {"validation loss": [1.0, LOSSES.get(self.config["method"], 1.5) + abs(self.config["lr"] - 8e-3)]}

    def set_up(self):
        pass

    def time_steps(self, warm, timed):
        return 0.5, 0.01


@pytest.fixture
def fake(monkeypatch, tmp_path):
    Fake.clock = 0.0
    monkeypatch.setattr(coordinates, "LanguageRun", Fake)
    monkeypatch.setattr(coordinates, "ImageRun", Fake)
    monkeypatch.setattr(time, "monotonic", lambda: Fake.clock)
    pytest.importorskip("pytorch_optimizer")
    return text_folder(tmp_path)


def test_methods_in_several_processes_make_the_records_of_one(fake, tmp_path):
    alone = Store(tmp_path / "alone.jsonl")
    EXPERIMENT.run(alone, Context(data=fake, progress=False), phases=["scouting", "trainings"])
    methods = [ADAMW, CHOSEN, *EXPERIMENT.settings("quick")["methods"][1:]]
    paths = [tmp_path / f"part-{index}.jsonl" for index in range(3)]
    context = Context(data=fake, progress=False)
    for task, phase in (("tiny GPT", "scouting"), ("tiny GPT", "trainings"), ("tiny ViT", "trainings")):
        for index, path in enumerate(paths):
            part = merge(path, [tmp_path / "merged.jsonl"])
            EXPERIMENT.run(part, context, tasks=[task], methods=methods[index::3], phases=[phase])
        merged = merge(tmp_path / "merged.jsonl", paths)
        assert len(merge(tmp_path / "merged.jsonl", paths)) == len(merged), "nothing twice"
    assert {run.key for run in alone} == {run.key for run in merged}


def test_no_time_no_new_run_and_the_next_slice_goes_on(fake, tmp_path):
    path = tmp_path / "slices.jsonl"
    counts = []
    while len(counts) < 2 or counts[-1] > counts[-2]:
        EXPERIMENT.run(Store(path), Context(data=fake, progress=False, time_budget=95))
        counts.append(len(Store(path)))
    whole = Store(tmp_path / "whole.jsonl")
    EXPERIMENT.run(whole, Context(data=fake, progress=False))
    assert counts[0] == 10
    assert {run.key for run in Store(path)} == {run.key for run in whole}
    assert len([run for run in whole if "rounds" in run.config]) == 14


def test_a_basis_of_another_text_is_not_mixed_in(store):
    before = found(store).loss(SMALL_GPT, CHOSEN)
    other = next(records(SMALL_GPT, [CHOSEN]))
    store.add(Record(dict(other.config) | {"data": {"train": 2}}, other.result))
    with pytest.raises(LookupError):
        found(store).loss(SMALL_GPT, CHOSEN)
    assert before == 1.2
