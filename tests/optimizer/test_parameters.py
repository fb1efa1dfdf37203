"""Whatever the parameters are: tied, frozen, without gradient, in half precision, of compiled or copied models."""

import copy
import pickle

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP, FEW_OPTIMIZERS, MLP, ModelCase, OptimizerCase
from explicit import (
    Explicit,
    Wrapped,
    basis_of,
    case_and_basis,
    distance,
    identical,
    logistic,
    over_layouts_and_optimizers,
    train,
)

TOLERANCE = 1e-10
ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})
SGD = OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})

by_optimizer = pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS, ids=str)


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


TIED = ModelCase("tied", Tied, (4,), 3)


@pytest.mark.parametrize("partition", ["layer", "global"])
@by_optimizer
def test_tied_weights_are_one_parameter(optimizer, partition):
    basis = basis_of(TIED, partition=partition)
    sides = [kind(TIED.build(), basis, optimizer) for kind in (Wrapped, Explicit)]
    assert distance(*(train(side, TIED.batches(), 15) for side in sides)) < TOLERANCE
    assert sides[0].model.second.weight is sides[0].model.first.weight


@by_optimizer
def test_frozen_parameters_stay_as_they_are(optimizer):
    model = DEEP.build()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    basis = cases.estimate(egop.Objective(model, logistic, DEEP.batches()), partition="global")
    assert "2.weight" not in basis["global"].block.parameters
    before = cases.parameters_of(model)
    wrapped, explicit = (train(kind(model, basis, optimizer), DEEP.batches(), 15) for kind in (Wrapped, Explicit))
    assert distance(wrapped, explicit) < TOLERANCE
    assert torch.equal(wrapped["2.weight"], before["2.weight"])
    assert torch.equal(wrapped["2.bias"], before["2.bias"])


@by_optimizer
def test_parameters_frozen_and_thawed_while_training(optimizer):
    case, basis = case_and_basis("batched")
    ends = []
    for kind in (Wrapped, Explicit):
        side = kind(case.build(), basis, optimizer)
        layer = side.model[2].weight if kind is Wrapped else side.coordinates["2.weight"]
        for frozen in (False, True, False):
            layer.requires_grad_(not frozen)
            before = side.weights()
            after = train(side, case.batches(), 5)
            assert torch.equal(before["2.weight"], after["2.weight"]) == frozen
        ends.append(side.weights())
    assert distance(*ends) < TOLERANCE


@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS[:2], ids=str)  # Adagrad makes its state at once
def test_parameters_without_gradient_are_not_touched_and_have_no_state(optimizer):
    case, basis = case_and_basis("batched")
    side = Wrapped(case.build(), basis, optimizer)
    before = side.weights()
    for batch in case.batches():
        side.optimizer.zero_grad()
        side.loss(batch).backward()
        side.model[0].weight.grad = side.model[2].bias.grad = None
        side.optimizer.step()
    unchanged = {name for name, value in side.weights().items() if torch.equal(value, before[name])}
    assert unchanged == {"0.weight", "2.bias"}
    assert len(side.optimizer.inner.state) == len(before) - 2


