"""Trainings that are saved and resumed: what the tests of checkpoints have in common."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import egop
from egop import checkpoint
from training import WRAPPERS, basis, network, optimizer_of, steps, weights

STRUCTURES = {
    "Shared": egop.Shared(),
    "Kronecker": egop.Kronecker(),
    "output": egop.Shared(side="output"),
    "mixed": {"0.*": egop.Identity(), "2.*": egop.Shared(), "4.weight": egop.Full(), "6.weight": egop.Reduced(rank=2)},
}
REFRESHES = {"fixed": lambda: None, "online": lambda: egop.Online(every=3)}
CASES = [("Shared", "fixed"), ("Shared", "online"), ("Kronecker", "online"), ("output", "online")]
CASES += [("mixed", "fixed"), ("joint", "fixed")]
SAVED, STEPS = 2, 5  # before the first checkpoint, and in all


@functools.cache
def basis_of(structure):
    if structure == "joint":  # one block of weights with different numbers of rows
        return basis(egop.Identity(), partition="global")
    return basis(STRUCTURES[structure])


def training(wrapper, structure, refresh):
    model = WRAPPERS[wrapper](network())
    return model, optimizer_of(model, torch.optim.AdamW, None, REFRESHES[refresh](), basis_of(structure))


def empty(wrapper, refresh):
    """A model of other weights and an optimizer without a basis, as in a new process."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model = WRAPPERS[wrapper](model)
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=REFRESHES[refresh](), lr=1.0)


def resumed(folder, wrapper, refresh, *, trusted=True):
    model, optimizer = empty(wrapper, refresh)
    step = checkpoint.load(folder, model, optimizer)["step"]
    # Nothing is encoded again, which would lose what coordinates hold beyond the precision of the weights.
    assert trusted == (not any(block.was_written for block in optimizer.blocks))
    return model, optimizer, step


def finished(model, optimizer, step, **place):
    steps(model, optimizer, step, STEPS - step, **place)
    return weights(model)


def refused(action):
    """The error that says that nothing was loaded."""
    with pytest.raises((ValueError, TypeError)) as caught:
        action()
    assert "\n" not in str(caught.value)
    return re.sub(r"^Process \d failed. \w+: ", "", str(caught.value))  # as the other processes hear of it
