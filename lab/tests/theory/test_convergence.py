"""Adagrad, written out, is below its guarantees: in boxes however they lie, and without convexity."""

from __future__ import annotations

import math

import pytest
import torch

from convex_problems import PROBLEMS, Setting, assert_at_most, draw_orthonormal, quadratic
from egop_lab import theory
from egop_lab.theory.common import eigenbasis


def adagrad(loss, start, *, lr, steps, eps, project=None):
    """Run the paper's algorithm line by line; return the loss and the gradient of each step."""
    theta, squares = start, torch.full_like(start, eps**2)
    losses, gradients = [], []
    for _ in range(steps):
        gradient = torch.func.grad(loss)(theta)
        losses.append(float(loss(theta)))
        gradients.append(gradient)
        squares = squares + gradient.square()
        metric = squares.sqrt()
        theta = theta - lr * gradient / metric
        theta = theta if project is None else project(theta, metric)
    return losses, torch.stack(gradients)


def onto_box(center, half, axes):
    """Return the projection onto the box {center + axes z, |z_i| ≤ half_i} in a diagonal metric."""
    optimize = pytest.importorskip("scipy.optimize")

    def project(point, metric):
        roots = metric.sqrt()
        matrix, wanted = roots[:, None] * axes, roots * (point - center)
        limits = (-half.numpy(), half.numpy())
        found = optimize.lsq_linear(matrix.numpy(), wanted.numpy(), bounds=limits, method="bvls", tol=1e-14)
        return center + axes @ torch.from_numpy(found.x)

    return project


@pytest.mark.parametrize("axes_of", ["original", "eigenbasis"])
@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=str)
def test_the_averaged_regret_in_a_box_is_below_the_guarantee_for_general_sets(problem, axes_of):
    setting, steps, eps = Setting(problem), 20, 1e-4
    V, d = setting.basis, problem.dimension
    axes = torch.eye(d, dtype=torch.float64) if axes_of == "original" else V
    half = ((setting.points - setting.center) @ axes).abs().amax(0)  # the smallest such box that holds rho
    ratio = theory.smoothness_ratio_bound(setting.spectrum)
    sums = theory.smoothness_sum_bounds(setting.hessian)
    best = float(problem.loss(problem.minimizer))
    for basis, total in ((torch.eye(d, dtype=torch.float64), sums.lower), (V, ratio * sums.lower)):
        diameter, extent = float(2 * half.norm()), theory.box_extent(2 * half, axes.mT @ basis)
        for lr in (0.2 * extent, extent):
            start = basis.mT @ (setting.center + axes @ half)
            project = onto_box(basis.mT @ setting.center, half, basis.mT @ axes)
            losses, _ = adagrad(
                lambda x, basis=basis: problem.loss(basis @ x), start, lr=lr, steps=steps, eps=eps, project=project
            )
            bound = theory.regret_bound(total, diameter=diameter, extent=extent, lr=lr, steps=steps, eps=eps)
            assert_at_most("averaged regret in a box", sum(losses) / steps - best, bound)


def test_the_extent_of_a_box_is_that_of_its_corners():
    sides = torch.tensor([1.0, 0.2, 3.0], dtype=torch.float64)
    corners = torch.cartesian_prod(*([torch.tensor([-0.5, 0.5], dtype=torch.float64)] * 3)) * sides
    for seed in range(5):
        V = draw_orthonormal(3, 3, torch.Generator().manual_seed(seed))
        rotated = corners @ V
        brute = (rotated[:, None] - rotated).abs().max()
        assert theory.box_extent(sides, V) == pytest.approx(float(brute), rel=1e-12)
    assert theory.box_extent(sides) == 3


def test_a_rotation_changes_the_square_of_the_extent_by_up_to_the_dimension_and_no_more():
    d = 16
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < d:
        signs = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), signs)
    cube = torch.ones(d, dtype=torch.float64)
    assert theory.box_extent(cube, signs / d**0.5) ** 2 == pytest.approx(d)
    for seed in range(5):
        V = draw_orthonormal(d, d, torch.Generator().manual_seed(seed))
        assert_at_most("square of the extent", theory.box_extent(cube, V) ** 2, d)


