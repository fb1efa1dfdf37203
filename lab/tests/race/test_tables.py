"""The README and the docs show the tables that the records give."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from egop_lab.plots.figures import draw_picture, save_figure
from egop_lab.race import tables
from egop_lab.race.picture import make_picture
from egop_lab.race.results import load_records
from egop_lab.race.tasks import TASKS
from egop_lab.race.times import StepTimes
from egop_lab.race.tune import read_losses

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "docs" / "records"


@pytest.fixture(scope="module")
def records():
    return load_records(RECORDS / "race.jsonl")


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_show_the_tables_of_the_records(records, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- race: " in text
    times = tables.load_times(RECORDS / "race-times.jsonl")
    assert text == tables.fill_tables(text, records, times), "run: python -m egop_lab.race.tables"


@pytest.mark.parametrize("page", tables.PAGES)
def test_intervals_in_sentences_are_those_of_a_table(records, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {
        cell.lstrip("+-").partition(" (")[0]
        for make in (tables.make_results_table, tables.make_controls_table, tables.make_growth_table)
        for row in make(records, {})
        for cell in row
    }
    sentences = re.sub(r"<!-- race: .*?<!-- end -->", "", text, flags=re.DOTALL)
    found = re.findall(r"\d\.\d+ ± \d\.\d+", sentences)
    assert len(found) >= 2
    assert set(found) <= known


def test_losses_are_those_of_the_tuned_runs(records):
    losses = tables.final_losses(records, TASKS["gpt-6x384-400"], "AdamW")
    assert sorted(losses) == list(range(8))
    assert tables.format_losses(TASKS["gpt-6x384-400"], losses) == "1.433 ± 0.006"
    assert sorted(tables.longer_losses(records, TASKS["gpt-6x384-400"])) == [1.0, 1.5, 2.0, 3.0]


def test_missing_seeds_are_said(records):
    task = TASKS["gpt-6x384-400"]
    fewer = {run: record for run, record in records.items() if run.is_tuning or run.seed != 3}
    assert tables.format_losses(task, tables.final_losses(fewer, task, "AdamW")).endswith(" (7 seeds)")
    one = {run: record for run, record in records.items() if run.is_tuning or run.seed == 3}
    assert tables.format_losses(task, tables.final_losses(one, task, "AdamW")).endswith(" (1 seed)")


def test_controls_of_a_larger_task_have_the_rate_of_egop(records):
    task, losses = TASKS["gpt-12x768-400"], read_losses(records.values())
    rates = {method: tables.choose_run(task, method, losses).rate for method in tables.CONTROLS}
    assert set(rates.values()) == {rates["EGOP"]}
    assert tables.choose_run(task, "Muon", {}) is None


def test_a_curve_crosses_a_loss_between_two_evaluations():
    curve = [[10, 3.0], [20, 2.0], [30, 2.5], [40, 1.0]]
    assert tables.find_crossing(curve, 2.5) == 15
    assert tables.find_crossing(curve, 1.5) == pytest.approx(30 + 10 * 2 / 3)
    assert tables.find_crossing(curve, 0.5) == math.inf


def test_rates_compare_medians_of_tuning_runs(records):
    _, _, row, *_ = tables.make_rates_table(records, {})
    assert row == ["GPT 6×384, 400 steps", "2.0e-3", "1.4e-3", "0.001"]


def test_adamw_on_code_has_the_settings_that_are_best_at_full_length(records):
    choice = tables.choose_run(TASKS["gpt-12x768-code"], "AdamW", read_losses(records.values()))
    assert (choice.lr, choice.warmup, choice.steps) == (1e-3, 100, 573)


def test_the_picture_is_that_of_the_records(records, tmp_path):
    picture = make_picture(records, tables.load_times(RECORDS / "race-times.jsonl"))
    assert [panel.title for panel in picture.panels] == ["GPT 6×384", "GPT 12×768", "ResNet-34", "ViT 6×384"]
    save_figure(draw_picture(picture), tmp_path / "race.svg")
    assert (tmp_path / "race.svg").read_bytes() == (ROOT / "docs" / "images" / "race.svg").read_bytes()
    adamw, _, ours = picture.panels[0].series
    assert (adamw.label, ours.label) == ("AdamW", "EGOP")
    assert adamw.x[-1] == pytest.approx(400 * 0.00656, rel=0.01)
    assert ours.low[-1] <= ours.median[-1] <= ours.high[-1] < adamw.low[-1]


def test_the_length_that_reaches_a_loss_is_between_finished_ones():
    means = {1.0: 1.4, 2.0: 1.2, 3.0: 1.1}
    assert tables.steps_needed(means, 1.3) == "1.5×"
    assert tables.steps_needed(means, 1.15) == "2.5×"
    assert tables.steps_needed(means, 1.4) == "1×"
    assert tables.steps_needed(means, 1.0) == "> 3×"
    assert tables.steps_needed(means, 1.5) == "< 1×"


def test_times_are_ratios_of_the_same_round():
    times = {
        ("resnet-34", "eager", "AdamW"): StepTimes([1.0, 2.0, 1.0], [0.0] * 3),
        ("resnet-34", "eager", "EGOP"): StepTimes([1.1, 2.4, 1.3], [0.0] * 3),
    }
    _, row = tables.make_times_table({}, times)
    assert row[:2] == ["ResNet-34, 10 epochs, eager", "1.20 (1.10 to 1.30)"]
    assert row[-1] == "1000.0"


def test_times_include_the_renewals_up_to_a_step():
    task, base, own = TASKS["gpt-6x384-400"], StepTimes([1.0], [0.0]), StepTimes([1.0], [1.0])
    assert own.until(6.0) == [6 + 4]  # after steps 1, 2, 3 and 4
    assert own.until(400.0) == [400 + 16]
    assert tables.format_reached(task, [200.0] * 8, base, own) == ("50 % (50 to 50 %)", "54 %")
    assert tables.format_reached(task, [200.0] * 8, None, own)[1] == "–"
    header, row = tables.make_times_table({}, {(task.name, "eager", "AdamW"): base, (task.name, "eager", "EGOP"): own})
    assert row[header.index("EGOP")] == "1.04 (1.04 to 1.04)"


def test_every_task_has_a_title():
    assert {name for name in TASKS if not name.startswith("tiny")} == set(tables.TITLES)
