"""First bases: a fast path for wide layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import egop
from egop.numerics import eigenbasis, orthonormality_error
from egop.optimizer import moments
from egop.refresh import eigenbases


def one_step(model, refresh):
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, refresh=refresh, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


def test_a_wide_layer_with_few_rows_gets_all_its_eigenvectors(monkeypatch):
    monkeypatch.setattr(eigenbases, "WIDE", 30)
    monkeypatch.setattr(eigenbases, "LEADING", 20)
    model = nn.Linear(50, 12, bias=False)
    optimizer = one_step(model, egop.Online(structure=egop.Kronecker()))
    gradient = model.weight.grad.double()
    found = optimizer.basis["weight"].tensors
    _, expected = eigenbasis(gradient.mT @ gradient)
    torch.testing.assert_close(found["right"][:, :12].double(), expected[:, :12], rtol=0, atol=1e-4)
    assert orthonormality_error(found["right"]) < 1e-5
    torch.testing.assert_close(found["left"].double(), eigenbasis(gradient @ gradient.mT)[1], rtol=0, atol=1e-4)


def test_power_iterations_find_the_directions_that_a_first_basis_lacks(monkeypatch):
    monkeypatch.setattr(eigenbases, "WIDE", 16)
    monkeypatch.setattr(eigenbases, "LEADING", 8)
    V = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    gram = V * 0.7 ** torch.arange(24.0, dtype=torch.float64) @ V.mT
    basis, sound = eigenbases.decompose_leading(gram[None], torch.eye(24).double()[None])
    assert sound.all()
    start = eigenbases.off_diagonal_share(gram, basis[0])
    for _ in range(40):
        basis, _ = eigenbases.iterate(gram[None], basis)
    assert eigenbases.off_diagonal_share(gram, basis[0]) < 1e-3 < start


@pytest.mark.parametrize("structure", [egop.Kronecker(), egop.Shared(), egop.Full()], ids=str)
def test_a_wide_block_is_rebased_without_an_explicit_rotation(structure, monkeypatch):
    """SGD is the same in every basis."""
    monkeypatch.setattr(moments, "_WIDE", 1)
    model, plain = nn.Linear(7, 4).double(), nn.Linear(7, 4).double()
    plain.load_state_dict(model.state_dict())
    wrapped = egop.ReparameterizedOptimizer(
        model, torch.optim.SGD, refresh=egop.Online(every=2, structure=structure), lr=0.1
    )
    for optimizer, each in ((wrapped, model), (torch.optim.SGD(plain.parameters(), lr=0.1), plain)):
        generator = torch.Generator().manual_seed(0)
        for _ in range(7):
            for parameter in each.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=1e-12)
