"""Recorded steps of the matrix optimizers equal computed ones, whatever changes in between."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import egop
from egop.optim import matrix_optimizer
from explicit import identical
from recordings import record_on_the_cpu

KINDS = [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam]
# Refresh and structure of the initial basis; the first gradient alone would not determine all directions.
REFRESHES = {
    "alone": (None, None),
    "online": (egop.Online(every=3), egop.Shared(side="smaller")),
    "both": (egop.Online(every=3), egop.Kronecker()),
    "aligned": (egop.Aligned(), egop.Shared(side="smaller")),
}
CASES = [(kind, way) for kind in KINDS for way in REFRESHES if (kind, way) != (egop.optim.PolarAdam, "aligned")]
# Cases that do not amplify rounding: aligned signs diverge after a difference of 1e-15.
STEADY = [case for case in CASES if case != (egop.optim.Sign, "aligned")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def made(kind, way, device="cpu"):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)]
    model = nn.Sequential(*layers).double()
    options = {"lr": 0.02, "weight_decay": 0.1}
    if way == "alone":
        model.to(device)
        return model, kind([layer.weight for layer in model if isinstance(layer, nn.Linear)], **options)
    refresh, structure = REFRESHES[way]
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(2, 6).double()])
    names = {f"{place}.weight": egop.extras.RandomRotation(seed=place, like=structure) for place in (0, 2, 4)}
    basis = egop.estimate(objective, structure=names, partition="parameter", progress=False)
    outside = torch.optim.AdamW
    return model, egop.ReparameterizedOptimizer(
        model.to(device), kind, basis, refresh=refresh, outside=outside, **options
    )


def trained(model, optimizer, steps, *, without=()):
    """Train with changing rates, and with steps in which a layer has no gradient."""
    weight = model[0].weight
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(weight)
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        if step in without:
            weight.grad = None
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
            group["weight_decay"] = 0.1 if step % 4 else 0.0
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_replayed_steps_equal_computed_steps(kind, way, monkeypatch):
    results, counts = [], {}
    for recorded in (False, True):
        model, optimizer = made(kind, way)
        counts = record_on_the_cpu(monkeypatch) if recorded else {}
        trained(model, optimizer, range(12), without=(5, 6))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in optimizer.param_groups:
            group["nesterov"] = False  # part of the recording
        results.append(trained(model, optimizer, range(12, 24)))
    assert identical(*results)
    assert counts["replayed"] > counts["recorded"] > 0


def test_recordings_are_dropped_with_the_stacks_that_they_read(monkeypatch):
    """If layouts change or many sets of weights have had gradients, stacks are formed again."""
    results = []
    for recorded in (False, True):
        if recorded:
            record_on_the_cpu(monkeypatch)
            monkeypatch.setattr(matrix_optimizer, "_MAX_STACKINGS", 2)
        model, optimizer = made(egop.optim.PolarAdam, "alone")
        for first in range(0, 12, 4):
            trained(model, optimizer, range(first, first + 4), without=(first + 1,))
            model[2].weight.data = model[2].weight.data.mT.contiguous().mT if first == 4 else model[2].weight.data
        results.append(trained(model, optimizer, range(12, 16)))
    assert identical(*results)


def test_copy_has_its_own_recordings(monkeypatch):
    record_on_the_cpu(monkeypatch)
    model, optimizer = made(egop.optim.PolarAdam, "alone")
    trained(model, optimizer, range(6))
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert identical(trained(model, optimizer, range(6, 12)), trained(twin_model, twin, range(6, 12)))


def test_class_is_recorded_only_if_it_declares_so_itself(monkeypatch):
    """A subclass may count steps or draw random numbers, which a recording would repeat."""

    class Growing(egop.optim.Sign):
        calls = 0

        def compute_updates(self, stack, matrices):
            self.calls += 1
            return self.calls * super().compute_updates(stack, matrices)

    results = []
    for recorded in (False, True):
        if recorded:
            record_on_the_cpu(monkeypatch)
        model, optimizer = made(Growing, "alone")
        results.append(trained(model, optimizer, range(8)))
    assert identical(*results)


@needs_gpu
@pytest.mark.parametrize("way", REFRESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_step_invalidates_earlier_autograd_graphs(kind, way):
    if (kind, way) not in CASES:
        pytest.skip("PolarAdam has no lookahead")
    model, optimizer = made(kind, way, "cuda")
    trained(model, optimizer, range(6))
    loss = model(torch.ones(4, 6, device="cuda", dtype=torch.float64)).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_gpu
@pytest.mark.parametrize(("kind", "way"), STEADY)
def test_step_on_a_gpu_equals_step_on_the_cpu(kind, way):
    results = []
    for device in ("cpu", "cuda"):
        model, optimizer = made(kind, way, device)
        found = trained(model, optimizer, range(8), without=(2,))
        results.append({name: value.cpu() for name, value in found.items()})
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=1e-7)


@needs_gpu
@pytest.mark.parametrize(("kind", "way"), STEADY)
def test_recorded_steps_on_a_gpu_equal_computed_steps(kind, way, monkeypatch):
    results = []
    for recorded in (False, True):
        with monkeypatch.context() as patch:
            if not recorded:
                patch.setattr(egop.numerics.Recorder, "device_for", lambda self, tensors: None)
            model, optimizer = made(kind, way, "cuda")
            trained(model, optimizer, range(12), without=(5, 6))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            results.append(trained(model, optimizer, range(12, 30)))
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=1e-7)


def test_rates_that_change_apart_need_no_new_recording(monkeypatch):
    weights = [nn.Parameter(torch.ones(3 + place, 4).double()) for place in range(6)]
    optimizer = egop.optim.PolarAdam([{"params": [weight]} for weight in weights], lr=0.01)
    counts = record_on_the_cpu(monkeypatch)
    for step in range(40):
        for place, (group, weight) in enumerate(zip(optimizer.param_groups, weights, strict=True)):
            group["lr"] = 0.01 * (1 + place) if step >= 5 * place else 0.0
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).double()
        optimizer.step()
    assert counts["recorded"] == 1
