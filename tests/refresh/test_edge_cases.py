"""Edge cases: late gradients, changed structures, foreign states, a rebase that fails halfway."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import egop
from egop.numerics import eigenbasis
from egop.optimizer import moments


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def step(model, optimizer, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if name.split(".")[0] in without else gradient
    optimizer.step()


def online(model, structure=None, kind=torch.optim.Adam, **arguments):
    refresh = egop.Online(every=4, structure=structure or egop.Kronecker(), spread=False)
    return egop.ReparameterizedOptimizer(model, kind, refresh=refresh, lr=0.01, **arguments)


def test_a_late_first_gradient_still_gives_the_basis():
    model = network()
    optimizer = online(model, egop.Shared())
    step(model, optimizer, 0, without=("0",))
    assert torch.equal(optimizer.basis["0.weight"].tensors["basis"], torch.eye(6).double())
    resumed = network()
    other = online(resumed, egop.Shared())
    other.load_state_dict(optimizer.state_dict())
    for each, own in ((model, optimizer), (resumed, other)):
        step(each, own, 1)
        weight = each[0].weight
        expected = eigenbasis(weight.grad.mT @ weight.grad)[1]
        torch.testing.assert_close(own.basis["0.weight"].tensors["basis"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [egop.Shared(), egop.Kronecker(), egop.Full()], ids=str)
@pytest.mark.parametrize("second", [egop.Shared(), egop.Kronecker(), egop.Full()], ids=str)
def test_refresh_continues_after_a_change_of_structure(first, second):
    model = network()
    optimizer = online(model, first)
    for seed in range(5):
        step(model, optimizer, seed)
    another = network()
    other = online(another, second)
    step(another, other, 0)
    optimizer.rebase(other.basis, moments="reset")
    for seed in range(5, 14):
        step(model, optimizer, seed)
    assert {change.kind for change in optimizer.basis.values()} == {type(second).__name__}
    assert all(cases.round_trip_error(change) < 1e-12 for change in optimizer.basis.values())
    assert optimizer.refresher.failures == 0


def test_loading_a_state_without_a_refresh_resets_the_refresh():
    plain, model = network(), network()
    saved = egop.ReparameterizedOptimizer(plain, torch.optim.Adam, lr=0.01)
    step(plain, saved, 0)
    optimizer = online(model)
    step(model, optimizer, 0)
    optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.blocks
    step(model, optimizer, 1)
    assert len(optimizer.blocks) == 2


def test_a_group_may_be_added_before_the_first_step():
    model, extra = network(), nn.Linear(4, 3).double()
    optimizer = online(model)
    optimizer.add_param_group({"params": [(f"extra.{name}", value) for name, value in extra.named_parameters()]})
    for parameter in [*model.parameters(), *extra.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert "extra.weight" in optimizer.basis


def test_a_rebase_that_fails_halfway_leaves_the_weights_unchanged(monkeypatch):
    model = network()
    optimizer = online(model, kind=torch.optim.SGD)
    step(model, optimizer, 0)
    other = network()
    elsewhere = online(other, kind=torch.optim.SGD)
    step(other, elsewhere, 7)

    def copy_the_basis_only(targets, sources):
        targets[0].copy_(sources[0])
        raise MemoryError

    monkeypatch.setattr(moments, "copy_all", copy_the_basis_only)
    with pytest.raises(MemoryError):
        optimizer.rebase(elsewhere.basis)
    monkeypatch.undo()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, 1)
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("structure", [egop.Identity(), egop.Shared(), egop.Kronecker()], ids=str)
def test_gradients_have_the_strides_of_coordinates_for_fused_kernels(structure):
    """In channels_last, gradients have other strides than coordinates."""
    results = []
    for basis_wanted in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        basis = None
        if basis_wanted:
            objective = egop.Objective(model, lambda m, x: m(x).square().mean(), [torch.randn(2, 3, 5, 5)])
            basis = egop.estimate(objective, structure=structure, partition="parameter", progress=False)
        kind = torch.optim.SGD if structure != egop.Identity() else torch.optim.Adam
        optimizer = egop.ReparameterizedOptimizer(model, kind, basis, lr=0.1, fused=True)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(memory_format=torch.channels_last) if gradient.dim() == 4 else gradient
        optimizer.step()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_autocast_does_not_change_a_step():
    results = []
    for inside in (False, True):
        model = network().float()
        optimizer = online(model)
        for seed in range(6):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                step(model, optimizer, seed)
        results.append(model[0].weight.detach().clone())
    assert torch.equal(*results)
