"""BallConstrainedAdagrad: Algorithm 2 as written, and in the ball."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

import cases
import egop
from cases import MLP
from egop.extras import constrained
from egop.extras.constrained import BallConstrainedAdagrad, project_onto_ball
from explicit import identical


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_metric(size, decades, seed=0):
    """Positive entries over so many powers of ten."""
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 10 ** (decades * (uniform - 0.5))


# Dimension, decades of the metric, radius as a fraction of the distance.
PROJECTIONS = [
    (1, 0, 0.5),
    (2, 1, 0.9),
    (7, 2, 0.1),
    (30, 6, 0.5),
    (30, 14, 0.9),
    (30, 28, 1e-3),
    (200, 14, 1e-9),
    (200, 14, 1 - 1e-12),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("size", "decades", "fraction"), PROJECTIONS)
def test_the_projection_satisfies_the_optimality_conditions(size, decades, fraction, seed):
    point, metric = normal(size, seed=seed) * spread_metric(size, 4, seed + 1), spread_metric(size, decades, seed)
    radius = fraction * float(point.norm())
    center = 0.1 * radius * normal(size, seed=seed + 100) / size**0.5 if fraction < 0.9 else torch.zeros_like(point)
    (x,), multiplier = project_onto_ball([point], [metric], radius, [center])
    stationarity = metric * (x - point) + multiplier * (x - center)
    assert multiplier > 0
    assert float(stationarity.abs().max()) <= 1e-10 * float((metric * (point - center)).abs().max())
    assert float((x - center).norm()) == pytest.approx(radius, rel=1e-12)


def projected_by_solver(point, metric, radius):
    cvxpy = pytest.importorskip("cvxpy")
    x = cvxpy.Variable(len(point))
    weighted = cvxpy.multiply(metric.sqrt().numpy(), x - point.numpy())
    programme = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(weighted)), [cvxpy.norm(x) <= radius])
    programme.solve(solver=cvxpy.CLARABEL)
    return torch.from_numpy(x.value)


def projected_by_descent(point, metric, radius):
    """Gradient steps on the distance, each put back into the ball along the radius: slow, and shares no idea."""
    x = torch.zeros_like(point)
    for _ in range(20_000):
        x = x - (x - point) * metric / metric.max()
        x = x * min(1.0, radius / float(x.norm()))
    return x


@pytest.mark.parametrize("solve", [projected_by_solver, projected_by_descent])
@pytest.mark.parametrize(("size", "radius"), [(2, 0.5), (5, 1.0), (12, 0.2)])
def test_the_projection_is_that_of_a_generic_solver(solve, size, radius):
    point, metric = 3 * normal(size, seed=size), spread_metric(size, 2, size)
    (x,), _ = project_onto_ball([point], [metric], radius)
    torch.testing.assert_close(x, solve(point, metric, radius), atol=2e-5 * radius, rtol=0)


def test_a_point_inside_stays_as_it_is():
    points = [normal(3), normal(2, 2)]
    moved, multiplier = project_onto_ball(points, [torch.ones(3), torch.ones(2, 2)], 100.0)
    assert multiplier == 0
    assert all(torch.equal(one, other) for one, other in zip(moved, points, strict=True))


def test_several_tensors_are_projected_as_one_vector():
    point, metric, center = 3 * normal(9), spread_metric(9, 3), normal(9, seed=1)
    (whole,), multiplier = project_onto_ball([point], [metric], 0.7, [center])
    parts, same = project_onto_ball(
        *([x[:3], x[3:].view(3, 2)] for x in (point, metric)), 0.7, [center[:3], center[3:].view(3, 2)]
    )
    torch.testing.assert_close(torch.cat([part.flatten() for part in parts]), whole, rtol=1e-13, atol=1e-13)
    assert same == pytest.approx(multiplier)


def algorithm_2(loss, start, *, lr, radius, eps, steps):
    """The paper's pseudocode for one vector, with the multiplier found by bisection."""
    theta, v, path = start.clone(), torch.full_like(start, eps**2), []
    for _ in range(steps):
        g = torch.func.grad(loss)(theta)
        v = v + g * g
        h = v.sqrt()
        w = theta - lr * g / h
        low, high = 0.0, 1e30
        if w.norm() > radius:
            for _ in range(250):
                middle = (low + high) / 2
                low, high = (middle, high) if (h * w / (h + middle)).norm() > radius else (low, middle)
        theta = h * w / (h + high) if w.norm() > radius else w
        path.append(theta)
    return torch.stack(path)


