"""The wrapper does what the inner optimizer does on f∘V, for every optimizer, partition and model."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP, FEW_OPTIMIZERS, MLP, MODELS, OPTIMIZERS, ModelCase, OptimizerCase
from explicit import Explicit, Wrapped, basis_of, distance, identical, train

STEPS = 12
TOLERANCE = 1e-10


class Branches(nn.Module):
    """Three layers of one shape, of which every batch uses two, and one which is never used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        first, second = (0, 1) if x.sum() > 0 else (1, 2)
        return self.head(self.layers[second](torch.tanh(self.layers[first](x))))


def convolution():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


RECURRENT = MODELS[3]
BRANCHES = ModelCase("branches", Branches, (4,), 3)
CONVOLUTION = ModelCase("convolution", convolution, (2, 5, 5), 3)
EVERYTHING = {"everything": ["*"]}

# Model and partition; each has a path of its own through the wrapper.
LAYOUTS = {
    "one-tensor-blocks": (MLP, "layer"),
    "batched-blocks": (DEEP, "layer"),
    "global-block": (MLP, "global"),
    "everything-in-one-block": (MLP, EVERYTHING),
    "two-tensors-a-block": (RECURRENT, "layer"),
    "blocks-without-gradient": (BRANCHES, "layer"),
    "part-of-a-block-without-gradient": (BRANCHES, {"one": ["layers.0.*", "layers.1.*"], "two": ["layers.2.*"]}),
}

