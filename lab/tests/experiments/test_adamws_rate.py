"""EGOP at AdamW's best learning rate: the page shows the record, and missing runs are done once."""

import copy
import math
from pathlib import Path

import pytest

from egop_lab.experiments import adamws_rate
from egop_lab.training.problems import PROBLEMS

DOCS = Path(__file__).parents[3] / "docs"


TABLES = {
    "records": adamws_rate.make_table,
    "default": adamws_rate.make_default_table,
    "small": adamws_rate.make_convolutions_table,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_record(name):
    table = TABLES[name](adamws_rate.read_losses(adamws_rate.RECORD))
    lines = [f"| {' | '.join(row)} |" for row in (table.header, *table.rows)]
    lines.insert(1, "|---" * len(table.header) + "|")
    shown = (DOCS / "reproduction" / "adamws-rate.md").read_text().split(f"<!-- {name} -->\n")[1]
    assert shown == "\n".join(lines) + "\n", "\n".join(lines)


def test_the_advice_gives_the_numbers_of_the_record():
    losses = adamws_rate.read_losses(adamws_rate.RECORD)
    _, number, lower, _, _, _, capped, *_ = adamws_rate.make_table(losses).rows[0]
    at_default = adamws_rate.make_default_table(losses).rows[0][2]
    summary = f"lower than AdamW on {lower} of {number} small problems, and on {capped} with rates capped at 0.008"
    page = " ".join((DOCS / "howto" / "learning-rate.md").read_text().split())
    assert summary in page
    assert f"With both at the default rate, 1e-3, it ended lower on {at_default}." in page


def test_losses_are_compared_by_seed_at_adamws_rate():
    adamws = {seed: 2.0 + seed for seed in range(5)}
    losses = {
        ("a", "AdamW", 0.1): adamws,
        ("a", "EGOP", 0.1): {seed: loss / 2 for seed, loss in adamws.items()},
        ("a", "EGOP", 0.2): dict.fromkeys(range(5), 0.1),
        ("b", "AdamW", 0.1): adamws,
        ("b", "EGOP", 0.1): {**adamws, 4: math.inf},
        ("b", "EGOP", 0.008): adamws,
    }
    assert adamws_rate.compare(losses) == {
        "a": pytest.approx((-math.log(2), 0), abs=1e-12),
        "b": (math.inf, math.inf),
    }
    losses["a", "AdamW", 0.001] = {seed: loss * 2 for seed, loss in adamws.items()}
    losses["a", "EGOP", 0.001] = adamws
    assert adamws_rate.compare(losses, default=True) == {"a": pytest.approx((-math.log(2), 0), abs=1e-12)}
    losses["a", "EGOP", 0.008] = losses["a", "EGOP", 0.1]
    assert adamws_rate.compare(losses, limit=0.008)["b"] == (0, 0)


def test_sizes_of_convolutions_are_compared_by_seed_at_three_rates():
    sizes = {1: 1.0, 2: 0.9, 3: 1.2, 4: 1.0}
    losses = {("a", "AdamW", 0.02): dict.fromkeys(range(5), 1.0), ("b", "AdamW", 0.02): {}}
    for rate in (0.02, 0.008, 0.002):
        for factor, method in adamws_rate._FACTORS.items():
            losses["a", method, rate] = {seed: sizes[factor] * (1 + seed + rate) for seed in range(5)}
    rows = adamws_rate.make_convolutions_table(losses).rows
    assert [row[1:3] for row in rows] == [("+0%", "0"), ("−10%", "1"), ("+20%", "0"), ("+0%", "0")]
    assert all(row[1:3] == row[3:5] == row[5:7] for row in rows)


def test_other_sizes_change_the_updates_of_convolutions_alone():
    task = PROBLEMS["cnn-digits"].make(0, None)
    steps = {}
    for method in ("EGOP, convolutions x 3", "EGOP, convolutions x 1"):
        model = copy.deepcopy(task.model)
        optimizer = adamws_rate._build(method, model)
        task.loss(model, next(iter(task.batches))).backward()
        optimizer.step()
        steps[method] = {name: weight.detach() for name, weight in model.named_parameters()}
    before = {name: weight.detach() for name, weight in task.model.named_parameters()}
    ours, single = ({name: float((some[name] - before[name]).norm()) for name in before} for some in steps.values())
    convolutions = adamws_rate.find_convolutions(task.model)
    assert len(convolutions) == 3
    for name in before:
        decay = 1e-5 * float(before[name].norm())
        assert ours[name] == pytest.approx(single[name] * (3 if name in convolutions else 1), rel=0.02, abs=decay)


def test_missing_runs_are_done_once(tmp_path, monkeypatch):
    monkeypatch.setattr(adamws_rate, "RECORD", tmp_path / "runs.jsonl")
    monkeypatch.setattr(adamws_rate, "PROBLEMS", {"table": PROBLEMS["table"]})
    monkeypatch.setattr(adamws_rate, "train", lambda *arguments: {"losses": [1.0, 0.5]})
    for _ in range(2):
        adamws_rate.main("", "abc")
        runs = [("AdamW", 0.05), ("AdamW", 0.001), *(("EGOP", rate) for rate in (0.05, 0.008, 0.004, 0.001))]
        expected = {("table", *run): dict.fromkeys(range(5), 0.5) for run in runs}
        assert adamws_rate.read_losses(tmp_path / "runs.jsonl") == expected
        assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 30
