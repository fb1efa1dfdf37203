import pytest
import torch

import egop
from egop_lab.builders import build_torch_optimizer
from egop_lab.data.digits import digits
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.models.small import cross_entropy, scores, xavier_
from egop_lab.training import batched
from egop_lab.training import digits as digits_problem
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.digits import BATCH, STEPS_PER_EPOCH, DigitsProblem, make_generator
from egop_lab.training.loop import train
from egop_lab.training.records import Record, Store
from egop_lab.training.tuning import TUNING
from fakes import verdicts

LOSSES = {
    "Adam": {ORIGINAL: 1e-3, EGOP: 1e-4},
    "Adagrad": {ORIGINAL: 1e-2, EGOP: 1e-3},
    "SGD": {ORIGINAL: 0.1, EGOP: 0.1},
    "SGD+momentum": {ORIGINAL: 0.05, EGOP: 0.05},
}


def faked(tmp_path, losses, accuracy=None, only_at_chosen=False, tuned=1):
    """Make up runs in which one rate has the best validation accuracy, and perhaps another one on tuning trials."""
    store = Store(tmp_path / "records.jsonl")
    experiment = DigitsExperiment("quick", store)
    for optimizer, rates in experiment.settings["rates"].items():
        for kind in (ORIGINAL, EGOP):
            for rate in rates:
                turned = kind == EGOP and optimizer in ("Adam", "Adagrad")
                elsewhere = only_at_chosen and turned and rate != rates[1]
                loss = losses[optimizer][kind] * (1e9 if elsewhere else 1)
                share = (accuracy or {}).get((optimizer, kind), 0.9)
                for seed in (0, 1, 2, TUNING):
                    config = {"optimizer": optimizer, "coordinates": kind, "lr": rate, "seed": seed}
                    soon = loss if turned else 2 * loss
                    result = {"loss": [10.0, soon, loss], "test accuracy": share}
                    best = rates[tuned if seed == TUNING else 1]
                    result["best validation accuracy"] = 0.95 if rate == best else 0.5
                    store.add(Record(experiment.config(**config), result))
    return experiment


def judged(*arguments, **options):
    return verdicts(faked(*arguments, **options))


def test_rates_are_chosen_as_in_the_paper_and_those_of_tuning_trials_stand_beside(tmp_path):
    experiment = faked(tmp_path, LOSSES, only_at_chosen=True, tuned=2)
    found = {each.id: each for each in experiment.judge() if each.kind == "claim"}
    lower = found["digits/Adam-lower"]
    assert lower.verdict == "holds"
    (other,) = lower.alternatives
    assert (other.verdict, other.rule) == ("does not hold", "rates chosen on tuning trials of their own")
    assert "EGOP: 1e+05" in other.finding
    assert found["digits/Adam-robust"].alternatives == ()


def test_all_claims_hold_where_the_records_are_as_the_paper_says(tmp_path):
    found = judged(tmp_path, LOSSES)
    assert len(found) == 14
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize(
    ("losses", "failing"),
    [
        ({"Adam": {ORIGINAL: 1e-3, EGOP: 2e-3}}, {"Adam-lower", "Adam-faster", "Adam-robust"}),
        ({"Adagrad": {ORIGINAL: 1.0, EGOP: 0.5}}, {"Adagrad-below-sgd", "Adagrad-faster-than-sgd"}),
        (
            {"SGD": {ORIGINAL: 1e-5, EGOP: 1e-5}},
            {f"{name}-{claim}" for name in ("Adam", "Adagrad") for claim in ("below-sgd", "faster-than-sgd")},
        ),
    ],
)
def test_each_claim_fails_where_the_records_say_so(tmp_path, losses, failing):
    found = judged(tmp_path, LOSSES | losses)
    assert {claim for claim, verdict in found.items() if verdict != "holds"} == failing


def test_a_lower_accuracy_and_a_gain_at_one_rate_are_noticed(tmp_path):
    found = judged(tmp_path, LOSSES, accuracy={("Adam", EGOP): 0.8}, only_at_chosen=True)
    failing = {claim for claim, verdict in found.items() if verdict != "holds"}
    assert failing == {"Adam-accuracy", "Adam-robust", "Adagrad-robust"}


