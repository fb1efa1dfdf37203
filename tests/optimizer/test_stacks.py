"""Blocks of one shape go through one product, whatever part of them has a gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import egop
from egop.numerics import copy_all
from explicit import distance, identical

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STRUCTURES = [
    egop.Full(),
    egop.Shared(),
    egop.Kronecker(),
    egop.Auxiliary(rank=5),
    egop.Reduced(rank=5),
    egop.Identity(),
]


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)).double()


def basis(structure, seed=3):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    objective = egop.Objective(network(), lambda model, batch: model(batch).tanh().square().mean(), [inputs])
    return egop.estimate(
        objective, structure=structure, partition="parameter", samples=9, generator=generator, progress=False
    )


def train(optimizer, model, count=12, skip=()):
    """Take steps on given gradients; layers in ``skip`` have none in every second step."""
    generator = torch.Generator().manual_seed(4)
    for step in range(count):
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            parameter.grad = None if step % 2 and name.split(".")[0] in skip else gradient
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def one_at_a_time(model, found, kind, **arguments):
    """Build a separate optimizer for each layer, so that no two blocks share a stack."""
    own = [
        egop.ReparameterizedOptimizer(
            [(f"{index}.{name}", parameter) for name, parameter in layer.named_parameters()],
            kind,
            egop.Basis([change for name, change in found.items() if name.startswith(f"{index}.")]),
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
def test_a_stack_is_its_blocks_one_by_one(structure, skip):
    found, arguments = basis(structure), {"lr": 0.01, "weight_decay": 0.1}
    models = network(), network()
    together = egop.ReparameterizedOptimizer(models[0], torch.optim.AdamW, found, **arguments)
    assert max(len(stack.blocks) for stack in together._engine.stacks) == 4
    apart = one_at_a_time(models[1], found, torch.optim.AdamW, **arguments)
    assert distance(train(together, models[0], skip=skip), train(apart, models[1], skip=skip)) < 1e-12


@pytest.mark.parametrize("skip", [(), ("0", "3")], ids=["all", "two without"])
@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_gram_matrices_of_a_stack_are_those_of_its_blocks(structure, skip):
    models, refreshes = (network(), network()), [egop.Online(every=3, structure=structure, spread=False)] * 2
    together = egop.ReparameterizedOptimizer(models[0], torch.optim.SGD, basis(structure), refresh=refreshes[0])
    apart = one_at_a_time(models[1], basis(structure), torch.optim.SGD, refresh=refreshes[1])
    results = [train(each, model, skip=skip) for each, model in zip((together, apart), models, strict=True)]
    assert distance(*results) < 1e-12


def test_a_structure_that_is_replaced_leaves_nothing_behind():
    """The old structure's Gram matrices are dropped, and the next gradient counts in full."""
    model, found = network(), basis(egop.Kronecker())
    refresh = egop.Online(every=1, structure=egop.Shared())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh, lr=0.1)
    train(optimizer, model, count=5)
    fresh = copy.deepcopy(model)
    optimizer.rebase(found, moments="reset")
    other = egop.ReparameterizedOptimizer(fresh, torch.optim.Adam, found, refresh=refresh, lr=0.1)
    trained, expected = train(optimizer, model, count=7), train(other, fresh, count=7)
    for name in found:
        torch.testing.assert_close(trained[name], expected[name], rtol=0, atol=1e-10)


def train_convolutions(device, structure, memory_format, count=20):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3))
    model = model.double().to(device).to(memory_format=memory_format)
    refresh = egop.Online(every=3, structure={"*weight": structure})
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        inputs = torch.randn(8, 4, 9, 9, generator=generator, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        model(inputs.contiguous(memory_format=memory_format)).square().mean().backward()
        optimizer.step()
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    assert all(weight.is_contiguous(memory_format=memory_format) for weight in weights)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_kernels_with_channels_last_train_like_others(structure, device):
    formats = (torch.contiguous_format, torch.channels_last)
    assert distance(*(train_convolutions(device, structure, each) for each in formats)) < 1e-8


@needs_gpu
@pytest.mark.parametrize("split", [False, True], ids=["all there", "one layer left on the CPU"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_step_on_a_gpu_is_one_on_the_cpu(structure, split):
    """With blocks without gradient in between, and a basis that changes."""
    results = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        if split:
            model[1].to("cpu")
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis(structure), lr=0.01)
        for seed, skip in enumerate([(), ("1",), (), (), ()], start=4):
            found = train(optimizer, model, count=6, skip=skip)
            optimizer.rebase(basis(structure, seed))
        results.append({name: value.cpu() for name, value in found.items()})
    assert distance(*results) < 1e-10


@needs_gpu
@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_gram_matrices_and_moments_on_a_gpu_are_those_on_the_cpu(structure):
    results = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        refresh = egop.Online(every=3)
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis(structure), refresh=refresh, lr=0.01)
        found = train(optimizer, model, count=5)  # before rounding makes other signs of weak directions
        state = optimizer.state_dict()
        told = {f"{n} {k}": value for n, entry in state["state"].items() for k, value in entry.items()}
        found |= {key: value for key, value in told.items() if value.dim() > 0 and value.is_floating_point()}
        results.append({name: value.cpu() for name, value in found.items()})
    assert distance(*results) < 1e-8


@pytest.mark.parametrize("refresh", [None, egop.Online(every=2)], ids=["fixed", "online"])
def test_a_shallow_copy_is_the_same_optimizer(refresh):
    results = []
    for copied in (False, True):
        model = network()
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis(egop.Shared()), refresh=refresh)
        train(optimizer, model, count=3)
        twin = copy.copy(optimizer) if copied else optimizer
        train(twin, model, count=3)
        results.append(train(optimizer, model, count=3))
    assert identical(*results)


def test_many_tensors_are_copied_by_one_call():
    """The copy uses a private function of torch; this test fails if torch removes or changes it."""
    targets = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(2, 2).mT]
    versions = [target._version for target in targets]
    sources = [torch.randn(2, 3), torch.randn(4), torch.randn(2, 2)]
    copy_all(targets, sources)
    assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
    assert all(target._version > version for target, version in zip(targets, versions, strict=True))
    copy_all([], [])
