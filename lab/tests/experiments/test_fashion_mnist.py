import math

import pytest
import torch
from torch import nn

import egop
from egop_lab.data.batches import DataSet, Split
from egop_lab.experiments import fashion_mnist
from egop_lab.experiments.fashion_claims import Method, compare_at_equal_settings, judge_growth, judge_rank
from egop_lab.experiments.fashion_mnist import FashionMnistExperiment
from egop_lab.training import fashion as fashion_runs
from egop_lab.training.context import Context
from egop_lab.training.fashion import Runs, normal_, train_batched
from egop_lab.training.records import Store
from egop_lab.training.tuning import TUNING

RANKS = (50, 200, 1000, 2000)
METHODS = ["original", "r = 3", "r = 20", "r = 3, these alone"]


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judge made-up runs: when each rank reaches the loss 0.1, its best accuracy, its seconds."""

    def go(reached, accuracy=None, seconds=None, preset="full", accuracies=None):
        class Fake:
            def __init__(self, images, context):
                self.context = context

            def spectrum(self, config):
                return {"index": [1, 2], "eigenvalues": [1.0, 0.5], "dimension": 2, "even": [1, 2], "samples": 2}

            def time_epochs(self, config):
                took = (seconds or {}).get(config["rank"], 10.0)
                return {"seconds per epoch": took / 100, "estimation seconds": 1.0 if config["rank"] else 0.0}

            def curves(self, config):
                rank, epochs = config["rank"], config["epochs"]
                losses = [1.0 if epoch < reached.get(rank, epochs) else 0.1 for epoch in range(epochs + 1)]
                best = (accuracy or {}).get(
                    -rank if config.get("reduced") else rank, 0.8 if config.get("reduced") else 0.9
                )
                shares = [0.1] * (epochs // 2) + [best] * (epochs + 1 - epochs // 2)
                if config["seed"] == TUNING:
                    place = config["lr"], config["weight_decay"]
                    shares = [(accuracies or {}).get(place, -abs(place[0] - 1e-2) - abs(place[1] - 1e-1))] * 2
                return {"loss": losses, "validation accuracy": shares, "test accuracy": shares}

        monkeypatch.setattr(fashion_mnist, "Runs", Fake)
        monkeypatch.setattr(fashion_mnist, "train_batched", lambda runs, configs: ([*map(runs.curves, configs)], 1.0))
        experiment = FashionMnistExperiment(preset, Store(tmp_path / "records.jsonl"))
        experiment.run(Context(progress=False))
        return {each.id.partition("/")[2]: each.verdict for each in experiment.judge()}, experiment

    return go


FASTER = {0: 90, 50: 80, 200: 60, 1000: 40, 2000: 40}
SECONDS = {0: 30.0, 50: 25.0, 200: 20.0, 1000: 15.0, 2000: 40.0}


def failing(found):
    return {claim for claim, verdict in found[0].items() if verdict != "holds"}


def test_all_claims_hold_where_the_records_are_as_the_paper_says(judged):
    found = judged(FASTER, seconds=SECONDS)
    assert len(found[0]) == 2 * len(RANKS) + 5
    assert failing(found) == set()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reached": FASTER | {50: 90}}, {"r50-faster"}),
        ({"reached": FASTER | {2000: 200}}, {"r2000-faster", "grows"}),
        ({"reached": FASTER | {200: 85}}, {"grows"}),
        ({"reached": dict.fromkeys((*FASTER,), 40) | {0: 90}}, {"grows"}),
        ({"reached": FASTER, "accuracy": {200: 0.85}}, {"r200-accuracy"}),
        ({"reached": FASTER, "accuracy": {-1000: 0.95}}, {"auxiliary"}),
        ({"reached": FASTER, "seconds": SECONDS | {0: 5.0}}, {"wall-clock", "sooner"}),
        ({"reached": FASTER, "seconds": SECONDS | {2000: 5.0}}, {"wall-clock"}),
        ({"reached": FASTER, "seconds": SECONDS | {50: 5.0}}, {"wall-clock"}),
    ],
)
def test_each_claim_fails_where_the_records_say_so(judged, options, expected):
    assert failing(judged(**({"seconds": SECONDS} | options))) == expected


def test_what_the_other_search_and_equal_settings_say_stands_beside(judged):
    _, experiment = judged(FASTER, seconds=SECONDS, accuracies={(0.1, 0.01): 0.5, (0.05, 0): 0.9})
    grows = next(each for each in experiment.judge() if each.id.endswith("/grows"))
    assert [other.rule.partition(":")[0] for other in grows.alternatives] == [
        "final loss at equal learning rate and weight decay"
    ]
    assert grows.alternatives[0].verdict == "does not hold"
    assert compare_at_equal_settings([0, 50, 200], [[1.0, 0.9, 0.8], [math.nan, 1.0, 1.0]]).verdict == "holds"
    assert compare_at_equal_settings([0, 50, 200], [[1.0, 2.0, 1.5]]).verdict == "does not hold", (
        "no gain to begin with"
    )
    assert compare_at_equal_settings([0, 50, 200], [[1.0, 0.9, 0.9]]).finding == (
        "Lower, of 1 combinations: original to r = 50: 1; r = 50 to r = 200: 0."
    )


def test_a_spectrum_without_an_end_is_not_captured():
    index = [1, 1000, 4000]
    steep, flat = ({"index": index, "eigenvalues": values} for values in ([1.0, 1e-6, 1e-6], [1.0, 1.0, 1.0]))
    assert [judge_rank(each, judged=True).verdict for each in (steep, flat)] == ["holds", "does not hold"]


def test_a_loss_that_is_never_reached_is_said_to_be():
    found = judge_growth({0: 90, 50: 60, 200: None})
    assert found.finding.endswith("r = 50: 60; r = 200: not reached.")
    assert found.verdict == "does not hold"
    assert judge_growth({0: 90, 50: None, 200: 60}).verdict == "holds"


def test_the_quick_preset_does_not_judge_the_clock(judged):
    found, _ = judged({0: 9, 50: 8, 200: 7, 500: 6}, preset="quick")
    unknown = {"wall-clock", "sooner", "suffices"}
    assert {found[claim] for claim in unknown} == {"cannot be judged"}
    assert {verdict for claim, verdict in found.items() if claim not in unknown} == {"holds"}


def test_the_search_goes_along_two_lines_and_its_best_is_used(judged):
    _, experiment = judged(FASTER)
    assert len([record for record in experiment.store if record.config.get("seed") == TUNING]) == 6 * 81, (
        "the grid has the lines"
    )
    (*_, tuning) = experiment._tuning(Method(50), "lines")
    assert len(tuning) == 17
    assert {(config["lr"], config["weight_decay"]) for config in tuning if config["weight_decay"] != 0.01} == {
        (1e-2, decay) for decay in (0, 1e-5, 1e-4, 1e-3, 5e-2, 1e-1, 2e-1, 5e-1)
    }
    reported = [
        record.config
        for record in experiment.store
        if record.config["kind"] == "run" and record.config["seed"] < TUNING
    ]
    assert {(config["lr"], config["weight_decay"], config["epochs"]) for config in reported} == {(1e-2, 1e-1, 100)}
    assert {config["seed"] for config in reported} == {0, 1, 2}


def test_a_search_of_the_whole_grid_can_find_another_place(judged):
    """With the first weight decay the best rate is 0.1; the best overall is a rate of 0.05 without weight decay."""
    _, experiment = judged({}, accuracies={(0.1, 0.01): 0.5, (0.05, 0): 0.9})
    assert experiment.choose_rates(Method(50), "lines") == (0.1, 0.01)
    assert experiment.choose_rates(Method(50), "grid") == (0.05, 0)


class Toy(FashionMnistExperiment):
    @property
    def settings(self):
        small = {"images": 90, "ranks": [3, 20], "epochs": 2, "tuning epochs": 1, "trials": 2, "spectrum samples": 12}
        few = {"rates": [1e-2, 1e-1], "weight decays": [0, 0.01], "leading directions alone": 3, "timed epochs": 1}
        return super().settings | small | few


def small_network():
    return nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.fixture
def tiny(monkeypatch):
    """Use a 16-4-3 network and random images."""
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.rand(120, 16, generator=generator), torch.arange(120) % 3)
    monkeypatch.setattr(fashion_runs, "fashion_mnist", lambda folder: DataSet(split, split, split))
    monkeypatch.setattr(fashion_runs, "fashion_folder", lambda folder: folder)
    monkeypatch.setattr(fashion_runs, "fashion_network", small_network)
    monkeypatch.setattr(fashion_runs, "BATCH", 30)


@pytest.mark.usefixtures("tiny")
def test_a_run_says_where_its_images_are_from(tmp_path):
    said = []
    Runs(90, Context(data=str(tmp_path), say=said.append))
    assert said == [f"images: {tmp_path}"]


@pytest.mark.usefixtures("tiny")
def test_a_toy_run_has_all_methods(tmp_path):
    store = Store(tmp_path / "records.jsonl")
    experiment = Toy("quick", store)
    experiment.run(Context(progress=False))
    assert len(store) == 1 + 4 * 3 + 4 * 2 + 4
    for seed in (0, 1):
        runs = experiment.records(kind="run", seed=seed)
        assert [len(run.result["loss"]) for run in runs] == [3, 3, 3, 3]
        starts = [run.result["loss"][0] for run in runs]
        assert max(starts) == pytest.approx(min(starts), rel=1e-5), "equivalent starts"
    times = experiment.records(kind="timing")
    assert [time.result["estimation seconds"] > 0 for time in times] == [False, True, True, True]
    assert all(time.result["seconds per epoch"] > 0 for time in times)
    assert len(experiment.judge()) == 9
    first, second = experiment.pictures()
    assert [series.label for series in first.panels[0].series] == METHODS
    assert len(first.panels[1].series[0].x) == 12
    bars = second.panels[1]
    assert bars.kind == "bar"
    assert [list(series.x) for series in bars.series] == [METHODS] * 2


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("method", [{"rank": 0}, {"rank": 3}, {"rank": 20}, {"rank": 3, "reduced": True}])
def test_runs_together_are_the_runs_one_at_a_time(method, monkeypatch):
    monkeypatch.setattr(fashion_runs, "fashion_network", lambda: small_network().double())
    runs = Runs(100, Context(progress=False))  # the last batch is smaller
    runs.train_set, runs.validation, runs.test = (
        (images.double(), labels) for images, labels in (runs.train_set, runs.validation, runs.test)
    )
    own = [{"lr": 0.01, "weight_decay": 0.5}, {"lr": 0.1, "weight_decay": 0.0}]
    configs = [{**method, **pair, "epochs": 3, "seed": seed} for pair in own for seed in (4, 2)]
    found, _ = train_batched(runs, configs)
    for config, curves in zip(configs, found, strict=True):
        alone = runs.train(config)
        for name, values in curves.items():
            assert values == pytest.approx(alone[name], rel=1e-8), (config, name)


def test_nothing_is_kept_of_a_run_after_its_divergence():
    found = fashion_runs._end_at_divergence({"loss": [1.0, math.inf, 2.0], "validation accuracy": [0.1, 0.2, 0.3]})
    assert found["loss"][:2] == [1.0, math.inf]
    assert math.isnan(found["loss"][2])
    assert found["validation accuracy"][:2] == [0.1, 0.2]
    assert math.isnan(found["validation accuracy"][2])


@pytest.mark.usefixtures("tiny")
def test_a_search_that_is_not_done_is_said_to_be_so(tmp_path):
    with pytest.raises(LookupError, match="left"):
        Toy().judge()


@pytest.mark.usefixtures("tiny")
def test_a_layer_with_fewer_weights_than_the_rank_has_a_full_basis():
    basis, seconds = Runs(120, Context(progress=False)).basis(20, 0)
    assert seconds > 0
    assert {name: change.kind for name, change in basis.items()} == {"0.weight": "Auxiliary", "2.weight": "Full"}
    assert basis.spectrum["0.weight"].samples == 20, "at least as many gradients as directions"


@pytest.mark.usefixtures("tiny")
def test_the_spectrum_is_the_one_of_a_full_basis():
    runs = Runs(120, Context(progress=False))
    found = runs.spectrum({"seed": 0, "samples": 12})
    basis = egop.estimate(
        runs._objective(0),
        rho=egop.Initialization(init_fn=normal_),
        partition={"first": ["0.weight"]},
        structure=egop.Full(),
        samples=12,
        generator=fashion_runs.generator(0, 2),
        progress=False,
    )
    wanted = basis.spectrum["0.weight"].eigenvalues[:12]
    assert torch.allclose(torch.tensor(found["eigenvalues"], dtype=torch.float64), wanted, rtol=1e-4, atol=1e-9)


def test_weight_decay_is_on_weights_and_not_on_biases():
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))
    weights, biases = fashion_runs._optimizer(model, None, 0.1, 0.3).param_groups
    assert ([value.dim() for value in weights["params"]], weights["weight_decay"]) == ([2, 2], 0.3)
    assert ([value.dim() for value in biases["params"]], biases["weight_decay"]) == ([1, 1], 0)


def test_the_start_is_standard_normal_with_small_biases():
    model = normal_(nn.Sequential(nn.Linear(400, 100)), torch.Generator().manual_seed(0))
    assert model[0].weight.std().item() == pytest.approx(1, abs=0.02)
    assert 0.04 < model[0].bias.abs().max().item() <= 0.05
