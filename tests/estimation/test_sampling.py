"""Gradients at drawn points: loop and vmap agree, and random numbers are independent."""

from __future__ import annotations

import collections
from concurrent.futures import ThreadPoolExecutor, wait
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
from egop.estimation.sampling import sample_gradients
from sampled import GAUSSIAN, METHODS, Recorder, assert_same, dropping, sample_both

# --- the gradients ---


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_loop_gives_the_gradient_at_each_point_and_batch(case):
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
def test_loop_and_vmap_agree_on_all_kinds_of_batches(kind, lines):
    pack, unpack = BATCH_KINDS[kind]
    batches = [pack(x, y, i) for i, (x, y) in enumerate(cases.MLP.batches(), start=1)]
    objective = egop.Objective(cases.mlp().double(), lambda m, b: cases.cross_entropy(m, unpack(b)), batches)
    looped, vmapped = sample_both(objective)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, GAUSSIAN, 7), looped)
    assert lines() == []


def test_loop_and_vmap_agree_with_a_smaller_last_batch(lines):
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    assert [len(batch[0]) for batch in loader] == [16, 16, 8]
    objective = egop.Objective(cases.MLP.build(), cases.cross_entropy, loader)
    looped, vmapped = sample_both(objective, 11)
    assert_same(vmapped, looped)
    assert_same(cases.sample(objective, GAUSSIAN, 11), looped)
    assert lines() == []


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_loop_and_vmap_agree_on_one_shared_batch(samples, lines):
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


def test_loop_and_vmap_agree_on_tied_frozen_and_unused_parameters(lines):
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
def test_names_select_gradients_without_changing_draws(method):
    objective = cases.MLP.objective()
    everything = cases.sample(objective, GAUSSIAN, 5, method=method)
    some = cases.sample(objective, GAUSSIAN, 5, method=method, names=["2.weight", "0.bias"])
    assert_same(some, {name: everything[name] for name in ("2.weight", "0.bias")})


