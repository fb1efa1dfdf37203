"""The report says what the records say: verdicts both ways, sizes, devices; and what is missing, in one line."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from egop import reproduction
from egop.cli import app
from egop.experiments import registry, reproduce
from egop.experiments.base import (
    Context,
    Experiment,
    MissingDataError,
    Panel,
    Picture,
    Series,
    compare,
    finished,
    quartiles,
)
from egop.experiments.records import Store


class Toy(Experiment):
    """Two methods that end at a number of their own."""

    id, title, figures = "toy", "A <toy>", "Figure 0"
    ends: ClassVar = {"fast": 0.25, "slow": 0.5}

    def settings(self, preset):
        return {"trials": 2, "rates": [0.1, 0.2]}

    def run(self, store, context):
        for method, end in self.ends.items():
            for seed in range(2):
                config = self.config(context.preset, method=method, seed=seed)
                if config not in store:
                    store.add(finished(config, {"loss": [1.0, end + seed / 100]}, 0.5))

    def judge(self, store, preset):
        ends = {method: self.records(store, preset, method=method)[0].result["loss"][-1] for method in self.ends}
        return [compare("toy/faster", "Fast is lower than slow | really.", *((m, ends[m]) for m in ("fast", "slow")))]

    def pictures(self, store, preset):
        series = []
        for method in self.ends:
            low, middle, high = quartiles([r.result["loss"] for r in self.records(store, preset, method=method)])
            series.append(Series(method, [0, 1], middle, low, high, method))
        return [Picture("toy", "Loss & more", [Panel("Loss", "step", "loss", series)])]


class Backwards(Toy):
    ends: ClassVar = {"fast": 0.5, "slow": 0.25}


class Hungry(Toy):
    id = "hungry"

    def run(self, store, context):
        raise MissingDataError("Fashion things are not here: do this.")


@pytest.fixture
def toys(monkeypatch):
    """A registry of toy experiments only."""
    kinds = {"toy": Toy, "hungry": Hungry}
    for module in (registry, reproduce, reproduction):
        monkeypatch.setattr(module, "experiment", lambda id: kinds[id]())
    for module in (registry, reproduction):
        monkeypatch.setattr(module, "IDS", tuple(kinds))


@pytest.mark.parametrize(("kind", "verdict"), [(Toy, "holds"), (Backwards, "does not hold")])
def test_a_claim_can_come_out_both_ways(tmp_path, kind, verdict):
    store = Store(tmp_path / "toy.jsonl")
    kind().run(store, Context())
    (judged,) = kind().judge(store, "quick")
    assert judged.verdict == verdict
    assert "0.25" in judged.found
    assert "0.5" in judged.found


def test_what_is_missing_is_said_and_the_others_go_on(tmp_path, toys):
    lines = []
    outcomes = reproduce.reproduce(["hungry", "toy"], tmp_path, Context(progress=False), say=lines.append)
    assert outcomes[0].problem == "Fashion things are not here: do this."
    assert outcomes[1].judged[0].verdict == "holds"
    assert any("left out: Fashion things" in line for line in lines)


def test_the_report_shows_claims_numbers_settings_device_and_figures(tmp_path, toys):
    reproduce.reproduce(["toy"], tmp_path / "records", Context(progress=False), say=lambda line: None)
    found = reproduction.sections(tmp_path / "records")
    reproduction.write_markdown(found, tmp_path / "out" / "reproduction.md")
    reproduction.write_html(found, tmp_path / "out" / "reproduction.html")
    text = (tmp_path / "out" / "reproduction.md").read_text()
    assert "Of 1 claims 1 hold." in text
    assert "| Fast is lower than slow \\| really. | holds | fast: 0.25; slow: 0.5. |" in text
    assert "Preset: **quick**. 4 runs, 2 seconds in all, on CPU" in text
    assert "trials: 2; rates: [0.1, 0.2]" in text
    assert "It has not been run." in text
    assert (tmp_path / "out" / "images" / "reproduction" / "toy.svg").exists()
    page = (tmp_path / "out" / "reproduction.html").read_text()
    assert "A &lt;toy&gt;" in page
    assert "A <toy>" not in page
    assert 'aria-label="Loss &amp; more"' in page
    assert "http" not in page.replace("https://matplotlib.org", "")
    HTMLParser().feed(page)


def test_the_full_preset_is_reported_where_there_is_one(tmp_path, toys):
    for preset in ("quick", "full"):
        reproduce.reproduce(["toy"], tmp_path, Context(preset, progress=False), say=lambda line: None)
    assert reproduction.sections(tmp_path, ["toy"])[0].preset == "full"


def test_runs_that_are_still_to_come_are_said_to_be(tmp_path, toys):
    store = Store(tmp_path / "toy.jsonl")
    store.add(finished(Toy().config("quick", method="fast", seed=0), {"loss": [1.0, 0.2]}, 0.5))
    (section,) = reproduction.sections(tmp_path, ["toy"])
    assert section.problem.startswith("Not all of its runs are there yet")


def test_the_same_records_give_the_same_report(tmp_path, toys):
    reproduce.reproduce(["toy"], tmp_path / "records", Context(progress=False), say=lambda line: None)
    for name in ("one", "two"):
        reproduction.write_html(reproduction.sections(tmp_path / "records"), tmp_path / f"{name}.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def egop_command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_command_line_lists_runs_and_reports(tmp_path, toys):
    listed = egop_command("reproduce")
    assert listed.exit_code == 0
    assert "toy" in listed.output
    ran = egop_command("reproduce", "toy", "--records", tmp_path / "records")
    assert ran.exit_code == 0, ran.output
    assert "holds: Fast is lower than slow" in ran.output
    report = egop_command("report", "--records", tmp_path / "records", "--out", tmp_path / "out")
    assert report.exit_code == 0, report.output
    assert "Of 1 claims 1 hold." in report.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "unknown"], "There is no experiment unknown. There are: toy, hungry."),
        (["reproduce", "toy", "--preset", "huge"], "Invalid preset value: huge. Must be quick or full."),
        (["report", "--records", "nowhere"], "There are no records in nowhere. Make some with"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(toys, arguments, message):
    result = egop_command(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_said(tmp_path, toys):
    result = egop_command("reproduce", "toy", "--device", "cuda", "--records", tmp_path)
    assert result.exit_code == 2
    assert "There is no CUDA device here. Use --device cpu." in result.output


def test_missing_data_ends_with_status_one(tmp_path, toys):
    result = egop_command("reproduce", "hungry", "--records", tmp_path)
    assert result.exit_code == 1
    assert "left out: Fashion things are not here: do this." in result.output


def test_a_damaged_record_is_said_in_one_line_and_nothing_is_lost(tmp_path, toys):
    egop_command("reproduce", "toy", "--records", tmp_path)
    path = tmp_path / "toy.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{not a record", *lines[1:]]) + "\n")
    result = egop_command("report", "--records", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "Line 1 of" in result.output
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [json.loads(line) for line in lines[1:]]
