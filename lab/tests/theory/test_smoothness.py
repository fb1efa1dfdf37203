"""Coordinate-wise smoothness sums: exact by semidefinite programme, and bracketed without one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from convex_problems import assert_at_most, draw_decaying, draw_orthonormal
from egop_lab import theory


def symmetric(dimension, seed=0):
    matrix = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (matrix + matrix.mT) / 2


def rotated(values, seed=0):
    V = draw_orthonormal(len(values), len(values), torch.Generator().manual_seed(seed))
    return V * torch.as_tensor(values, dtype=torch.float64) @ V.mT


HESSIANS = {
    "strong decay": rotated([k**-2.0 for k in range(1, 11)]),
    "nearly isotropic": rotated([1 + 0.01 * k for k in range(10)]),
    "isotropic": torch.eye(6, dtype=torch.float64) * 3,
    "rank one": torch.ones(5, 5, dtype=torch.float64),
    "semidefinite": draw_decaying(20, 9, 0.5, 0).mT @ draw_decaying(20, 9, 0.5, 0),
    "indefinite": symmetric(8),
    "negative": -rotated([3.0, 2.0, 1.0]),
    "a saddle": torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
    "a flat coordinate": torch.block_diag(torch.zeros(1, 1), rotated([2.0, 1.0, 0.5])),
    "one number": torch.tensor([[-2.5]]),
    "tiny": 1e-150 * symmetric(4),
    "huge": 1e150 * symmetric(4),
    "several": torch.stack([symmetric(6, seed) for seed in range(3)]),
    "single precision": rotated([4.0, 2.0, 1.0]).float(),
}


def slack(constants, hessian):
    """Return the smallest eigenvalue of diag(L) ∓ ∇²f, relative to the largest constant."""
    difference = [torch.diag(constants) - sign * hessian.double() for sign in (1, -1)]
    return min(float(torch.linalg.eigvalsh(each).min()) for each in difference) / float(constants.max())


@pytest.mark.parametrize("name", HESSIANS)
def test_the_bounds_enclose_the_exact_sum_and_all_constants_are_valid(name):
    pytest.importorskip("cvxpy")
    hessian = HESSIANS[name]
    exact = theory.smoothness_constants(hessian)
    bounds = theory.smoothness_sum_bounds(hessian)
    print(f"{name}: {bounds.lower:.9g} ≤ {float(exact.sum()):.9g} ≤ {bounds.upper:.9g}")
    assert bounds.lower <= float(exact.sum()) * (1 + 1e-9)
    assert float(exact.sum()) <= bounds.upper * (1 + 1e-6)
    assert bounds.upper <= bounds.lower * (1 + 1e-5)
    assert bounds.upper == pytest.approx(float(bounds.constants.sum()), rel=1e-12)
    assert slack(exact, hessian) >= -1e-10
    assert slack(bounds.constants, hessian) >= -1e-10


@pytest.mark.parametrize("name", HESSIANS)
def test_the_sum_is_between_the_bounds_that_are_known_in_closed_form(name):
    stack = HESSIANS[name].double().reshape(-1, *HESSIANS[name].shape[-2:])
    bounds = theory.smoothness_sum_bounds(stack)
    size = stack.shape[-1]
    for hessian in stack:
        every = torch.tensor(list(itertools.product((1.0, -1.0), repeat=size)), dtype=torch.float64)
        forms = float(((every @ hessian) * every).sum(-1).abs().max())
        assert_at_most("the nuclear norm", float(torch.linalg.svdvals(hessian).sum()), bounds.upper)
        assert_at_most("the largest sign form", forms, bounds.upper)
    assert_at_most("against the sums of rows", bounds.lower, float(stack.abs().amax(0).sum()))
    assert_at_most("against d times the norm", bounds.lower, size * float(torch.linalg.matrix_norm(stack, 2).max()))


def test_of_two_dimensions_the_sum_is_known():
    for a, b, c in [(2.0, 1.0, 3.0), (2.0, -1.0, 0.5), (1.0, 1.0, 1.0), (5.0, 0.0, 1.0)]:
        bounds = theory.smoothness_sum_bounds(torch.tensor([[a, b], [b, c]]))
        assert bounds.lower == pytest.approx(a + c + 2 * abs(b), rel=1e-5)
        assert bounds.upper == pytest.approx(a + c + 2 * abs(b), rel=1e-5)


def test_for_a_semidefinite_hessian_the_best_signs_are_within_pi_over_two():
    for seed in range(5):
        hessian = symmetric(9, seed) @ symmetric(9, seed)
        every = torch.tensor(list(itertools.product((1.0, -1.0), repeat=9)), dtype=torch.float64)
        signs = float(((every @ hessian) * every).sum(-1).max())
        bounds = theory.smoothness_sum_bounds(hessian)
        assert_at_most("signs", signs, bounds.upper)
        assert_at_most("Nesterov's π/2", bounds.lower, math.pi / 2 * signs)


def test_one_set_of_constants_for_several_hessians_costs_at_least_that_of_each_and_at_most_the_sum():
    stack = HESSIANS["several"]
    together = theory.smoothness_sum_bounds(stack)
    each = [theory.smoothness_sum_bounds(hessian) for hessian in stack]
    assert_at_most("the largest", max(one.lower for one in each), together.upper)
    assert_at_most("the sum", together.lower, sum(one.upper for one in each))
    assert together.lower > 1.01 * max(one.upper for one in each), "these Hessians need different constants"


def test_no_rotation_has_a_smaller_sum_than_the_eigenbasis_of_the_hessian():
    values = [1.0, 0.5, 0.1, 0.01]
    assert theory.smoothness_sum_bounds(torch.diag(torch.tensor(values))).upper == pytest.approx(sum(values))
    for seed in range(10):
        assert theory.smoothness_sum_bounds(rotated(values, seed)).lower >= sum(values)


def test_many_dimensions_need_no_solver():
    hessian = rotated([1 / k for k in range(1, 301)])
    bounds = theory.smoothness_sum_bounds(hessian, tolerance=1e-4)
    assert bounds.upper <= bounds.lower * (1 + 1e-4)
    assert slack(bounds.constants, hessian) >= -1e-10


def test_the_bounds_hold_whenever_it_stops():
    hessian = symmetric(15)
    best = theory.smoothness_sum_bounds(hessian)
    early = theory.smoothness_sum_bounds(hessian, iterations=2)
    assert early.lower <= best.upper
    assert early.upper >= best.lower
    assert early.upper > 1.001 * early.lower, "two iterations are too few"
    assert slack(early.constants, hessian) >= -1e-10


def test_without_curvature_there_is_nothing_to_pay():
    pytest.importorskip("cvxpy")
    assert theory.smoothness_constants(torch.zeros(3, 3)).tolist() == [0, 0, 0]
    assert theory.smoothness_sum_bounds(torch.zeros(3, 3)).upper == 0
