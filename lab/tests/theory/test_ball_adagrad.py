"""BallConstrainedAdagrad: the projection, Algorithm 2 as written, inside the wrapper, and what is refused."""

from __future__ import annotations

import io
import math

import pytest
import torch

import cases
import egop
from cases import MLP, OptimizerCase
from egop_lab.theory import BallConstrainedAdagrad
from egop_lab.theory.ball_adagrad import project_onto_ball
from explicit import LAYOUTS, Explicit, Wrapped, case_and_basis, distance, identical, train


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_metric(size, decades, seed=0):
    """Draw positive entries spread over the given number of decades."""
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "decades", "fraction"), PROJECTIONS)
def test_projection_satisfies_optimality_conditions(size, decades, fraction, seed):
    point, metric = normal(size, seed=seed) * spread_metric(size, 4, seed + 1), spread_metric(size, decades, seed)
    radius = fraction * float(point.norm())
    center = 0.1 * radius * normal(size, seed=seed + 100) / size**0.5 if fraction < 0.9 else torch.zeros_like(point)
    (x,), multiplier = project_onto_ball([point], [metric], radius, [center])
    stationarity = metric * (x - point) + multiplier * (x - center)
    assert multiplier > 0
    assert float(stationarity.abs().max()) <= 1e-10 * float((metric * (point - center)).abs().max())
    assert float((x - center).norm()) == pytest.approx(radius, rel=1e-12)


def project_by_descent(point, metric, radius):
    """Project by gradient descent on the distance, rescaling into the ball after each step."""
    x = torch.zeros_like(point)
    for _ in range(20_000):
        x = x - (x - point) * metric / metric.max()
        x = x * min(1.0, radius / float(x.norm()))
    return x


@pytest.mark.parametrize(("size", "radius"), [(2, 0.5), (5, 1.0), (12, 0.2)])
def test_projection_matches_generic_solver(size, radius):
    point, metric = 3 * normal(size, seed=size), spread_metric(size, 2, size)
    (x,), _ = project_onto_ball([point], [metric], radius)
    torch.testing.assert_close(x, project_by_descent(point, metric, radius), atol=2e-5 * radius, rtol=0)


def test_projection_keeps_interior_points():
    points = [normal(3), normal(2, 2)]
    moved, multiplier = project_onto_ball(points, [torch.ones(3), torch.ones(2, 2)], 100.0)
    assert multiplier == 0
    assert all(torch.equal(one, other) for one, other in zip(moved, points, strict=True))


def test_projection_treats_tensors_as_one_vector():
    point, metric, center = 3 * normal(9), spread_metric(9, 3), normal(9, seed=1)
    (whole,), multiplier = project_onto_ball([point], [metric], 0.7, [center])
    parts, same = project_onto_ball(
        *([x[:3], x[3:].view(3, 2)] for x in (point, metric)), 0.7, [center[:3], center[3:].view(3, 2)]
    )
    torch.testing.assert_close(torch.cat([part.flatten() for part in parts]), whole, rtol=1e-13, atol=1e-13)
    assert same == pytest.approx(multiplier)


def algorithm_2(loss, start, *, lr, radius, eps, steps):
    """Run the paper's pseudocode for one vector, finding the multiplier by bisection."""
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
    """Return a least-squares loss whose minimum is far from the origin."""
    data, goal = normal(size, size, seed=seed), 3 * normal(size, seed=seed + 1)
    return lambda theta: (data @ (theta - goal)).square().sum() / 2


@pytest.mark.parametrize("radius", [0.3, 2.0, 1e6])
@pytest.mark.parametrize("eps", [1e-10, 0.5])
def test_steps_match_algorithm_2(radius, eps):
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


def test_converges_to_best_point_of_ball():
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
def test_equals_torch_adagrad_inside_ball(dtype, radius):
    ours, theirs = MLP.build().to(dtype), MLP.build().to(dtype)
    train_model(ours, BallConstrainedAdagrad(ours.parameters(), lr=0.1, radius=radius, eps=1e-3))
    train_model(theirs, torch.optim.Adagrad(theirs.parameters(), lr=0.1, initial_accumulator_value=1e-6, eps=0))
    assert identical(cases.parameters_of(ours), cases.parameters_of(theirs))


