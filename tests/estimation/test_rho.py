"""Distributions of parameter points."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import cases
import egop
from sampled import Recorder

SHAPES = {"a": (3,), "b": (2, 2)}
DIMENSION = 7
DRAWS = 4000


def function_objective(dtype=torch.float64):
    tensors = {name: torch.full(shape, 0.5, dtype=dtype) for name, shape in SHAPES.items()}
    return egop.Objective.from_function(lambda a, b: a.sum() + b.sum(), tensors)


def draw(rho, objective, count=DRAWS, seed=0):
    """Return the drawn points as rows."""
    generator = torch.Generator().manual_seed(seed)
    points = [rho.draw(objective, generator) for _ in range(count)]
    return torch.stack([torch.cat([value.flatten() for value in point.values()]) for point in points])


CENTER = {"a": torch.tensor([1.0, -2.0, 3.0]), "b": torch.tensor([[4.0, -5.0], [6.0, 7.0]])}
CENTER_ROW = torch.cat([value.flatten() for value in CENTER.values()]).double()


# --- Gaussian ---


def test_gaussian_is_independent_normal_around_the_center():
    rows = (draw(egop.Gaussian(scale=2.0, center=CENTER), function_objective()) - CENTER_ROW) / 2
    bound = 5 / DRAWS**0.5  # five standard errors
    torch.testing.assert_close(rows.mean(0), torch.zeros(DIMENSION, dtype=torch.float64), rtol=0, atol=bound)
    covariance = rows.mT @ rows / DRAWS
    torch.testing.assert_close(covariance, torch.eye(DIMENSION, dtype=torch.float64), rtol=0, atol=2**0.5 * bound)
    assert rows.pow(4).mean().item() == pytest.approx(3, abs=5 * (96 / DRAWS / DIMENSION) ** 0.5)


def test_gaussian_is_standard_normal_by_default():
    rows = draw(egop.Gaussian(), function_objective())
    assert rows.mean().abs().item() < 5 / (DRAWS * DIMENSION) ** 0.5
    assert rows.square().mean().item() == pytest.approx(1, abs=5 * (2 / DRAWS / DIMENSION) ** 0.5)


# --- Ball ---


def test_ball_is_uniform_and_isotropic():
    radius = 3.0
    rows = draw(egop.Ball(radius, center=CENTER), function_objective()) - CENTER_ROW
    lengths = rows.norm(dim=1)
    assert lengths.max().item() <= radius
    # the volume inside r is (r/R)^d, so these are uniform: Kolmogorov-Smirnov at the 0.1 % level
    volumes = (lengths / radius).pow(DIMENSION).sort().values
    steps = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    assert (volumes - steps).abs().max().item() < 1.95 / DRAWS**0.5
    # E r² = R² d/(d+2), spread evenly over all directions
    assert lengths.square().mean().item() == pytest.approx(radius**2 * DIMENSION / (DIMENSION + 2), rel=0.02)
    second_moment = rows.mT @ rows / DRAWS
    expected = radius**2 / (DIMENSION + 2) * torch.eye(DIMENSION, dtype=torch.float64)
    torch.testing.assert_close(second_moment, expected, rtol=0, atol=5 * radius**2 / (DIMENSION + 2) / DRAWS**0.5 * 2)
    torch.testing.assert_close(rows.mean(0), torch.zeros(DIMENSION, dtype=torch.float64), rtol=0, atol=5 / DRAWS**0.5)


# --- Recentered ---


def test_recentered_follows_training():
    objective = function_objective()
    for value in (0.5, 20.0):
        for tensor in objective.parameters.values():
            tensor.fill_(value)
        rows = draw(egop.Recentered(scale=0.1), objective, 1000)
        noise = (rows - value) / 0.1
        assert noise.mean().abs().item() < 5 / (1000 * DIMENSION) ** 0.5
        assert noise.square().mean().item() == pytest.approx(1, abs=5 * (2 / 1000 / DIMENSION) ** 0.5)


@pytest.mark.parametrize("method", ["loop", "vmap"])
def test_recentered_ignores_values_written_while_sampling(method):
    objective = cases.MLP.objective()
    start = cases.parameters_of(objective.module)
    near, exact = Recorder(egop.Recentered(scale=1e-3)), Recorder(egop.Recentered())
    cases.sample(objective, near, 30, method=method, chunk_bytes=1)
    cases.sample(objective, exact, 5, method=method, chunk_bytes=1)
    # noise of scale 1e-3 each, not a random walk away from the start
    assert max((point[n] - start[n]).abs().max().item() for point in near.points for n in start) < 6e-3
    assert all(torch.equal(point[name], start[name]) for point in exact.points for name in start)


# --- Initialization ---


class Raw(nn.Module):
    """A parameter without an initializer next to a layer with one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 7.0))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) * self.scale


LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "convolution": lambda: nn.Conv2d(2, 3, 3),
    "embedding": lambda: nn.Embedding(6, 3),
    "recurrent": lambda: nn.GRU(3, 4),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "layer norm": lambda: nn.LayerNorm(4),
    "attention": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, dim_feedforward=6),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, dim_feedforward=6, batch_first=True),
    "network": cases.convolutional,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_initialization_matches_the_distribution_of_built_modules(layer):
    count = 200
    with torch.random.fork_rng():
        torch.manual_seed(1)
        built = [dict(LAYERS[layer]().named_parameters()) for _ in range(count)]
        model = LAYERS[layer]()
    objective = egop.Objective(model, lambda model, batch: 0, [])
    generator = torch.Generator().manual_seed(2)
    drawn = [egop.Initialization().draw(objective, generator) for _ in range(count)]
    assert list(drawn[0]) == list(built[0])
    for name in built[0]:
        expected = torch.stack([each[name].detach() for each in built]).double()
        found = torch.stack([each[name] for each in drawn]).double()
        spread = expected.std().item()
        if spread == 0:  # zeros and ones
            assert torch.equal(found, expected), name
            continue
        assert found.std(0).min() > 0.5 * spread, name  # every entry is drawn again every time
        assert found.mean().item() == pytest.approx(expected.mean().item(), abs=6 * spread / found.numel() ** 0.5), name
        assert found.std().item() == pytest.approx(spread, rel=6 / found.numel() ** 0.5), name
        if found.abs().max() < 2 * spread:  # uniform: the same bounds
            assert found.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.05), name


def test_attention_still_has_a_known_reset_function(caplog):
    # torch keeps it private: should it be renamed, the attention weights would silently stay where they are
    attention = nn.MultiheadAttention(4, 2)
    assert callable(getattr(attention, "reset_parameters", None) or getattr(attention, "_reset_parameters", None))
    assert callable(getattr(nn.Transformer, "_reset_parameters", None))
    egop.Initialization().check(egop.Objective(attention, lambda model, batch: 0, []))
    assert caplog.messages == []


def test_init_fn_replaces_the_own_initializers():
    def init(model):
        for parameter in model.parameters():
            nn.init.uniform_(parameter, 5.0, 6.0)

    objective = cases.MLP.objective()
    rho = egop.Initialization(init_fn=init)
    rho.check(objective)
    rows = draw(rho, objective, 50)
    assert rows.min() >= 5
    assert rows.max() <= 6
    assert (rows.std(0) > 0.15).all()


def normal(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, 2.0, 3.0)


def in_turns():
    """Build an initializer with its own state: every call gives the next of many stored points."""
    numbers = iter(torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3 + 2)

    def init(model):
        number = next(numbers)
        for parameter in model.parameters():
            nn.init.constant_(parameter, number.item())

    return init


INITIALIZERS = {
    "plain": lambda model: normal,
    "in turns": lambda model: in_turns(),
}


