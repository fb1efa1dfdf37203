"""Sampling in chunks that fit into memory."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cases
import egop
from egop.estimation import gradients, sampling
from egop.estimation.sampling import sample_gradients
from sampled import GAUSSIAN, METHODS, Recorder, assert_same, dropping, sample_both


def chunk_lengths(objective, samples, **options):
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return [len(next(iter(chunk.values()))) for chunk in sample_gradients(objective, GAUSSIAN, samples, **options)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization(), egop.Recentered(0.1)])
def test_draws_do_not_depend_on_chunks(method, rho):
    data = TensorDataset(*(torch.cat(each) for each in zip(*cases.MLP.batches(), strict=True)))
    loader = DataLoader(data, batch_size=16, shuffle=True)  # reshuffles three times
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, loader)
    one, some, all_at_once = (
        cases.sample(objective, rho, 13, method=method, chunk_bytes=size) for size in (1, 12_000, 2**30)
    )
    assert_same(one, all_at_once)
    assert_same(some, all_at_once)


def test_looped_dropout_does_not_depend_on_chunks():
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches())
    one, many = (cases.sample(objective, GAUSSIAN, 13, method="loop", chunk_bytes=size) for size in (1, 2**30))
    assert_same(one, many)


@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Ball(1.0), egop.Initialization(), egop.Recentered(0.1)])
def test_draws_over_several_blocks_do_not_depend_on_chunks(rho):
    objective, points = cases.MLP.objective(), 2100  # blocks have 1024 points
    some, all_at_once = (cases.sample(objective, rho, points, chunk_bytes=size) for size in (300_000, 2**30))
    assert_same(some, all_at_once)
    assert len({row[0, 0].item() for row in some["0.weight"]}) == points


def batches_seen(rho, loss, count=20, **options):
    """Return the first entries of the batches that a shuffling loader yields."""
    data = TensorDataset(torch.arange(60.0, dtype=torch.float64).reshape(60, 1).expand(60, 6), torch.zeros(60).long())
    seen = []

    def watched(model, batch):
        seen.append(batch[0][0, 0].item())
        return loss(model, batch)

    objective = egop.Objective(cases.MLP.build(), watched, DataLoader(data, batch_size=20, shuffle=True))
    cases.sample(objective, rho, count, method="loop", **options)
    return seen


def restless(model, batch):
    torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    return cases.cross_entropy(model, batch)


def test_random_numbers_of_rho_and_loss_do_not_change_the_batches():
    expected = batches_seen(GAUSSIAN, cases.cross_entropy)
    assert len(set(expected)) > 6  # a pass has three
    assert batches_seen(GAUSSIAN, restless) == expected
    assert batches_seen(egop.Initialization(), restless) == expected
    assert batches_seen(egop.Recentered(), restless, chunk_bytes=1) == expected


def full_above(points, monkeypatch):
    """Simulate a device with memory for this many points; return the list of the sizes that were tried."""
    tried = []
    real = sampling.vmap_gradients

    def vmap_gradients(objective, names, taken):
        tried.append(len(taken))
        if len(taken) > points:
            raise torch.OutOfMemoryError
        return real(objective, names, taken)

    for module in (gradients, sampling):  # where it is tried, and where it is used
        monkeypatch.setattr(module, "vmap_gradients", vmap_gradients)
    return tried


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_chunk_is_halved_until_it_fits_into_memory(method, monkeypatch, lines):
    objective = cases.MLP.objective()
    expected = cases.sample(objective, GAUSSIAN, 50, method="vmap")
    tried = full_above(15, monkeypatch)
    assert_same(cases.sample(objective, GAUSSIAN, 50, method=method), expected)
    assert tried[1:] == [50, 25, 12, 12, 12, 12, 2]  # after the trial of two
    assert lines() == []


def test_single_point_that_does_not_fit_raises_and_restores_the_model(monkeypatch):
    objective = cases.MLP.objective()
    before = cases.state_of(objective.module)
    chunks = sample_gradients(objective, GAUSSIAN, 50, generator=torch.Generator(), method="vmap", chunk_bytes=5000)
    next(chunks)
    full_above(0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        next(chunks)
    assert cases.state_of(objective.module) == before


def test_batch_that_is_a_view_counts_by_its_own_size():
    def longest(batches):
        objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, batches)
        return max(chunk_lengths(objective, 200, method="vmap", chunk_bytes=2**20))

    x, y = (torch.cat(each) for each in zip(*cases.MLP.batches(200), strict=True))
    parts = list(zip(x.split(16), y.split(16), strict=True))
    assert longest(parts) == longest([tuple(tensor.clone() for tensor in batch) for batch in parts]) > 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization(), egop.Recentered(0.1)])
def test_loop_and_vmap_agree_on_a_gpu(rho):
    batches = [tuple(tensor.cuda() for tensor in batch) for batch in cases.MLP.batches()]
    objective = egop.Objective(cases.MLP.build().cuda(), cases.cross_entropy, batches)
    looped, vmapped = sample_both(objective, 70, rho)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, rho, 70, chunk_bytes=50_000), looped)


@pytest.mark.parametrize(("images", "expected"), [(2, True), (256, False)])
def test_large_convolutions_are_looped_on_the_cpu(images, expected, monkeypatch):
    used = []
    vmap_gradients = gradients.vmap_gradients
    monkeypatch.setattr(gradients, "vmap_gradients", lambda *args: used.append(args) or vmap_gradients(*args))
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 10 * 10, 3))
    batch = torch.randn(images, 1, 12, 12), torch.randint(3, (images,))
    objective = egop.Objective(model, cases.cross_entropy, [batch])
    found = cases.sample(objective, GAUSSIAN, 4)
    assert bool(used) is expected
    at_once = cases.sample(objective, GAUSSIAN, 4, method="vmap")
    assert used
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, at_once[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_tf32_is_not_mistaken_for_an_error_of_vmap(precision):
    """cuDNN uses TF32 for convolutions by default, and a program may choose it for matrix products."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 10)]
    model = nn.Sequential(*layers).cuda()
    batch = torch.randn(128, 1, 12, 12, device="cuda"), torch.randint(10, (128,), device="cuda")
    objective = egop.Objective(model, cases.cross_entropy, [batch])
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled
    torch.set_float32_matmul_precision(precision)
    try:
        cases.sample(objective, egop.Initialization(), 4, method="vmap")  # raises an error if vmap seems wrong
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.enabled) == (precision, kept[1])
    finally:
        torch.set_float32_matmul_precision(kept[0])


