"""The rate of what AdamW updates beside EGOP: the page shows the record, and missing runs are done once."""

import dataclasses
import json
from pathlib import Path

from egop_lab.race import outside_rate
from egop_lab.race.tasks import TASKS

PAGE = Path(__file__).parents[3] / "docs" / "reproduction" / "adamws-rate.md"


def test_the_page_shows_the_record():
    rows = outside_rate.make_table(map(json.loads, outside_rate.RECORD.read_text().splitlines()))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    assert PAGE.read_text().split("<!-- outside -->\n")[1] == "\n".join(lines) + "\n", "\n".join(lines)


def test_differences_are_paired():
    losses = {1: 2.0, 2: 1.5, 4: 1.75}
    records = [
        {"task": task, "multiple": multiple, "seed": seed, "test": loss + seed}
        for task in outside_rate.TASKS
        for multiple, loss in losses.items()
        for seed in outside_rate.SEEDS
    ]
    for row in outside_rate.make_table(records)[1:]:
        assert row[2:] == ["4.000 ± 1.963", "3.500 ± 1.963", "−0.500 ± 0.000", "3.750 ± 1.963", "−0.250 ± 0.000"]


def test_missing_runs_are_done_once(tmp_path, monkeypatch):
    monkeypatch.setattr(outside_rate, "RECORD", tmp_path / "runs.jsonl")
    monkeypatch.setattr(outside_rate, "SEEDS", range(1))
    task = dataclasses.replace(TASKS["tiny"], steps=4)
    monkeypatch.setattr(outside_rate, "TASKS", {"tiny": (task, 10)})
    for _ in range(2):
        outside_rate.main("tiny", "")
        runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        assert [run["multiple"] for run in runs] == [1, 2, 4]
    assert len({run["test"] for run in runs}) == 3