def test_the_best_learning_rate_is_the_extent_and_a_ball_is_the_default():
    terms = {"diameter": 3.0, "steps": 10, "extent": 1.5}
    best = theory.regret_bound(2.0, lr=1.5, **terms)
    assert best == pytest.approx(4 * 1.5**2 * 2.0 / 10)
    assert all(theory.regret_bound(2.0, lr=1.5 * factor, **terms) > best for factor in (0.9, 1.1))
    ball = {"diameter": 3.0, "lr": 0.7, "steps": 10, "eps": 0.1}
    assert theory.regret_bound(2.0, **ball) == theory.regret_bound(2.0, extent=3.0, **ball)


def waves(dimension, seed):
    """Return Σ a_j (1 − cos⟨q_j, θ⟩), nonnegative but not convex, and the bound ±Σ a_j q_j q_jᵀ on its Hessian."""
    Q = draw_orthonormal(dimension, dimension, torch.Generator().manual_seed(seed))
    weights = torch.arange(1, dimension + 1, dtype=torch.float64) ** -2
    dominating = Q * weights @ Q.mT
    return (lambda x: (weights * (1 - torch.cos(x @ Q))).sum()), torch.stack([dominating, -dominating]), Q


@pytest.mark.parametrize("lr", [0.03, 0.3, 3.0])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_mean_gradient_norm_without_convexity_is_below_its_bound_in_both_coordinates(lr, eps):
    for seed in range(2):
        loss, hessians, Q = waves(8, seed)
        start = 2 * torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert torch.linalg.eigvalsh(torch.func.hessian(loss)(start))[0] < 0, "it is not convex there"
        for basis in (torch.eye(8, dtype=torch.float64), Q):
            total = theory.smoothness_sum_bounds(basis.mT @ hessians @ basis).upper
            _, gradients = adagrad(
                lambda x, basis=basis, loss=loss: loss(basis @ x), basis.mT @ start, lr=lr, steps=200, eps=eps
            )
            for steps in (1, 10, 200):
                bound = theory.gradient_norm_bound(
                    total, gap=float(loss(start)), dimension=8, lr=lr, steps=steps, eps=eps
                )
                assert_at_most("mean 1-norm of the gradients", float(gradients[:steps].abs().sum(1).mean()), bound)


def test_on_a_quadratic_the_ratio_gives_the_bound_for_the_eigenbasis():
    setting = Setting(quadratic(12))
    start, V = setting.points[0], setting.basis
    gap = float(setting.problem.loss(start) - setting.problem.loss(setting.problem.minimizer))
    total = theory.smoothness_ratio_bound(setting.spectrum) * theory.smoothness_sum_bounds(setting.hessian).lower
    terms = {"lr": 0.3, "steps": 100, "eps": 1e-3}
    _, gradients = adagrad(lambda x: setting.problem.loss(V @ x), V.mT @ start, **terms)
    bound = theory.gradient_norm_bound(total, gap=gap, dimension=12, **terms)
    assert_at_most("mean 1-norm in the eigenbasis", float(gradients.abs().sum(1).mean()), bound)
    assert_at_most("Euclidean norm, the same in both", float((gradients @ V.mT).norm(dim=1).mean()), bound)


@pytest.mark.parametrize("smoothness", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("gap", [0.0, 1e-3, 1e3])
@pytest.mark.parametrize("eps", [1e-12, 1.0])
def test_the_gradient_bound_is_the_larger_solution_of_its_equation(smoothness, gap, eps):
    bound = theory.gradient_norm_bound(smoothness, gap=gap, dimension=3, lr=0.5, steps=4, eps=eps) * 2

    def right(S):
        return gap / 0.5 + 3 * eps + 0.5 * smoothness * math.log(S / eps)

    assert bound == pytest.approx(right(bound), rel=1e-12)
    assert all(right(bound * (1 + excess)) < bound * (1 + excess) for excess in (1e-6, 0.1, 1.0, 100.0))


def test_one_norms_of_gradients_are_not_the_same_in_both_coordinates():
    """So the bound has to be on gradients in the coordinates in which Adagrad runs, not on those of f."""
    setting = Setting(quadratic(12))
    gradient = setting.problem.gradient(setting.points[0])
    _, V = eigenbasis(setting.egop)
    assert float(gradient.abs().sum() / (V.mT @ gradient).abs().sum()) > 1.2