@pytest.mark.parametrize("method", METHODS)
def test_chunks_fit_into_the_given_memory(method):
    objective = cases.MLP.objective()
    held = sum(p.numel() * 8 for p in objective.parameters.values())
    assert chunk_lengths(objective, 5, method=method, chunk_bytes=1) == [1] * 5
    limited = chunk_lengths(objective, 50, method=method, chunk_bytes=50 * held)
    assert sum(limited) == 50
    assert 1 < max(limited) <= 25  # values and gradients are both held
    assert max(chunk_lengths(objective, 600, method=method)) <= sampling.CHUNK_POINTS


def test_chunks_allow_for_activations():
    def lengths(size):
        objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, cases.MLP.batches(1, size))
        return max(chunk_lengths(objective, 200, method="vmap", chunk_bytes=2**20))

    assert lengths(16) > 10 * lengths(4096) > 0


def test_points_are_drawn_at_most_one_chunk_ahead():
    rho = Recorder(GAUSSIAN)
    objective = cases.MLP.objective()
    held = sum(p.numel() * 8 for p in objective.parameters.values())
    chunks = sample_gradients(objective, rho, 10**9, generator=torch.Generator(), method="loop", chunk_bytes=8 * held)
    taken = sum(len(chunk["0.bias"]) for chunk in itertools.islice(chunks, 5))
    chunks.close()
    assert len(rho.points) <= taken + 1


def test_progress_bar_shows_samples_and_remaining_time(capsys):
    cases.sample(cases.MLP.objective(), GAUSSIAN, 300, progress=True)
    shown = capsys.readouterr().err
    assert "Sampling gradients: 100%" in shown
    assert "300/300" in shown
    assert "<00:00" in shown
    cases.sample(cases.MLP.objective(), GAUSSIAN, 3, progress=False)
    assert capsys.readouterr().err == ""
