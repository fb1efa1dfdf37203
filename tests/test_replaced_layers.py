"""A model whose layers or tensors are replaced behind the optimizer's back."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import egop

BUILDERS = [egop.EGOP, lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online())]


def replace_by_loading(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def replace_a_layer(model):
    model[2] = nn.Linear(5, 3)


@pytest.mark.parametrize("replace", [replace_by_loading, replace_a_layer])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("build", BUILDERS)
def test_new_tensors_in_the_model_are_noticed(build, replace, steps):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = build(model)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    replace(model)
    with pytest.warns(
        UserWarning, match=r"new tensors under the names .*2\.weight.* which the optimizer does not train"
    ):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()  # said once


@pytest.mark.parametrize("build", BUILDERS)
def test_parameters_without_a_gradient_are_no_reason_to_warn(build):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    optimizer = build(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for used in ((0, 2), (0, 1, 2)):
            optimizer.zero_grad()
            outputs = torch.ones(3, 4)
            for index in used:
                outputs = model[index](outputs)
            outputs.sum().backward()
            optimizer.step()
        del model[1]
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
