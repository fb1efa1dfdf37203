"""The first bases: announced where they take long, and quick also where layers are wide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import egop
from egop.numerics.linalg import eigenbasis, orthonormality_error
from egop.optimizer import moments
from egop.refresh import methods


def one_step(model, refresh):
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, refresh=refresh, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("refresh", [egop.Online(), egop.WhenDrifted()], ids=lambda each: type(each).__name__)
def test_first_bases_that_take_long_are_announced_before_the_work_begins(refresh, capsys, monkeypatch):
    def shown_before(matrix):
        assert "First bases: 4 up to 9 wide, about 0 s:   0%" in capsys.readouterr().err
        monkeypatch.setattr(methods.linalg, "eigenbasis", eigenbasis)
        return eigenbasis(matrix)

    monkeypatch.setattr(methods, "_PATIENCE", 0.0)
    monkeypatch.setattr(methods.linalg, "eigenbasis", shown_before)
    one_step(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 2)), refresh)
    assert "4/4" in capsys.readouterr().err


def test_those_that_take_no_time_are_not(capsys):
    one_step(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 2)), egop.Online())
    assert capsys.readouterr().err == ""


def test_the_estimate_grows_with_the_work():
    def matrix(kind):
        return SimpleNamespace(shape=(6000, 6000), device=torch.device(kind))

    full = methods.FROM_SCRATCH.seconds([matrix("cpu")])
    assert 10 < full < 100
    assert methods.ITERATION.seconds([matrix("cpu")]) < 5
    assert methods.FROM_SCRATCH.seconds([matrix("cuda")]) < full


def test_a_wide_layer_with_few_rows_gets_all_its_eigenvectors(monkeypatch):
    monkeypatch.setattr(methods, "WIDE", 30)
    monkeypatch.setattr(methods, "LEADING", 20)
    model = nn.Linear(50, 12, bias=False)
    optimizer = one_step(model, egop.Online(structure=egop.Kronecker()))
    gradient = model.weight.grad.double()
    found = optimizer.basis["weight"].tensors
    _, expected = eigenbasis(gradient.mT @ gradient)
    torch.testing.assert_close(found["right"][:, :12].double(), expected[:, :12], rtol=0, atol=1e-4)
    assert orthonormality_error(found["right"]) < 1e-5
    torch.testing.assert_close(found["left"].double(), eigenbasis(gradient @ gradient.mT)[1], rtol=0, atol=1e-4)


def test_of_wider_ones_the_iteration_finds_the_rest(monkeypatch):
    monkeypatch.setattr(methods, "WIDE", 16)
    monkeypatch.setattr(methods, "LEADING", 8)
    V = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    gram = V * 0.7 ** torch.arange(24.0, dtype=torch.float64) @ V.mT
    basis, sound = methods.first(gram[None], torch.eye(24).double()[None])
    assert sound.all()
    start = methods.off_diagonal(gram, basis[0])
    for _ in range(40):
        basis, _ = methods.renewed(gram[None], basis)
    assert methods.off_diagonal(gram, basis[0]) < 1e-3 < start


@pytest.mark.parametrize("structure", [egop.Kronecker(), egop.Shared(), egop.Full()], ids=str)
def test_the_point_of_a_wide_block_moves_to_its_new_basis_without_their_rotation(structure, monkeypatch):
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
