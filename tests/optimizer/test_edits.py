"""Whoever else writes to the parameters, training goes on from what they are."""

import copy

import pytest
import torch
from torch import nn

from cases import OptimizerCase
from egop.optimizer import stacks
from explicit import (
    LAYOUTS,
    Explicit,
    Wrapped,
    case_and_basis,
    distance,
    identical,
    over_layouts_and_optimizers,
    train,
)

TOLERANCE = 1e-10
ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})
SGD = OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})

by_layout = pytest.mark.parametrize("layout", LAYOUTS)

EDITS = {
    "in-place": lambda p: p.mul_(0.5).add_(0.1),
    "sliced": lambda p: p[0].fill_(0.25),
    "through-data": lambda p: p.data.mul_(0.5),
    "data-replaced": lambda p: setattr(p, "data", p.data * 0.5),
    "rows-swapped-through-data": lambda p: p.data.copy_(p.data.flip(0)),
    "one-entry": lambda p: p.view(-1)[3].add_(1e-9),
}


@pytest.fixture
def on_another_device(monkeypatch):
    """Detect writes only by torch's version counter, as on devices where comparing values would be costly."""
    monkeypatch.setattr(stacks, "compares_values", lambda device: False)


@pytest.mark.parametrize("edit", EDITS)
@over_layouts_and_optimizers
def test_training_goes_on_from_edited_weights_with_the_same_moments(optimizer, layout, edit):
    case, basis = case_and_basis(layout)
    wrapped, explicit = (kind(case.build(), basis, optimizer) for kind in (Wrapped, Explicit))
    for side in (wrapped, explicit):
        train(side, case.batches(), 5)
    for name in ("0.weight", "2.weight"):
        with torch.no_grad():
            EDITS[edit](wrapped.model.get_parameter(name))
    explicit.write(wrapped.weights())
    assert distance(*(train(side, case.batches(), 5) for side in (wrapped, explicit))) < TOLERANCE


@by_layout
def test_a_permutation_is_noticed_although_it_keeps_the_sum(layout):
    case, basis = case_and_basis(layout)
    model = case.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((8 * parameter).round() / 8)  # sums of these are exact in any order
    sides = wrapped, explicit = [kind(model, basis, SGD) for kind in (Wrapped, Explicit)]
    for permuted in (lambda p: p.flip(0), lambda p: p.flip(-1), lambda p: p.flatten().roll(1).view_as(p)):
        weight = wrapped.model[0].weight
        weight.data.copy_(permuted(weight.data))
        explicit.write(wrapped.weights())
        for side in sides:
            side.optimizer.param_groups[0]["lr"] = 0.0
            train(side, case.batches(), 1)
        assert distance(wrapped.weights(), explicit.weights()) < TOLERANCE
        with torch.no_grad():
            weight.copy_((8 * weight).round() / 8)


@over_layouts_and_optimizers
def test_training_goes_on_from_loaded_weights(optimizer, layout):
    case, basis = case_and_basis(layout)
    wrapped, explicit = (kind(case.build(), basis, optimizer) for kind in (Wrapped, Explicit))
    start = copy.deepcopy(wrapped.model.state_dict())
    for side in (wrapped, explicit):
        train(side, case.batches(), 5)
    wrapped.model.load_state_dict(start)
    explicit.write(start)
    assert distance(*(train(side, case.batches(), 5) for side in (wrapped, explicit))) < TOLERANCE


@over_layouts_and_optimizers
def test_weights_that_are_swapped_out_and_back_leave_no_trace(optimizer, layout):
    """Averaged weights are swapped in like this for an evaluation."""
    case, basis = case_and_basis(layout)
    sides = [Wrapped(case.build(), basis, optimizer) for _ in range(2)]
    for swapped, side in enumerate(sides):
        train(side, case.batches(), 3)
        if swapped:
            kept = copy.deepcopy(side.model.state_dict())
            side.model.load_state_dict({name: 0 * value for name, value in kept.items()})
            side.model.load_state_dict(kept)
        train(side, case.batches(), 3)
    assert identical(*(side.weights() for side in sides))


def test_torch_counts_writes_to_a_parameter():
    """On devices where values are not compared, outside writes are detected by this private counter."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        writes = [
            lambda: layer.weight.add_(1),
            lambda: layer.weight[0].fill_(3),
            lambda: layer.weight.view(-1).mul_(2),
            lambda: layer.weight.copy_(torch.ones(2, 2)),
            lambda: nn.init.zeros_(layer.weight),
            lambda: layer.load_state_dict(nn.Linear(2, 2).state_dict()),
            lambda: torch._foreach_add_([layer.weight], 1.0),
        ]
        for write in writes:
            before = layer.weight._version
            write()
            assert layer.weight._version > before
    before = layer.weight._version
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight._version == before
    layer.weight.data.add_(1)
    assert layer.weight._version == before  # why the docstring warns of .data


@pytest.mark.parametrize("edit", ["in-place", "sliced", "data-replaced", "one-entry"])
@by_layout
@pytest.mark.usefixtures("on_another_device")
def test_elsewhere_writes_are_noticed_by_the_counter(layout, edit):
    test_training_goes_on_from_edited_weights_with_the_same_moments(ADAMW, layout, edit)


@pytest.mark.parametrize("layout", ["blocks", "global", "everything"])
@pytest.mark.usefixtures("on_another_device")
def test_elsewhere_weights_that_were_swapped_out_and_back_leave_no_trace(layout):
    test_weights_that_are_swapped_out_and_back_leave_no_trace(ADAMW, layout)


@by_layout
@pytest.mark.usefixtures("on_another_device")
def test_elsewhere_copies_and_loaded_optimizers_go_on_bit_for_bit(layout):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, ADAMW)
    train(side, case.batches(), 3)
    loaded = Wrapped(case.build(), None, ADAMW)
    loaded.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    loaded.model.load_state_dict(side.model.state_dict())
    copied = copy.deepcopy(side)
    expected = train(side, case.batches(), 3)
    assert identical(train(copied, case.batches(), 3), expected)
    assert identical(train(loaded, case.batches(), 3), expected)


@by_layout
@pytest.mark.usefixtures("on_another_device")
def test_elsewhere_coordinates_saved_beside_edited_weights_are_not_taken_for_theirs(layout):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, ADAMW)
    train(side, case.batches(), 3)
    with torch.no_grad():
        side.model[0].weight.mul_(0.5)
    copied = copy.deepcopy(side)
    expected = train(side, case.batches(), 3)
    assert identical(train(copied, case.batches(), 3), expected)
