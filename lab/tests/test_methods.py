"""The compared methods: their labels, the calls that build them, and what each of them steps."""

import json
import sys
from pathlib import Path

import pytest
import torch

import egop
from egop_lab import builders, methods
from egop_lab.builders import Setup
from egop_lab.methods import RESNET, SMALL
from egop_lab.training.records import Store

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def make_setup(**options):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    return Setup(model=model, options={"lr": 0.1}, **options)


def test_labels_are_those_of_the_records_that_are_kept():
    recorded = {run.config["method"] for run in Store(RECORDS / "resnet.jsonl")}
    assert recorded <= set(RESNET)
    assert len(recorded) >= 7


def test_calls_are_those_of_the_records_that_are_kept():
    text = "".join((RECORDS / f"{name}.jsonl").read_text() for name in ("matrix-factorization", "errors-in-variables"))
    for name in SMALL:
        assert json.dumps(methods.describe(name)) in text
    assert methods.describe("Adam") is None


def test_the_call_says_how_often_a_basis_is_renewed():
    assert SMALL["SOAP"].describe(7) == (
        "pytorch_optimizer.SOAP(betas=(0.9, 0.999), weight_decay=0.0, precondition_frequency=7)"
    )
    assert "update_proj_gap=200" in methods.describe("GaLore")


@pytest.mark.parametrize("method", SMALL.values(), ids=list(SMALL))
def test_none_of_the_small_problems_has_weight_decay(method):
    pytest.importorskip("pytorch_optimizer")
    made = method(Setup(model=torch.nn.Linear(2, 2), options={"lr": 0.1}))
    assert made.param_groups[0].get("weight_decay", 0.0) == 0.0
    assert made.param_groups[0]["lr"] == 0.1


def test_the_cadence_is_the_one_asked_for():
    pytest.importorskip("pytorch_optimizer")
    start = make_setup(every=7, period=70)
    cadences = {name: made.param_groups[0]["precondition_frequency"]
                for name, method in RESNET.items() if name.startswith("SOAP") and "ours" not in name
                for made in [method(start)]}  # fmt: skip
    assert cadences == {"SOAP once": 10**9, "SOAP 100": 100, "SOAP each epoch": 70, "SOAP every 10": 7}
    assert SMALL["Shampoo"](make_setup(every=1)).preconditioning_compute_steps == 1


def test_our_soap_has_its_constants_and_both_sides_of_every_weight():
    start = make_setup()
    made = RESNET["SOAP 100, ours"](start)
    start.model(torch.ones(5, 3)).square().sum().backward()
    made.step()
    assert made.param_groups[0]["betas"] == (0.95, 0.95)
    assert {change.kind for change in made.basis.values()} == {"Kronecker"}
    assert len(made.basis) == 3


def test_a_basis_can_be_sampled_again_around_the_current_point():
    objective = egop.Objective(torch.nn.Linear(1, 1), lambda model, batch: 0.0, [0])
    assert make_setup(period=3, objective=objective).resample(0.5).rho == egop.Recentered(0.5)


def test_without_the_package_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(builders.MissingPackageError, match=r"^SOAP comes from .* pip install pytorch-optimizer\.$"):
        RESNET["SOAP 100"](make_setup())


def test_muon_is_for_kernels_and_adamw_for_the_rest():
    pytest.importorskip("pytorch_optimizer")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    muon, adamw = RESNET["Muon"](Setup(model=model, options={"lr": 0.1})).param_groups
    assert [id(each) for each in muon["params"]] == [id(model[0].weight)]
    assert len(adamw["params"]) == 3
