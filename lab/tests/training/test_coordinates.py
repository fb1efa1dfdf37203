"""Runs of the comparison of coordinates: every method on every kind of network, its weights, schedules and bases."""

from __future__ import annotations

import math

import pytest
import torch

import egop
from egop_lab.builders import CombinedOptimizer
from egop_lab.data.images import HeldImages
from egop_lab.data.text import Text
from egop_lab.methods import BASES, COLUMNS, COORDINATES, cell, get_methods
from egop_lab.training import coordinates
from egop_lab.training.coordinates import ImageRun, LanguageRun, step_times

CPU = torch.device("cpu")
METHODS = get_methods(COORDINATES)
COMMON = {"task": "tiny", "seed": 0, "lr": 1e-2, "weight decay": 0.1, "batch": 4, "samples": 2, "warm-up": 2}
GPT = COMMON | {"layers": 2, "width": 8, "heads": 2, "context": 8, "interval": 5, "windows": 4, "steps": 10}
RESNET = COMMON | {"network": "residual", "depths": [1, 1], "width": 4, "crop": 16, "epochs": 2}
VIT = COMMON | {"network": "transformer", "patch": 8, "layers": 1, "width": 8, "heads": 2, "hidden": 12, "crop": 16}
VIT |= {"epochs": 2}


def text():
    numbers = torch.Generator().manual_seed(0)
    return Text(*(torch.randint(0, 256, (400,), generator=numbers).to(torch.uint8) for _ in range(2)))


def pictures():
    numbers = torch.Generator().manual_seed(0)
    parts = [(torch.randint(0, 256, (8, 3, 20, 20), generator=numbers).to(torch.uint8), torch.arange(8) % 3)] * 2
    return HeldImages(*parts, crop=16)


def run_of(name, **further):
    if name == "GPT":
        return LanguageRun(text(), GPT | further, CPU)
    return ImageRun(pictures(), (RESNET if name == "ResNet" else VIT) | further, CPU)


def stepped(run, steps=3):
    """The names of what has moved after some steps."""
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
    run.set_up()
    batches = [batch for _ in range(steps) for batch in run][:steps]
    for batch in batches:
        run.optimizer.zero_grad()
        run.loss(run.model, batch).backward()
        run.optimizer.step()
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    return {name for name, parameter in run.model.named_parameters() if not parameter.equal(before[name])}


@pytest.mark.slow
@pytest.mark.parametrize("network", ["GPT", "ResNet", "ViT"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_steps_hidden_weights_and_what_is_outside(method, network):
    if method == "SOAP":
        pytest.importorskip("pytorch_optimizer")
    run = run_of(network, method=method)
    moved = stepped(run)
    hidden = {id(weight) for weight in run.make_setup().hidden}
    wanted = {name for name, weight in run.model.named_parameters() if id(weight) in hidden}
    assert wanted <= moved
    assert {"GPT": "tokens.weight", "ResNet": "fc.bias", "ViT": "head.weight"}[network] in moved
    if isinstance(run.optimizer, egop.ReparameterizedOptimizer):
        assert set(run.optimizer.basis) == wanted, "coordinates differ in nothing else than coordinates"
    elif isinstance(run.optimizer, CombinedOptimizer):
        inside = run.optimizer.parts[0].param_groups[0]["params"]
        assert {id(each) for each in inside} == hidden
        outside = run.optimizer.parts[1].param_groups[0]
        assert outside["betas"] == ((0.9, 0.95) if network == "GPT" else (0.9, 0.999))


def test_first_layers_are_inside_and_embeddings_and_heads_are_not():
    assert set(coordinates.hidden(run_of("ResNet").model)) >= {"conv1.weight", "layer2.0.downsample.0.weight"}
    assert "fc.weight" not in coordinates.hidden(run_of("ResNet").model)
    names = coordinates.hidden(run_of("ViT").model)
    assert names[0] == "patches.weight"
    assert not {"head.weight", "positions.weight"} & set(names)


def test_the_grid_is_complete_but_for_one_cell():
    cells = {cell(base, column) for base in BASES for column in COLUMNS}
    assert cells - set(METHODS) == {"PolarAdam, aligned"}
    assert set(METHODS) - cells == {"EGOP", "Muon", "NorMuon", "SOAP"}


@pytest.mark.parametrize(("name", "total"), [("GPT", 10), ("ViT", 4)])
def test_the_rate_rises_stays_and_falls(name, total):
    run = run_of(name, method="AdamW", decay=0.4)
    run.set_up()
    rates = [run.optimizer.param_groups[0]["lr"] for _ in range(run.passes) for _ in run]
    expected = [1e-2 * min(1, k / 2, (total - k + 1) / (0.4 * total)) for k in range(1, total + 1)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert rates[-1] == pytest.approx(1e-2 / (0.4 * total))


def test_without_a_decay_the_rate_stays():
    run = run_of("GPT", method="AdamW")
    assert [run.lr_factor(step) for step in (1, 2, 3, 10)] == [0.5, 1, 1, 1]


def test_a_basis_from_before_the_training_is_made_once_for_runs_of_one_seed(monkeypatch):
    made = []
    estimate = egop.estimate
    monkeypatch.setattr(egop, "estimate", lambda *args, **options: made.append(1) or estimate(*args, **options))
    coordinates._kept.cache_clear()
    for rate in (1e-3, 1e-2):
        stepped(run_of("GPT", method="Sign, EGOP up front", lr=rate), 1)
    stepped(run_of("GPT", method="PolarAdam, EGOP up front"), 1)
    assert len(made) == 1
    stepped(run_of("GPT", method="Sign, EGOP up front", seed=1), 1)
    assert len(made) == 2


def test_steps_are_timed_in_turns_and_every_basis_is_paid_for(monkeypatch):
    made, order = [], []
    estimate = egop.estimate
    monkeypatch.setattr(egop, "estimate", lambda *args, **options: made.append(1) or estimate(*args, **options))
    timing = {"rounds": 2, "warm": 2, "timed": 4}

    def make(method):
        order.append(method)
        return run_of("ViT", method=method, **timing)

    names = ["AdamW", "Sign, EGOP up front"]
    times = step_times({name: lambda name=name: make(name) for name in names}, timing)
    assert order == [names[0], *names * 2], "the first one is for what a process sets up once"
    assert len(made) == 2
    assert all(len(times[name][part]) == 2 for name in names for part in ("before", "step"))
    assert all(0 < second < math.inf for name in names for second in times[name]["step"])
    assert min(times[names[1]]["before"]) > max(times[names[0]]["before"])
