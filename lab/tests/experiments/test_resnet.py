"""The residual-network experiment: a run at toy size, claims that come out both ways, slices of time."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.base import Alternative, Judgement, add_alternatives
from egop_lab.experiments.resnet import ResnetExperiment
from egop_lab.experiments.resnet_claims import (
    ADAMW,
    AROUND,
    PERIODIC,
    SOAP_10,
    SOAP_100,
    SOAP_EPOCH,
    SOAP_ONCE,
    SOAP_OURS,
    UPFRONT,
)
from egop_lab.experiments.resnet_long import FIRST, LongRuns
from egop_lab.experiments.resnet_runs import OPTIONAL, ShortRuns
from egop_lab.methods import RESNET as METHODS
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from egop_lab.training.tuning import TUNING
from fakes import image_folder

ONLINE, MUON = "EGOP online", "Muon"
EXPERIMENT = ResnetExperiment("full")
SMALL = {"batch": 8, "trials": 1, "side": 20, "crop": 16, "depths": [1], "width": 4, "images": ["all", "all"]}


def full(store):
    return ResnetExperiment("full", store)


class Toy(ShortRuns):
    """So small that all methods run in seconds."""

    @property
    def settings(self):
        return super().settings | SMALL | {"epochs": 2, "methods": list(METHODS)}


class LongToy(LongRuns):
    """The same, of long runs."""

    @property
    def settings(self):
        return super().settings | SMALL | {"epochs": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def toy(folder, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("records") / "resnet.jsonl")
    Toy("quick", store).run(Context(data=folder, progress=False))
    return store


def context(folder, **options):
    return Context(data=folder, progress=False, **options)


def test_every_method_is_tuned_and_reported(toy):
    for method in METHODS:
        tuning, reported = (
            [run for run in toy if run.config["method"] == method and (run.config["seed"] >= TUNING) is tuned]
            for tuned in (True, False)
        )
        assert [len(run.result["validation loss"]) for run in tuning] == [2]
        (run,) = reported
        for name in ("validation loss", "accuracy", "training loss", "training accuracy", "seconds"):
            assert len(run.result[name]) == 3, "before the first epoch and after each"
        assert all(math.isfinite(loss) for loss in run.result["validation loss"])
        assert math.isnan(run.result["training loss"][0])
        assert math.isnan(run.result["training accuracy"][0])
        assert 0 <= run.result["training accuracy"][-1] <= 1
        assert sorted(run.result["seconds"]) == run.result["seconds"]
        assert 0 <= run.result["ten-crop accuracy"] <= 1
        assert run.config["data"] == {"train": 27, "validation": 15, "classes": 3}


def test_methods_start_at_the_same_point_and_differ_later(toy):
    runs = {run.config["method"]: run.result for run in toy if run.config["seed"] == 0}
    assert len({run["validation loss"][0] for run in runs.values()}) == 1
    # Bases are not renewed within an epoch of three steps, so that some methods still coincide.
    lasts = [runs[method]["training loss"][-1] for method in (ADAMW, UPFRONT, PERIODIC, AROUND, SOAP_ONCE, MUON)]
    assert len(set(lasts)) == len(lasts)


def test_the_first_epoch_of_a_periodic_basis_is_that_of_the_up_front_one(toy):
    one, other = (
        next(run.result for run in toy if run.config["seed"] == 0 and run.config["method"] == method)
        for method in (UPFRONT, PERIODIC)
    )
    assert one["training loss"][1] == other["training loss"][1]
    assert one["training loss"][2] != other["training loss"][2]


def test_a_finished_experiment_does_nothing_again(toy, folder, monkeypatch):
    before = len(list(toy))
    monkeypatch.setattr(Toy, "training", lambda *_: pytest.fail("done again"))
    Toy("quick", toy).run(context(folder))
    assert len(list(toy)) == before


def test_a_toy_run_gives_claims_and_pictures(toy):
    judged = Toy("quick", toy).judge()
    assert {each.verdict for each in judged} == {"cannot be judged"}
    assert len({each.id for each in judged}) == len(judged)
    pictures = Toy("quick", toy).pictures()
    assert [picture.name for picture in pictures] == ["resnet", "resnet-time"]
    assert [panel.title for panel in pictures[0].panels][-1] == "Training accuracy"
    losses = pictures[0].panels[0].series
    assert [series.label for series in losses] == list(METHODS)
    assert list(losses[0].x) == [1, 2]
    assert [series.egop for series in losses] == ["EGOP" in name for name in METHODS]


def test_runs_go_on_where_they_were_and_what_may_be_left_out_comes_last(folder, monkeypatch):
    done, killed = [], []

    class Fake:
        def __init__(self, data, config, device):
            self.config = config

        def __call__(self, progress):
            if len(done) == 5 and not killed:
                killed.append(True)
                raise KeyboardInterrupt
            done.append((self.config["method"], self.config["seed"]))
            return {"ten-crop accuracy": 0.5}

    monkeypatch.setattr(Toy, "training", Fake)
    toy = Toy()
    with pytest.raises(KeyboardInterrupt):
        toy.run(context(folder))
    toy.run(context(folder))
    assert len(done) == len(set(done)) == 2 * len(METHODS)
    last = [(method, seed) for seed in (TUNING, 0) for method in OPTIONAL]
    assert done[-len(last) :] == last


def test_missing_images_are_said_in_one_line(tmp_path):
    with pytest.raises(MissingDataError, match=r"train/CLASS/\*\.jpg"):
        ResnetExperiment().run(Context(data=str(tmp_path), progress=False))


def test_a_missing_package_is_said_in_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MissingDataError, match="pip install pytorch-optimizer"):
        Toy().run(context(folder))


# What the methods look like when all of the paper's claims hold: the validation loss falls by this much an epoch, an
# epoch takes so many seconds, and the training loss and the error end here.
PAPER = {
    ADAMW: (0.10, 10.0, 0.5, 0.30),
    UPFRONT: (0.14, 11.0, 0.4, 0.25),
    PERIODIC: (0.20, 12.0, 0.3, 0.20),
    ONLINE: (0.20, 14.0, 0.3, 0.20),
    SOAP_ONCE: (0.11, 20.0, 0.45, 0.28),
    SOAP_EPOCH: (0.19, 20.0, 0.3, 0.22),
    SOAP_10: (0.19, 21.0, 0.3, 0.22),
    MUON: (0.15, 11.0, 0.4, 0.25),
}


def fake_store(path, methods, data=9469, floor=-math.inf, runs=EXPERIMENT.short, trials=3, timed=True):
    settings = runs.settings
    store = Store(path)
    common = {"data": {"train": data, "classes": 10}, "batch": 128, "crop": 96}
    for method, (fall, seconds, training, error) in methods.items():
        epochs = range(settings["epochs"] + 1)
        for rate in settings["rates"]:
            tuning = settings["tuning epochs"]
            config = EXPERIMENT.config(method=method, lr=rate, seed=TUNING, epochs=tuning, **common)
            accuracy = 0.5 if rate == 1e-3 else 0.4
            store.add(
                Record(config, {"ten-crop accuracy": accuracy, "seconds": [seconds * e for e in range(tuning + 1)]})
            )
        for seed in range(trials):
            result = {
                "validation loss": [max(3 - fall * epoch, floor) + 0.01 * seed for epoch in epochs],
                "accuracy": [0.05 * epoch for epoch in epochs],
                "training loss": [math.nan, *(2 - (2 - training) * epoch / epochs[-1] for epoch in epochs[1:])],
                "seconds": [seconds * epoch if timed else math.nan for epoch in epochs],
                "ten-crop accuracy": 1 - error,
                "ten-crop loss": 3 - fall * epochs[-1],
            }
            if runs is EXPERIMENT.long:
                result["training accuracy"] = [math.nan] + [1 - training] * epochs[-1]
            config = {"method": method, "lr": 1e-3, "seed": seed, "epochs": settings["epochs"]}
            store.add(Record(EXPERIMENT.config(**config, **common), result))
    return store


UNKNOWN = "resnet/training-accuracy"


def ours(judged):
    """Return the judgement under our own rule, with AdamW's lowest validation loss as the target."""
    return (*judged.alternatives, judged)[0]


