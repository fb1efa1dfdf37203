"""The residual-network experiment: a run at toy size, claims that come out both ways, slices of time."""

from __future__ import annotations

import math
import sys
import time

import pytest

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.resnet import OPTIONAL, ResnetExperiment
from egop_lab.methods import RESNET, compared
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING
from fakes import image_folder

METHODS = compared(RESNET)
ADAMW, UPFRONT, PERIODIC, ONLINE, BOTH_SIDES, SOAP_ONCE, SOAP_EPOCH, SOAP_10, MUON = METHODS
EXPERIMENT = ResnetExperiment()


class Toy(ResnetExperiment):
    """So small that all methods run in seconds."""

    def settings(self, preset):
        return super().settings("quick") | {
            "batch": 8,
            "trials": 1,
            "epochs": 2,
            "side": 20,
            "crop": 16,
            "depths": [1],
            "width": 4,
            "images": ["all", "all"],
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def toy(folder, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("records") / "resnet.jsonl")
    Toy().run(store, Context(data=folder, progress=False))
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
        for name in ("validation loss", "accuracy", "training loss", "seconds"):
            assert len(run.result[name]) == 3, "before the first epoch and after each"
        assert all(math.isfinite(loss) for loss in run.result["validation loss"])
        assert math.isnan(run.result["training loss"][0])
        assert sorted(run.result["seconds"]) == run.result["seconds"]
        assert 0 <= run.result["ten-crop accuracy"] <= 1
        assert run.config["data"] == {"train": 27, "validation": 15, "classes": 3}


def test_methods_start_at_the_same_point_and_differ_later(toy):
    runs = {run.config["method"]: run.result for run in toy if run.config["seed"] == 0}
    assert len({run["validation loss"][0] for run in runs.values()}) == 1
    # Bases are not renewed within an epoch of three steps, so that some methods still coincide.
    lasts = [runs[method]["training loss"][-1] for method in (ADAMW, UPFRONT, PERIODIC, SOAP_ONCE, MUON)]
    assert len(set(lasts)) == len(lasts)


def test_the_first_epoch_of_a_periodic_basis_is_that_of_the_up_front_one(toy):
    one, other = (
        next(run.result for run in toy if run.config["seed"] == 0 and run.config["method"] == method)
        for method in (UPFRONT, PERIODIC)
    )
    assert one["training loss"][1] == other["training loss"][1]
    assert one["training loss"][2] != other["training loss"][2]


def test_a_finished_experiment_does_nothing_again(toy, folder, monkeypatch):
    monkeypatch.setattr(Toy, "training", None)
    Toy().run(toy, context(folder))


def test_a_toy_run_gives_claims_and_pictures(toy):
    judged = Toy().judge(toy, "quick")
    assert {each.verdict for each in judged} == {"cannot be judged"}
    assert len({each.id for each in judged}) == len(judged)
    pictures = Toy().pictures(toy, "quick")
    assert [picture.name for picture in pictures] == ["resnet", "resnet-time"]
    losses = pictures[0].panels[0].series
    assert [series.label for series in losses] == list(METHODS)
    assert list(losses[0].x) == [1, 2]
    assert [series.egop for series in losses] == ["EGOP" in name for name in METHODS]


def test_no_time_no_new_run_and_the_next_slice_goes_on(folder, tmp_path, monkeypatch):
    done = []

    class Fake:
        def __init__(self, data, config, device):
            self.config = config

        def __call__(self, progress):
            done.append((self.config["method"], self.config["seed"]))
            clock[0] += 10
            return {"ten-crop accuracy": 0.5}

    clock = [0.0]
    monkeypatch.setattr(Toy, "training", Fake)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store = Store(tmp_path / "resnet.jsonl")
    Toy().run(store, context(folder, time_budget=0.0))
    assert done == [(ADAMW, TUNING)], "the first run starts at second 0"
    Toy().run(Store(store.path), context(folder, time_budget=35.0))
    assert len(done) == 5
    Toy().run(Store(store.path), context(folder))
    assert len(done) == len(set(done)) == 2 * len(METHODS)
    assert done[-2:] == [(BOTH_SIDES, TUNING), (BOTH_SIDES, 0)], "what may be left out comes last"


def test_missing_images_are_said_in_one_line(tmp_path):
    with pytest.raises(MissingDataError, match=r"train/CLASS/\*\.jpg"):
        EXPERIMENT.run(Store(tmp_path / "resnet.jsonl"), Context(data=str(tmp_path), progress=False))


def test_a_missing_package_is_said_in_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MissingDataError, match="pip install pytorch-optimizer"):
        Toy().run(Store(tmp_path / "resnet.jsonl"), context(folder))


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


def fake_store(path, methods, data=9469, floor=-math.inf):
    settings = EXPERIMENT.settings("full")
    store = Store(path)
    common = {"data": {"train": data, "classes": 10}, "batch": 128, "crop": 96}
    for method, (fall, seconds, training, error) in methods.items():
        epochs = range(settings["epochs"] + 1)
        for rate in settings["rates"]:
            config = EXPERIMENT.config("full", method=method, lr=rate, seed=TUNING, epochs=3, **common)
            store.add(Record(config, {"ten-crop accuracy": 0.5 if rate == 1e-3 else 0.4}))
        for seed in range(settings["trials"]):
            result = {
                "validation loss": [max(3 - fall * epoch, floor) + 0.01 * seed for epoch in epochs],
                "accuracy": [0.05 * epoch for epoch in epochs],
                "training loss": [math.nan, *(2 - (2 - training) * epoch / epochs[-1] for epoch in epochs[1:])],
                "seconds": [seconds * epoch for epoch in epochs],
                "ten-crop accuracy": 1 - error,
            }
            store.add(Record(EXPERIMENT.config("full", method=method, lr=1e-3, seed=seed, epochs=10, **common), result))
    return store


