"""RotatedPolarAdam: its bases, their schedule, and its steps on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from egop.numerics import SideStream
from egop.optim import RotatedPolarAdam, matrix_optimizer
from egop.optim.rotated import _is_due, renew

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(24, 40)] * 3 + [(40, 24)] * 2 + [(24, 24), (16, 8, 3, 3), (48, 4, 3, 3), (1, 5)]


def make_weights(device="cpu", dtype=torch.float64, layout=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    layouts = [layout if weight.dim() == 4 else torch.contiguous_format for weight in drawn]
    return [
        nn.Parameter(weight.to(device, dtype).contiguous(memory_format=own))
        for weight, own in zip(drawn, layouts, strict=True)
    ]


def train(weights, optimizer, first=0, last=14):
    """Step along gradients of quadratics with different curvatures."""
    for step in range(first, last):
        for place, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(1000 * step + place)
            rows = weight.detach().double().cpu().flatten(1)
            noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
            curvature = torch.logspace(0, -2, rows.shape[1], dtype=torch.float64)
            gradient = (rows * curvature + noise * curvature.sqrt()).reshape(weight.shape)
            weight.grad = torch.empty_like(weight).copy_(gradient)
        optimizer.step()
    return [weight.detach().double().cpu() for weight in weights]


def distance(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_bases_are_renewed_ever_more_rarely_and_then_periodically():
    assert [step for step in range(70) if _is_due(step, 20)] == [1, 2, 3, 4, 6, 8, 12, 16, 20, 40, 60]
    assert [step for step in range(30, 700) if _is_due(step, 200)] == [32, 48, 64, 96, 128, 192, 200, 400, 600]
    assert [step for step in range(7) if _is_due(step, 1)] == [1, 2, 3, 4, 5, 6]


def test_renewals_converge_to_eigenvectors_strongest_first():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 6)[:, None]
    rotation = torch.linalg.qr(torch.randn(2, 6, 6, generator=generator, dtype=torch.float64))[0]
    original = rotation @ rows @ rows.mT @ rotation.mT
    bases = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    for _ in range(60):
        turns, fresh = renew(bases.mT @ original @ bases, bases)
        torch.testing.assert_close(bases @ turns, fresh, rtol=0, atol=1e-12)
        bases = fresh
    inside = bases.mT @ original @ bases
    values = inside.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(inside, values.diag_embed(), rtol=0, atol=1e-9)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(original).flip(-1), rtol=1e-9, atol=0)


def test_a_basis_stays_where_the_momentum_is_zero_or_not_finite():
    generator = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(2, 5, 5, generator=generator, dtype=torch.float64))[0]
    grams = torch.zeros(2, 5, 5, dtype=torch.float64)
    grams[1] = torch.nan
    turns, fresh = renew(grams, bases)
    torch.testing.assert_close(turns, torch.eye(5, dtype=torch.float64).expand(2, 5, 5), rtol=0, atol=1e-14)
    torch.testing.assert_close(fresh, bases, rtol=0, atol=1e-14)


def test_step_does_not_depend_on_the_layout_of_convolutions():
    weights = make_weights()
    expected = train(weights, RotatedPolarAdam(weights, lr=0.02, every=5))
    weights = make_weights(layout=torch.channels_last)
    assert distance(train(weights, RotatedPolarAdam(weights, lr=0.02, every=5)), expected) < 1e-11


@needs_gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("recorded", [False, True])
def test_step_on_a_gpu_equals_step_on_the_cpu(recorded, layout, monkeypatch):
    if not recorded:
        monkeypatch.setattr(matrix_optimizer, "SMALL_NETWORK_BYTES", 0)
    ends = []
    for device in ("cpu", "cuda"):
        weights = make_weights(device, layout=layout)
        ends.append(train(weights, RotatedPolarAdam(weights, lr=0.02, every=5, weight_decay=0.1)))
    assert distance(*ends) < 1e-7


@needs_gpu
def test_float32_on_a_gpu_is_close_to_float64_until_the_first_renewal():
    exact, weights = make_weights(), make_weights("cuda", torch.float32)
    expected = train(exact, RotatedPolarAdam(exact, lr=0.02), 0, 1)
    found = train(weights, RotatedPolarAdam(weights, lr=0.02), 0, 1)
    assert distance(found, expected) < 0.02 * 0.05  # bfloat16 of an update of size 0.2


@needs_gpu
def test_bases_on_a_gpu_stay_orthonormal_and_weights_converge():
    weights = make_weights("cuda", torch.float32)
    optimizer = RotatedPolarAdam(weights, lr=0.05, every=5)
    start = [float(weight.detach().norm()) for weight in weights]
    train(weights, optimizer, 0, 60)
    assert all(float(weight.detach().norm()) < 0.8 * norm for weight, norm in zip(weights, start, strict=True))
    for weight in weights:
        basis = optimizer.state[weight]["basis"]
        ones = torch.eye(len(basis), device="cuda")
        torch.testing.assert_close(basis.mT @ basis, ones, rtol=0, atol=2e-6)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_renewals_computed_ahead_equal_those_computed_in_the_step(dtype, monkeypatch):
    ends = []
    for ahead in (True, False):
        weights = make_weights("cuda", dtype)
        optimizer = RotatedPolarAdam(weights, lr=0.02, every=3)
        if not ahead:
            monkeypatch.setattr(optimizer, "_renew_ahead", lambda *arguments: None)
        train(weights, optimizer, 0, 9)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(train(weights, optimizer, 9, 16))
    assert distance(*ends) < (1e-5 if dtype is torch.float32 else 1e-10)


@needs_gpu
def test_state_that_was_edited_after_a_renewal_was_computed_is_used():
    ends = []
    for ahead in (True, False):
        weights = make_weights("cuda")
        optimizer = RotatedPolarAdam(weights, lr=0.02, every=3)
        train(weights, optimizer, 0, 6)  # the next step renews
        if not ahead:
            optimizer._ahead.clear()
        for weight in weights:
            optimizer.state[weight]["exp_avg"].mul_(torch.linspace(0, 1, weight.numel()).view(weight.shape).cuda())
        ends.append(train(weights, optimizer, 6, 8))
    assert distance(*ends) < 1e-12


@needs_gpu
def test_steps_do_not_wait_for_the_gpu():
    weights = make_weights("cuda", torch.float32)
    optimizer = RotatedPolarAdam(weights, lr=0.02, every=3)
    train(weights, optimizer, 0, 12)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(optimizer._side_stream, SideStream)


@needs_gpu
def test_groups_whose_rates_part_step_as_on_the_cpu():
    ends = []
    for device in ("cpu", "cuda"):
        weights = make_weights(device)
        groups = [{"params": weights[:4]}, {"params": weights[4:]}]
        optimizer = RotatedPolarAdam(groups, lr=0.02, every=5)
        for step in range(12):
            optimizer.param_groups[1]["lr"] = 0.02 if step < 4 or step == 9 else 0.01
            optimizer.param_groups[0]["weight_decay"] = 0.1 if step > 6 else 0.0
            end = train(weights, optimizer, step, step + 1)
        ends.append(end)
    assert distance(*ends) < 1e-7


@needs_gpu
def test_a_basis_that_was_overwritten_is_used_by_the_next_step():
    ends = []
    for device in ("cpu", "cuda"):
        weights = make_weights(device)
        optimizer = RotatedPolarAdam(weights, lr=0.02, every=100)
        train(weights, optimizer, 0, 9)
        basis = optimizer.state[weights[0]]["basis"]
        basis.data.copy_(torch.eye(len(basis)))  # which autograd does not count
        ends.append(train(weights, optimizer, 9, 11))
    assert distance(*ends) < 1e-7
