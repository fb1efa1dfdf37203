"""Spectrum: the eigenvalues of a block's EGOP matrix, and what they say."""

from __future__ import annotations

import pytest
import torch

import cases
import egop


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
