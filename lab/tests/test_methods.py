"""The registry of methods: each stands there once, is made from what it needs, and says what it lacks."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import egop
from egop_lab import builders, methods
from egop_lab.builders import CombinedOptimizer, Setup
from egop_lab.methods import BENCH, COMPILED, EPOCH, LANGUAGE, METHODS, RESNET, SMALL, get_label, get_methods
from egop_lab.training.records import Store

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def started(**options):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    return Setup(model=model, options={"lr": 0.1}, **options)


def test_names_are_unique_and_so_are_labels_of_a_comparison():
    assert max(Counter(method.name for method in METHODS).values()) == 1
    for where in (LANGUAGE, RESNET, SMALL, BENCH, COMPILED, EPOCH):
        labels = [method.labels[where] for method in METHODS if where in method.labels]
        assert list(get_methods(where)) == labels
        assert len(set(labels)) == len(labels) > 1
    assert get_label(RESNET, "soap") == "SOAP every 10"
    assert get_label(BENCH, "soap") == "SOAP"


@pytest.mark.parametrize("where", [LANGUAGE, RESNET])
def test_labels_are_those_of_the_records_that_are_kept(where):
    recorded = {run.config["method"] for run in Store(RECORDS / f"{where}.jsonl")}
    assert recorded <= set(get_methods(where))
    assert len(recorded) >= 7


def test_calls_are_those_of_the_records_that_are_kept():
    text = "".join((RECORDS / f"{name}.jsonl").read_text() for name in ("matrix-factorization", "errors-in-variables"))
    for name in get_methods(SMALL):
        assert json.dumps(methods.describe(name)) in text
    assert methods.describe("Adam") is None


def test_the_call_says_how_often_a_basis_is_renewed():
    assert get_methods(SMALL)["SOAP"].build.describe(7) == (
        "pytorch_optimizer.SOAP(betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=7)"
    )
    assert "update_proj_gap=200" in methods.describe("GaLore")


@pytest.mark.parametrize("method", get_methods(SMALL).values(), ids=list(get_methods(SMALL)))
def test_none_of_the_small_problems_has_weight_decay(method):
    pytest.importorskip("pytorch_optimizer")
    made = method.make(Setup(model=torch.nn.Linear(2, 2), options={"lr": 0.1}))
    assert made.param_groups[0].get("weight_decay", 0.0) == 0.0
    assert made.param_groups[0]["lr"] == 0.1


def test_the_cadence_is_the_one_asked_for():
    pytest.importorskip("pytorch_optimizer")
    start = started(every=7, period=70)
    cadences = {name: made.param_groups[0]["precondition_frequency"]
                for name, method in get_methods(RESNET).items() if name.startswith("SOAP") and "ours" not in name
                for made in [method.make(start)]}  # fmt: skip
    assert cadences == {"SOAP once": 10**9, "SOAP 100": 100, "SOAP each epoch": 70, "SOAP every 10": 7}
    assert get_methods(SMALL)["Shampoo"].make(started(every=1)).preconditioning_compute_steps == 1


def test_our_soap_has_its_constants_and_both_sides_of_every_weight():
    start = started()
    made = get_methods(RESNET)["SOAP 100, ours"].make(start)
    start.model(torch.ones(5, 3)).square().sum().backward()
    made.step()
    assert made.param_groups[0]["betas"] == (0.95, 0.95)
    assert {change.kind for change in made.basis.values()} == {"Kronecker"}
    assert len(made.basis) == 3


def test_a_basis_can_be_sampled_again_around_the_current_point():
    assert started(period=3, objective=egop.Objective(torch.nn.Linear(1, 1), lambda model, batch: 0.0, [0])).resample(
        0.5
    ).rho == egop.Recentered(0.5)


def test_a_start_that_lacks_something_is_told_so():
    with pytest.raises(ValueError, match="The method shared-fixed needs a setup with objective"):
        get_methods(LANGUAGE)["EGOP fixed"].make(started())


def test_without_the_package_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(builders.MissingPackageError, match=r"^SOAP comes from .* pip install pytorch-optimizer\.$"):
        get_methods(LANGUAGE)["SOAP"].make(started())


def test_muon_is_for_hidden_matrices_and_adamw_for_the_rest():
    start = started()
    made = get_methods(LANGUAGE)["Muon"].make(start)
    assert isinstance(made, CombinedOptimizer)
    muon, adamw = made.parts
    middle = start.model[1].weight
    assert {id(each) for each in muon.param_groups[0]["params"]} == {id(start.model[0].weight), id(middle)}
    assert len(adamw.param_groups[0]["params"]) == 4


def test_a_basis_can_be_online_in_some_weights_only():
    start = started(inside="1.*")
    made = get_methods(LANGUAGE)["EGOP online"].make(start)
    start.model(torch.ones(5, 3)).square().sum().backward()
    made.step()
    assert isinstance(made, egop.ReparameterizedOptimizer)
    assert list(made.basis) == ["1.weight"]