def verdicts(store):
    judged = full(store).judge()
    return {each.id.removeprefix("resnet/"): ours(each).verdict for each in judged if each.id != UNKNOWN}


def test_the_target_is_the_papers_and_ours_stands_beside(tmp_path):
    twice = {name: (2 * fall, *others) for name, (fall, *others) in PAPER.items()}
    judged = full(fake_store(tmp_path / "r.jsonl", twice, floor=1.5)).judge()
    found = {each.id: each for each in judged if each.finding.startswith(("Epochs", "Seconds"))}
    assert len(found) == 15
    assert {each.verdict for each in found.values()} == {"holds"}
    upfront = found["resnet/upfront-epochs"]
    # SOAP's median ends at 1.51, and 1.05 times that is 1.586.
    assert upfront.finding == "Epochs to a validation loss of 1.586: EGOP up-front: 6; AdamW: 8."
    assert (upfront.paper, upfront.alternatives[0].rule) == ("15 and 24", "to the lowest of AdamW's medians")


def test_what_the_images_are_is_said_first(tmp_path):
    remark, renewed, not_run = full(fake_store(tmp_path / "r.jsonl", PAPER)).remarks()
    assert not_run.startswith("Not run with 30 epochs: AdamW, EGOP up-front,")
    assert remark.startswith("The images are Imagenette's 9,469 of 10 classes at 96 px, not ImageNet's 1.28 million")
    assert renewed.startswith("An epoch has 73 steps here and 10,000 in the paper")
    other, *_ = full(fake_store(tmp_path / "s.jsonl", PAPER, data=1000)).remarks()
    assert other.startswith("The images are a folder's 1,000")


