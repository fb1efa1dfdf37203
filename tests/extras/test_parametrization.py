"""f∘V by torch's own parametrizations, an independent way to what the optimizer does."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP, MLP, MODELS, OptimizerCase
from egop.basis import Block
from explicit import basis_of, distance, identical, logistic

RECURRENT, ATTENTION = MODELS[3], MODELS[4]
STEPS, TOLERANCE = 10, 1e-10

# Where a gradient is exactly zero (a bias before BatchNorm, a key's bias), what is computed is rounding noise, and with
# torch's own eps (1e-8, Adagrad 1e-10) the optimizers divide it by little more than itself. This eps is above it.
EPS = 1e-4
OPTIMIZERS = [
    OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01, "eps": EPS, "weight_decay": 0.1}),
    OptimizerCase("Adagrad", torch.optim.Adagrad, {"lr": 0.05, "eps": EPS}),
    OptimizerCase("SGD-momentum", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
]
# A random basis differs in how it is found, not in what is done with it.
SAME = (egop.extras.RandomRotation(seed=1, like=egop.Kronecker()),)
STRUCTURES = [each for each in cases.STRUCTURES if each not in SAME]
DROPPING = egop.Reduced(rank=3, keep_rest=False)

LAYOUTS = {f"{case}-{structure}": (case, structure) for case in MODELS if case is not DEEP for structure in STRUCTURES}


# AdamW everywhere, the others in every structure of one model.
PAIRS = [
    (layout, optimizer) for layout, (case, *_) in LAYOUTS.items() for optimizer in OPTIMIZERS[: 3 if case is MLP else 1]
]


@cache
def case_and_basis(layout):
    case, structure = LAYOUTS[layout]
    return case, basis_of(case, partition="parameter", structure=structure)


def train(model, optimizer, batches, steps=STEPS):
    for step in range(steps):
        optimizer.zero_grad()
        logistic(model, batches[step % len(batches)]).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("layout", "optimizer"), PAIRS, ids=str)
def test_optimizer_equals_the_parametrized_model(layout, optimizer):
    case, basis = case_and_basis(layout)
    model, literal = case.build(), egop.extras.parametrize(case.build(), basis)
    train(model, egop.ReparameterizedOptimizer(model, optimizer.kind, basis, **optimizer.arguments), case.batches())
    train(literal, optimizer.kind(literal.parameters(), **optimizer.arguments), case.batches())
    found, expected = (cases.parameters_of(each) for each in (model, egop.extras.merge(literal)))
    assert distance(found, expected) < TOLERANCE
    assert distance(found, cases.parameters_of(case.build())) > 1e-3  # and it did train
    assert all(torch.isfinite(value).all() for value in found.values())


def whole(case, **options):
    return basis_of(case, **{"structure": egop.Full()} | options)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("case", [MLP, RECURRENT, ATTENTION], ids=str)
def test_model_computes_the_same_function_and_is_restored(case, structure):
    basis = basis_of(case, partition="parameter", structure=structure)
    model, (inputs, _) = case.build(), case.batches()[0]
    expected, before = model(inputs), cases.parameters_of(model)
    assert egop.extras.parametrize(model, basis) is model
    if structure == DROPPING:  # the one that changes the model: only what is in the span is left of it
        before |= basis.decode(basis.encode(before))
    else:
        torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-12)
    assert egop.extras.merge(model) is model
    assert distance(cases.parameters_of(model), before) < 1e-12
    assert not any(hasattr(part, "parametrizations") for part in model.modules())


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_parameters_are_the_coordinates(structure):
    basis = basis_of(MLP, structure=structure)
    model, start = egop.extras.parametrize(MLP.build(), basis), cases.parameters_of(MLP.build())
    expected = [each for coordinates in basis.encode(start).values() for each in coordinates]
    found = [parameter for name, parameter in model.named_parameters() if "original" in name]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=0)


def test_block_of_several_tensors_is_refused():
    with pytest.raises(ValueError, match=r"Block 'global' has 3 tensors; .* partition='parameter', or use"):
        egop.extras.parametrize(RECURRENT.build(), whole(RECURRENT, partition="global"))


def test_gradients_are_the_encoded_gradients():
    basis = whole(MLP)
    plain, model = MLP.build(), egop.extras.parametrize(MLP.build(), basis)
    for each in (plain, model):
        logistic(each, MLP.batches()[0]).backward()
    expected = basis.encode({name: parameter.grad for name, parameter in plain.named_parameters()})
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in basis:
        owner, _, last = name.rpartition(".")
        gradient = found[f"{owner}.parametrizations.{last}.original0"]
        torch.testing.assert_close(gradient, expected[name][0], rtol=0, atol=1e-14)


def test_copy_of_a_parametrized_model_is_independent():
    model = egop.extras.parametrize(RECURRENT.build(), whole(RECURRENT, partition="parameter"))
    other = copy.deepcopy(model)
    before = cases.parameters_of(other)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), RECURRENT.batches(), 3)
    assert identical(cases.parameters_of(other), before)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), RECURRENT.batches(), 3)
    assert identical(cases.parameters_of(other), cases.parameters_of(model))


def test_half_precision_weights_have_single_precision_coordinates():
    case = cases.ModelCase("half", cases.mlp, (6,), 3, torch.bfloat16)
    basis = basis_of(case)
    model = egop.extras.parametrize(case.build(), basis)
    coordinates = {parameter.dtype for name, parameter in model.named_parameters() if "original" in name}
    assert coordinates == {torch.float32}
    assert model[0].weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in egop.extras.merge(model).parameters()} == {torch.bfloat16}


def test_merge_keeps_parametrizations_of_others():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    nn.utils.parametrizations.orthogonal(model[1])
    egop.extras.parametrize(model, egop.Basis([basis_of(DEEP)["0.weight"]]))
    egop.extras.merge(model)
    assert not hasattr(model[0], "parametrizations")
    assert hasattr(model[1], "parametrizations")


def foreign(name, shape):
    return egop.Basis(
        [basis_of(MLP)["2.weight"], egop.Identity().accumulator(cases.block(name, **{name: shape})).finish()[1]]
    )


@pytest.mark.parametrize(
    ("basis", "message"),
    [
        (
            ("encoder.weight", (2, 2)),
            (
                r"Block 'encoder\.weight' of the basis needs a parameter 'encoder\.weight', which the model does "
                r"not have\. It has: 0\.weight, 0\.bias, 2\.weight, 2\.bias"
            ),
        ),
        (("0.weight", (6, 5)), r"'0\.weight' has shape \(6, 5\), got a tensor of \(5, 6\)"),
    ],
)
def test_basis_of_another_model_is_refused_and_nothing_changes(basis, message):
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match=message):
        egop.extras.parametrize(model, foreign(*basis))
    assert cases.state_of(model) == before
    assert not any(hasattr(part, "parametrizations") for part in model.modules())


def test_tied_weights_are_refused_and_stay_tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)).double()
    model[1].weight = model[0].weight
    objective = egop.Objective(model, lambda m, batch: m(batch).square().mean(), [torch.tensor([1, 2])])
    basis = cases.estimate(objective, samples=5)
    with pytest.raises(ValueError, match=r"'0\.weight' is tied to '1\.weight', and a parametrization would untie them"):
        egop.extras.parametrize(model, basis)
    assert model[1].weight is model[0].weight


def make_parametrized():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    bases = [
        egop.Shared().change(block, {"basis": torch.linalg.qr(torch.randn(size, size))[0]})
        for block, size in ((block_of("0.weight", (3, 4)), 4), (block_of("1.weight", (2, 3)), 3))
    ]
    return egop.extras.parametrize(model, egop.Basis(bases))


def block_of(name, shape):
    return Block(name, (name,), (torch.Size(shape),), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_parametrized_model_may_be_cast(dtype):
    model = make_parametrized().to(dtype)
    assert model(torch.ones(2, 4, dtype=dtype)).dtype == dtype
    assert {parameter.dtype for parameter in egop.extras.merge(model).parameters()} == {dtype}


def test_merged_weights_that_were_frozen_stay_frozen():
    model = egop.extras.merge(make_parametrized())
    assert [model[0].weight.requires_grad, model[1].weight.requires_grad] == [False, True]
