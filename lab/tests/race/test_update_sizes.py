"""Sizes of EGOP's updates: the page shows the records, and missing runs are done once."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from egop_lab.race import update_sizes
from egop_lab.race.results import load_records
from egop_lab.race.tasks import TASKS, TUNING_SEEDS, Run
from egop_lab.race.tune import read_losses

PAGE = Path(__file__).parents[3] / "docs" / "reproduction" / "adamws-rate.md"
RACE_PAGE = PAGE.with_name("race.md")


def make_tables():
    small = map(json.loads, update_sizes.RECORD.read_text().splitlines())
    losses = read_losses(load_records(*update_sizes.TUNING_RECORDS).values())
    return {
        "adams": update_sizes.make_adams_table(losses),
        "convolutions": update_sizes.make_convolutions_table(losses),
        "race": update_sizes.make_outside_table(losses),
        "outside": update_sizes.make_table(small),
        "muon": update_sizes.make_muon_table(map(json.loads, update_sizes.MUON_RECORD.read_text().splitlines())),
    }


@pytest.mark.parametrize("name", ["adams", "convolutions", "race", "outside", "muon"])
def test_the_page_shows_the_records(name):
    page = RACE_PAGE if name == "muon" else PAGE
    rows = make_tables()[name]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    assert page.read_text().split(f"<!-- {name} -->\n")[1] == "\n".join(lines) + "\n", "\n".join(lines)


def test_differences_are_paired():
    losses = {1: 2.0, 2: 1.5, 4: 1.75}
    records = [
        {"task": task, "multiple": multiple, "seed": seed, "test": loss + seed}
        for task in update_sizes.TASKS
        for multiple, loss in losses.items()
        for seed in update_sizes.SEEDS
    ]
    for row in update_sizes.make_table(records)[1:]:
        assert row[2:] == ["4.000 ± 1.963", "3.500 ± 1.963", "−0.500 ± 0.000", "3.750 ± 1.963", "−0.250 ± 0.000"]


def test_medians_need_all_tuning_seeds():
    shared = {
        "task": "resnet-34",
        "method": "EGOP",
        "steps": 730,
        "beta": 0.99,
        "warmup": 50,
        "clip": 1.0,
    }
    losses = {Run(**shared, seed=seed, rate=-2): seed - 10000.0 for seed in TUNING_SEEDS}
    losses |= {Run(**shared, seed=seed, rate=0): 0.5 for seed in TUNING_SEEDS[:2]}
    assert update_sizes.make_convolutions_table(losses)[3] == ["3 ×", "1.000", "–", "–", "–"]


def test_missing_runs_are_done_once(tmp_path, monkeypatch):
    monkeypatch.setattr(update_sizes, "RECORD", tmp_path / "runs.jsonl")
    monkeypatch.setattr(update_sizes, "SEEDS", range(1))
    task = dataclasses.replace(TASKS["tiny"], steps=4)
    monkeypatch.setattr(update_sizes, "TASKS", {"tiny": (task, 10)})
    for _ in range(2):
        update_sizes.main("tiny", "")
        runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        assert [run["multiple"] for run in runs] == [1, 2, 4]
    assert len({run["test"] for run in runs}) == 3


def test_missing_runs_of_muon_are_done_once(tmp_path, monkeypatch):
    monkeypatch.setattr(update_sizes, "MUON_RECORD", tmp_path / "runs.jsonl")
    monkeypatch.setattr(update_sizes, "_MUON_RATES", {"Muon": range(5, 7), "EGOP": range(3, 4)})
    monkeypatch.setattr(update_sizes, "TASKS", {"gpt-3x96": (dataclasses.replace(TASKS["tiny"], steps=4), 10)})
    for _ in range(2):
        update_sizes.main("muon", "")
        runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        assert Counter((run["method"], run["rate"]) for run in runs) == {("Muon", 5): 3, ("Muon", 6): 3, ("EGOP", 3): 3}
    assert [row[0] for row in update_sizes.make_muon_table(runs)] == ["GPT 3×96", "Muon", "`EGOP`"]
