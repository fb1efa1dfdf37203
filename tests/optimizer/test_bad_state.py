"""State dicts that do not fit are refused, and everything stays as it was."""

import copy

import pytest
import torch
from torch import nn

import cases
from cases import MLP, ModelCase, OptimizerCase
from egop.optimizer.state import encode_about, read_about
from explicit import LAYOUTS, Wrapped, basis_of, case_and_basis, distance, identical, train

ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})


def trained(case, optimizer=ADAMW, layout_basis=None, **options):
    side = Wrapped(case.build(), layout_basis or basis_of(case), optimizer, **options)
    train(side, case.batches(), 3)
    return side


def state_of_module(module, inputs=(6,)):
    return trained(ModelCase("other", module, inputs, 3)).optimizer.state_dict()


def plain():
    model = MLP.build()
    optimizer = torch.optim.AdamW(model.parameters())
    cases.train(model, optimizer, MLP.batches(), 2)
    return optimizer.state_dict()


def own():
    return copy.deepcopy(trained(MLP).optimizer.state_dict())


def without(*path):
    """Return the optimizer's own state dict without the entry at this path."""
    state = own()
    place = state
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return state


def changed(value, *path):
    """Return the optimizer's own state dict with another value at this path."""
    state = own()
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return state


def told(**about):
    """Return the optimizer's own state dict with a changed description of its first parameter."""
    entry = own()["state"][0]
    return changed(encode_about(read_about(entry) | about), "state", 0, "egop/about")