def norm_of(model):
    return math.sqrt(sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("radius", [0.3, 1.5])
def test_all_parameters_share_one_ball(dtype, radius):
    model, norms = MLP.build().to(dtype), []
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "eps": 0.1}]
    assert norm_of(model) > radius, "the start is outside"
    optimizer = BallConstrainedAdagrad(groups, lr=0.2, radius=radius, eps=1e-3)
    train_model(model, optimizer, steps=15, watch=lambda: norms.append(norm_of(model)))
    assert max(norms) <= radius * (1 + 4 * torch.finfo(dtype).eps)
    assert max(norms) >= radius * (1 - 4 * torch.finfo(dtype).eps), "the ball was felt"
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_tensors_and_groups_form_one_vector():
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


def test_center_is_where_first_step_begins():
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


def test_parameter_without_gradient_does_not_move():
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


def test_resting_parameters_outside_ball_are_refused():
    still = torch.tensor([2.0], requires_grad=True)
    moving = torch.zeros(2, requires_grad=True)
    optimizer = BallConstrainedAdagrad([still, moving], lr=1.0, radius=1.0)
    moving.sum().backward()
    with pytest.raises(ValueError, match="without a gradient are 2 from the center, outside the ball of radius 1"):
        optimizer.step()
    assert moving.tolist() == [0, 0]


def ball(center):
    settings = {"lr": 0.3, "radius": 0.5 if center else 1.5, "center": center, "eps": 1e-6}
    return OptimizerCase("ball", BallConstrainedAdagrad, settings)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("center", [None, "start"])
def test_wrapped_steps_match_reparameterized_loss(layout, center):
    case, basis = case_and_basis(layout)
    ends = [train(side(case.build(), basis, ball(center)), case.batches(), 8) for side in (Wrapped, Explicit)]
    assert distance(*ends) < 1e-9
    plain = train(Wrapped(case.build(), basis, OptimizerCase("", torch.optim.Adagrad, {"lr": 0.3})), case.batches(), 8)
    assert distance(ends[0], plain) > 1e-2, "the constraint was active"


@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=2)], ids=str)
@pytest.mark.parametrize("center", [None, "start"])
def test_ball_of_coordinates_is_ball_of_parameters(structure, center):
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
    if not isinstance(structure, egop.Auxiliary):  # it has more coordinates than parameters
        assert max(lengths) == pytest.approx(0.8)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("center", [None, "start"])
def test_resumes_exactly(wrapped, center):
    def make(model, radius=0.6, center=center):
        settings = {"lr": 0.3, "radius": radius, "center": center}
        if not wrapped:
            return BallConstrainedAdagrad(model.parameters(), **settings)
        return egop.ReparameterizedOptimizer(model, BallConstrainedAdagrad, case_and_basis("blocks")[1], **settings)

    model = MLP.build()
    optimizer = make(model)
    train_model(model, optimizer, 4)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train_model(model, optimizer, 4)
    other = MLP.build()
    resumed = make(other, radius=7.0, center=None)  # the state dict has the settings
    file.seek(0)
    states = torch.load(file, weights_only=True)
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    train_model(other, resumed, 4)
    assert identical(cases.parameters_of(other), cases.parameters_of(model))


def test_groups_share_one_radius():
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "radius": radius} for radius in (1.0, 2.0)]
    with pytest.raises(ValueError, match="Must be the same in all groups"):
        BallConstrainedAdagrad(groups).step()


def test_nonfinite_gradients_show_up_in_parameters():
    theta = torch.zeros(3, requires_grad=True)
    optimizer = BallConstrainedAdagrad([theta], lr=1.0, radius=1.0)
    theta.grad = torch.tensor([1.0, math.nan, 1.0])
    optimizer.step()
    assert theta.isnan().tolist() == [False, True, False]


def test_accepts_odd_shapes_closure_and_tensor_lr():
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
