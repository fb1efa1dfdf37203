"""Gradients at drawn points: loop and vmapped, chunked to fit memory."""

from __future__ import annotations

import collections
import copy
import itertools
import logging
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import cases
import egop
from egop import chunks, gradients, sampling
from egop.sampling import sample_gradients

METHODS = ["loop", "vmap"]
GAUSSIAN = egop.Gaussian(scale=0.5)


def assert_same(found, expected, tolerance=1e-12):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def sample_both(objective, samples=7, rho=GAUSSIAN, **options):
    return [cases.sample(objective, rho, samples, method=method, **options) for method in METHODS]


@pytest.fixture
def lines(caplog):
    """What egop has logged so far."""
    caplog.set_level(logging.DEBUG, logger="egop")
    return lambda: caplog.messages


class Recorder(egop.Distribution):
    """Another distribution, whose draws it keeps."""

    def __init__(self, rho):
        self.rho, self.points = rho, []

    def draw(self, objective, generator):
        self.points.append(self.rho.draw(objective, generator))
        return self.points[-1]


# --- the gradients ---


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_the_loop_gives_the_gradient_at_each_drawn_point_on_the_batch_whose_turn_it_is(case):
    objective, rho = case.objective(), Recorder(GAUSSIAN)
    gradients = cases.sample(objective, rho, 6, method="loop")
    batches = case.batches()
    for i in range(6):
        model = case.build()
        model.load_state_dict(model.state_dict() | rho.points[i])
        cases.cross_entropy(model, batches[i % len(batches)]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_loop_and_vmap_give_the_same_gradients(case, lines):
    model = case.build()
    if any(isinstance(part, nn.BatchNorm2d) for part in model.modules()):
        model.eval()
    looped, vmapped = sample_both(case.objective(model))
    assert_same(vmapped, looped)
    assert_same(cases.sample(case.objective(model), GAUSSIAN, 7), looped)
    assert lines() == []


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weight: float


BATCH_KINDS = {
    "dict": (lambda x, y, i: {"y": y, "x": x}, lambda b: (b["x"], b["y"])),
    "ordered dict": (lambda x, y, i: collections.OrderedDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "named tuple": (lambda x, y, i: Batch(x, y, 1.0), lambda b: (b.x, b.y)),
    "nested": (lambda x, y, i: [{"data": (x,)}, [y]], lambda b: (b[0]["data"][0], b[1][0])),
    "strings and None": (lambda x, y, i: (x, y, f"batch {i}", None, i), lambda b: (b[0], b[1])),
    "numbers that matter": (lambda x, y, i: (x, y, float(i)), lambda b: (b[0] * b[2], b[1])),
    "arrays": (lambda x, y, i: (x, np.full(3, i), y), lambda b: (b[0] * float(b[1][0]), b[2])),
    "tensor": (lambda x, y, i: torch.cat([x, F.one_hot(y, 3)], 1), lambda b: (b[:, :6], b[:, 6:])),
    "no tensors": (lambda x, y, i: i, lambda b: (torch.full((2, 6), float(b)).double(), torch.tensor([0, 1]))),
    "objects": (lambda x, y, i: SimpleNamespace(x=x, y=y), lambda b: (b.x, b.y)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCH_KINDS)
def test_loop_and_vmap_agree_on_batches_of_every_kind(kind, lines):
    pack, unpack = BATCH_KINDS[kind]
    batches = [pack(x, y, i) for i, (x, y) in enumerate(cases.MLP.batches(), start=1)]
    objective = egop.Objective(cases.mlp().double(), lambda m, b: cases.cross_entropy(m, unpack(b)), batches)
    looped, vmapped = sample_both(objective)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, GAUSSIAN, 7), looped)
    assert lines() == []


def test_loop_and_vmap_agree_when_the_last_batch_of_a_pass_is_smaller(lines):
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    assert [len(batch[0]) for batch in loader] == [16, 16, 8]
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, loader)
    looped, vmapped = sample_both(objective, 11)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, GAUSSIAN, 11), looped)
    assert lines() == []


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_loop_and_vmap_agree_on_one_batch_shared_by_all_points(samples, lines):
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, cases.MLP.batches()[:1])
    looped, vmapped = sample_both(objective, samples)
    assert_same(vmapped, looped)
    assert {len(gradient) for gradient in vmapped.values()} == {samples}
    assert lines() == []