def flat_slope(lr, steps, dtype, wrapped):
    """Train a weight of ones on a linear loss of slope 1; return the weight and the optimizer."""
    layer = nn.Linear(4, 4, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    objective = egop.Objective(
        layer, lambda model, batch: (model.weight * batch).sum(), [torch.ones(4, 4, dtype=dtype)]
    )
    basis = cases.estimate(objective, structure=egop.Full())
    optimizer = (
        egop.ReparameterizedOptimizer(layer, torch.optim.SGD, basis, lr=lr)
        if wrapped
        else torch.optim.SGD(layer.parameters(), lr=lr)
    )
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    return layer.weight.detach(), optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parameters_have_float32_master_coordinates(dtype):
    plain, _ = flat_slope(lr=1e-4, steps=500, dtype=dtype, wrapped=False)
    ours, optimizer = flat_slope(lr=1e-4, steps=500, dtype=dtype, wrapped=True)
    assert torch.equal(plain, torch.ones_like(plain))  # every update is below the last digit, and lost
    assert torch.allclose(ours.float(), torch.tensor(0.95), atol=4e-3)
    assert ours.dtype == dtype
    assert all(parameter.dtype == torch.float32 for parameter in optimizer.inner.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("estimated", "trained", "expected"),
    [
        (torch.float64, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_coordinates_have_the_precision_of_the_parameters_and_not_of_the_basis(estimated, trained, expected):
    basis = basis_of(ModelCase("mlp", cases.mlp, (6,), 3, estimated))
    case = ModelCase("mlp", cases.mlp, (6,), 3, trained)
    side = Wrapped(case.build(), basis, ADAMW)
    train(side, case.batches(), 2)
    for block in side.optimizer.basis.values():
        assert block.block.dtype == expected
        assert block.tensors["basis"].dtype == expected
    coordinates = [p for p in side.optimizer.inner.param_groups[0]["params"] if p.numel() > 5]
    assert {coordinate.dtype for coordinate in coordinates} == {expected}


@by_optimizer
def test_compiled_models_train_as_they_are(optimizer):
    expected = train(Wrapped(MLP.build(), basis_of(MLP), optimizer), MLP.batches(), 8)
    for estimated_on_compiled in (True, False):
        model = MLP.build()
        compiled = torch.compile(model, backend="eager")
        objective = egop.Objective(compiled if estimated_on_compiled else model, logistic, MLP.batches())
        basis = cases.estimate(objective, sampling="loop")
        assert list(basis) == ["0.weight", "2.weight"]
        side = Wrapped(MLP.build(), None, optimizer)
        side.model = compiled
        side.optimizer = egop.ReparameterizedOptimizer(
            compiled.named_parameters(), optimizer.kind, basis, **optimizer.arguments
        )
        train(side, MLP.batches(), 4)
        # What was saved of the compiled model can be loaded beside the plain one.
        again = egop.ReparameterizedOptimizer(model, optimizer.kind, **optimizer.arguments)
        again.load_state_dict(side.optimizer.state_dict())
        side.model, side.optimizer = model, again
        assert distance(train(side, MLP.batches(), 4), expected) < TOLERANCE


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}


@pytest.mark.parametrize("how", COPIES)
@over_layouts_and_optimizers
def test_copies_of_model_and_optimizer_go_on_identically_and_apart(optimizer, layout, how):
    case, basis = case_and_basis(layout)
    side, straight = (Wrapped(case.build(), basis, optimizer) for _ in range(2))
    expected = train(straight, case.batches(), 8)
    train(side, case.batches(), 4)
    twin = copy.copy(side)
    twin.model, twin.optimizer = COPIES[how]((side.model, side.optimizer))
    halfway = side.weights()
    assert identical(train(twin, case.batches(), 4), expected)
    assert identical(side.weights(), halfway)  # the copy has trained alone
    assert identical(train(side, case.batches(), 4), expected)
    assert identical(twin.weights(), expected)
    assert all(
        one is other
        for one, other in zip(twin.optimizer.param_groups[0]["params"], twin.model.parameters(), strict=True)
    )


def test_pickling_takes_every_basis_once():
    """Blocks of one shape are views of one tensor, which pickle would otherwise write again for each of them."""
    case, basis = case_and_basis("batched")
    sizes = [len(pickle.dumps(Wrapped(case.build(), each, SGD).optimizer)) for each in (basis, None)]
    assert sizes[0] - sizes[1] < 1.2 * sum(change.nbytes for change in basis.values()) + 6000


def test_a_group_that_the_inner_optimizer_refuses_is_not_added():
    class Picky(torch.optim.SGD):
        def add_param_group(self, group):
            if len(group["params"]) > 2:
                raise ValueError("too many")
            super().add_param_group(group)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    named = list(model.named_parameters())
    optimizer = egop.ReparameterizedOptimizer(named[:2], Picky, lr=0.1)
    with pytest.raises(ValueError, match="too many"):
        optimizer.add_param_group({"params": named[2:]})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": named[2:4]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    optimizer.step()