def wider():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def renamed():
    return nn.Sequential(nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def reordered():
    names = ["2.weight", "2.bias", "0.weight", "0.bias"]
    return trained(MLP, groups=[{"names": names}]).optimizer.state_dict()


def in_groups():
    groups = [{"names": ["0.weight", "0.bias"]}, {"names": ["2.weight", "2.bias"]}]
    return trained(MLP, groups=groups).optimizer.state_dict()


DAMAGED = "The state dict does not fit this optimizer, or is damaged"

# A state dict that is loaded into an AdamW over the small network, and what the error says.
REFUSED = {
    "of other names": (
        lambda: state_of_module(renamed),
        (
            r"It was saved for another model: only it has \['1\.bias', '1\.weight', '3\.bias', '3\.weight'\], "
            r"only the optimizer has \['0\.bias', '0\.weight', '2\.bias', '2\.weight'\]"
        ),
    ),
    "of other shapes": (
        lambda: state_of_module(wider),
        r"Its '0\.weight' has shape \(7, 6\), but here it has \(5, 6\)",
    ),
    "of another order": (reordered, r"parameters in another order: \['2\.weight', .*\], but here \['0\.weight', .*\]"),
    "of more groups": (in_groups, r"It has groups of \[2, 2\] parameters .*, this optimizer has \[4\]"),
    "of a plain optimizer": (
        plain,
        "It was saved by another optimizer. Moments from another coordinate system cannot be loaded: load the model's",
    ),
    "of another optimizer": (
        lambda: trained(MLP, OptimizerCase("SGD", torch.optim.SGD, {"lr": 0.1})).optimizer.state_dict(),
        "It was saved with SGD, but this optimizer runs AdamW",
    ),
    "of a later version": (lambda: told(version=99), "has version 99; this egop reads 2"),
    "of an unknown structure": (
        lambda: told(block=read_about(own()["state"][0])["block"] | {"structure": "Fancy"}),
        "Unknown structure 'Fancy'. This version of egop knows .*Identity",
    ),
    "not a dict": (lambda: [1, 2], r"must be what optimizer\.state_dict\(\) returns, got \[1, 2\]"),
    "empty": (dict, rf"{DAMAGED}\. It needs 'state' and 'param_groups'\. From a whole checkpoint"),
    "without state": (lambda: without("state"), rf"{DAMAGED}\. It needs 'state'"),
    "without groups": (lambda: without("param_groups"), rf"{DAMAGED}\. It needs 'state'"),
    "without version": (lambda: told(version=None), "has version None; this egop reads 2"),
    "without a word of what it is of": (
        lambda: without("state", 0, "egop/about"),
        r"An 'egop/about' cannot be read \(KeyError",
    ),
    "with words that are none": (
        lambda: changed(torch.ones(3), "state", 0, "egop/about"),
        "An 'egop/about' cannot be read",
    ),
    "without state of a parameter": (lambda: without("state", 2), r"It has no state for '2\.weight'"),
    "without coordinates": (
        lambda: without("state", 2, "egop/coordinates/0"),
        r"It has no 'egop/coordinates/0' of block '2\.weight'",
    ),
    "without a basis": (
        lambda: without("state", 0, "egop/basis/basis"),
        rf"{DAMAGED}\. KeyError: 'basis'",
    ),
    "with counts that are none": (
        lambda: changed(torch.ones(2, dtype=torch.int64), "state", 1, "egop/clock"),
        DAMAGED,
    ),
    "without a second moment": (
        lambda: without("state", 0, "exp_avg_sq"),
        r"It has no 'exp_avg_sq' of block '0\.weight', which AdamW keeps",
    ),
    "with a moment of another shape": (
        lambda: changed(torch.ones(5, 6).double(), "state", 0, "exp_avg"),
        r"'exp_avg' of block '0\.weight' is a .* of shape \(5, 6\)\. Must be a tensor of shape \(30,\)",
    ),
    "with a moment of another dtype": (
        lambda: changed(torch.ones(30), "state", 0, "exp_avg"),
        r"'exp_avg' of block '0\.weight' has dtype torch\.float32\. Must be torch\.float64",
    ),
    "with a moment that is text": (
        lambda: changed("abc", "state", 1, "exp_avg"),
        r"'exp_avg' of parameter '0\.bias' is 'abc'\. Must be a tensor of shape \(5,\)",
    ),
    "with a moment that is not AdamW's": (
        lambda: changed(torch.ones(30).double(), "state", 0, "velocity"),
        r"It has 'velocity' of block '0\.weight', which AdamW does not keep",
    ),
    "with a negative count of steps": (
        lambda: changed(torch.tensor(-1.0), "state", 0, "step"),
        r"'step' of block '0\.weight' is -1\.0\. Must be a count",
    ),
    "with lr as text": (
        lambda: changed("abc", "param_groups", 0, "lr"),
        "AdamW cannot step with the hyper-parameters of a group",
    ),
    "with one beta": (
        lambda: changed((0.9,), "param_groups", 0, "betas"),
        "AdamW cannot step with the hyper-parameters of a group",
    ),
    "with a basis cut short": (
        lambda: changed(torch.eye(7), "state", 0, "egop/basis/basis"),
        r"Block '0\.weight' .*needs a basis of shape \(30, 30\), got \(7, 7\)",
    ),
    "with a basis that is none": (
        lambda: changed(torch.ones(30, 30).double(), "state", 0, "egop/basis/basis"),
        "not orthonormal",
    ),
    "with state of nothing": (
        lambda: changed({"step": torch.tensor(1.0)}, "state", 99),
        r"It has state for \[99\], which are not parameters",
    ),
    "with coordinates cut short": (
        lambda: changed(torch.ones(7), "state", 0, "egop/coordinates/0"),
        r"Block '0\.weight' has coordinates of shape \(7,\), but \(30,\) here",
    ),
    "with state that is none": (lambda: changed(None, "state"), DAMAGED),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_dict_that_does_not_fit_changes_nothing(what):
    make, message = REFUSED[what]
    side, straight = (trained(MLP) for _ in range(2))
    before, model_before = copy.deepcopy(side.optimizer.state_dict()), cases.state_of(side.model)
    with pytest.raises(ValueError, match=message):
        side.optimizer.load_state_dict(make())
    assert cases.state_of(side.model) == model_before
    assert equal(side.optimizer.state_dict(), before)
    assert identical(*(train(each, MLP.batches(), 3) for each in (side, straight)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_failed_load_the_right_state_dict_still_loads(layout):
    case, basis = case_and_basis(layout)
    side, straight = (trained(case, layout_basis=basis) for _ in range(2))
    state, weights = copy.deepcopy(side.optimizer.state_dict()), copy.deepcopy(side.model.state_dict())
    train(side, case.batches(), 2)
    with pytest.raises(ValueError, match=DAMAGED):
        side.optimizer.load_state_dict({key: value for key, value in state.items() if key != "param_groups"})
    side.optimizer.load_state_dict(state)
    side.model.load_state_dict(weights)
    assert identical(*(train(each, case.batches(), 3) for each in (side, straight)))


def test_a_scheduler_still_drives_the_optimizer_after_a_failed_load():
    side = trained(MLP)
    scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 1, gamma=0.5)
    with pytest.raises(ValueError, match=DAMAGED):
        side.optimizer.load_state_dict(without("param_groups"))
    train(side, MLP.batches(), 1)
    scheduler.step()
    assert side.optimizer.param_groups[0]["lr"] == 0.005
    before = side.weights()
    side.optimizer.param_groups[0]["lr"] = 0.0
    train(side, MLP.batches(), 1)
    assert distance(side.weights(), before) < 1e-14


def equal(one, other):
    """Return True if two state dicts hold the same values, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_what_is_compared_here_can_differ():
    state = own()
    assert equal(state, copy.deepcopy(state))
    assert not equal(state, without("state", 0))
    assert not equal(state, changed(torch.zeros(30).double(), "state", 0, "egop/coordinates/0"))