def test_sgd_that_differs_between_coordinates_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="SGD differs"):
        judged(tmp_path, LOSSES | {"SGD": {ORIGINAL: 0.1, EGOP: 0.01}})


class Toy(DigitsExperiment):
    @property
    def settings(self):
        rates = {"Adam": [0.01, 0.04], "Adagrad": [0.1], "SGD": [0.1, 0.4], "SGD+momentum": [0.1]}
        return {"trials": 2, "tuning trials": 1, "epochs": 2, "rates": rates}


def test_a_toy_run_has_curves_of_all_methods_in_both_coordinates(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def stack(bases):
        """Draw random bases: estimating real ones takes longer than the rest of the test."""
        sizes = {"0.weight": 2048, "2.weight": 320}
        return batched.Basis(
            tuple(
                ((name,), torch.linalg.qr(torch.randn(2, size, size, generator=generator))[0])
                for name, size in sizes.items()
            )
        )

    monkeypatch.setattr(DigitsProblem, "bases", lambda self: [])
    monkeypatch.setattr(batched.Basis, "stack", stack)
    store = Store(tmp_path / "records.jsonl")
    experiment = Toy("quick", store)
    experiment.run(Context(progress=False))
    assert len(store) == 6 * 1 + 6 * 2 * 2
    assert {len(record.result["loss"]) for record in store} == {3}
    for seed in (0, 1):
        starts = {record.result["loss"][0] for record in experiment.records(seed=seed)}
        assert max(starts) <= min(starts) * 1.0001, "equivalent starts"
    found = verdicts(experiment)
    assert found["SGD-same"] == found["SGD+momentum-same"] == "holds"
    (picture,) = experiment.pictures()
    assert [len(panel.series) for panel in picture.panels] == [8, 8, 8]
    assert [len(series.x) for series in picture.panels[0].series] == [3] * 8
    assert all(series.egop == (EGOP in series.label) for series in picture.panels[0].series)


class Epochs:
    """Batches of a trial; each pass is its next epoch."""

    def __init__(self, tensors, seed):
        self.tensors, self.seed, self.epoch = tensors, seed, 0

    def __iter__(self):
        order = torch.randperm(len(self.tensors[0]), generator=make_generator(self.seed, self.epoch))
        self.epoch += 1
        return (tuple(tensor[rows] for tensor in self.tensors) for rows in order.split(BATCH))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD+momentum"])
def test_a_run_in_the_batch_is_the_run_by_itself(optimizer, turned):
    seeds, rates = [1, 5], [0.01, 0.02]
    bases = [
        egop.estimate(
            egop.Objective(digits_problem.network(seed), cross_entropy, [digits().train.batch]),
            rho=egop.Initialization(init_fn=xavier_),
            partition={"last": ["2.weight"]},
            structure=egop.Full(),
            samples=10,
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )
        for seed in seeds
    ]
    problem = DigitsProblem(seeds, torch.device("cpu"))
    basis = batched.Basis.stack(bases) if turned else None
    found, _ = batched.train(problem, optimizer, rates, 2 * STEPS_PER_EPOCH, record_every=STEPS_PER_EPOCH, basis=basis)
    model, sets = digits_problem.network(seeds[1]), digits().to("cpu")
    alone = train(
        model,
        build_torch_optimizer(optimizer, model, rates[0], bases[1] if turned else None),
        cross_entropy,
        Epochs(sets[0], seeds[1]),
        2,
        evaluate=lambda model: scores(model, *sets),
        progress=False,
    )
    assert found["loss"][1, 0].tolist() == pytest.approx(alone.loss, rel=1e-4)
    assert found["test accuracy"][1, 0].tolist() == pytest.approx(alone.metrics["test accuracy"], abs=2e-3)


def test_a_basis_has_a_block_for_each_weight_matrix(monkeypatch):
    monkeypatch.setattr("egop_lab.training.digits.digits_network", lambda: torch.nn.Sequential(torch.nn.Linear(64, 10)))
    (basis,) = DigitsProblem([0], torch.device("cpu")).bases()
    assert list(basis) == ["0.weight"]
    assert basis.spectrum["0.weight"].samples == 650
