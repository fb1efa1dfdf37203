"""Spectrum: the eigenvalues of a block's EGOP matrix, and what they say."""

from __future__ import annotations

import math

import pytest
import torch

import cases
import egop
from egop.basis.spectrum import agreement
from egop.numerics.linalg import random_orthonormal


def spectrum(*eigenvalues):
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    return egop.Spectrum(values, torch.ones_like(values), samples=10)


def test_the_stable_rank_is_the_sum_of_roots_over_the_largest_root():
    assert spectrum(16.0, 4.0, 1.0, 0.0).stable_rank == pytest.approx((4 + 2 + 1) / 4)


def test_the_stable_rank_goes_from_one_to_the_dimension():
    assert spectrum(7.0, 0.0, 0.0).stable_rank == 1
    assert spectrum(7.0, 7.0, 7.0).stable_rank == pytest.approx(3)


def test_the_decay_is_relative_to_the_largest():
    assert spectrum(8.0, 4.0, 1.0).decay.tolist() == [1.0, 0.5, 0.125]


def test_gradients_that_are_all_zero_have_a_stable_rank_of_zero_and_no_decay():
    nothing = spectrum(0.0, 0.0)
    assert nothing.stable_rank == 0
    assert nothing.decay.tolist() == [0.0, 0.0]


def test_the_density_is_one_over_the_dimension_on_an_axis_and_one_where_all_entries_are_alike():
    def density_for(direction):
        theta = {"theta": torch.zeros(4, dtype=torch.float64)}
        objective = egop.Objective.from_function(lambda theta: (theta @ direction).square(), theta)
        return cases.estimate(objective, rho=egop.Gaussian(), samples=3).spectrum["theta"].density[0].item()

    assert density_for(torch.tensor([0.0, 0, 5, 0]).double()) == pytest.approx(1 / 4)
    assert density_for(torch.tensor([3.0, -3, 3, 3]).double()) == pytest.approx(1)
    assert density_for(torch.tensor([1.0, 1, 0, 0]).double()) == pytest.approx(1 / 2)


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.95, 3), (1.0, 3)])
def test_the_effective_dimension_is_the_smallest_that_holds_the_fraction(fraction, expected):
    assert spectrum(6.0, 3.0, 1.0, 0.0).effective_dimension(fraction) == expected


def test_the_effective_dimension_of_nothing_is_zero():
    assert spectrum(0.0, 0.0).effective_dimension(0.9) == 0


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.1, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match="Invalid fraction value"):
        spectrum(1.0).effective_dimension(fraction)


# --- stability: how far two halves agree ---


def side(values, vectors):
    return torch.tensor(values, dtype=torch.float64), vectors


def plane(angle):
    """The axes of the plane, turned."""
    turned = torch.tensor([angle]).double()
    return torch.stack([torch.cat([turned.cos(), -turned.sin()]), torch.cat([turned.sin(), turned.cos()])])


def test_the_agreement_is_the_squared_cosine_between_leading_directions():
    one, other = side([9.5, 0.5], plane(0.0)), side([9.5, 0.5], plane(0.7))
    assert agreement([one], [one]) == pytest.approx(1)
    assert agreement([one], [other]) == pytest.approx(math.cos(0.7) ** 2)
    assert agreement([one], [side([5.0, 5.0], plane(0.7))]) == pytest.approx(math.cos(0.7) ** 2)  # the smaller k
    both = side([5.0, 5.0], plane(0.0)), side([5.0, 5.0], plane(0.7))
    assert agreement([both[0]], [both[1]]) == pytest.approx(1)  # two planes in the plane are the same


def test_the_agreement_of_two_sides_is_that_of_the_product_of_their_subspaces():
    one, other = side([9.5, 0.5], plane(0.0)), side([9.5, 0.5], plane(0.7))
    directions = [torch.kron(plane(angle)[:, 0], plane(angle)[:, 0]) for angle in (0.0, 0.7)]
    expected = (directions[0] @ directions[1]).item() ** 2
    assert agreement([one, one], [other, other]) == pytest.approx(expected)


def test_there_is_no_agreement_where_nothing_was_decomposed_or_all_is_zero():
    assert agreement([], []) is None
    assert agreement([side([0.0, 0.0], plane(0.0))], [side([1.0, 0.0], plane(0.0))]) is None


def test_independent_subspaces_agree_to_about_k_over_d():
    generator = torch.Generator().manual_seed(0)
    values = [1.0] * 9 + [0.0] * 41
    found = [
        agreement(*([side(values, random_orthonormal(50, 50, generator))] for _ in range(2)), fraction=1.0)
        for _ in range(40)
    ]
    assert sum(found) / len(found) == pytest.approx(9 / 50, rel=0.1)