def test_loop_and_vmap_agree_on_a_function():
    objective = egop.Objective.from_function(
        lambda a, b: (a.sin() * b).sum(), {"a": torch.ones(3, dtype=torch.float64), "b": torch.ones(1).double()}
    )
    looped, vmapped = sample_both(objective)
    assert_same(vmapped, looped)


def test_loop_and_vmap_agree_on_tied_and_frozen_and_unused_parameters(lines):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    net[3].weight.requires_grad_(False)
    model = nn.ModuleDict({"net": net, "unused": nn.Linear(2, 2)}).double()
    loss = lambda model, batch: cases.cross_entropy(model["net"], batch)  # noqa: E731
    looped, vmapped = sample_both(egop.Objective(model, loss, cases.MLP.batches()))
    assert_same(vmapped, looped)
    assert list(looped) == ["net.0.weight", "net.0.bias", "net.2.bias", "net.3.bias", "unused.weight", "unused.bias"]
    assert looped["unused.weight"].abs().sum() == 0
    assert lines() == []


@pytest.mark.parametrize("method", METHODS)
def test_only_the_named_parameters_are_differentiated_and_all_are_drawn(method):
    objective = cases.MLP.objective()
    everything = cases.sample(objective, GAUSSIAN, 5, method=method)
    some = cases.sample(objective, GAUSSIAN, 5, method=method, names=["2.weight", "0.bias"])
    assert_same(some, {name: everything[name] for name in ("2.weight", "0.bias")})


