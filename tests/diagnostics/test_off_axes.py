"""How far gradients lie off the axes, and how much of the curvature is on them: known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import egop
from egop.basis import Block
from egop.diagnostics import off_axes
from egop.diagnostics.curvature import curvature
from egop.estimation import partition_objective
from egop.numerics import random_orthonormal


def nothing():
    pass


def test_it_is_the_log_of_the_roots_less_that_of_noise():
    """With many draws noise has nothing, and the number is that of the Gram matrix itself."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, 6).double()
    Q = random_orthonormal(6, 6, generator)
    gram = off_axes._Grams(Block("w", ("w",), (torch.Size([2000, 6]),), torch.float64))
    gram.add(torch.randn(2000, 6, generator=generator).double() * scales @ Q.mT)
    matrix = Q @ (scales**2).diag() @ Q.mT
    expected = math.log(float(matrix.diagonal().sqrt().sum() / scales.sum()))
    value, _ = off_axes._off_axes(gram.sides[0], 2000, generator)
    assert value == pytest.approx(expected, abs=0.05)
    assert expected > 0.4


def linear(inputs, outputs):
    """A linear layer with white noise for gradients; the batches are those."""
    model = nn.Linear(inputs, outputs, bias=False).double()
    noise = [torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).double() for seed in range(64)]
    return egop.Objective(model, lambda model, batch: (model.weight * batch).sum(), noise)


@pytest.mark.parametrize("draws", [1, 2, 5, 32])
@pytest.mark.parametrize("shape", [(24, 16), (6, 40), (40, 3)])
def test_white_noise_is_never_seen(draws, shape):
    objective = linear(*shape)
    found = off_axes.here(objective, partition_objective(objective, "parameter")[0], draws, 0, nothing)
    assert found.draws == draws
    assert not found.is_seen, found


def test_batches_that_come_again_are_counted_once():
    objective = linear(8, 4)
    objective = egop.Objective(objective.module, lambda model, batch: (model.weight * batch).sum(), [torch.ones(4, 8)])
    found = off_axes.here(objective, partition_objective(objective, "parameter")[0], 32, 0, nothing)
    assert found.draws == 1


def test_sides_that_are_too_wide_are_left_out_and_weights_with_no_other_too(monkeypatch):
    monkeypatch.setattr(off_axes, "_WIDEST", 10)
    objective = linear(24, 6)
    blocks = partition_objective(objective, "parameter")[0]
    (gram,) = off_axes._grams_of(blocks).values()
    gram.add(torch.ones(6, 24).double())
    assert [len(side) for side in gram.sides] == [6]
    monkeypatch.setattr(off_axes, "_WIDEST", 4)
    assert off_axes.here(objective, blocks, 4, 0, nothing) is None


def test_of_layers_that_are_alike_the_first_the_last_and_one_between_are_looked_at():
    blocks = [Block(f"layers.{k}.w", (f"layers.{k}.w",), (torch.Size([3, 3]),), torch.float32) for k in range(9)]
    assert list(off_axes._grams_of(blocks)) == ["layers.0.w", "layers.4.w", "layers.8.w"]


def test_the_curvature_of_a_rotated_quadratic_is_on_the_axes_of_its_basis():
    generator = torch.Generator().manual_seed(0)
    scales, Q = torch.logspace(0, -1, 8).double(), random_orthonormal(8, 8, generator)
    objective = egop.Objective.from_function(
        lambda theta: (scales * (Q.mT @ theta).square()).sum() / 2, {"theta": torch.ones(8).double()}
    )
    basis = egop.estimate(objective, rho=egop.Gaussian(), samples=4000, progress=False)
    found = curvature(objective, basis, 0)
    hessian = Q @ scales.diag() @ Q.mT
    assert found.original == pytest.approx(float(hessian.diagonal().square().sum() / hessian.square().sum()), abs=0.15)
    assert found.rotated > 0.95
    assert found.promise > 0.2
