"""Wrappers that frameworks put around an optimizer, in the two ways in which they have been written."""

import copy

import pytest
import torch

import cases
import egop
from cases import MLP
from explicit import basis_of, case_and_basis, identical, logistic


class Copying:
    """As Lightning's up to 2.5: of a subclass of the optimizer's class, with a copy of its ``__dict__``."""

    def __init__(self, optimizer):
        self.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key not in ("step", "__del__")}
        self.__class__ = type("Copying", (Copying, type(optimizer)), {})
        self.original = optimizer

    def step(self, closure=None):
        return self.original.step(closure)


class Passing:
    """As Lightning's from 2.6 on: likewise, with nothing of its own, so that what is missing is read there."""

    def __init__(self, optimizer):
        self.original = optimizer
        self.__class__ = type("Passing", (Passing, type(optimizer)), {})

    def step(self, closure=None):
        return self.original.step(closure)

    def __getattr__(self, name):
        return getattr(self.original, name)


def steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        optimizer.step()
    return cases.parameters_of(model)


def started(basis=None, **options):
    model = MLP.build()
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.01, **options)


ACTIONS = {
    "rebase": lambda optimizer: optimizer.rebase(case_and_basis("blocks")[1]),
    "rebase with other blocks": lambda optimizer: optimizer.rebase(
        basis_of(MLP, structure=egop.Shared()), moments="reset"
    ),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(saved()),
    "param_groups": lambda optimizer: optimizer.param_groups[0].update(lr=0.03),
    "other param_groups": lambda optimizer: setattr(
        optimizer, "param_groups", [dict(group, lr=0.03) for group in optimizer.param_groups]
    ),
    "state": lambda optimizer: optimizer.state.clear(),
    "renew_basis": lambda optimizer: optimizer.renew_basis(),
}


def saved():
    model, optimizer = started(case_and_basis("blocks")[1])
    steps(model, optimizer, 3)
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("kind", [Copying, Passing])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("acts", ["wrapper", "original"])
@pytest.mark.parametrize("before", [0, 2])
def test_what_is_done_to_one_is_done_to_the_other(action, acts, before, kind):
    ends, untouched = [], None
    for wrapped in (True, False):
        options = {"refresh": egop.Online(every=50)} if action == "renew_basis" else {}
        model, optimizer = started(basis_of(MLP, structure=egop.extras.RandomRotation()), **options)
        wrapper = kind(optimizer) if wrapped else optimizer
        steps(model, wrapper, max(before, 1) if action == "renew_basis" else before)
        untouched = untouched or steps(*copy.deepcopy((model, optimizer)), 4, first=2)
        ACTIONS[action](wrapper if acts == "wrapper" else optimizer)
        ends.append(steps(model, wrapper, 4, first=2))
        assert wrapper.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert wrapper.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert identical(*ends)
    assert identical(ends[0], untouched) == (action == "state" and before == 0)


@pytest.mark.parametrize("kind", [Copying, Passing])
def test_a_group_that_is_added_through_a_wrapper_with_a_basis_moves(kind):
    ends = []
    for wrapped in (True, False):
        model = MLP.build()
        first = [(name, each) for name, each in model.named_parameters() if name.startswith("0")]
        optimizer = egop.ReparameterizedOptimizer(first, torch.optim.AdamW, lr=0.01)
        wrapper = kind(optimizer) if wrapped else optimizer
        steps(model, wrapper, 2)
        basis = egop.Basis([case_and_basis("blocks")[1]["2.weight"]])
        rest = [(name, each) for name, each in model.named_parameters() if name.startswith("2")]
        wrapper.add_param_group({"params": rest, "basis": basis, "lr": 0.02})
        before = model[2].weight.detach().clone()
        ends.append(steps(model, wrapper, 3, first=2))
        assert not torch.equal(model[2].weight, before)
        assert [block.name for block in optimizer.blocks] == ["2.weight"]
    assert identical(*ends)
