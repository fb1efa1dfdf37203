import math

import pytest
import torch

from egop_lab.experiments.linear_networks import LinearNetworksExperiment, _compare_levels
from egop_lab.training import batched
from egop_lab.training import linear as linear_problem
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.linear import BLOCK, FIRST, LinearProblem
from egop_lab.training.records import Store
from egop_lab.training.tuning import TUNING
from fakes import verdicts

CPU = torch.device("cpu")
FINALS = {
    "Adam": {ORIGINAL: 1e-6, EGOP: 1e-10, BLOCK: 1e-10, FIRST: 1e-7},
    "Adagrad": {ORIGINAL: 1e-6, EGOP: 1e-9, BLOCK: 1e-9, FIRST: 1e-9},
    "SGD": {ORIGINAL: 1e-5, EGOP: 1e-5},
    "SGD+momentum": {ORIGINAL: 1e-5, EGOP: 1e-5},
}


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Judge made-up final losses; the second rate is the best one in original coordinates."""

    def go(finals, only_at_chosen=False, diverging=None, slow=True):
        def train(problem, optimizer, rates, steps, *, basis, record_every, **_):
            final_loss = finals[optimizer][basis or ORIGINAL]
            every = LinearNetworksExperiment().settings["rates"][optimizer]
            factors = torch.tensor([1.0 if rate == every[1] else 3.0 for rate in rates], dtype=torch.float64)
            if only_at_chosen and basis is not None and optimizer in ("Adam", "Adagrad"):
                factors = torch.where(factors > 1, 1e9, factors)
            if optimizer == diverging:
                factors[-1] = math.nan
            last = (final_loss * factors).expand(len(problem.seeds), -1)
            count = steps // record_every + 1
            late = count // 2 if basis is None and optimizer in ("Adam", "Adagrad") and slow else 1
            before = torch.ones_like(last)
            curve = torch.stack([before if place < late else last for place in range(count)], dim=-1)
            return {"loss": curve, "validation loss": 2 * curve}, 1.0

        monkeypatch.setattr(batched, "train", train)
        monkeypatch.setattr(LinearProblem, "__init__", lambda self, seeds, *_: setattr(self, "seeds", seeds))
        monkeypatch.setattr(LinearProblem, "basis", lambda self, kind: None if kind == ORIGINAL else kind)
        experiment = LinearNetworksExperiment("quick", Store(tmp_path / "records.jsonl"))
        experiment.run(Context(progress=False))
        return verdicts(experiment)

    return go


def changed(optimizer, **finals):
    kinds = {"original": ORIGINAL, "whole": EGOP, "block": BLOCK, "first": FIRST}
    return FINALS | {optimizer: FINALS[optimizer] | {kinds[name]: value for name, value in finals.items()}}


def test_all_claims_hold_where_the_records_are_as_the_paper_says(judged):
    found = judged(FINALS)
    assert len(found) == 17
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize(
    ("finals", "failing"),
    [
        (changed("Adam", whole=5e-7, block=5e-7, first=9e-7), {"Adam-lower"}),
        (changed("Adagrad", block=5e-7), {"Adagrad-block"}),
        (changed("Adam", block=1e-5), {"Adam-block", "Adam-block-lower"}),
        (changed("Adagrad", first=5e-7), {"Adagrad-first-layer"}),
        (changed("Adam", first=1e-10), {"Adam-first-layer"}),
        (changed("SGD", original=1e-8, whole=1e-8), {"adaptive"}),
        (
            changed("Adam", whole=math.nan),
            {"adaptive"}
            | {f"Adam-{name}" for name in ("lower", "faster", "robust", "validation", "block", "first-layer")},
        ),
    ],
)
def test_each_claim_fails_where_the_records_say_so(judged, finals, failing):
    assert {claim for claim, verdict in judged(finals).items() if verdict != "holds"} == failing


def test_a_loss_that_is_reached_no_sooner_is_not_faster(judged):
    found = judged(changed("Adagrad", original=1e-9), slow=False)
    assert {claim for claim, verdict in found.items() if claim.endswith("faster") and verdict == "holds"} == {
        "Adam-faster"
    }, "which ends lower"


def test_a_curve_that_is_mostly_lower_is_faster_and_levels_stand_beside():
    epochs, original = [0, 20, 40, 60, 80], [1.0, 1e-6, 1e-7, 1e-8, 1e-9]
    late = _compare_levels(epochs, [1.0, 1e-11, 1e-11, 1e-5, 1e-5], original)
    assert late.verdict == "holds"
    assert late.finding.startswith("EGOP and original, by 20: 1e-05: 20 and 20; 1e-10: 20 and never; 1e-15: never")
    assert _compare_levels(epochs, original, original).verdict == "does not hold"


def test_losses_at_the_rounding_floor_are_said_to_be(judged, tmp_path):
    found = judged(changed("Adam", original=1e-33, whole=1e-35))
    assert found["Adam-lower"] == found["Adam-validation"] == "does not hold"
    store = Store(tmp_path / "records.jsonl")
    lower = LinearNetworksExperiment("quick", store).judge()[0]
    assert lower.finding.endswith("both at the rounding floor.")
    assert lower.margin == 0


def test_a_gain_at_one_learning_rate_only_is_not_robust(judged):
    found = judged(FINALS, only_at_chosen=True)
    assert found["Adam-robust"] == found["Adagrad-robust"] == "does not hold"
    assert found["Adam-lower"] == "holds"


def test_sgd_that_diverges_in_both_coordinates_at_some_rates_is_still_compared(judged):
    assert judged(changed("SGD", whole=1e-5), diverging="SGD")["SGD-same"] == "holds"


def test_sgd_that_differs_between_coordinates_is_an_error(judged):
    with pytest.raises(AssertionError, match="SGD differs"):
        judged(changed("SGD", whole=1e-2))


class Toy(LinearNetworksExperiment):
    @property
    def settings(self):
        rates = {name: [rate, 4 * rate] for name, rate in {"Adam": 0.01, "Adagrad": 0.01, "SGD": 1.0}.items()}
        small = {"trials": 2, "tuning trials": 1, "epochs": 3, "samples": 2000, "gradients": 200}
        return super().settings | small | {"rates": rates | {"SGD+momentum": [0.1, 0.4]}}


def test_a_toy_run_has_every_variant_and_keeps_curves_only_at_the_chosen_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(linear_problem, "WIDTHS", (10, 5, 4, 10))
    store = Store(tmp_path / "records.jsonl")
    experiment = Toy("quick", store)
    experiment.run(Context(progress=False))
    assert len(store) == 4 * 2 + 2 * 2 * (4 * 2 + 2 * 2)
    for record in store:
        rate = experiment.choose_rate(record.config["optimizer"])
        reported = record.config["seed"] < TUNING and record.config["lr"] == rate
        assert ("loss" in record.result) == reported
        assert record.result["best validation"] > 0
    for optimizer in ("Adam", "Adagrad"):
        for seed in (0, 1):
            starts = {
                record.result["loss"][0]
                for record in experiment.records(optimizer=optimizer, seed=seed)
                if "loss" in record.result
            }
            assert max(starts) <= min(starts) * 1.0001, "equivalent starts in all coordinates"
    assert {claim.verdict for claim in experiment.judge() if claim.id.endswith("-same")} == {"holds"}
    first, variants = experiment.pictures()
    assert [len(panel.series) for panel in first.panels] == [8, 8, 8]
    assert [len(panel.series) for panel in variants.panels] == [8, 6, 6]
    assert first.panels[0].series[0].x == [0, 1, 2, 3]


@pytest.fixture
def problem(monkeypatch):
    monkeypatch.setattr(linear_problem, "WIDTHS", (10, 5, 4, 10))
    return LinearProblem([3, 4], 2000, 150, torch.float64, CPU)


def test_the_data_have_the_papers_singular_values():
    inputs, target = linear_problem._draw_data(0, 400)
    wanted = torch.arange(1, 11, dtype=torch.float64) ** -2.0
    assert torch.allclose(torch.linalg.svdvals(inputs), wanted)
    assert target.shape == (10, 10)


def test_the_recorded_loss_is_the_mean_over_all_training_samples(problem):
    point = {name: value[:, None] for name, value in problem.start().items()}
    product = point["2.weight"] @ point["1.weight"] @ point["0.weight"]
    residuals = problem.train[:, None] @ (product - problem.target[:, None]).mT
    assert torch.allclose(problem.evaluate(point)["loss"], residuals.square().sum((-2, -1)) / 1000)
    batches = torch.stack([problem.losses(point, problem.batch(step)) for step in range(problem.steps_per_epoch)])
    assert torch.allclose(batches.mean(0), problem.evaluate(point)["loss"])


def test_block_bases_are_one_a_layer_and_the_first_layer_is_one_of_them(problem):
    whole, block, first = (problem.basis(kind) for kind in (EGOP, BLOCK, FIRST))
    assert [names for names, _ in whole.blocks] == [linear_problem.NAMES]
    assert [tuple(v.shape) for _, v in whole.blocks] == [(2, 110, 110)]
    assert [names for names, _ in block.blocks] == [(name,) for name in linear_problem.NAMES]
    assert [names for names, _ in first.blocks] == [("0.weight",)]
    assert torch.equal(first.blocks[0][1], block.blocks[0][1])
    assert problem.basis(ORIGINAL) is None
