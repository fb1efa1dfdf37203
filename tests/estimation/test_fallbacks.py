"""Fallback to the loop if vmap cannot be used."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import cases
import egop
from sampled import GAUSSIAN, assert_same, sample_both


class Branching(nn.Module):
    """Data-dependent control flow."""

    def __init__(self):
        super().__init__()
        self.net = cases.mlp().double()

    def forward(self, x):
        y = self.net(x)
        return y if y.mean().item() > 0 else 2 * y


class Counting(nn.Module):
    """A buffer that affects the output and is replaced in each forward pass."""

    def __init__(self):
        super().__init__()
        self.net = cases.mlp().double()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        y = self.net(x)
        self.seen = 0.5 * self.seen + y.detach().mean(0)
        return y - self.seen


def in_turns(model, batch):
    """Draw random numbers outside torch, which vmap would share between all points of a chunk."""
    return cases.cross_entropy(model, (batch[0] * random.random(), batch[1]))


def mixed(model, batch):
    return cases.cross_entropy(model, (batch[0] * np.random.rand(), batch[1]))  # noqa: NPY002


def by_label(model, batch):
    """Compute a loss whose control flow depends on the batch alone."""
    return cases.cross_entropy(model, (batch[0] * (1 + batch[1].max().item()), batch[1]))


FALL_BACKS = {
    "batch norm in training mode": (lambda: cases.MODELS[2].build(), cases.cross_entropy, "BatchNorm2d"),
    "data-dependent control flow": (Branching, cases.cross_entropy, "item"),
    "batch-dependent control flow": (lambda: cases.MLP.build(), by_label, "item"),
    "a buffer that is replaced": (Counting, cases.cross_entropy, "'seen'"),
    "random numbers of Python": (lambda: cases.MLP.build(), in_turns, "random"),
    "random numbers of numpy": (lambda: cases.MLP.build(), mixed, "random"),
}


@pytest.mark.parametrize("kind", FALL_BACKS)
def test_fallback_to_the_loop_logs_one_line(kind, lines):
    build, loss, word = FALL_BACKS[kind]
    model = build()
    batches = cases.MODELS[2].batches() if kind.startswith("batch norm") else cases.MLP.batches()
    objective = egop.Objective(model, loss, batches)
    found = cases.sample(objective, GAUSSIAN, 9, chunk_bytes=20_000)
    (line,) = lines()
    assert line.startswith("egop samples gradients one at a time")
    assert word in line
    assert "\n" not in line
    assert_same(found, cases.sample(objective, GAUSSIAN, 9, method="loop"))
    assert len(lines()) == 1


@pytest.mark.parametrize("kind", FALL_BACKS)
def test_explicit_vmap_raises_if_it_cannot_be_used(kind):
    build, loss, _ = FALL_BACKS[kind]
    batches = cases.MODELS[2].batches() if kind.startswith("batch norm") else cases.MLP.batches()
    objective = egop.Objective(build(), loss, batches)
    before = cases.state_of(objective.module)
    with pytest.raises(RuntimeError, match="vmap"):
        cases.sample(objective, GAUSSIAN, 9, method="vmap")
    assert cases.state_of(objective.module) == before


def test_batch_norm_in_eval_mode_or_without_statistics_is_vmapped(lines):
    model = cases.MODELS[2].build().eval()
    cases.sample(cases.MODELS[2].objective(model), GAUSSIAN, 3)
    plain = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    looped, vmapped = sample_both(egop.Objective(plain, cases.cross_entropy, cases.MLP.batches()))
    assert_same(vmapped, looped)
    assert lines() == []


CLOSURES = {
    "with its gradient": lambda weight, model, batch: cases.cross_entropy(model, batch) + weight.square().sum(),
    "as a factor": lambda weight, model, batch: cases.cross_entropy(model, batch) * weight.square().sum(),
    "as a constant": lambda weight, model, batch: cases.cross_entropy(model, batch) * weight.detach().square().sum(),
}


@pytest.mark.parametrize("kind", CLOSURES)
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Recentered()], ids=["gaussian", "recentered"])
def test_loss_that_closes_over_a_parameter_falls_back(kind, dropout, rho, lines):
    model = cases.MLP.build()
    weight = model[0].weight
    if dropout:
        model[1] = nn.Dropout(0.5)
    objective = egop.Objective(model, lambda model, batch: CLOSURES[kind](weight, model, batch), cases.MLP.batches())
    looped = cases.sample(objective, rho, 9, method="loop", chunk_bytes=10_000)
    assert_same(cases.sample(objective, rho, 9, chunk_bytes=10_000), looped)
    assert len(lines()) == 1


def test_loss_that_closes_over_the_model_is_vmapped(lines):
    model = cases.MLP.build()
    objective = egop.Objective(model, lambda _, batch: cases.cross_entropy(model, batch), cases.MLP.batches())
    looped, vmapped = sample_both(objective)
    assert_same(vmapped, looped)
    assert_same(looped, cases.sample(cases.MLP.objective(), GAUSSIAN, 7))
    assert lines() == []


def test_later_batch_can_cause_the_fallback(lines):
    def loss(model, batch):
        if len(batch[0]) == 4:
            batch[0].max().item()
        return cases.cross_entropy(model, batch)

    large, small = cases.MLP.batches(6), cases.MLP.batches(6, size=4)
    objective = egop.Objective(cases.MLP.build(), loss, large + small)
    found = cases.sample(objective, GAUSSIAN, 30, chunk_bytes=20_000)
    assert_same(found, cases.sample(objective, GAUSSIAN, 30, method="loop"))
    assert len(lines()) == 1
