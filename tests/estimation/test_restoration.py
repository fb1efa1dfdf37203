"""Sampling restores everything, whatever happens."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import cases
import egop
from egop.estimation.sampling import sample_gradients
from sampled import GAUSSIAN, METHODS, assert_same


class Fragile(nn.Module):
    """BatchNorm, Dropout, a replaced buffer, an existing gradient, a frozen parameter and mixed modes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(1, dtype=torch.float64))
        self.double()
        self.first.weight.grad = torch.ones_like(self.first.weight)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        y = self.head(self.drop(self.norm(self.first(x))))
        self.last = y.detach().mean().reshape(1)
        return y


class Calm(Fragile):
    """The same model, but it can be vmapped."""

    def __init__(self):
        super().__init__()
        self.norm.eval()

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x))))


class Trouble(Exception):  # noqa: N818
    pass


def failing_at(call, error):
    """Build a loss that draws random numbers and fails from the given call on."""
    calls = itertools.count(1)

    def loss(model, batch):
        torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        if next(calls) >= call:
            raise error
        return cases.cross_entropy(model, batch)

    return loss


PATHS = {"loop": (Fragile, "loop"), "fallback": (Fragile, "auto"), "vmap": (Calm, "auto")}


def quiet(model, batch):
    torch.rand(1)
    return cases.cross_entropy(model, batch)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization()], ids=["gaussian", "initialization"])
def test_state_is_restored_after_success(path, rho):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    cases.sample(objective, rho, 9, method=method, chunk_bytes=10_000)
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [Trouble("loss"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_state_is_restored_if_the_loss_fails(path, error, call):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, failing_at(call, error), cases.MLP.batches())
    before = cases.state_of(model)
    with pytest.raises(type(error)):
        cases.sample(objective, GAUSSIAN, 20, method=method, chunk_bytes=10_000)
    assert cases.state_of(model) == before
    # and the objective can be used again
    assert objective.current["first.weight"].data_ptr() == model.first.weight.data_ptr()


@pytest.mark.parametrize("path", PATHS)
def test_state_is_restored_if_the_consumer_stops_early(path):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    generator = torch.Generator()
    chunks = sample_gradients(objective, GAUSSIAN, 100, generator=generator, method=method, chunk_bytes=10_000)
    next(chunks), next(chunks)
    chunks.close()
    assert cases.state_of(model) == before
    for _ in sample_gradients(objective, GAUSSIAN, 100, generator=generator, method=method, chunk_bytes=10_000):
        break
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
def test_state_is_restored_if_the_consumer_fails(path):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    chunks = sample_gradients(objective, GAUSSIAN, 100, generator=torch.Generator(), method=method)
    next(chunks)
    with pytest.raises(KeyboardInterrupt):
        chunks.throw(KeyboardInterrupt())
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
def test_state_is_restored_if_the_batches_run_out(path):
    build, method = PATHS[path]
    model = build()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match="batches are empty"):
        cases.sample(egop.Objective(model, quiet, DataLoader([])), GAUSSIAN, 5, method=method)
    with pytest.raises(ValueError, match="ran out"):
        cases.sample(egop.Objective(model, quiet, iter(cases.MLP.batches())), GAUSSIAN, 5, method=method)
    assert cases.state_of(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_iterator_with_enough_batches_is_allowed(method):
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, iter(cases.MLP.batches(4)))
    gradients = cases.sample(objective, GAUSSIAN, 4, method=method)
    assert_same(gradients, cases.sample(cases.MLP.objective(), GAUSSIAN, 4, method=method))


def test_sampling_between_steps_does_not_change_training():
    def train(sampled):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Fragile()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for batch in cases.MLP.batches():
                optimizer.zero_grad()
                cases.cross_entropy(model, batch).backward()
                if sampled:
                    objective = egop.Objective(model, quiet, cases.MLP.batches())
                    cases.sample(objective, egop.Recentered(0.1), 5)
                optimizer.step()
            return copy.deepcopy(model.state_dict())

    assert_same(train(sampled=True), train(sampled=False))


@pytest.mark.parametrize("sampling", ["auto", "loop"])
def test_a_layer_that_is_used_twice_stays_the_models_own(sampling):
    layer, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4).eval()
    model = torch.nn.Sequential(layer, norm, torch.nn.Tanh(), layer, norm, torch.nn.Linear(4, 2))
    inputs = torch.randn(16, 4)
    before, parameters = model(inputs), list(model.named_parameters())
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [inputs])
    egop.estimate(objective, structure=egop.Shared(), samples=8, sampling=sampling, progress=False)
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(parameters, model.named_parameters(), strict=True))
    assert torch.equal(model(inputs), before)
    assert layer.weight is model[3].weight


def test_an_interrupt_before_sampling_leaves_the_tensors_of_a_function(monkeypatch):
    theta = torch.zeros(3)
    objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
    trainable = objective._trainable_parameters

    def interrupt():
        trainable()
        objective._sampled = {}
        raise KeyboardInterrupt

    monkeypatch.setattr(objective, "_trainable_parameters", interrupt)
    with pytest.raises(KeyboardInterrupt), objective.preserve():
        pass
    assert objective.parameters["theta"] is theta
