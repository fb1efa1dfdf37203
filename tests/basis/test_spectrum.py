"""Spectrum: the eigenvalues of a block's EGOP matrix and their summaries."""

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


def test_zero_gradients_have_stable_rank_zero():
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


# --- reliability: how much of a spectrum is chance ---


def rows_of(kind, draws, rows, dimension, generator):
    """Draw white noise: independent rows, or rows along one direction per draw, with draws of very different sizes."""
    if kind == "independent":
        return torch.randn(draws, rows, dimension, generator=generator, dtype=torch.float64)
    row = torch.randn(draws, 1, dimension, generator=generator, dtype=torch.float64)
    sizes = torch.randn(draws, 1, 1, generator=generator, dtype=torch.float64).exp()
    return sizes * row * torch.randn(draws, rows, 1, generator=generator, dtype=torch.float64)


def estimated(structure, gradients):
    block = egop.basis.Block("w", ("w",), (gradients.shape[1:],), torch.float64, (0,), (0,))
    accumulator = structure.accumulator(block)
    for chunk in gradients.split(7):
        accumulator.add([chunk])
    return accumulator.finish()[0]


@pytest.mark.parametrize(
    "structure", [egop.Full(), egop.Shared(), egop.Shared(side="output"), egop.Kronecker()], ids=str
)
@pytest.mark.parametrize("draws", [2, 9, 60, 400])
@pytest.mark.parametrize("kind", ["independent", "alike"])
def test_white_noise_is_not_reliable_however_many_draws(structure, draws, kind):
    generator = torch.Generator().manual_seed(0)
    found = [estimated(structure, rows_of(kind, draws, 6, 12, generator)) for _ in range(5)]
    assert all(each.samples == draws for each in found)
    assert sum(each.reliability for each in found) / len(found) < 0.35
    assert sum(each.is_supported for each in found) <= (draws == 2)  # two draws may be alike by chance


def test_the_reliability_is_what_different_draws_have_in_common():
    gradients = rows_of("alike", 5, 4, 3, torch.Generator().manual_seed(0)) + 0.3
    grams = [gradient.mT @ gradient for gradient in gradients]
    whole = sum(grams) / 5
    pairs = sum((grams[i] * grams[j]).sum() for i in range(5) for j in range(5) if i != j) / 20
    flat = whole.trace() ** 2 / 3
    expected = (pairs - flat) / (whole.square().sum() - flat)
    assert estimated(egop.Shared(), gradients).reliability == pytest.approx(expected.item())


def test_direction_shared_by_all_draws_is_reliable():
    direction = torch.randn(1, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = rows_of("independent", 20, 6, 12, torch.Generator().manual_seed(0)) + direction
    found = estimated(egop.Shared(), gradients)
    assert found.reliability > 0.9
    assert found.is_supported


def test_reliability_of_one_draw_is_unknown():
    assert estimated(egop.Shared(), torch.ones(1, 6, 12).double()).reliability is None
