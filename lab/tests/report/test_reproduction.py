"""The report says what the records say: verdicts both ways, sizes, devices; and what is missing, in one line."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from egop_lab.cli import app
from egop_lab.data.missing import MissingDataError
from egop_lab.experiments import registry, reproduce
from egop_lab.experiments.base import Alternative, Experiment, Judgement, Table, compare
from egop_lab.experiments.curves import quartiles
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.report import reproduction, wording
from egop_lab.training.context import Context, make_record
from egop_lab.training.records import Store


class Toy(Experiment):
    """Two methods that end at a number of their own."""

    id = "toy"
    ends: ClassVar = {"fast": 0.25, "slow": 0.5}

    @classmethod
    def declare(cls):
        sizes = [{"n": 1, "d": 2}, {"n": 3, "d": 4}]
        full = {"trials": 2, "rates": [0.1, 0.2], "methods": ["SGD", "SGD, two-sided"], "sizes": sizes}
        return {"title": "A <toy>", "figures": "Figure 0", "full": full}

    def run(self, context):
        for method, end in self.ends.items():
            for seed in range(2):
                config = self.config(method=method, seed=seed)
                if config not in self.store:
                    self.store.add(make_record(config, {"loss": [1.0, end + seed / 100]}, 0.5))

    def judge(self):
        ends = {method: self.records(method=method)[0].result["loss"][-1] for method in self.ends}
        return [compare("toy/faster", "Fast is lower than slow | really.", *((m, ends[m]) for m in ("fast", "slow")))]

    def pictures(self):
        series = []
        for method in self.ends:
            low, middle, high = quartiles([r.result["loss"] for r in self.records(method=method)])
            series.append(Series(method, [0, 1], middle, low, high, method))
        return [Picture("toy", "Loss & more", [Panel("Loss", "step", "loss", series)])]


class Backwards(Toy):
    ends: ClassVar = {"fast": 0.5, "slow": 0.25}


class Hungry(Toy):
    id = "hungry"

    def run(self, context):
        raise MissingDataError("Fashion things are not here: do this.")


def test_a_table_is_in_the_report(tmp_path):
    table = Table("Ends & more", ("method", "loss | rate"), (("<fast>", "0.25"), ("slow", "0.5")))
    section = reproduction.Section(Toy(), tables=(table,))
    reproduction.write_markdown([section], tmp_path / "report.md")
    assert (
        "**Ends & more**\n\n| method | loss \\| rate |\n|---|---|\n| <fast> | 0.25 |\n| slow | 0.5 |\n"
        in (tmp_path / "report" / "toy.md").read_text()
    )


@pytest.fixture
def toys(monkeypatch):
    """Replace the registry by one that holds only toy experiments."""
    kinds = {"toy": Toy, "hungry": Hungry}
    for module in (registry, reproduce, reproduction):
        monkeypatch.setattr(module, "find_experiment", kinds.__getitem__)
    for module in (registry, reproduction):
        monkeypatch.setattr(module, "IDS", tuple(kinds))


@pytest.mark.parametrize(("kind", "verdict"), [(Toy, "holds"), (Backwards, "does not hold")])
def test_a_claim_can_come_out_both_ways(kind, verdict):
    toy = kind()
    toy.run(Context())
    (judged,) = toy.judge()
    assert judged.verdict == verdict
    assert "0.25" in judged.finding
    assert "0.5" in judged.finding


def test_what_is_missing_is_said_and_the_others_go_on(tmp_path, toys):
    lines = []
    assert not reproduce.reproduce(["hungry", "toy"], tmp_path, "quick", Context(progress=False), say=lines.append)
    assert "  left out: Fashion things are not here: do this." in lines
    assert lines[-1].startswith("  holds: Fast is lower")


def test_the_report_shows_claims_numbers_settings_device_and_figures(tmp_path, toys):
    reproduce.reproduce(["toy"], tmp_path / "records", "quick", Context(progress=False), say=lambda line: None)
    found = reproduction.load_sections(tmp_path / "records")
    reproduction.write_markdown(found, tmp_path / "out" / "reproduction.md")
    summary = (tmp_path / "out" / "reproduction.md").read_text()
    assert "Of the paper's 1 claim, 1 holds." in summary
    assert "| [A <toy>](reproduction/toy.md) | 1 / 1 | All hold. |" in summary
    assert "Not run: hungry.\n" in summary
    assert not (tmp_path / "out" / "reproduction" / "hungry.md").exists()
    text = (tmp_path / "out" / "reproduction" / "toy.md").read_text()
    assert "| Fast is lower than slow \\| really. | holds | fast: 0.25; slow: 0.5. |  |" in text
    assert "preset **quick**: 4 runs, 2 seconds in all, on CPU" in text
    assert "| methods | [SGD; SGD, two-sided] |\n| sizes | [n 1, d 2; n 3, d 4] |" in text
    assert "](../images/reproduction/toy.svg)" in text
    assert (tmp_path / "out" / "images" / "reproduction" / "toy.svg").exists()


def section(*judged, preset="full", **options):
    return reproduction.Section(Toy(preset), tuple(judged), **options)


def judged(name, verdict="holds", kind="claim", words="So it is."):
    return Judgement(f"toy/{name}", words, verdict, "1 and 2.", kind)


def test_claims_of_the_paper_targets_and_checks_are_counted_apart():
    found = section(
        judged("a"),
        judged("b"),
        judged("c", "does not hold"),
        judged("d", "cannot be judged"),
        judged("e", kind="target"),
        judged("f", "does not hold", "target"),
        judged("g", "does not hold", "target"),
        judged("h", kind="check"),
        judged("i", kind="check"),
    )
    assert reproduction.format_counts([found, section()]) == (
        "Of the paper's 4 claims, 2 hold, 1 does not hold, 1 cannot be judged; "
        "of this project's 3 targets, 1 is met, 2 are not; 2 checks passed."
    )
    assert reproduction.format_counts([section(judged("h", kind="check"))]) == "1 check passed."
    assert reproduction.format_counts([section()]) == "Nothing has been run yet."


def test_readings_of_ours_are_not_claims_of_the_paper(tmp_path):
    found = section(judged("a"), judged("b", "does not hold", "reading"))
    assert reproduction.format_counts([found]) == (
        "Of the paper's 1 claim, 1 holds; of our 1 reading of its figures, 1 does not hold."
    )
    assert wording.count_holding(found.judged) == "1 / 1"
    reproduction.write_markdown([found], tmp_path / "r.md")
    assert "| Our reading: So it is. | **does not hold** |" in (tmp_path / "r" / "toy.md").read_text()


def flipped(name, verdict, other):
    beside = (Alternative("ours", other, "3 and 4."),)
    return Judgement(
        f"toy/{name}", "So it is.", verdict, "1 and 2.", paper="5 and 6", threshold="by 7", alternatives=beside
    )


def test_other_rules_thresholds_and_the_papers_numbers_stand_beside(tmp_path):
    found = [section(flipped("a", "holds", "does not hold"), flipped("b", "does not hold", "holds"),
                     flipped("c", "does not hold", "holds"))]  # fmt: skip
    row = (
        "| So it is. | holds | 1 and 2.<br>Our threshold: by 7.<br>Alternative criterion (ours): does not hold. "
        "3 and 4. | 5 and 6 |"
    )
    reproduction.write_markdown(found, tmp_path / "r.md")
    assert row in (tmp_path / "r" / "toy.md").read_text()
    text = (tmp_path / "r.md").read_text()
    assert "2 of the claims that fail would hold, and 1 of those that hold would fail" in text
    assert "Does not hold: “So it is” and 1 other; another criterion reverses 3." in text


def get_methods(experiment, name, verdict, margin, kind="claim"):
    return Judgement(f"{experiment}/{name}", f"{name}.", verdict, "1 and 2.", kind, margin=margin)


def test_what_cannot_be_judged_for_one_reason_is_shown_as_one():
    unknown = [Judgement(f"t/{name}", f"Target: {name}.", "cannot be judged", "Not there.", "target") for name in "abc"]
    other = Judgement(
        "t/d", "d.", "cannot be judged", "Not there.", "target", alternatives=(Alternative("ours", "holds", "1."),)
    )
    held = [Judgement(f"t/{name}", f"{name}.", "holds", "Not there.", "target") for name in "ef"]
    shown = wording.merge_unjudged([unknown[0], held[0], *unknown[1:], other, held[1]])
    assert [item.statement for item in shown] == ["Target: a; b; c.", "e.", "d.", "f."]


def test_the_strongest_and_the_clearest_are_those_furthest_apart_one_an_experiment():
    items = [
        get_methods("one", "a", "holds", 2.0),
        get_methods("one", "b", "holds", 3.0),
        get_methods("two", "c", "holds", 1.0),
        get_methods("three", "d", "does not hold", -0.5),
        get_methods("three", "e", "does not hold", None),
        get_methods("four", "f", "does not hold", -9.0, "target"),
        get_methods("five", "g", "does not hold", -1.0),
        get_methods("six", "h", "does not hold", 0.0),
    ]
    assert [item.statement for item in wording.select_furthest(items, "holds")] == ["b.", "c."]
    assert [item.statement for item in wording.select_furthest(items, "does not hold")] == ["g.", "d."]
    assert [wording.format_distance(item) for item in (items[1], items[3])] == ["a factor of 1000", "a factor of 3.2"]
    assert wording.format_distance(get_methods("one", "a", "holds", 25.2)) == "25 orders of magnitude"


class Named(Toy):
    @classmethod
    def declare(cls):
        declared = super().declare()
        declared["full"]["tasks"] = {"one": {"n": 1}, "two": {"n": 2, "d": 3}}
        return declared | {"labels": ["fig:toy", "table:toy"], "paper": {"trials": "2", "rates": "[0.1]"}}


def test_what_differs_from_the_paper_is_said_from_the_settings(tmp_path):
    assert wording.describe_deviations(Named()) == "Differs from the paper in rates: [0.1, 0.2] (paper: [0.1])."
    assert wording.describe_deviations(Toy()) == ""
    assert wording.format_settings(Named())[-2:] == [("tasks: one", "n 1"), ("tasks: two", "n 2, d 3")]
    reproduction.write_markdown([reproduction.Section(Named())], tmp_path / "r.md")
    text = (tmp_path / "r" / "toy.md").read_text()
    assert "In the paper: Figure 0 (`fig:toy`, `table:toy`)." in text
    assert "| tasks: two | n 2, d 3 |" in text


@pytest.mark.parametrize("id", registry.IDS)
def test_what_the_paper_has_is_named_of_settings_that_there_are(id):
    one = registry.find_experiment(id)("full")
    assert set(one.paper) <= set(one.settings)
    assert bool(one.paper) == bool(one.labels), "what is not in the paper has neither"


def test_the_quick_preset_is_explained_only_where_a_section_has_it(tmp_path):
    for preset, said in (("full", 0), ("quick", 1)):
        reproduction.write_markdown([section(judged("a"), preset=preset)], tmp_path / "r.md")
        assert (tmp_path / "r.md").read_text().count("small sizes and few trials") == said


def test_one_run_in_one_thread_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    store = Store(tmp_path / "toy.jsonl")
    store.add(make_record(Toy().config(method="fast", seed=0), {"loss": [1.0, 0.2]}, 0.5))
    monkeypatch.setattr(Toy, "ends", {"fast": 0.25})
    monkeypatch.setattr(Toy, "judge", lambda self: [judged("a")])
    monkeypatch.setattr(reproduction, "find_experiment", lambda id: Toy)
    reproduction.write_markdown(reproduction.load_sections(tmp_path, ["toy"]), tmp_path / "r.md")
    assert "1 run, 0 seconds in all, on CPU, 1 thread (" in (tmp_path / "r" / "toy.md").read_text()


def test_the_full_preset_is_reported_where_there_is_one(tmp_path, toys):
    for preset in ("quick", "full"):
        reproduce.reproduce(["toy"], tmp_path, preset, Context(progress=False), say=lambda line: None)
    assert reproduction.load_sections(tmp_path, ["toy"])[0].experiment.preset == "full"


def test_runs_that_are_still_to_come_are_said_to_be(tmp_path, toys):
    store = Store(tmp_path / "toy.jsonl")
    store.add(make_record(Toy().config(method="fast", seed=0), {"loss": [1.0, 0.2]}, 0.5))
    (section,) = reproduction.load_sections(tmp_path, ["toy"])
    assert section.problem.startswith("Not all of its runs are there yet")


def test_the_same_records_give_the_same_report(tmp_path, toys):
    reproduce.reproduce(["toy"], tmp_path / "records", "quick", Context(progress=False), say=lambda line: None)
    for name in ("one", "two"):
        reproduction.write_markdown(reproduction.load_sections(tmp_path / "records"), tmp_path / name / "r.md")
    for path in ("r.md", "r/toy.md", "images/reproduction/toy.svg"):
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


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
    assert "Of the paper's 1 claim, 1 holds." in report.output
    assert "fig:LRMF" in (tmp_path / "out" / "paper-index.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "unknown"], "There is no experiment unknown. There are: toy, hungry."),
        (["reproduce", "toy", "--preset", "huge"], "Invalid preset value: huge. Must be quick or full."),
        (["reproduce", "toy", "--all"], "Name experiments (toy) or pass --all, not both."),
        (["reproduce", "toy", "--device", "foo"], "Invalid device value: foo. Must be cpu or cuda."),
        (["reproduce", "toy", "--device", "meta"], "Invalid device value: meta. Must be cpu or cuda."),
        (["reproduce", "toy", "--device", "cuda:99"], "There is no CUDA:99 device here. Use --device cpu."),
        (["reproduce", "toy", "--data", "/nonexist"], "There is no /nonexist: --data must name an existing folder"),
        (["report", "--records", "nowhere"], "There are no records in nowhere. Create some with"),
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


def test_an_interrupted_reproduction_says_how_to_go_on(tmp_path, toys, monkeypatch):
    def run(self, context):
        raise KeyboardInterrupt

    monkeypatch.setattr(Toy, "run", run)
    result = egop_command("reproduce", "toy", "--records", tmp_path)
    assert result.exit_code == 130
    assert result.stderr == "Interrupted. Run the same command again to resume.\n"


def test_an_experiment_says_what_it_uses_once(tmp_path, toys, monkeypatch):
    class Telling(Toy):
        def run(self, context):
            for _ in range(2):
                context.say("images: here")
            super().run(context)

    monkeypatch.setattr(reproduce, "find_experiment", lambda id: Telling)
    shown = egop_command("reproduce", "toy", "--records", tmp_path).output
    assert shown.splitlines().count("  images: here") == 1


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
