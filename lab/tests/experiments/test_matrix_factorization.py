import math

import pytest
import torch

from egop_lab.experiments import tuned_experiment
from egop_lab.experiments.matrix_factorization import CONSTANT, SPEED, MatrixFactorizationExperiment, crossing
from egop_lab.experiments.tuned_experiment import Method
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.factorization import PRINTED, Factorization
from egop_lab.training.records import Store
from egop_lab.training.tuning import TUNING
from fakes import faked, in_this_process, verdicts

SIZES = {"n": 6, "rank": 2, "condition": 2.0, "decay": 0.5, "noise": 0.01, "samples": 60}


def test_the_instances_are_the_papers():
    problem = Factorization([0, 7], **SIZES)
    assert torch.linalg.svdvals(problem.data[1]).tolist() == pytest.approx([k**-0.5 for k in range(1, 7)])
    assert torch.linalg.svdvals(problem.truth[1]).tolist() == pytest.approx([1, 0.5, 0, 0, 0, 0], abs=1e-12)
    noise = problem.targets - problem.data @ problem.truth
    assert 0.005 < noise.std().item() < 0.02


def test_the_start_is_the_spectral_one():
    problem = Factorization([3], **SIZES)
    start = problem.start()
    U, values, Vh = torch.linalg.svd(torch.linalg.inv(problem.data[0]) @ problem.targets[0])
    product = start["L"][0] @ start["R"][0].mT
    assert torch.allclose(product, U[:, :2] * values[:2] @ Vh[:2])
    assert torch.allclose(start["L"][0].mT @ start["L"][0], start["R"][0].mT @ start["R"][0])  # balanced
    printed = Factorization([3], **SIZES, start=PRINTED).single_trial(3).start()
    assert torch.allclose(printed["L"][0] @ printed["R"][0].mT, U[:, :2] / values[:2] @ Vh[:2])


def test_the_optimum_is_attained_and_not_undercut():
    problem = Factorization([3], **SIZES)
    U, values, Vh = torch.linalg.svd(problem.targets[0])
    best = {"L": (torch.linalg.inv(problem.data[0]) @ (U[:, :2] * values[:2]))[None, None], "R": Vh[:2].mT[None, None]}
    assert problem.losses(best, 0).item() == pytest.approx(problem.least.item(), rel=1e-12)
    assert problem.evaluate(best)["excess"].item() < 1e-12
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        near = {name: value + 1e-3 * torch.randn(value.shape, generator=generator) for name, value in best.items()}
        assert problem.losses(near, 0).item() > problem.least.item()


def test_there_is_a_basis_for_each_factor():
    basis = Factorization([0, 1], **SIZES).basis(EGOP)
    assert [names for names, _ in basis.blocks] == [("L",), ("R",)]
    assert [tuple(v.shape) for _, v in basis.blocks] == [(2, 12, 12)] * 2


class Toy(MatrixFactorizationExperiment):
    @property
    def settings(self):
        settings = super().settings
        small = {"trials": 2, "tuning trials": 1, "steps": 20, "record every": 10, "record tuning every": 10}
        return {**settings, **small, "sizes": SIZES, "exponents": {key: [-2, -1] for key in settings["exponents"]}}


