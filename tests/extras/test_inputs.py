"""A plain optimizer on rotated data takes the steps of the reparameterized one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import egop
from cases import MLP, OptimizerCase
from explicit import basis_of, logistic

FIRST = {"first": ["0.weight"]}
OPTIMIZERS = [
    OptimizerCase("Adam", torch.optim.Adam, {"lr": 0.01}),
    OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    OptimizerCase("Adagrad", torch.optim.Adagrad, {"lr": 0.05}),
    OptimizerCase("SGD-momentum", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
]


@pytest.fixture
def basis():
    return basis_of(MLP, partition=FIRST, structure=egop.Shared())


def train(model, optimizer, batches):
    losses = []
    for step in range(50):
        optimizer.zero_grad()
        loss = logistic(model, batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_training_on_rotated_data_equals_reparameterized_training(basis, optimizer):
    model, rotated = MLP.build(), MLP.build()
    wrapped = egop.ReparameterizedOptimizer(model, optimizer.kind, basis, **optimizer.arguments)
    inputs = egop.extras.rotate_inputs(rotated, basis, *(x for x, _ in MLP.batches()))
    batches = [(x, labels) for x, (_, labels) in zip(inputs, MLP.batches(), strict=True)]
    plain = optimizer.kind(rotated.parameters(), **optimizer.arguments)
    expected, found = train(model, wrapped, MLP.batches()), train(rotated, plain, batches)
    assert max(abs(one - other) for one, other in zip(expected, found, strict=True)) < 1e-10
    back = egop.extras.rotate_inputs(rotated, basis, *inputs, inverse=True)
    for x, (original, _) in zip(back, MLP.batches(), strict=True):
        torch.testing.assert_close(x, original, rtol=0, atol=1e-12)
    for one, other in zip(model.parameters(), rotated.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_model_computes_the_same_on_rotated_data(basis):
    model, (x, _) = MLP.build(), MLP.batches()[0]
    expected, kept, weight = model(x), x.clone(), model[0].weight.detach().clone()
    (rotated,) = egop.extras.rotate_inputs(model, basis, x)
    V = basis["0.weight"].tensors["basis"]
    torch.testing.assert_close(rotated, x @ V, rtol=0, atol=1e-12)
    torch.testing.assert_close(model[0].weight.detach(), weight @ V, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(rotated), expected, rtol=0, atol=1e-12)
    assert torch.equal(x, kept)


def test_data_may_have_any_leading_dimensions_and_precision(basis):
    data = torch.randn(2, 3, 6), torch.randn(6).half(), torch.randn(4, 6, dtype=torch.float64)
    found = egop.extras.rotate_inputs(MLP.build(), basis, *data)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in data]


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Conv1d(6, 5, 1))


REFUSED = {
    "two blocks": (
        MLP.build,
        lambda: basis_of(MLP, structure=egop.Shared()),
        r"The basis must have one block, the first layer's weight; it has \['0\.weight', '2\.weight'\]",
    ),
    "another structure": (
        MLP.build,
        lambda: basis_of(MLP, partition=FIRST),
        r"Block '0\.weight' has structure Full\. Only a rotation that all rows share .* structure=egop\.Shared\(\)",
    ),
    "no linear layer": (
        Convolutional,
        lambda: basis_of(MLP, partition=FIRST, structure=egop.Shared()),
        r"for the weight of a linear layer; '0\.weight' is the weight of a Conv1d",
    ),
    "another model": (
        nn.Sequential,
        lambda: basis_of(MLP, partition=FIRST, structure=egop.Shared()),
        r"'0\.weight' is not in this model",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rotation_that_cannot_be_moved_into_the_data_is_refused(what):
    build, basis, message = REFUSED[what]
    model, found = build(), basis()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match=message):
        egop.extras.rotate_inputs(model, found, torch.zeros(2, 6))
    assert cases.state_of(model) == before


def test_data_of_another_width_is_refused_before_anything_changes(basis):
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        egop.extras.rotate_inputs(model, basis, torch.zeros(2, 6), torch.zeros(2, 7))
    assert cases.state_of(model) == before


def test_integers_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Linear(3, 2))
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.randn(8, 3)])
    basis = egop.estimate(objective, partition={"first": ["0.weight"]}, structure=egop.Shared(), progress=False)
    before = model[0].weight.detach().clone()
    with pytest.raises(TypeError, match=r"convert data of torch\.uint8 first"):
        egop.extras.rotate_inputs(model, basis, torch.ones(4, 3), torch.ones(4, 3, dtype=torch.uint8))
    assert torch.equal(model[0].weight, before)
