"""BallConstrainedAdagrad in use: odd input, inside the wrapper, saved and resumed, given what does not fit."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

import cases
import egop
from cases import MLP, OptimizerCase
from egop.extras.constrained import BallConstrainedAdagrad
from explicit import LAYOUTS, Explicit, Wrapped, case_and_basis, distance, identical, train


def train_model(model, optimizer, steps=8, watch=lambda: None):
    batches = MLP.batches()
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = batches[step % len(batches)]
        dtype = next(model.parameters()).dtype
        torch.nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
        optimizer.step()
        watch()


def test_a_radius_can_follow_a_schedule():
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = BallConstrainedAdagrad([theta], lr=100.0, radius=1.0)
    for radius in (1.0, 2.0, 0.5):
        optimizer.param_groups[0]["radius"] = radius
        theta.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        optimizer.step()
        assert theta.norm().item() == pytest.approx(radius)


def test_gradients_that_are_not_finite_are_seen_in_the_parameters_as_with_any_optimizer():
    theta = torch.zeros(3, requires_grad=True)
    optimizer = BallConstrainedAdagrad([theta], lr=1.0, radius=1.0)
    theta.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert theta.isnan().tolist() == [False, True, False]


def test_odd_shapes_a_closure_and_a_tensor_for_a_learning_rate():
    shapes = [(), (0,), (2, 0), (1, 1, 2)]
    parameters = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    optimizer = BallConstrainedAdagrad(parameters, lr=torch.tensor(0.5), radius=1.0)

    def closure():
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert sum(float(parameter.detach().square().sum()) for parameter in parameters) <= 1 + 1e-12


CENTERS = [None, "start"]


def ball(center, radius=1.5):
    return OptimizerCase("ball", BallConstrainedAdagrad, {"lr": 0.3, "radius": radius, "center": center, "eps": 1e-6})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("center", CENTERS)
def test_in_the_wrapper_it_is_the_same_optimizer_on_the_reparameterised_loss(layout, center):
    case, basis = case_and_basis(layout)
    settings = ball(center, radius=0.5 if center else 1.5)
    sides = [side(case.build(), basis, settings) for side in (Wrapped, Explicit)]
    ends = [train(side, case.batches(), 8) for side in sides]
    assert distance(*ends) < 1e-9
    plain = train(Wrapped(case.build(), basis, OptimizerCase("", torch.optim.Adagrad, {"lr": 0.3})), case.batches(), 8)
    assert distance(ends[0], plain) > 1e-2, "the ball was felt"


@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=2)], ids=str)
@pytest.mark.parametrize("center", CENTERS)
def test_the_ball_of_coordinates_is_the_ball_of_parameters(structure, center):
    model = MLP.build()
    start = cases.parameters_of(model)
    basis = cases.estimate(MLP.objective(), structure=structure)
    optimizer = egop.ReparameterizedOptimizer(model, BallConstrainedAdagrad, basis, lr=0.5, radius=0.8, center=center)
    lengths = []

    def watch():
        away = [p.detach() - (start[name] if center else 0) for name, p in model.named_parameters()]
        lengths.append(math.sqrt(sum(float(each.square().sum()) for each in away)))

    train_model(model, optimizer, steps=10, watch=watch)
    assert max(lengths) <= 0.8 * (1 + 1e-12)
    if not isinstance(structure, egop.Auxiliary):  # its coordinates are more than the parameters
        assert max(lengths) == pytest.approx(0.8)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


RESUMED = [(False, None), (False, "start"), (False, "tensors"), (True, None), (True, "start")]


@pytest.mark.parametrize(("wrapped", "center"), RESUMED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_resuming_is_exact(wrapped, center, dtype):
    def make(model, radius=0.6, center=center):
        center = [torch.ones_like(p) / 5 for p in model.parameters()] if center == "tensors" else center
        settings = {"lr": 0.3, "radius": radius, "center": center}
        if not wrapped:
            return BallConstrainedAdagrad(model.parameters(), **settings)
        return egop.ReparameterizedOptimizer(model, BallConstrainedAdagrad, case_and_basis("blocks")[1], **settings)

    model = MLP.build().to(dtype)
    optimizer = make(model)
    train_model(model, optimizer, 4)
    states = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    twin = copy.deepcopy((model, optimizer))
    train_model(model, optimizer, 4)
    train_model(*twin, 4)
    other = MLP.build().to(dtype)
    resumed = make(other, radius=7.0, center=None)  # the settings come from the state dict
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    train_model(other, resumed, 4)
    assert identical(cases.parameters_of(other), cases.parameters_of(model))
    assert identical(cases.parameters_of(twin[0]), cases.parameters_of(model))


def weight():
    return [torch.zeros(2, requires_grad=True)]


REFUSED = {
    "a negative lr": (lambda: BallConstrainedAdagrad(weight(), lr=-1.0), ValueError, "Invalid lr value: -1.0. Must be"),
    "no number for lr": (lambda: BallConstrainedAdagrad(weight(), lr="fast"), TypeError, "Invalid lr value: 'fast'"),
    "no radius": (
        lambda: BallConstrainedAdagrad(weight(), radius=0),
        ValueError,
        "Invalid radius value: 0. Must be pos",
    ),
    "a radius that is nan": (
        lambda: BallConstrainedAdagrad(weight(), radius=math.nan),
        ValueError,
        "radius value: nan",
    ),
    "no eps": (
        lambda: BallConstrainedAdagrad(weight(), eps=0.0),
        ValueError,
        "Invalid eps value: 0.0. Must be a positive",
    ),
    "an eps that vanishes": (
        lambda: BallConstrainedAdagrad([torch.zeros(2, dtype=torch.float16, requires_grad=True)], eps=1e-6),
        ValueError,
        r"Invalid eps value: 1e-06\. Its square is zero in torch\.float16\. Must be at least 7\.8e-03",
    ),
    "an unknown center": (
        lambda: BallConstrainedAdagrad(weight(), center="middle"),
        ValueError,
        r"Invalid center value: 'middle', .* Must be None \(the origin\), 'start', or one tensor per parameter",
    ),
    "a center of another shape": (
        lambda: BallConstrainedAdagrad(weight(), center=[torch.zeros(3)]),
        ValueError,
        r"Invalid center value: shape \(3,\), but the parameter has shape \(2,\)",
    ),
    "too few centers": (
        lambda: BallConstrainedAdagrad(weight() + weight(), center=[torch.zeros(2)]),
        ValueError,
        r"Invalid center value: too few tensors, but a parameter of shape \(2,\) has none",
    ),
    "too many centers": (
        lambda: BallConstrainedAdagrad(weight(), center=[torch.zeros(2)] * 2),
        ValueError,
        "Invalid center value: 1 tensors too many",
    ),
    "too many centers for a group": (
        lambda: BallConstrainedAdagrad([{"params": weight(), "center": [torch.zeros(2)] * 3}]),
        ValueError,
        "Invalid center value: 2 tensors too many",
    ),
    "a later group without its center": (
        lambda: BallConstrainedAdagrad(weight(), center=[torch.zeros(2)]).add_param_group({"params": weight()}),
        ValueError,
        "too few tensors",
    ),
    "two radii": (
        lambda: BallConstrainedAdagrad([{"params": weight(), "radius": 2.0}, {"params": weight()}]),
        ValueError,
        r"Invalid radius value: \[1\.0, 2\.0\]\. Must be the same in all groups",
    ),
    "a complex parameter": (
        lambda: BallConstrainedAdagrad([torch.zeros(2, dtype=torch.complex64, requires_grad=True)]),
        TypeError,
        "real floating-point parameters",
    ),
    "tensors for a center in the wrapper": (
        lambda: egop.ReparameterizedOptimizer(
            MLP.build(), BallConstrainedAdagrad, center=[torch.zeros(5, 6), torch.zeros(5)]
        ),
        ValueError,
        r"inside egop\.ReparameterizedOptimizer None or 'start'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_group_that_is_refused_is_not_kept():
    optimizer = BallConstrainedAdagrad(weight(), center=[torch.zeros(2)])
    with pytest.raises(ValueError, match="radius"):
        optimizer.add_param_group({"params": weight(), "radius": 9.0, "center": None})
    with pytest.raises(ValueError, match="too few tensors"):
        optimizer.add_param_group({"params": weight() + weight(), "center": [torch.ones(2)]})
    assert (len(optimizer.param_groups), len(optimizer.state)) == (1, 1)


def test_radii_that_came_apart_and_sparse_gradients_are_refused_before_anything_is_stepped():
    first, second = weight()[0], weight()[0]
    optimizer = BallConstrainedAdagrad([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones(2), torch.ones(2).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    second.grad = None
    optimizer.param_groups[1]["radius"] = 3.0
    with pytest.raises(ValueError, match="Must be the same in all groups"):
        optimizer.step()
    assert first.tolist() == second.tolist() == [0, 0]