def test_the_result_has_the_shape_of_the_figure(tmp_path, monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    monkeypatch.setattr(tuned_experiment, "run_in_processes", in_this_process)
    store = Store(tmp_path / "records.jsonl")
    Toy("quick", store).run(Context(progress=False))
    (picture,) = Toy("quick", store).pictures()
    assert [panel.title for panel in picture.panels] == [
        "Loss", "Reconstruction", "Learning rates",
        "Loss, fastest rates", "Reconstruction, fastest rates", "Steps needed",
    ]  # fmt: skip
    assert [line.label for line in picture.panels[0].series] == [
        "Adam", "Adam, EGOP", "Adagrad", "Adagrad, EGOP", "SOAP", "SOAP (0.95)", "Shampoo",
    ]  # fmt: skip
    assert list(picture.panels[0].series[0].x) == [0, 10, 20]
    assert len(verdicts(Toy("quick", store))) == 9


@pytest.mark.slow
def test_the_full_preset_has_further_rows(tmp_path, monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    monkeypatch.setattr(tuned_experiment, "run_in_processes", in_this_process)
    store = Store(tmp_path / "records.jsonl")
    Toy("full", store).run(Context(progress=False))
    first, second = Toy("full", store).pictures()
    labels = [line.label for line in first.panels[0].series]
    assert {"GaLore", "Adam, random rotation", "Adagrad, random rotation"} < set(labels)
    assert [panel.title for panel in second.panels] == ["Annealed", "Annealed", "Constant", "Constant"]
    assert [line.label for line in second.panels[2].series] == [
        "Adam", "Adam, EGOP", "Adagrad", "Adagrad, EGOP", "SOAP", "Shampoo",
    ]  # fmt: skip
    assert len(verdicts(Toy("full", store))) == 11

    # Without a schedule the rate stays:
    for optimizer in ("Adam", "SOAP"):  # one that is batched and one that is not
        annealed, constant = (
            [run.result["excess"] for run in store if run.config["optimizer"] == optimizer
             and run.config["coordinates"] == ORIGINAL and run.config.get("schedule") == schedule
             and run.config["lr"] == 0.1 and run.config["seed"] == TUNING and "start" in run.config]
            for schedule in (None, CONSTANT)
        )  # fmt: skip
        assert annealed[0][0] == constant[0][0], "the same start"
        assert annealed[0][-1] != constant[0][-1]


def outcome(decades):
    """Return made-up distances to the optimum that fall by this many decades, and errors that fall with them."""

    def result(config):
        count = config["steps"] // config["record every"] + 1
        fall = decades(Method(config["optimizer"], config["coordinates"]), config["lr"])
        excess = [10.0 ** (-fall * place / (count - 1)) for place in range(count)]
        return {"excess": [max(value, 1e-16) for value in excess], "error": [0.1 + value for value in excess]}

    return result


def test_the_claims_hold_where_the_records_say_so(tmp_path):
    found = verdicts(
        faked(
            MatrixFactorizationExperiment,
            outcome(lambda method, rate: 12 if method.coordinates == EGOP else 3),
            tmp_path,
        )
    )
    assert set(found.values()) == {"holds"}
    assert len(found) == 9


@pytest.mark.slow
def test_the_printed_start_is_judged_and_the_spectral_one_stands_beside(tmp_path):
    def result(config):
        turned = config["coordinates"] == EGOP
        return outcome(lambda method, rate: 12 if turned == ("start" in config) else 3)(config)

    experiment = faked(MatrixFactorizationExperiment, result, tmp_path, preset="full")
    judged = experiment.judge()
    assert {each.verdict for each in judged} == {"holds"}
    apart = [each for each in judged if "superimposed" not in each.id]
    assert {other.verdict for each in apart for other in each.alternatives if other.rule == "from Σ^½"} == {
        "does not hold"
    }
    sooner = [other for each in judged for other in each.alternatives if other.rule.startswith("fewer steps")]
    assert [other.verdict for other in sooner] == ["holds"] * 2, "without a schedule"
    assert [each.kind for each in judged] == ["claim", "claim", "reading", "reading"] * 2 + ["claim"] * 3
    methods = {record.config["optimizer"] for record in experiment.store if "start" in record.config}
    assert methods == {"Adam", "Adagrad", "SOAP", "Shampoo"}, "the paper's"


def test_the_claims_fail_where_the_records_say_so(tmp_path):
    found = verdicts(
        faked(
            MatrixFactorizationExperiment,
            outcome(lambda method, rate: 3 if method.coordinates == EGOP else 12),
            tmp_path,
        )
    )
    assert {name for name, verdict in found.items() if verdict == "holds"} == {"superimposed"}


def test_traces_that_come_apart_are_not_superimposed(tmp_path):
    def result(config):
        found = outcome(lambda method, rate: 3)(config)
        return (
            found | {"excess": [100 * value for value in found["excess"]]} if config["optimizer"] == "SOAP" else found
        )

    experiment = faked(MatrixFactorizationExperiment, result, tmp_path)
    judged = {each.id.partition("/")[2]: each for each in experiment.judge()}["superimposed"]
    assert judged.verdict == judged.alternatives[0].verdict == "does not hold"
    assert "furthest apart at step 0, by a factor of 50." in judged.finding


def test_traces_that_differ_only_in_what_is_left_are_superimposed_in_the_loss(tmp_path):
    falls = {"Adam": 30, "Adagrad": 40, "SOAP": 50, "Shampoo": 60}
    made = faked(MatrixFactorizationExperiment, outcome(lambda m, rate: falls.get(m.optimizer, 30)), tmp_path)
    judged = {each.id.partition("/")[2]: each for each in made.judge()}["superimposed"]
    assert (judged.verdict, judged.alternatives[0].verdict) == ("holds", "does not hold")


def test_a_difference_that_is_rounding_is_no_lower_loss(tmp_path):
    def all_at_the_optimum(method, rate):
        return 14 if method.coordinates == EGOP else 13

    experiment = faked(MatrixFactorizationExperiment, outcome(all_at_the_optimum), tmp_path)
    judged = {each.id.partition("/")[2]: each for each in experiment.judge()}
    assert judged["Adam-lower"].verdict == judged["Adam-closer"].verdict == "does not hold"
    assert "Both have found the optimum." in judged["Adam-lower"].finding
    assert judged["Adam-faster"].verdict == "holds"


def test_the_fastest_rate_is_chosen_apart_from_the_one_of_the_lowest_loss(tmp_path):
    def fast_or_deep(config):
        count = config["steps"] // config["record every"] + 1
        at_once = 0.5 * SPEED if config["lr"] >= 0.01 else 1.0
        last = 1e-8 if config["lr"] >= 0.01 else 1e-12
        return {"excess": [1.0, *[at_once] * (count - 2), last], "error": [0.1] * count}

    experiment = faked(MatrixFactorizationExperiment, fast_or_deep, tmp_path)
    case = experiment.cases()[0]
    assert experiment.choose_rate(case, Method("Adam")) < 0.01
    assert experiment.fastest(Method("Adam")) >= 0.01
    assert len(experiment.reported_runs(case, Method("Adam"), 0.01)) == 3


def test_steps_to_a_threshold():
    assert crossing([1.0, 1e-2, 1e-4], 1e-3) == pytest.approx(1.5)
    assert crossing([1.0, 1e-2, 0.0], 1e-9) == pytest.approx(1.5)
    assert crossing([1.0, 1e-2], 1e-3) == math.inf
    assert crossing([1e-4, 1.0], 1e-3) == 0
