"""Blocks of one shape go through one product, whatever part of them has a gradient, compiled or not."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import egop
from egop.batches import copy_all
from explicit import distance

STRUCTURES = [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(5), egop.Reduced(5), egop.Identity()]


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)).double()


def basis(structure):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    objective = egop.Objective(network(), lambda model, batch: model(batch).tanh().square().mean(), [inputs])
    return egop.estimate(
        objective, structure=structure, partition="parameter", samples=9, generator=generator, progress=False
    )


def train(optimizer, model, count=12, skip=()):
    """Steps on given gradients; layers in ``skip`` have none in every second step."""
    generator = torch.Generator().manual_seed(4)
    for step in range(count):
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = None if step % 2 and name.split(".")[0] in skip else gradient
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_at_a_time(model, found, kind, **arguments):
    """An optimizer of its own for each layer: no two blocks in a batch."""
    own = [
        egop.ReparameterizedOptimizer(
            [(f"{index}.{name}", parameter) for name, parameter in layer.named_parameters()],
            kind,
            egop.Reparameterization([change for name, change in found.items() if name.startswith(f"{index}.")]),
            **arguments,
        )
        for index, layer in enumerate(model)
    ]

    class Together:
        def step(self):
            for each in own:
                each.step()

    return Together()


@pytest.mark.parametrize("skip", [(), ("1",), ("0", "3")], ids=["all", "one without", "two without"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_batch_is_its_blocks_one_by_one(structure, skip):
    found, arguments = basis(structure), {"lr": 0.01, "weight_decay": 0.1}
    models = network(), network()
    together = egop.ReparameterizedOptimizer(models[0], torch.optim.AdamW, found, **arguments)
    assert max(len(batch.blocks) for batch in together.batches) == 4
    apart = one_at_a_time(models[1], found, torch.optim.AdamW, **arguments)
    assert distance(train(together, models[0], skip=skip), train(apart, models[1], skip=skip)) < 1e-12


@pytest.mark.parametrize("skip", [(), ("0", "3")], ids=["all", "two without"])
@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_gram_matrices_of_a_batch_are_those_of_its_blocks(structure, skip):
    models, refreshes = (network(), network()), [egop.Online(every=3, structure=structure, spread=False)] * 2
    together = egop.ReparameterizedOptimizer(models[0], torch.optim.SGD, basis(structure), refresh=refreshes[0])
    apart = one_at_a_time(models[1], basis(structure), torch.optim.SGD, refresh=refreshes[1])
    results = [train(each, model, skip=skip) for each, model in zip((together, apart), models, strict=True)]
    assert distance(*results) < 1e-12


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_gives_the_same_result():
    models = network(), network()
    refresh, arguments = egop.Online(every=2, structure=egop.Shared()), {"lr": 0.01}
    optimizers = [
        egop.ReparameterizedOptimizer(
            model, torch.optim.AdamW, basis(egop.Shared()), refresh=refresh, compile=compiled, **arguments
        )
        for model, compiled in zip(models, (False, True), strict=True)
    ]
    results = [train(each, model) for each, model in zip(optimizers, models, strict=True)]
    assert distance(*results) < 1e-12


def test_many_tensors_are_copied_by_one_call():
    """By a function of torch with a private name: this notices when it is gone or works in another way."""
    targets = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(2, 2).mT]
    versions = [target._version for target in targets]
    sources = [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2)]
    copy_all(targets, sources)
    assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
    assert all(target._version > version for target, version in zip(targets, versions, strict=True))
    copy_all([], [])