class Keyed(nn.Module):
    """Attention weights that do not change when all keys are shifted: the gradient of that bias is rounding noise."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(((self.query(x) @ self.key(x).mT).softmax(-1) @ x).mean(1))


def test_rounding_noise_in_a_gradient_that_is_zero_does_not_rule_out_vmap(lines):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Keyed(), torch.randn(16, 5, 4)
    objective = egop.Objective(model, cases.cross_entropy, [(x, torch.arange(16) % 3)])
    gradients = cases.sample(objective, GAUSSIAN, 20)
    assert 0 < gradients["key.bias"].abs().max() < 1e-6
    assert lines() == []


# --- the fall back to the loop ---


class Branching(nn.Module):
    """Data-dependent control flow."""

    def __init__(self):
        super().__init__()
        self.net = cases.mlp().double()

    def forward(self, x):
        y = self.net(x)
        return y if y.mean().item() > 0 else 2 * y


class Counting(nn.Module):
    """A buffer that each forward pass replaces, and that matters."""

    def __init__(self):
        super().__init__()
        self.net = cases.mlp().double()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        y = self.net(x)
        self.seen = 0.5 * self.seen + y.detach().mean(0)
        return y - self.seen


def in_turns(model, batch):
    """Draws random numbers outside torch, which vmap would share between all points of a chunk."""
    return cases.cross_entropy(model, (batch[0] * random.random(), batch[1]))


def mixed(model, batch):
    return cases.cross_entropy(model, (batch[0] * np.random.rand(), batch[1]))  # noqa: NPY002


def by_label(model, batch):
    """Control flow that depends on the batch alone."""
    return cases.cross_entropy(model, (batch[0] * (1 + batch[1].max().item()), batch[1]))


FALL_BACKS = {
    "batch norm in training mode": (lambda: cases.MODELS[2].build(), cases.cross_entropy, "BatchNorm2d"),
    "data-dependent control flow": (Branching, cases.cross_entropy, "item"),
    "batch-dependent control flow": (lambda: cases.MLP.build(), by_label, "item"),
    "a buffer that is replaced": (Counting, cases.cross_entropy, "'seen'"),
    "random numbers of Python": (lambda: cases.MLP.build(), in_turns, "random"),
    "random numbers of numpy": (lambda: cases.MLP.build(), mixed, "random"),
}


@pytest.mark.parametrize("kind", FALL_BACKS)
def test_what_vmap_cannot_do_goes_through_the_loop_and_one_line_says_why(kind, lines):
    build, loss, word = FALL_BACKS[kind]
    model = build()
    batches = cases.MODELS[2].batches() if kind.startswith("batch norm") else cases.MLP.batches()
    objective = egop.Objective(model, loss, batches)
    found = cases.sample(objective, GAUSSIAN, 9, chunk_bytes=20_000)
    (line,) = lines()
    assert line.startswith("egop samples gradients one at a time")
    assert word in line
    assert "\n" not in line
    assert_same(found, cases.sample(objective, GAUSSIAN, 9, method="loop"))
    assert len(lines()) == 1


@pytest.mark.parametrize("kind", FALL_BACKS)
def test_vmap_where_it_was_asked_for_and_cannot_be_used_is_an_error(kind):
    build, loss, _ = FALL_BACKS[kind]
    batches = cases.MODELS[2].batches() if kind.startswith("batch norm") else cases.MLP.batches()
    objective = egop.Objective(build(), loss, batches)
    before = cases.state_of(objective.module)
    with pytest.raises(RuntimeError, match="vmap"):
        cases.sample(objective, GAUSSIAN, 9, method="vmap")
    assert cases.state_of(objective.module) == before


def test_batch_norm_in_evaluation_mode_or_without_statistics_is_vmapped(lines):
    model = cases.MODELS[2].build().eval()
    cases.sample(cases.MODELS[2].objective(model), GAUSSIAN, 3)
    plain = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    looped, vmapped = sample_both(egop.Objective(plain, cases.cross_entropy, cases.MLP.batches()))
    assert_same(vmapped, looped)
    assert lines() == []


CLOSURES = {
    "with its gradient": lambda weight, model, batch: cases.cross_entropy(model, batch) + weight.square().sum(),
    "as a factor": lambda weight, model, batch: cases.cross_entropy(model, batch) * weight.square().sum(),
    "as a constant": lambda weight, model, batch: cases.cross_entropy(model, batch) * weight.detach().square().sum(),
}


@pytest.mark.parametrize("kind", CLOSURES)
@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Recentered()], ids=["gaussian", "recentered"])
def test_a_parameter_that_the_loss_reads_past_its_argument_rules_out_vmap(kind, dropout, rho, lines):
    model = cases.MLP.build()
    weight = model[0].weight
    if dropout:
        model[1] = nn.Dropout(0.5)
    objective = egop.Objective(model, lambda model, batch: CLOSURES[kind](weight, model, batch), cases.MLP.batches())
    looped = cases.sample(objective, rho, 9, method="loop", chunk_bytes=10_000)
    assert_same(cases.sample(objective, rho, 9, chunk_bytes=10_000), looped)
    assert len(lines()) == 1


def test_a_model_that_the_loss_reads_past_its_argument_is_the_same_model(lines):
    model = cases.MLP.build()
    objective = egop.Objective(model, lambda _, batch: cases.cross_entropy(model, batch), cases.MLP.batches())
    looped, vmapped = sample_both(objective)
    assert_same(vmapped, looped)
    assert_same(looped, cases.sample(cases.MLP.objective(), GAUSSIAN, 7))
    assert lines() == []


def test_trouble_that_vmap_meets_only_later_falls_back_there(lines):
    def loss(model, batch):
        if len(batch[0]) == 4:
            batch[0].max().item()
        return cases.cross_entropy(model, batch)

    large, small = cases.MLP.batches(6), cases.MLP.batches(6, size=4)
    objective = egop.Objective(cases.MLP.build(), loss, large + small)
    found = cases.sample(objective, GAUSSIAN, 30, chunk_bytes=20_000)
    assert_same(found, cases.sample(objective, GAUSSIAN, 30, method="loop"))
    assert len(lines()) == 1


# --- randomness ---


def dropping():
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)).double()


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_models_with_dropout_have_a_mask_of_their_own_at_each_point(method, lines):
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches()[:1])
    gradients = cases.sample(objective, egop.Recentered(), 40, method=method)["2.weight"]
    assert len({row[0, 0].item() for row in gradients}) == 40
    assert lines() == []


def test_dropout_has_the_same_gradients_in_the_mean_in_both_ways():
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches()[:1])
    looped, vmapped = sample_both(objective, 2000, egop.Recentered())
    for name, rows in looped.items():
        error = (rows.std(0) ** 2 / 2000 + vmapped[name].std(0) ** 2 / 2000).sqrt()
        assert ((rows.mean(0) - vmapped[name].mean(0)).abs() <= 6 * error + 1e-12).all()


@pytest.mark.parametrize("rho", [egop.Gaussian(), egop.Ball(1.0), egop.Recentered(1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_the_points_and_the_random_numbers_of_the_loss_are_independent(rho, method):
    theta = torch.zeros(50, dtype=torch.float64)
    objective = egop.Objective.from_function(lambda theta: (theta * torch.randn_like(theta)).sum(), {"theta": theta})
    recorder = Recorder(rho)
    noise = cases.sample(objective, recorder, 40, method=method)["theta"].flatten()
    points = torch.stack([point["theta"] for point in recorder.points]).flatten()[: len(noise)]
    assert torch.corrcoef(torch.stack([noise, points]))[0, 1].abs() < 5 / len(noise) ** 0.5


def test_the_batches_and_the_random_numbers_of_the_loss_are_independent():
    class Noise:
        """A data set that is drawn anew."""

        def __iter__(self):
            yield torch.randn(50, dtype=torch.float64)

    def loss(batch, theta):
        return (theta * batch * torch.randn_like(batch)).sum()

    objective = egop.Objective.from_function(loss, {"theta": torch.zeros(50).double()}, Noise())
    products = cases.sample(objective, egop.Recentered(), 40, method="loop")["theta"].flatten()
    assert products.mean().abs() < 5 / len(products) ** 0.5


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_same_seed_gives_the_same_gradients_and_another_seed_others(method):
    def of(seed):
        torch.rand(seed)  # whatever the global state is
        return cases.sample(egop.Objective(model, cases.cross_entropy, loader), GAUSSIAN, 9, seed=seed, method=method)

    model = dropping()
    data = TensorDataset(*(torch.cat(each) for each in zip(*cases.MLP.batches(), strict=True)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    assert_same(of(1), of(1))
    assert not torch.equal(of(1)["0.weight"], of(2)["0.weight"])


def test_a_generator_goes_on_from_draw_to_draw():
    generator = torch.Generator().manual_seed(0)
    first, second = (next(sample_gradients(cases.MLP.objective(), GAUSSIAN, 2, generator=generator)) for _ in range(2))
    assert not torch.equal(first["0.weight"], second["0.weight"])


# --- chunks ---


def chunk_lengths(objective, samples, **options):
    options.setdefault("generator", torch.Generator().manual_seed(0))
    return [len(next(iter(chunk.values()))) for chunk in sample_gradients(objective, GAUSSIAN, samples, **options)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization(), egop.Recentered(0.1)])
def test_the_draws_do_not_depend_on_the_chunks(method, rho):
    data = TensorDataset(*(torch.cat(each) for each in zip(*cases.MLP.batches(), strict=True)))
    loader = DataLoader(data, batch_size=16, shuffle=True)  # reshuffles three times
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, loader)
    one, some, all_at_once = (
        cases.sample(objective, rho, 13, method=method, chunk_bytes=size) for size in (1, 12_000, 2**30)
    )
    assert_same(one, all_at_once)
    assert_same(some, all_at_once)


def test_in_the_loop_dropout_does_not_depend_on_the_chunks_either():
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches())
    one, many = (cases.sample(objective, GAUSSIAN, 13, method="loop", chunk_bytes=size) for size in (1, 2**30))
    assert_same(one, many)


@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Ball(1.0), egop.Initialization(), egop.Recentered(0.1)])
def test_the_draws_do_not_depend_on_the_chunks_over_several_blocks_either(rho, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK_POINTS", 40)
    objective = cases.MLP.objective()
    some, all_at_once = (cases.sample(objective, rho, 130, chunk_bytes=size) for size in (30_000, 2**30))
    assert_same(some, all_at_once)
    assert len({row[0, 0].item() for row in some["0.weight"]}) == 130


def batches_seen(rho, loss, count=20, **options):
    """The first entries of the batches that a shuffling loader gives."""
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


def test_what_rho_and_the_loss_draw_does_not_change_the_batches():
    expected = batches_seen(GAUSSIAN, cases.cross_entropy)
    assert len(set(expected)) > 6  # a pass has three
    assert batches_seen(GAUSSIAN, restless) == expected
    assert batches_seen(egop.Initialization(), restless) == expected
    assert batches_seen(egop.Recentered(), restless, chunk_bytes=1) == expected


def full_above(points, monkeypatch):
    """A device whose memory is enough for so many points at once; the numbers that were tried."""
    tried = []
    real = sampling.vmapped

    def vmapped(objective, names, taken):
        tried.append(len(taken))
        if len(taken) > points:
            raise torch.OutOfMemoryError
        return real(objective, names, taken)

    for module in (chunks, sampling):  # where it is tried, and where it is used
        monkeypatch.setattr(module, "vmapped", vmapped)
    return tried


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_a_chunk_that_does_not_fit_is_halved_until_it_does(method, monkeypatch, lines):
    objective = cases.MLP.objective()
    expected = cases.sample(objective, GAUSSIAN, 50, method="vmap")
    tried = full_above(15, monkeypatch)
    assert_same(cases.sample(objective, GAUSSIAN, 50, method=method), expected)
    assert tried[1:] == [50, 25, 12, 12, 12, 12, 2]  # after the trial of two
    assert lines() == []


def test_one_point_that_does_not_fit_is_an_error_and_the_model_stays(monkeypatch):
    objective = cases.MLP.objective()
    before = cases.state_of(objective.module)
    chunks = sample_gradients(objective, GAUSSIAN, 50, generator=torch.Generator(), method="vmap", chunk_bytes=5000)
    next(chunks)
    full_above(0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        next(chunks)
    assert cases.state_of(objective.module) == before


def test_a_batch_that_is_a_part_of_a_large_tensor_counts_by_its_own_size():
    def longest(batches):
        objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, batches)
        return max(chunk_lengths(objective, 200, method="vmap", chunk_bytes=2**20))

    x, y = (torch.cat(each) for each in zip(*cases.MLP.batches(200), strict=True))
    parts = list(zip(x.split(16), y.split(16), strict=True))
    assert longest(parts) == longest([tuple(tensor.clone() for tensor in batch) for batch in parts]) > 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization(), egop.Recentered(0.1)])
def test_loop_and_vmap_agree_on_a_gpu_too(rho):
    batches = [tuple(tensor.cuda() for tensor in batch) for batch in cases.MLP.batches()]
    objective = egop.Objective(cases.MLP.build().cuda(), cases.cross_entropy, batches)
    looped, vmapped = sample_both(objective, 70, rho)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, rho, 70, chunk_bytes=50_000), looped)


@pytest.mark.parametrize(("images", "expected"), [(2, True), (256, False)])
def test_large_convolutions_go_one_at_a_time_on_the_cpu(images, expected, monkeypatch):
    """Where that is faster; unless the caller says otherwise."""
    used = []
    monkeypatch.setattr(chunks, "vmapped", lambda *args: used.append(args) or vmapped(*args))
    vmapped = gradients.vmapped
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
def test_products_of_few_digits_are_not_taken_for_an_error_of_vmap(precision):
    """By default cuDNN convolves in TF32, and a program may choose it for products too."""
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
def test_chunks_are_as_small_as_the_memory_asks(method):
    objective = cases.MLP.objective()
    held = sum(p.numel() * 8 for p in objective.parameters.values())
    assert chunk_lengths(objective, 5, method=method, chunk_bytes=1) == [1] * 5
    limited = chunk_lengths(objective, 50, method=method, chunk_bytes=50 * held)
    assert sum(limited) == 50
    assert 1 < max(limited) <= 25  # values and gradients are both held
    assert max(chunk_lengths(objective, 600, method=method)) <= chunks.CHUNK_POINTS


def test_chunks_make_room_for_what_the_backward_pass_keeps():
    def lengths(size):
        objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, cases.MLP.batches(1, size))
        return max(chunk_lengths(objective, 200, method="vmap", chunk_bytes=2**20))

    assert lengths(16) > 10 * lengths(4096) > 0


def test_points_are_drawn_no_further_ahead_than_one_chunk():
    rho = Recorder(GAUSSIAN)
    objective = cases.MLP.objective()
    held = sum(p.numel() * 8 for p in objective.parameters.values())
    chunks = sample_gradients(objective, rho, 10**9, generator=torch.Generator(), method="loop", chunk_bytes=8 * held)
    taken = sum(len(chunk["0.bias"]) for chunk in itertools.islice(chunks, 5))
    chunks.close()
    assert len(rho.points) <= taken + 1


def test_a_progress_bar_shows_the_samples_and_the_time_left(capsys):
    cases.sample(cases.MLP.objective(), GAUSSIAN, 300, progress=True)
    shown = capsys.readouterr().err
    assert "Sampling gradients: 100%" in shown
    assert "300/300" in shown
    assert "<00:00" in shown
    cases.sample(cases.MLP.objective(), GAUSSIAN, 3, progress=False)
    assert capsys.readouterr().err == ""


# --- what sampling leaves behind ---


class Fragile(nn.Module):
    """BatchNorm and Dropout, a buffer that is replaced, a gradient that is there, a frozen layer, mixed modes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(1, dtype=torch.float64))
        self.double()
        self.first.weight.grad = torch.ones_like(self.first.weight)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        y = self.head(self.drop(self.norm(self.first(x))))
        self.last = y.detach().mean().reshape(1)
        return y


