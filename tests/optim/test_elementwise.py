"""Elementwise operations give the same result by GPU kernels and by torch, for every memory layout."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

import egop
from egop.optim import elementwise

KINDS = [egop.optim.Sign, egop.optim.Sinkhorn, egop.optim.PolarAdam]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAST = torch.channels_last


def weights_of(device, shapes, dtype=torch.float32, memory_format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [
        each.to(device, dtype, memory_format=memory_format if each.dim() == 4 else torch.contiguous_format)
        for each in made
    ]


def stepped(optimizer, weights, steps=6, layout=torch.preserve_format):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.grad = torch.empty_like(weight, memory_format=layout).copy_(gradient)
        optimizer.step()
    return [weight.detach().double().cpu() for weight in weights]


def close(found, wanted, within):
    return all(float((one - other).abs().max()) < within for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_step_does_not_depend_on_the_layout_of_convolutions(kind):
    shapes = [(6, 4, 3, 3), (6, 4, 3, 3), (5, 7)]
    results = []
    for layout in (torch.contiguous_format, LAST):
        weights = weights_of("cpu", shapes, torch.float64, layout)
        results.append(stepped(kind(weights, lr=0.1, weight_decay=0.1), weights))
    assert close(*results, 1e-12)


@pytest.mark.parametrize("gradient", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("weight", [torch.contiguous_format, LAST])
def test_gradients_and_state_may_have_another_layout_than_the_weight(weight, gradient):
    shapes = [(6, 4, 3, 3), (6, 4, 3, 3)]
    weights = weights_of("cpu", shapes, torch.float64)
    wanted = stepped(egop.optim.PolarAdam(weights, lr=0.1), weights)
    weights = weights_of("cpu", shapes, torch.float64, weight)
    optimizer = egop.optim.PolarAdam(weights, lr=0.1)
    for each in weights:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[each][name] = torch.zeros_like(each, memory_format=gradient)
    assert close(stepped(optimizer, weights, layout=gradient), wanted, 1e-12)


def test_transform_that_depends_on_the_column_order_gets_the_original_order():
    class Weighted(egop.optim.Sign):
        def transform(self, matrices, group):
            return matrices * torch.arange(matrices.shape[-1], dtype=matrices.dtype)

    results = []
    for layout in (torch.contiguous_format, LAST):
        weights = weights_of("cpu", [(6, 4, 3, 3)], torch.float64, layout)
        results.append(stepped(Weighted(weights, lr=0.1), weights))
    assert close(*results, 1e-12)


def test_missing_triton_is_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "egop.optim.kernels", None)  # the import fails
    monkeypatch.delattr(egop.optim, "kernels", raising=False)  # set if the kernels were loaded before
    elementwise._load_kernels.cache_clear()
    with caplog.at_level(logging.INFO, "egop"):
        assert elementwise._load_kernels(torch.device("cuda")) is None
    elementwise._load_kernels.cache_clear()
    assert "Triton does not work here" in caplog.text


@needs_gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", [False, True])
def test_step_on_a_gpu_equals_step_on_the_cpu(kind, layout, recorded, monkeypatch):
    from egop.optim import matrix_optimizer

    if not recorded:
        monkeypatch.setattr(matrix_optimizer, "SMALL_NETWORK_BYTES", 0)
    shapes = [(64, 32, 3, 3)] * 3 + [(48, 96)] * 2 + [(96, 48), (7, 13), (1, 5), (40, 8, 1, 1)]
    # What Sign takes for rounding depends on the precision.
    exact = weights_of("cpu", shapes, torch.float32 if kind is egop.optim.Sign else torch.float64)
    wanted = stepped(kind(exact, lr=0.01, weight_decay=0.1), exact)
    weights = weights_of("cuda", shapes, memory_format=layout)
    found = stepped(kind(weights, lr=0.01, weight_decay=0.1), weights)
    # Polar factors are iterated in bfloat16; the rate is 0.01, an update's root mean square 0.2.
    assert close(found, wanted, 6 * 0.002 * (0.2 if kind is egop.optim.PolarAdam else 1e-3))


@needs_gpu
def test_kernels_are_used_and_agree_with_torch(monkeypatch):
    from egop.optim import kernels

    calls = []
    for name in ("update_moments", "apply_updates"):
        own = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, own=own, name=name, **k: (calls.append(name), own(*a, **k)))
    shapes = [(33, 65)] * 4 + [(16, 3, 5, 5)]
    results = []
    for any_order in (True, False):
        weights = weights_of("cuda", shapes, memory_format=LAST)
        optimizer = egop.optim.Sinkhorn(weights, lr=0.01, weight_decay=0.1)
        optimizer._is_recordable = any_order
        results.append(stepped(optimizer, weights, 2))
        used, calls = calls, []
        assert bool(used) == any_order
    assert close(*results, 1e-6)


@needs_gpu
def test_unaligned_tensors_are_stepped():
    flat = torch.randn(4 * 35 + 1, device="cuda")
    weights = [flat[1 + 35 * place :][:35].view(5, 7) for place in range(4)]
    alone = [weight.clone() for weight in weights]
    found = stepped(egop.optim.PolarAdam(weights, lr=0.01), weights)
    assert close(found, stepped(egop.optim.PolarAdam(alone, lr=0.01), alone), 1e-4)


@needs_gpu
def test_step_invalidates_earlier_autograd_graphs(monkeypatch):
    from egop.optim import matrix_optimizer

    monkeypatch.setattr(matrix_optimizer, "SMALL_NETWORK_BYTES", 0)  # not recorded
    weight = torch.nn.Parameter(torch.ones(32, 64, device="cuda"))
    loss = (weight @ weight.mT).sum()
    weight.grad = torch.ones_like(weight)
    egop.optim.PolarAdam([weight], lr=0.01).step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@needs_gpu
def test_nan_gradient_gives_nan_weight_and_zero_gradient_no_change(monkeypatch):
    weights = weights_of("cuda", [(32, 64)] * 2)
    before = weights[1].clone()
    optimizer = egop.optim.PolarAdam(weights, lr=0.01)
    weights[0].grad, weights[1].grad = torch.full_like(weights[0], torch.nan), torch.zeros_like(before)
    optimizer.step()
    assert weights[0].isnan().all()
    assert torch.equal(weights[1], before)


@needs_gpu
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e15, 1e30])
def test_polar_factor_does_not_depend_on_the_scale(size):
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)).cuda()
    found = egop.optim.polar(matrices * size).float()
    assert float((found - egop.optim.polar(matrices).float()).abs().max()) < 0.02