def quadratic(size=6, seed=0):
    """A least-squares loss whose minimum is far from the origin."""
    data, goal = normal(size, size, seed=seed), 3 * normal(size, seed=seed + 1)
    return lambda theta: (data @ (theta - goal)).square().sum() / 2


@pytest.mark.parametrize("radius", [0.3, 2.0, 1e6])
@pytest.mark.parametrize("eps", [1e-10, 0.5])
def test_it_is_algorithm_2(radius, eps):
    loss, start = quadratic(), 0.1 * normal(6)
    theta, path = start.clone().requires_grad_(), []
    optimizer = BallConstrainedAdagrad([theta], lr=0.4, radius=radius, eps=eps)
    for _ in range(30):
        optimizer.zero_grad()
        loss(theta).backward()
        optimizer.step()
        path.append(theta.detach().clone())
    expected = algorithm_2(loss, start, lr=0.4, radius=radius, eps=eps, steps=30)
    torch.testing.assert_close(torch.stack(path), expected, rtol=1e-9, atol=1e-9)
    assert float(expected.norm(dim=1).max()) == pytest.approx(radius) or radius > 10


def test_it_converges_to_the_best_point_of_the_ball():
    loss, theta = quadratic(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = BallConstrainedAdagrad([theta], lr=1.0, radius=1.0)
    for _ in range(1500):
        optimizer.zero_grad()
        loss(theta).backward()
        optimizer.step()
    gradient = torch.func.grad(loss)(theta.detach())
    multiplier = -gradient @ theta.detach()
    torch.testing.assert_close(-gradient, multiplier * theta.detach(), rtol=0, atol=1e-6)
    assert multiplier > 0
    assert theta.norm().item() == pytest.approx(1, rel=1e-12)


def train_model(model, optimizer, steps=8, watch=lambda: None):
    batches = MLP.batches()
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = batches[step % len(batches)]
        dtype = next(model.parameters()).dtype
        torch.nn.functional.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
        optimizer.step()
        watch()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("radius", [1e3, math.inf])
def test_inside_the_ball_it_is_torchs_adagrad_with_this_epsilon_bit_for_bit(dtype, radius):
    ours, theirs = MLP.build().to(dtype), MLP.build().to(dtype)
    train_model(ours, BallConstrainedAdagrad(ours.parameters(), lr=0.1, radius=radius, eps=1e-3))
    train_model(theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.1, initial_accumulator_value=1e-6, eps=0))
    assert identical(cases.parameters_of(ours), cases.parameters_of(theirs))


def norm_of(model):
    return math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("radius", [0.3, 1.5])
def test_every_iterate_is_inside_one_ball_for_all_parameters(dtype, radius):
    model, norms = MLP.build().to(dtype), []
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "eps": 0.1}]
    assert norm_of(model) > radius, "the start is outside"
    optimizer = BallConstrainedAdagrad(groups, lr=0.2, radius=radius, eps=1e-3)
    train_model(model, optimizer, steps=15, watch=lambda: norms.append(norm_of(model)))
    assert max(norms) <= radius * (1 + 4 * torch.finfo(dtype).eps)
    assert max(norms) >= radius * (1 - 4 * torch.finfo(dtype).eps), "the ball was felt"
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_many_tensors_and_groups_are_one_vector():
    loss, start = quadratic(), 0.1 * normal(6)
    whole = start.clone().requires_grad_()
    parts = [
        start[:1].clone().requires_grad_(),
        start[1:5].reshape(2, 2).clone().requires_grad_(),
        start[5].clone().requires_grad_(),
    ]
    one = BallConstrainedAdagrad([whole], lr=0.3, radius=0.8)
    other = BallConstrainedAdagrad([{"params": parts[:2]}, {"params": parts[2:]}], lr=0.3, radius=0.8)
    for _ in range(20):
        for optimizer, theta in ((one, whole), (other, torch.cat([part.flatten() for part in parts]))):
            optimizer.zero_grad()
            loss(theta).backward()
            optimizer.step()
    torch.testing.assert_close(torch.cat([part.detach().flatten() for part in parts]), whole.detach())


