"""What an optimizer does outside of a step grows with the number of parameters, not with its square."""

import copy
import sys

import pytest
import torch
from torch import nn

import egop


def count_calls(function):
    """Return how many calls of Python and C functions a function makes, and its result."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return count, result


def build_model(size):
    model = nn.Module()
    model.weights = nn.ParameterList([nn.Parameter(torch.ones(3, 2)) for _ in range(size)])
    return model


def wrap(model, **options):
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.01, **options)


OPTIMIZERS = {
    "Online": lambda model: wrap(model, refresh=egop.Online(every=1, moments="reset")),
    "no basis": wrap,
}


def set_gradients(parameters):
    for parameter in parameters:
        parameter.requires_grad_(True)
        parameter.grad = torch.ones_like(parameter)


def write_state(optimizer):
    for entry in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in entry:
                entry[key] = entry[key] + 1


def count_work(make, size):
    """Return the number of calls in each thing that is done with an optimizer of so many parameters."""
    model = build_model(size)
    calls = {}
    calls["construct"], optimizer = count_calls(lambda: make(model))
    for frozen in model.weights[1:]:
        frozen.requires_grad_(False)
    set_gradients(model.weights[:1])
    calls["first step"], _ = count_calls(optimizer.step)
    set_gradients(model.weights)
    calls["step with new parameters"], _ = count_calls(optimizer.step)
    calls["step"], _ = count_calls(optimizer.step)
    calls["show"], _ = count_calls(lambda: repr(optimizer) + str(optimizer.plan))
    calls["state dict"], state = count_calls(lambda: copy.copy(optimizer.state_dict()))
    calls["load"], _ = count_calls(lambda: optimizer.load_state_dict(state))
    write_state(optimizer)
    calls["step after a write"], _ = count_calls(optimizer.step)
    calls["bind"], _ = count_calls(lambda: wrap(model, basis=optimizer.basis))
    calls["rebase"], _ = count_calls(lambda: optimizer.rebase(optimizer.basis, moments="reset"))
    return calls


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_work_grows_with_the_number_of_parameters_not_with_its_square(name):
    count_work(OPTIMIZERS[name], 10)  # what is done once
    small, large = (count_work(OPTIMIZERS[name], size) for size in (50, 200))
    growth = {what: calls / small[what] for what, calls in large.items()}
    assert {what: factor for what, factor in growth.items() if factor > 4.5} == {}
