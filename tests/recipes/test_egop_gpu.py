"""EGOP on a GPU: the same steps as on the CPU, half precision, loss scaling, and exact resumption."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import egop
from egop.optim import matrix_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "every": 5}
LAST = 16  # steps, past several renewals


def make_model(dtype):
    torch.manual_seed(0)
    hidden = [
        nn.Linear(32, 48),
        nn.LayerNorm(48),
        nn.Tanh(),
        nn.Linear(48, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
    ]
    return nn.Sequential(*hidden, nn.Linear(32, 4)).to(dtype)


def compute_loss(model, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    weight = next(model.parameters())
    outputs = model(inputs.to(weight.device, weight.dtype))
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return nn.functional.cross_entropy(outputs, inputs[:, :4].argmax(1).to(weight.device))


def train(model, optimizer, first=0, last=LAST):
    for step in range(first, last):
        optimizer.zero_grad()
        compute_loss(model, step).backward()
        optimizer.step()
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def distance(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("update_rms", [0.4, "adam"])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_steps_equal_those_on_the_cpu(rotate, recorded, update_rms, monkeypatch):
    if not recorded:
        monkeypatch.setattr(matrix_optimizer, "SMALL_NETWORK_BYTES", 0)
    ends = []
    for device in ("cpu", "cuda"):
        model = make_model(torch.float64).to(device)
        ends.append(train(model, egop.EGOP(model, rotate=rotate, update_rms=update_rms, **SETTINGS)))
    assert distance(*ends) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, True])
def test_training_lowers_the_loss_as_on_the_cpu(dtype, fused):
    model = make_model(dtype).cuda()
    start = float(compute_loss(model, LAST))
    train(model, egop.EGOP(model, fused=fused, **SETTINGS))
    exact = make_model(torch.float64)
    train(exact, egop.EGOP(exact, **SETTINGS))
    found, wanted = float(compute_loss(model, LAST)), float(compute_loss(exact, LAST))
    assert found < 0.75 * start  # 0.72 in float64
    assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("stop", [7, 10])  # between two renewals, and before the step that installs one
def test_resumed_training_is_the_same_bit_for_bit(rotate, stop):
    model = make_model(torch.float32).cuda()
    optimizer = egop.EGOP(model, rotate=rotate, **SETTINGS)
    train(model, optimizer, 0, stop)
    other, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, stop)
    resumed = egop.EGOP(other, rotate=rotate, **SETTINGS)
    resumed.load_state_dict(state)
    assert distance(train(other, resumed, stop), expected) == 0


def test_loss_scaling_skips_a_step_that_overflows():
    model = make_model(torch.float32).cuda()
    optimizer, scaler = egop.EGOP(model, **SETTINGS), torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = None
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = compute_loss(model, step)
        scaler.scale(loss).backward()
        if step == 3:
            model[0].weight.grad[0, 0] = torch.inf
            before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            assert all(map(torch.equal, before, model.parameters()))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_compiled_model_takes_the_same_steps():
    ends = []
    for compiled in (False, True):
        model = make_model(torch.float64).cuda()
        optimizer = egop.EGOP(model, **SETTINGS)
        ends.append(train(torch.compile(model) if compiled else model, optimizer))
    assert distance(*ends) < 1e-6