def run(theta, loss, steps=10, **settings):
    theta = theta.clone().requires_grad_()
    optimizer = BallConstrainedAdagrad([theta], lr=0.5, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(theta).backward()
        optimizer.step()
    return theta.detach()


def test_a_center_shifts_the_ball():
    loss, start, center = quadratic(), 0.1 * normal(6), normal(6, seed=5)
    around_origin = run(start, lambda theta: loss(theta + center), radius=0.7)
    around_center = run(start + center, loss, radius=0.7, center=[center])
    torch.testing.assert_close(around_center, around_origin + center)
    assert float((around_center - center).norm()) == pytest.approx(0.7)


def test_the_center_may_be_where_the_parameters_start():
    loss, start = quadratic(), normal(6)
    torch.testing.assert_close(
        run(start, loss, radius=0.7, center="start"), run(start, loss, radius=0.7, center=[start])
    )


def test_the_start_is_where_the_first_step_begins():
    loss, theta = quadratic(), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = BallConstrainedAdagrad([theta], lr=5.0, radius=0.7, center="start")
    loaded = normal(6)
    with torch.no_grad():
        theta.copy_(loaded)  # a checkpoint, after the optimizer was made
    for _ in range(3):
        optimizer.zero_grad()
        loss(theta).backward()
        optimizer.step()
    assert float((theta.detach() - loaded).norm()) == pytest.approx(0.7)


def test_groups_may_have_centers_of_their_own_and_later_ones_share_the_ball():
    first, second, third = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    groups = [{"params": [first]}, {"params": [second], "center": "start"}]
    optimizer = BallConstrainedAdagrad(groups, lr=10.0, radius=1.0, center=[torch.ones(2)])
    optimizer.add_param_group({"params": [third], "center": [2 * torch.ones(2)]})
    (first.sum() + second.sum() + third.sum()).backward()
    optimizer.step()
    away = torch.cat([first.detach() - 1, second.detach(), third.detach() - 2])
    assert float(away.norm()) == pytest.approx(1)
    assert [group["center"] for group in optimizer.param_groups] == ["given", "start", "given"]


def test_a_parameter_without_a_gradient_does_not_move_and_leaves_the_others_the_rest_of_the_ball():
    still = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    moving = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = BallConstrainedAdagrad([still, moving], lr=10.0, radius=1.0)
    (moving * torch.tensor([1.0, -2.0])).sum().backward()
    optimizer.step()
    assert still.item() == 0.6
    assert moving.norm().item() == pytest.approx(0.8)
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient
    assert moving.norm().item() == pytest.approx(0.8)


def test_parameters_that_cannot_move_and_are_outside_are_an_error_and_nothing_is_stepped():
    still = torch.tensor([2.0], requires_grad=True)
    moving = torch.zeros(2, requires_grad=True)
    optimizer = BallConstrainedAdagrad([still, moving], lr=1.0, radius=1.0)
    moving.sum().backward()
    with pytest.raises(ValueError, match="no gradient are 2 from the center, outside the ball of radius 1"):
        optimizer.step()
    assert moving.tolist() == [0, 0]


def test_the_examples_in_docstrings_run(monkeypatch):
    monkeypatch.setattr(egop, "BallConstrainedAdagrad", BallConstrainedAdagrad, raising=False)
    results = doctest.testmod(constrained, extraglobs={"torch": torch, "egop": egop})
    assert results.attempted > 0
    assert results.failed == 0