class Calm(Fragile):
    """The same without what keeps it from being vmapped."""

    def __init__(self):
        super().__init__()
        self.norm.eval()

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x))))


class Trouble(Exception):  # noqa: N818
    pass


def failing_at(call, error):
    """A loss that does all kinds of things, and fails from one call on."""
    calls = itertools.count(1)

    def loss(model, batch):
        torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        if next(calls) >= call:
            raise error
        return cases.cross_entropy(model, batch)

    return loss


PATHS = {"loop": (Fragile, "loop"), "fallen back": (Fragile, "auto"), "vmap": (Calm, "auto")}


def quiet(model, batch):
    torch.rand(1)
    return cases.cross_entropy(model, batch)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rho", [GAUSSIAN, egop.Initialization()], ids=["gaussian", "initialization"])
def test_after_success_everything_is_as_it_was(path, rho):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    cases.sample(objective, rho, 9, method=method, chunk_bytes=10_000)
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("error", [Trouble("loss"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_when_the_loss_fails_it_is_seen_and_everything_is_as_it_was(path, error, call):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, failing_at(call, error), cases.MLP.batches())
    before = cases.state_of(model)
    with pytest.raises(type(error)):
        cases.sample(objective, GAUSSIAN, 20, method=method, chunk_bytes=10_000)
    assert cases.state_of(model) == before
    # and the objective can be used again
    assert objective.current["first.weight"].data_ptr() == model.first.weight.data_ptr()


@pytest.mark.parametrize("path", PATHS)
def test_when_the_consumer_stops_early_everything_is_as_it_was(path):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    generator = torch.Generator()
    chunks = sample_gradients(objective, GAUSSIAN, 100, generator=generator, method=method, chunk_bytes=10_000)
    next(chunks), next(chunks)
    chunks.close()
    assert cases.state_of(model) == before
    for _ in sample_gradients(objective, GAUSSIAN, 100, generator=generator, method=method, chunk_bytes=10_000):
        break
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
def test_when_the_consumer_fails_everything_is_as_it_was(path):
    build, method = PATHS[path]
    model = build()
    objective = egop.Objective(model, quiet, cases.MLP.batches())
    before = cases.state_of(model)
    chunks = sample_gradients(objective, GAUSSIAN, 100, generator=torch.Generator(), method=method)
    next(chunks)
    with pytest.raises(KeyboardInterrupt):
        chunks.throw(KeyboardInterrupt())
    assert cases.state_of(model) == before


@pytest.mark.parametrize("path", PATHS)
def test_when_the_batches_run_out_everything_is_as_it_was(path):
    build, method = PATHS[path]
    model = build()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match="batches are empty"):
        cases.sample(egop.Objective(model, quiet, DataLoader([])), GAUSSIAN, 5, method=method)
    with pytest.raises(ValueError, match="used up"):
        cases.sample(egop.Objective(model, quiet, iter(cases.MLP.batches())), GAUSSIAN, 5, method=method)
    assert cases.state_of(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_a_one_shot_iterator_that_lasts_is_fine(method):
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, iter(cases.MLP.batches(4)))
    gradients = cases.sample(objective, GAUSSIAN, 4, method=method)
    assert_same(gradients, cases.sample(cases.MLP.objective(), GAUSSIAN, 4, method=method))


def test_sampling_between_steps_does_not_change_training():
    def train(sampled):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Fragile()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for batch in cases.MLP.batches():
                optimizer.zero_grad()
                cases.cross_entropy(model, batch).backward()
                if sampled:
                    objective = egop.Objective(model, quiet, cases.MLP.batches())
                    cases.sample(objective, egop.Recentered(0.1), 5)
                optimizer.step()
            return copy.deepcopy(model.state_dict())

    assert_same(train(sampled=True), train(sampled=False))


# --- bad input ---


@pytest.mark.parametrize("samples", [0, -1, 2.5, "many", None, True])
def test_the_number_of_samples_must_be_a_positive_whole_number(samples):
    with pytest.raises(ValueError, match=r"Invalid samples value: .*Must be a whole number of at least 1"):
        next(sample_gradients(cases.MLP.objective(), GAUSSIAN, samples, generator=torch.Generator()))


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"Invalid sampling method: 'fast'. Must be 'auto', 'loop' or 'vmap'"):
        next(sample_gradients(cases.MLP.objective(), GAUSSIAN, 1, generator=torch.Generator(), method="fast"))