def test_what_was_not_recorded_is_not_judged(tmp_path):
    judged = {each.id: each for each in full(fake_store(tmp_path / "r.jsonl", PAPER)).judge()}
    assert judged[UNKNOWN].verdict == "cannot be judged"
    assert [each.id for each in judged.values() if each.kind == "reading"] == ["resnet/validation"]


def test_all_claims_can_hold(tmp_path):
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", PAPER)).values()) == {"holds"}


def test_all_claims_can_fail(tmp_path):
    worst = PAPER | {ADAMW: (0.2, 1.0, 0.1, 0.1), UPFRONT: (0.2, 90.0, 0.6, 0.5), PERIODIC: (0.15, 99.0, 0.7, 0.5)}
    worst |= dict.fromkeys((SOAP_ONCE, SOAP_EPOCH), (0.3, 2.0, 0.2, 0.2)) | {SOAP_10: (0.25, 2.0, 0.2, 0.2)}
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", worst)).values()) == {"does not hold"}


def test_numbers_come_from_the_records(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", PAPER)
    found = {each.id: ours(each).finding for each in full(store).judge()}
    # AdamW's median ends at 2.01; the others' middle seeds get there after 8 and 5 epochs.
    assert found["resnet/upfront-epochs"] == "Epochs to a validation loss of 2.010: EGOP up-front: 8; AdamW: 10."
    assert found["resnet/periodic-time"] == "Seconds to a validation loss of 2.010: EGOP each epoch: 60; AdamW: 100."
    assert found["resnet/upfront-training"] == "Last training loss: EGOP up-front: 0.4; AdamW: 0.5."


def test_a_method_that_never_gets_there_is_said_so(tmp_path):
    never = PAPER | {PERIODIC: (0.01, 1.0, 0.3, 0.2), SOAP_EPOCH: (0.01, 1.0, 0.3, 0.2)}
    store = fake_store(tmp_path / "r.jsonl", never)
    judged = {each.id: each for each in full(store).judge()}
    assert ours(judged["resnet/periodic-epochs"]).verdict == "does not hold"
    assert "EGOP each epoch: never" in judged["resnet/periodic-epochs"].finding
    assert ours(judged["resnet/periodic-soap"]).verdict == "cannot be judged", "neither got there"
    bars = full(store).pictures()[1].panels[0].series[0]
    assert math.isinf(bars.median[list(bars.x).index(PERIODIC)])


def test_the_learning_rate_is_that_of_the_best_tuning_accuracy(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG)
    assert full(store).short.choose_rate(ADAMW) == full(store).long.choose_rate(ADAMW) == 1e-3


def test_long_runs_are_tuned_by_runs_of_their_own(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", PAPER)
    with pytest.raises(LookupError, match=r"AdamW has no tuning run with learning rate 0\.0003"):
        full(store).long.choose_rate(ADAMW)
    assert EXPERIMENT.settings["tuning epochs"] == "10; 3 in the short runs"


def test_runs_that_are_still_to_come_are_named(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", {name: PAPER[name] for name in (ADAMW, UPFRONT)})
    with pytest.raises(LookupError, match="EGOP each epoch has no tuning run"):
        full(store).judge()


def test_a_method_that_no_claim_is_about_is_shown_with_the_runs_it_has(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", PAPER)
    fewer = Store(tmp_path / "fewer.jsonl")
    fewer.add(*(run for run in store if not (run.config["method"] == MUON and run.config["seed"] == 2)))
    assert len(full(fewer).short.reported_runs()[MUON]) == 2
    assert "over 3 trials, Muon: 2." in full(fewer).pictures()[0].caption
    assert "Muon" not in full(store).pictures()[0].caption


def test_runs_on_other_images_are_not_mixed_in(tmp_path):
    fake_store(tmp_path / "r.jsonl", PAPER | {ADAMW: (0.3, 1.0, 0.0, 0.0)}, data=100)
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", PAPER)).values()) == {"holds"}


def long_store(path, methods, **options):
    """Store long runs next to short ones in which no claim holds."""
    worst = dict.fromkeys(PAPER, (0.1, 10.0, 0.5, 0.3)) | {ADAMW: (0.3, 1.0, 0.0, 0.0)}
    fake_store(path, worst)
    slower = {name: (fall / 3, *others) for name, (fall, *others) in methods.items()}
    return fake_store(path, slower, runs=EXPERIMENT.long, **options)


LONG = {name: numbers for name, numbers in PAPER.items() if name in EXPERIMENT.long.settings["methods"]}
LONG |= {SOAP_OURS: PAPER[SOAP_10], SOAP_100: PAPER[SOAP_10], AROUND: PAPER[PERIODIC], "Random rotation": PAPER[ADAMW]}


def test_long_runs_are_judged_where_they_are_all_there(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG)
    judged = full(store).judge()
    failed = [each.id.removeprefix("resnet/") for each in judged if each.verdict == "does not hold"]
    assert failed == ["upfront-often-time", "upfront-period-time"], "up front it does not get to SOAP's loss"
    assert sum(each.verdict == "holds" for each in judged) > 15
    assert judged[0].alternatives[-1].rule == "10 epochs"
    assert len(full(store).remarks()) == 2
    assert "and there are 30 epochs of them, not 40" in full(store).remarks()[0]
    assert [table.title[:9] for table in full(store).tables()] == 2 * ["30 epochs"] + 2 * ["10 epochs"]
    names = [picture.name for picture in full(store).pictures()]
    assert names == ["resnet-long", "resnet-long-time", "resnet", "resnet-time"]


def test_claims_of_methods_that_lack_long_runs_keep_the_verdict_of_the_short_ones(tmp_path):
    store = long_store(tmp_path / "r.jsonl", {name: LONG[name] for name in FIRST})
    judged = {each.id.removeprefix("resnet/"): each for each in full(store).judge()}
    assert ours(judged["upfront-epochs"]).verdict == "holds"
    short = {each.id.removeprefix("resnet/"): each for each in full(store).short.judge()}
    assert judged["upfront-epochs"].finding != short["upfront-epochs"].finding
    assert judged["upfront-soap"] == short["upfront-soap"]
    assert full(store).remarks()[-1].startswith("Not run with 30 epochs: SOAP each epoch, SOAP once,")


def test_adamw_has_a_second_chance_at_another_rate(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG)
    known = full(store).long.judge()
    runs = full(store).long.reported_runs()[ADAMW]
    better = [{**run.result, "ten-crop accuracy": 0.9, "seconds": [math.nan] * 31} for run in runs]
    store.add(*(Record({**run.config, "lr": 3e-4}, result) for run, result in zip(runs, better, strict=True)))
    judged = {each.id.removeprefix("resnet/"): each for each in full(store).long.judge()}
    assert [each.verdict for each in judged.values()] == [each.verdict for each in known], "the chosen rate counts"
    (other,) = (each for each in judged["upfront-accuracy"].alternatives if each.rule == "AdamW at 0.0003")
    assert (other.verdict, other.finding) == (
        "does not hold",
        "Share of wrong answers, ten crops: EGOP up-front: 0.25; AdamW: 0.1.",
    )
    times = [each.finding for each in judged["upfront-time"].alternatives if "0.0003" in each.rule]
    assert times
    assert "never" not in "".join(times), "it has the pace of AdamW's other runs"
    two = Store(tmp_path / "two.jsonl")
    two.add(*list(store)[:-1])
    assert full(two).long.judge() == known, "one of its runs is missing"


def test_our_form_of_soap_stands_beside_the_packages(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG | {SOAP_OURS: (0.25, 9.0, 0.3, 0.1)})
    judged = {each.id.removeprefix("resnet/"): each for each in full(store).long.judge()}
    assert judged["often-time"].verdict == "holds"
    (other,) = (each for each in judged["often-time"].alternatives if each.rule == "SOAP 100 in our form")
    assert other.verdict == "does not hold"
    same = [each.verdict for each in judged["soap-accuracy"].alternatives if each.rule == "SOAP 100 in our form"]
    assert same == ["does not hold"], "where it is compared itself it is always shown"
    assert "SOAP 100, ours: " in other.finding
    without = long_store(tmp_path / "s.jsonl", {name: LONG[name] for name in FIRST})
    assert not any("our form" in each.rule for one in full(without).long.judge() for each in one.alternatives)


def test_what_only_the_other_rule_has_is_shown_where_it_differs():
    one = Judgement("resnet/a", "It is.", "holds", "1 and 2.")
    other = replace(
        one, alternatives=(Alternative("to b", "does not hold", "3 and 2."), Alternative("to c", "holds", "1 and 3."))
    )
    (joined,) = add_alternatives([one], "x", [other])
    assert joined.alternatives == (Alternative("x, to b", "does not hold", "3 and 2."),)


def test_without_three_trials_the_short_runs_count(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG, trials=2)
    assert full(store).judge() == full(store).short.judge()


def test_runs_beside_others_have_the_time_of_those_alone(tmp_path):
    store = long_store(tmp_path / "r.jsonl", LONG, timed=False)
    (_, first, *_), (_, second, *_) = (
        [run.result["seconds"] for run in full(store).long.reported_runs()[method]] for method in (SOAP_OURS, ADAMW)
    )
    assert first == pytest.approx([21.0 * epoch for epoch in range(31)])
    assert len(second) == 31


def test_a_table_says_what_an_epoch_costs_here_and_in_the_paper(tmp_path):
    table, reached = full(fake_store(tmp_path / "r.jsonl", PAPER)).tables()
    rows = {row[0]: row for row in table.rows}
    assert rows[ADAMW][-3:] == ("10.00 (10.00 to 10.00)", "1.0", "1.00")
    assert rows[SOAP_ONCE][-3:] == ("20.00 (20.00 to 20.00)", "2.0", "1.50")
    assert rows[ADAMW][3:5] == ("2.010", "10")
    # SOAP every 10 ends at 1.11 in the median, AdamW at 2.01.
    assert reached.header == ("method", "1.166", "2.010")
    assert {row[0]: row[1:] for row in reached.rows}[ADAMW] == ("never, never, never", "10, 10, never")
    assert rows[MUON][-1] == ""


def test_long_runs_are_searched_along_a_ladder_and_done_by_importance(folder, monkeypatch):
    done = []

    class Fake:
        def __init__(self, data, config, device):
            self.config = config

        def __call__(self, progress):
            done.append((self.config["method"], self.config["seed"], self.config["lr"]))
            return {"ten-crop accuracy": -abs(math.log(self.config["lr"] / 3e-3)), "seconds": [0.0, 1.0]}

    monkeypatch.setattr(LongToy, "training", Fake)
    toy = LongToy()
    toy.run(context(folder))
    # The best is at an end of those tried, again and again, until 1e-2 is worse.
    for method in FIRST:
        assert [lr for name, seed, lr in done if name == method and seed == TUNING] == [1e-3, 3e-4, 3e-3, 1e-2]
    assert {method for method, *_ in done[: 5 * len(FIRST)]} == set(FIRST), "tuned and run before all others"
    assert [each for each in done if each[1] == 0] == [(name, 0, 3e-3) for name in toy.settings["methods"]]