@pytest.mark.parametrize("kind", INITIALIZERS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_many_initializations_are_distinct(kind, frozen):
    model = cases.MLP.build()
    model[0].weight.requires_grad_(not frozen)  # the initializer draws it nevertheless
    objective = egop.Objective(model, cases.cross_entropy, [])
    rho = egop.Initialization(init_fn=INITIALIZERS[kind](model))
    before = cases.state_of(model)
    points = rho.draw_many(objective, torch.Generator().manual_seed(3), 300)
    assert cases.state_of(model) == before
    assert {name: value.shape[1:] for name, value in points.items()} == {
        name: parameter.shape for name, parameter in objective.parameters.items()
    }
    first = torch.stack([value.flatten(1)[:, 0] for value in points.values()])
    for entries in first:
        assert len(set(entries.tolist())) == 300
        assert entries.mean().item() == pytest.approx(2, abs=5 * 3 / 300**0.5)
        assert entries.std().item() == pytest.approx(3, rel=5 * (0.5 / 300) ** 0.5)


def test_errors_of_init_fn_are_raised():
    def init(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        egop.Initialization(init_fn=init).draw_many(cases.MLP.objective(), torch.Generator(), 100)


def test_init_fn_may_use_any_global_random_numbers():
    def init(model):
        with torch.no_grad():
            model.weight.fill_(np.random.rand() + random.random())  # noqa: NPY002

    objective = egop.Objective(nn.Linear(1, 1), lambda model, batch: 0, [])
    rho = egop.Initialization(init_fn=init)
    assert torch.equal(draw(rho, objective, 3, seed=1), draw(rho, objective, 3, seed=1))
    assert not torch.equal(draw(rho, objective, 3, seed=1), draw(rho, objective, 3, seed=2))


def test_parameter_without_initializer_stays():
    objective = egop.Objective(Raw(), lambda model, batch: model(batch).square().sum(), [torch.ones(4, 3)])
    rho = Recorder(egop.Initialization())
    cases.estimate(objective, rho=rho)
    assert all(point["scale"].tolist() == [7.0, 7.0] for point in rho.points)
    assert len({point["layer.weight"][0, 0].item() for point in rho.points}) == len(rho.points)


def test_tied_parameter_is_drawn():
    model = Raw()
    model.scale = nn.Parameter(torch.ones(2, 3))
    model.layer.weight = model.scale
    objective = egop.Objective(model, lambda model, batch: 0, [])
    assert draw(egop.Initialization(), objective, 20).std(0).min() > 0


def test_model_without_initializer_raises_with_remedies():
    model = nn.ParameterList([torch.zeros(2)])
    objective = egop.Objective(model, lambda model, batch: 0, [])
    with pytest.raises(ValueError, match=r"No submodule of ParameterList has a reset_parameters.*init_fn=.*Gaussian"):
        egop.Initialization().check(objective)


def test_initialization_needs_a_module():
    with pytest.raises(
        TypeError, match=r"needs a module.*built from a function. Use rho=egop.Gaussian\(scale\) or egop.Ball"
    ):
        cases.estimate(function_objective(), rho=egop.Initialization())
    with pytest.raises(TypeError, match="needs a module"):
        cases.estimate(function_objective())  # the default


# --- all of them ---

DISTRIBUTIONS = [
    egop.Gaussian(),
    egop.Ball(2.0),
    egop.Initialization(),
    egop.Initialization(init_fn=lambda model: nn.init.normal_(model[0].weight)),
    egop.Recentered(),
    egop.Recentered(0.1),
]


@pytest.mark.parametrize("rho", DISTRIBUTIONS)
def test_draw_restores_the_model_and_the_random_state(rho):
    model = cases.convolutional()  # BatchNorm's reset_parameters also resets its running statistics
    model(torch.randn(4, 2, 5, 5)).sum().backward()
    model[1].eval()
    objective = egop.Objective(model, cases.cross_entropy, [])
    before = cases.state_of(model)
    drawn = rho.draw(objective, torch.Generator().manual_seed(0))
    assert cases.state_of(model) == before
    assert {name: value.shape for name, value in drawn.items()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.parametrize("rho", [rho for rho in DISTRIBUTIONS if rho != egop.Recentered()])
def test_draws_depend_on_the_seed_only(rho):
    objective = cases.MLP.objective()
    one, again, other = (draw(rho, objective, 2, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


@pytest.mark.parametrize("rho", DISTRIBUTIONS)
@pytest.mark.parametrize("method", ["loop", "vmap"])
def test_frozen_parameters_keep_their_values_while_sampling(rho, method):
    model = cases.MLP.build()
    model[2].requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    seen = []

    def loss(model, batch):
        seen.append(torch.equal(model[2].weight, frozen))
        return cases.cross_entropy(model, batch)

    objective = egop.Objective(model, loss, cases.MLP.batches())
    gradients = cases.sample(objective, rho, 6, method=method, chunk_bytes=3 * 6 * 8 * 100)
    assert list(gradients) == ["0.weight", "0.bias"]
    assert seen
    assert all(seen)


@pytest.mark.parametrize("rho", [egop.Gaussian(), egop.Ball(3.0), egop.Recentered(1.0)])
def test_points_have_the_precision_of_the_parameters(rho):
    drawn = rho.draw(function_objective(torch.bfloat16), torch.Generator().manual_seed(0))
    assert {value.dtype for value in drawn.values()} == {torch.bfloat16}


def test_noise_for_half_precision_is_drawn_in_float32():
    wide = egop.Objective.from_function(lambda a: a.sum(), {"a": torch.zeros(1000, dtype=torch.bfloat16)})
    narrow = egop.Objective.from_function(lambda a: a.sum(), {"a": torch.zeros(1000, dtype=torch.float32)})
    expected = draw(egop.Gaussian(), narrow, 1).bfloat16()
    assert torch.equal(draw(egop.Gaussian(), wide, 1), expected)


@pytest.mark.parametrize("rho", [egop.Gaussian(2.0, CENTER), egop.Ball(3.0, CENTER), egop.Recentered(0.5)])
def test_many_points_have_the_distribution_of_single_ones(rho):
    objective = function_objective()
    points = rho.draw_many(objective, torch.Generator().manual_seed(1), DRAWS)
    many = torch.cat([value.flatten(1) for value in points.values()], 1)
    one = draw(rho, objective)
    spread = one.std(0)
    assert ((many.mean(0) - one.mean(0)).abs() < 8 * spread / DRAWS**0.5).all()
    assert ((many.std(0) / spread - 1).abs() < 8 / DRAWS**0.5).all()
    lengths = [(rows - rows.mean(0)).norm(dim=1).sort().values for rows in (many, one)]
    assert (lengths[0] - lengths[1]).abs().mean() < 0.02 * lengths[1].mean()
    assert len(set(many[:, 0].tolist())) == DRAWS


def test_many_points_of_recentered_without_scale_are_the_current_one():
    objective = cases.MLP.objective()
    points = egop.Recentered().draw_many(objective, torch.Generator(), 3)
    for name, parameter in objective.parameters.items():
        assert torch.equal(points[name], parameter.detach().expand(3, *parameter.shape))
        assert points[name].data_ptr() != parameter.data_ptr()


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: egop.Gaussian(scale=0), "Invalid scale value: 0. Must be a positive number"),
        (lambda: egop.Gaussian(scale=-1.0), "Invalid scale value: -1.0"),
        (lambda: egop.Gaussian(scale=float("nan")), "Invalid scale value: nan"),
        (lambda: egop.Gaussian(scale=float("inf")), "Invalid scale value: inf"),
        (lambda: egop.Ball(0.0), "Invalid radius value: 0.0. Must be a positive number"),
        (lambda: egop.Ball(float("inf")), "Invalid radius value: inf"),
        (lambda: egop.Recentered(-0.1), "Invalid scale value: -0.1. Must be zero or a positive number"),
    ],
)
def test_invalid_scale_or_radius_raises(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [egop.Gaussian, lambda **options: egop.Ball(1.0, **options)])
def test_center_must_match_the_parameters(make):
    objective = function_objective()
    with pytest.raises(ValueError, match=r"no value for the parameters \['b'\]; it has \['a', 'c'\]"):
        cases.sample(objective, make(center={"a": torch.zeros(3), "c": torch.zeros(3)}), 1)
    with pytest.raises(ValueError, match=r"center of 'a' has shape \(4,\), the parameter \(3,\)"):
        cases.sample(objective, make(center={"a": torch.zeros(4), "b": torch.zeros(2, 2)}), 1)