def broken_at(value):
    """A loss whose third batch is broken."""

    def loss(model, batch):
        x, y = batch
        return cases.cross_entropy(model, (x, y)) + torch.where(x[0, 0] > 100, value, 0.0)

    batches = cases.MLP.batches()
    batches[2][0][0, 0] = 1000
    return egop.Objective(cases.MLP.build(), loss, batches)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_a_loss_that_is_not_finite_names_the_draw(method, value, chunk_bytes):
    objective = broken_at(value)
    before = cases.state_of(objective.module)
    with pytest.raises(FloatingPointError, match=r"The loss is not finite at draw 2. .*rho of smaller scale"):
        cases.sample(objective, GAUSSIAN, 4, method=method, chunk_bytes=chunk_bytes)
    assert cases.state_of(objective.module) == before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_a_gradient_that_is_not_finite_names_the_parameter_and_the_draw(method, chunk_bytes):
    def loss(model, batch):
        # the root has a finite value and no finite gradient at zero
        return cases.cross_entropy(model, batch[:2]) + (batch[2] * model[2].bias).abs().sum().sqrt()

    batches = [(x, y, torch.tensor(float(i != 3))) for i, (x, y) in enumerate(cases.MLP.batches(5))]
    objective = egop.Objective(cases.MLP.build(), loss, batches)
    before = cases.state_of(objective.module)
    with pytest.raises(FloatingPointError, match=r"The gradient of '2.bias' is not finite at draw 3. "):
        cases.sample(objective, GAUSSIAN, 5, method=method, chunk_bytes=chunk_bytes)
    assert cases.state_of(objective.module) == before


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_a_first_draw_that_is_not_finite_is_named_too(method):
    objective = egop.Objective.from_function(lambda theta: theta.log().sum(), {"theta": -torch.ones(2)})
    with pytest.raises(FloatingPointError, match="The loss is not finite at draw 0"):
        cases.sample(objective, egop.Recentered(), 5, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_finite_gradients_whose_sum_is_not_are_fine(method):
    scale = torch.tensor([3e38, 3e38, 1.0])
    objective = egop.Objective.from_function(lambda theta: (scale * theta).sum() * 0.9, {"theta": torch.zeros(3)})
    gradients = cases.sample(objective, egop.Recentered(), 3, method=method)["theta"]
    assert gradients.sum() == float("inf")
    torch.testing.assert_close(gradients, (0.9 * scale).expand(3, 3))