UNKNOWN = "resnet/training-accuracy"


def ours(judged):
    """Of what is judged, what our rule says: AdamW's lowest validation loss is the target."""
    return (*judged.beside, judged)[0]


def verdicts(store):
    judged = EXPERIMENT.judge(store, "full")
    return {each.id.removeprefix("resnet/"): ours(each).verdict for each in judged if each.id != UNKNOWN}


def test_the_target_is_the_papers_and_ours_stands_beside(tmp_path):
    twice = {name: (2 * fall, *others) for name, (fall, *others) in PAPER.items()}
    judged = EXPERIMENT.judge(fake_store(tmp_path / "r.jsonl", twice, floor=1.5), "full")
    found = {each.id: each for each in judged if each.found.startswith(("Epochs", "Seconds"))}
    assert len(found) == 11
    assert {each.verdict for each in found.values()} == {"holds"}
    upfront = found["resnet/upfront-epochs"]
    # SOAP's median ends at 1.51, and 1.05 times that is 1.586.
    assert upfront.found == "Epochs to a validation loss of 1.586: EGOP up-front 6, AdamW 8."
    assert (upfront.paper, upfront.beside[0].rule) == ("15 and 24", "to AdamW's lowest validation loss")


def test_what_the_images_are_is_said_first(tmp_path):
    (remark,) = EXPERIMENT.remarks(fake_store(tmp_path / "r.jsonl", PAPER), "full")
    assert remark.startswith("The images are Imagenette's 9,469 of 10 classes at 96 px, not ImageNet's 1.28 million")
    (other,) = EXPERIMENT.remarks(fake_store(tmp_path / "s.jsonl", PAPER, data=100), "full")
    assert other.startswith("The images are a folder's 100")


def test_what_was_not_recorded_is_not_judged(tmp_path):
    judged = {each.id: each for each in EXPERIMENT.judge(fake_store(tmp_path / "r.jsonl", PAPER), "full")}
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
    found = {each.id: ours(each).found for each in EXPERIMENT.judge(store, "full")}
    # AdamW's median ends at 2.01; the others' middle seeds get there after 8 and 5 epochs.
    assert found["resnet/upfront-epochs"] == "Epochs to a validation loss of 2.010: EGOP up-front 8, AdamW 10."
    assert found["resnet/periodic-time"] == "Seconds to a validation loss of 2.010: EGOP each epoch 60, AdamW 100."
    assert found["resnet/upfront-training"] == "Last training loss: EGOP up-front 0.4, AdamW 0.5."


def test_a_method_that_never_gets_there_is_said_so(tmp_path):
    never = PAPER | {PERIODIC: (0.01, 1.0, 0.3, 0.2), SOAP_EPOCH: (0.01, 1.0, 0.3, 0.2)}
    store = fake_store(tmp_path / "r.jsonl", never)
    judged = {each.id: each for each in EXPERIMENT.judge(store, "full")}
    assert ours(judged["resnet/periodic-epochs"]).verdict == "does not hold"
    assert "EGOP each epoch never" in judged["resnet/periodic-epochs"].found
    assert ours(judged["resnet/periodic-soap"]).verdict == "cannot be judged", "neither got there"
    bars = EXPERIMENT.pictures(store, "full")[1].panels[0].series[0]
    assert math.isinf(bars.median[list(bars.x).index(PERIODIC)])


def test_the_learning_rate_is_that_of_the_best_tuning_accuracy(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", PAPER)
    assert EXPERIMENT.chosen(store, "full", ADAMW) == 1e-3


def test_runs_that_are_still_to_come_are_named(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", {name: PAPER[name] for name in (ADAMW, UPFRONT)})
    with pytest.raises(LookupError, match="EGOP each epoch has no tuning run"):
        EXPERIMENT.judge(store, "full")
    assert OPTIONAL == (BOTH_SIDES,)


def test_a_method_that_no_claim_is_about_is_shown_with_the_runs_it_has(tmp_path):
    store = fake_store(tmp_path / "r.jsonl", PAPER)
    fewer = Store(tmp_path / "fewer.jsonl")
    fewer.add(*(run for run in store if not (run.config["method"] == MUON and run.config["seed"] == 2)))
    assert len(EXPERIMENT.reported(fewer, "full")[MUON]) == 2
    assert "over 3 trials, Muon: 2." in EXPERIMENT.pictures(fewer, "full")[0].caption
    assert "Muon" not in EXPERIMENT.pictures(store, "full")[0].caption


def test_runs_on_other_images_are_not_mixed_in(tmp_path):
    fake_store(tmp_path / "r.jsonl", PAPER | {ADAMW: (0.3, 1.0, 0.0, 0.0)}, data=100)
    assert set(verdicts(fake_store(tmp_path / "r.jsonl", PAPER)).values()) == {"holds"}