VARIANTS = [
    OptimizerCase("SGD-maximize", torch.optim.SGD, {"lr": 0.01, "maximize": True}),
    OptimizerCase("SGD-dampening", torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
    OptimizerCase("SGD-foreach", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    OptimizerCase("SGD-fused", torch.optim.SGD, {"lr": 0.05, "fused": True}),
    OptimizerCase("Adam-amsgrad", torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    OptimizerCase("Adam-maximize", torch.optim.Adam, {"lr": 0.01, "maximize": True}),
    OptimizerCase("Adam-foreach", torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    OptimizerCase("Adam-single", torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    OptimizerCase("Adam-fused", torch.optim.Adam, {"lr": 0.01, "fused": True}),
    OptimizerCase("Adam-tensor-lr", torch.optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    OptimizerCase("AdamW-amsgrad", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    OptimizerCase("AdamW-foreach", torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    OptimizerCase("AdamW-fused", torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True}),
    OptimizerCase("Adagrad-fused", torch.optim.Adagrad, {"lr": 0.05, "fused": True}),
    OptimizerCase("Adagrad-decaying", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "maximize": True}),
    OptimizerCase("Adagrad-start", torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    OptimizerCase("RMSprop-centered", torch.optim.RMSprop, {"lr": 0.005, "centered": True, "momentum": 0.5}),
    OptimizerCase("RMSprop-foreach", torch.optim.RMSprop, {"lr": 0.005, "foreach": True}),
    OptimizerCase("Adadelta-foreach", torch.optim.Adadelta, {"lr": 0.5, "foreach": True, "maximize": True}),
    OptimizerCase("Adamax-foreach", torch.optim.Adamax, {"lr": 0.01, "foreach": True}),
    OptimizerCase("NAdam-decoupled", torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    OptimizerCase("RAdam-decoupled", torch.optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    OptimizerCase("ASGD", torch.optim.ASGD, {"lr": 0.05}),
    OptimizerCase("Rprop", torch.optim.Rprop, {"lr": 0.01}),
]

SGD = [case for case in OPTIMIZERS + VARIANTS if case.kind is torch.optim.SGD]

# Every optimizer where blocks are stacked and where some have no gradient, and a few of them in every layout.
STACKED, SKIPPED = "batched-blocks", "blocks-without-gradient"
PAIRS = [
    (optimizer, layout)
    for optimizer, layout in product(OPTIMIZERS, LAYOUTS)
    if layout in (STACKED, SKIPPED) or optimizer in FEW_OPTIMIZERS
]


@cache
def case_and_basis(layout):
    case, partition = LAYOUTS[layout]
    return case, basis_of(case, partition=partition)


@cache
def basis_in(case, structure):
    return basis_of(case, structure=structure)


@cache
def identity_in(case, in_one_block):
    return basis_of(case, structure=egop.Identity(), partition=EVERYTHING if in_one_block else "layer")


def both_ways(case, basis, optimizer):
    """Return the weights after training through the wrapper, and on explicit coordinates."""
    return [train(side(case.build(), basis, optimizer), case.batches(), STEPS) for side in (Wrapped, Explicit)]


@pytest.mark.parametrize(("optimizer", "layout"), PAIRS, ids=str)
def test_training_equals_training_on_explicit_coordinates(optimizer, layout):
    case, basis = case_and_basis(layout)
    wrapped, explicit = both_ways(case, basis, optimizer)
    assert distance(wrapped, explicit) < TOLERANCE
    assert distance(wrapped, cases.parameters_of(case.build())) > 1e-3  # and it did train


@pytest.mark.parametrize("optimizer", VARIANTS, ids=str)
def test_options_of_the_inner_optimizer_mean_the_same_in_coordinates(optimizer):
    case, basis = case_and_basis("blocks-without-gradient")
    wrapped, explicit = both_ways(case, basis, optimizer)
    assert distance(wrapped, explicit) < TOLERANCE


@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS, ids=str)
def test_training_equals_explicit_coordinates_in_every_structure(optimizer, structure):
    wrapped, explicit = both_ways(DEEP, basis_in(DEEP, structure), optimizer)
    assert distance(wrapped, explicit) < TOLERANCE


@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS, ids=str)
def test_convolutions_beside_batch_norm_equal_explicit_coordinates(optimizer):
    wrapped, explicit = both_ways(CONVOLUTION, basis_in(CONVOLUTION, egop.Full()), optimizer)
    assert distance(wrapped, explicit) < TOLERANCE


def test_the_basis_matters():
    adam = OptimizerCase("Adam", torch.optim.Adam, {"lr": 0.01})
    case, basis = case_and_basis("one-tensor-blocks")
    rotated, original = (train(Wrapped(case.build(), each, adam), case.batches(), STEPS) for each in (basis, None))
    assert distance(rotated, original) > 1e-3


def test_a_block_without_gradient_is_really_left_out_of_some_steps():
    model = BRANCHES.build()
    used = set()
    for batch in BRANCHES.batches():
        model.zero_grad()
        cases.cross_entropy(model, batch).backward()
        used.add(tuple(layer.weight.grad is not None for layer in model.layers))
    assert used == {(True, True, False), (False, True, True)}


@pytest.mark.parametrize(
    ("module", "in_one_block", "dtype"), [(Branches, False, torch.float32), (cases.deep, True, torch.float64)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS + VARIANTS, ids=str)
def test_with_the_identity_it_is_the_plain_optimizer_bit_for_bit(optimizer, module, in_one_block, dtype):
    case = ModelCase("any", module, (4,), 3, dtype)
    basis = identity_in(case, in_one_block)
    wrapped = train(Wrapped(case.build(), basis, optimizer), case.batches(), 10)
    plain = Wrapped(case.build(), None, optimizer)
    plain.optimizer = optimizer.kind(plain.model.parameters(), **optimizer.arguments)
    assert identical(wrapped, train(plain, case.batches(), 10))


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [*product(SGD, [STACKED]), *product(SGD[2:4], ["two-tensors-a-block", SKIPPED])],
    ids=str,
)
def test_sgd_is_the_same_in_every_basis(optimizer, layout):
    case, basis = case_and_basis(layout)
    rotated = train(Wrapped(case.build(), basis, optimizer), case.batches(), STEPS)
    original = train(Explicit(case.build(), None, optimizer), case.batches(), STEPS)
    assert distance(rotated, original) < TOLERANCE


def test_a_weight_without_gradient_moves_with_the_rest_of_its_block():
    """In a shared block no coordinate belongs to this parameter alone, so none could be held fixed."""
    case, basis = case_and_basis("part-of-a-block-without-gradient")
    side = Wrapped(case.build(), basis, OptimizerCase("Adam", torch.optim.Adam))
    before = side.weights()
    side.loss(next(batch for batch in case.batches() if batch[0].sum() < 0)).backward()
    assert side.model.layers[0].weight.grad is None
    side.optimizer.step()
    assert not torch.equal(side.model.layers[0].weight, before["layers.0.weight"])
