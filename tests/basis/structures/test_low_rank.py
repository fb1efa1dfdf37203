"""Auxiliary and Reduced: the paper's formulas by hand, and what they mean for training."""

from __future__ import annotations

import pytest
import torch

import cases
import egop
from cases import MLP
from egop.numerics import random_orthonormal
from explicit import basis_of, identical, logistic

WEIGHT = cases.block("weight", weight=(4, 5))
KINDS = [egop.Auxiliary, egop.Reduced]


def change_of(structure, seed=0):
    V = random_orthonormal(WEIGHT.size, structure.rank, torch.Generator().manual_seed(seed))
    return V, structure.change(WEIGHT, {"basis": V})


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_auxiliary_is_the_papers_algorithm():
    V, change = change_of(egop.Auxiliary(rank=3))
    eye = torch.eye(WEIGHT.size).double()
    theta_r, theta_d = randn(3), randn(WEIGHT.size, seed=2)
    (theta,) = change.decode([theta_r, theta_d])
    torch.testing.assert_close(theta.flatten(), V @ theta_r + (eye - V @ V.mT) @ theta_d, rtol=0, atol=1e-12)
    start = randn(4, 5)
    found = change.encode(start)
    torch.testing.assert_close(found[0], V.mT @ start.flatten(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], (eye - V @ V.mT) @ start.flatten(), rtol=0, atol=1e-12)
    torch.testing.assert_close(change.decode(found)[0], start, rtol=0, atol=1e-12)


def test_auxiliary_has_more_coordinates_than_entries():
    _, change = change_of(egop.Auxiliary(rank=3))
    assert change.coordinate_shapes() == ((3,), (20,))
    assert change.dense().shape == (20, 23)
    assert change.nbytes == 20 * 3 * 8
    assert change.cost_per_step == 2 * 2 * (2 * 20 * 3)  # encode and decode, two products each


def test_reduced_is_the_projection_onto_the_leading_directions():
    V, change = change_of(egop.Reduced(rank=3))
    x = randn(4, 5)
    torch.testing.assert_close(change.decode(change.encode(x))[0].flatten(), V @ V.mT @ x.flatten())
    assert not change.is_complete
    assert change.dense().shape == (20, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_equal_to_the_dimension_gives_the_full_basis(kind):
    gradients = randn(60, 4, 5) * torch.linspace(1, 3, 20).reshape(4, 5)
    found, full = (structure.accumulator(WEIGHT) for structure in (kind(rank=20), egop.Full()))
    for accumulator in (found, full):
        accumulator.add([gradients])
    (spectrum, change), (expected, dense) = found.finish(), full.finish()
    torch.testing.assert_close(spectrum.eigenvalues, expected.eigenvalues, rtol=1e-8, atol=0)
    torch.testing.assert_close(change.tensors["basis"], dense.tensors["basis"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_they_want_a_hundredth_of_the_dimension_but_no_fewer_than_their_rank(kind):
    large = cases.block("large", large=(100, 784))
    assert kind(rank=200).samples(large) == 784
    assert kind(rank=1000).samples(large) == 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, -1, 2.5, "3", None])
def test_rank_below_one_raises(kind, rank):
    with pytest.raises(ValueError, match=rf"Invalid rank value: {rank!r}\. Must be a whole number of at least 1"):
        kind(rank=rank)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_above_the_dimension_raises_and_changes_nothing(kind):
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(
        ValueError, match=r"Invalid rank value: 16\. Block '2\.weight' has only 15 entries; use egop\.Full\(\) for it"
    ):
        cases.estimate(MLP.objective(model), structure=kind(rank=16))
    assert cases.state_of(model) == before


# --- training ---


def trained(structure, optimizer=torch.optim.SGD, steps=20, **arguments):
    basis = basis_of(MLP, structure=structure)
    model = MLP.build()
    wrapped = egop.ReparameterizedOptimizer(model, optimizer, basis, **arguments)
    start = cases.parameters_of(model)
    for step in range(steps):
        wrapped.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        wrapped.step()
    return basis, start, cases.parameters_of(model)


def outside(basis, name, tensor):
    V = basis[name].tensors["basis"]
    return tensor.flatten() - V @ (V.mT @ tensor.flatten())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_reduced_moves_in_the_span_and_keeps_the_rest_of_the_start(optimizer):
    basis, start, end = trained(egop.Reduced(rank=3), optimizer, lr=0.1)
    assert identical(start, cases.parameters_of(MLP.build()))  # making the optimizer changes nothing
    for name in basis:
        moved = end[name] - start[name]
        assert moved.norm() > 1e-2
        assert outside(basis, name, moved).norm() < 1e-12
        assert outside(basis, name, start[name]).norm() > 0.1


def test_reduced_may_drop_the_rest_as_the_paper_writes_it():
    basis, start, end = trained(egop.Reduced(rank=3, keep_rest=False), torch.optim.Adam, lr=0.1)
    initial = cases.parameters_of(MLP.build())
    for name in basis:
        V = basis[name].tensors["basis"]
        torch.testing.assert_close(start[name].flatten(), V @ (V.mT @ initial[name].flatten()))  # at once
        assert outside(basis, name, end[name]).norm() < 1e-12


def test_sgd_in_reduced_coordinates_is_low_rank_gradient_descent():
    basis, _, end = trained(egop.Reduced(rank=3), lr=0.1)
    model = MLP.build()
    for step in range(20):
        model.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                if name in basis:
                    gradient = (gradient.flatten() - outside(basis, name, gradient)).reshape(gradient.shape)
                parameter -= 0.1 * gradient
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(end[name], parameter.detach(), rtol=0, atol=1e-12)


def test_sgd_in_auxiliary_coordinates_is_gradient_descent():
    _, _, end = trained(egop.Auxiliary(rank=3), lr=0.1)
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(end[name], parameter.detach(), rtol=0, atol=1e-12)


def test_what_is_refused_does_not_drop_anything():
    """Dropping the rest changes the model, so it comes last."""
    good = basis_of(MLP, structure=egop.Reduced(rank=3, keep_rest=False))
    foreign = egop.Identity().accumulator(cases.block("foreign", foreign=(2, 2))).finish()[1]
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match="for the parameter 'foreign', which the optimizer was not given"):
        egop.ReparameterizedOptimizer(model, torch.optim.SGD, egop.Basis([*good.values(), foreign]))
    with pytest.raises(ValueError, match="Online cannot renew bases of structure Reduced"):
        egop.ReparameterizedOptimizer(model, torch.optim.SGD, good, refresh=egop.Online())
    assert cases.state_of(model) == before