class Keyed(nn.Module):
    """Attention weights do not change if all keys are shifted, so the gradient of that bias is rounding noise."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(((self.query(x) @ self.key(x).mT).softmax(-1) @ x).mean(1))


def test_rounding_noise_in_a_zero_gradient_does_not_rule_out_vmap(lines):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Keyed(), torch.randn(16, 5, 4)
    objective = egop.Objective(model, cases.cross_entropy, [(x, torch.arange(16) % 3)])
    gradients = cases.sample(objective, GAUSSIAN, 20)
    assert 0 < gradients["key.bias"].abs().max() < 1e-6
    assert lines() == []


# --- randomness ---


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_each_point_has_its_own_dropout_mask(method, lines):
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches()[:1])
    gradients = cases.sample(objective, egop.Recentered(), 40, method=method)["2.weight"]
    assert len({row[0, 0].item() for row in gradients}) == 40
    assert lines() == []


def test_mean_gradients_with_dropout_agree():
    objective = egop.Objective(dropping(), cases.cross_entropy, cases.MLP.batches()[:1])
    looped, vmapped = sample_both(objective, 2000, egop.Recentered())
    for name, rows in looped.items():
        error = (rows.std(0) ** 2 / 2000 + vmapped[name].std(0) ** 2 / 2000).sqrt()
        assert ((rows.mean(0) - vmapped[name].mean(0)).abs() <= 6 * error + 1e-12).all()


@pytest.mark.parametrize("rho", [egop.Gaussian(), egop.Ball(1.0), egop.Recentered(1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_points_and_random_numbers_of_the_loss_are_independent(rho, method):
    theta = torch.zeros(50, dtype=torch.float64)
    objective = egop.Objective.from_function(lambda theta: (theta * torch.randn_like(theta)).sum(), {"theta": theta})
    recorder = Recorder(rho)
    noise = cases.sample(objective, recorder, 40, method=method)["theta"].flatten()
    points = torch.stack([point["theta"] for point in recorder.points]).flatten()[: len(noise)]
    assert torch.corrcoef(torch.stack([noise, points]))[0, 1].abs() < 5 / len(noise) ** 0.5


def test_batches_and_random_numbers_of_the_loss_are_independent():
    class Noise:
        """A data set drawn again on every pass."""

        def __iter__(self):
            yield torch.randn(50, dtype=torch.float64)

    def loss(batch, theta):
        return (theta * batch * torch.randn_like(batch)).sum()

    objective = egop.Objective.from_function(loss, {"theta": torch.zeros(50).double()}, Noise())
    products = cases.sample(objective, egop.Recentered(), 40, method="loop")["theta"].flatten()
    assert products.mean().abs() < 5 / len(products) ** 0.5


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_gradients_depend_on_the_seed_only(method):
    def of(seed):
        torch.rand(seed)  # whatever the global state is
        return cases.sample(egop.Objective(model, cases.cross_entropy, loader), GAUSSIAN, 9, seed=seed, method=method)

    model = dropping()
    data = TensorDataset(*(torch.cat(each) for each in zip(*cases.MLP.batches(), strict=True)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    assert_same(of(1), of(1))
    assert not torch.equal(of(1)["0.weight"], of(2)["0.weight"])


def test_generator_advances_between_calls():
    generator = torch.Generator().manual_seed(0)
    first, second = (next(sample_gradients(cases.MLP.objective(), GAUSSIAN, 2, generator=generator)) for _ in range(2))
    assert not torch.equal(first["0.weight"], second["0.weight"])


# --- bad input ---


@pytest.mark.parametrize("samples", [0, -1, 2.5, "many", None, True])
def test_invalid_samples_raise(samples):
    with pytest.raises(ValueError, match=r"Invalid samples value: .*Must be a whole number of at least 1"):
        next(sample_gradients(cases.MLP.objective(), GAUSSIAN, samples, generator=torch.Generator()))


def test_unknown_method_raises():
    with pytest.raises(ValueError, match=r"Invalid sampling method: 'fast'. Must be 'auto', 'loop' or 'vmap'"):
        next(sample_gradients(cases.MLP.objective(), GAUSSIAN, 1, generator=torch.Generator(), method="fast"))


def broken_at(value):
    """Build a loss whose third batch is broken."""

    def loss(model, batch):
        x, y = batch
        return cases.cross_entropy(model, (x, y)) + torch.where(x[0, 0] > 100, value, 0.0)

    batches = cases.MLP.batches()
    batches[2][0][0, 0] = 1000
    return egop.Objective(cases.MLP.build(), loss, batches)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_nonfinite_loss_names_the_draw(method, value, chunk_bytes):
    objective = broken_at(value)
    before = cases.state_of(objective.module)
    with pytest.raises(FloatingPointError, match=r"The loss is not finite at draw 2. .*smaller scale in rho"):
        cases.sample(objective, GAUSSIAN, 4, method=method, chunk_bytes=chunk_bytes)
    assert cases.state_of(objective.module) == before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_nonfinite_gradient_names_the_parameter_and_the_draw(method, chunk_bytes):
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
def test_nonfinite_first_draw_is_named(method):
    objective = egop.Objective.from_function(lambda theta: theta.log().sum(), {"theta": -torch.ones(2)})
    with pytest.raises(FloatingPointError, match="The loss is not finite at draw 0"):
        cases.sample(objective, egop.Recentered(), 5, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_finite_gradients_with_infinite_sum_are_allowed(method):
    scale = torch.tensor([3e38, 3e38, 1.0])
    objective = egop.Objective.from_function(lambda theta: (scale * theta).sum() * 0.9, {"theta": torch.zeros(3)})
    gradients = cases.sample(objective, egop.Recentered(), 3, method=method)["theta"]
    assert gradients.sum() == float("inf")
    torch.testing.assert_close(gradients, (0.9 * scale).expand(3, 3))


# --- threads ---


def test_estimates_in_several_threads_match_one_thread():
    def objective(width):
        with torch.random.fork_rng():
            torch.manual_seed(width)
            model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 2))
        data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 2)
        return egop.Objective(model, cases.cross_entropy, DataLoader(data, 8, shuffle=True))

    def estimated(objective):
        basis = egop.estimate(objective, samples=150, progress=False, structure=egop.Full(), sampling="loop")
        return {name: change.dense() for name, change in basis.items()}

    objectives = [objective(5), objective(6), objective(6)]
    objectives.append(objectives[0])  # one model in two threads
    alone = [estimated(each) for each in objectives]
    before = [cases.state_of(each.module) for each in objectives]
    with ThreadPoolExecutor(len(objectives)) as pool:
        together = list(pool.map(estimated, objectives, timeout=120))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert [cases.state_of(each.module) for each in objectives] == before


def test_another_thread_waits_while_vmap_has_swapped_the_parameters():
    checks = []

    class Watched(nn.Linear):
        def forward(self, x):
            if not checks and not isinstance(self.weight, nn.Parameter):
                checks.append(pool.submit(egop.Initialization().check, objective))
                wait(checks, timeout=0.3)
            return super().forward(x)

    with ThreadPoolExecutor(1) as pool:
        model = Watched(3, 2)
        objective = egop.Objective(model, cases.cross_entropy, [(torch.randn(8, 3), torch.arange(8) % 2)])
        egop.estimate(objective, samples=40, progress=False)
    assert checks[0].result() is None
