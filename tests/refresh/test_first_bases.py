"""First bases: a progress bar if they take long, and a fast path for wide layers."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize("refresh", [egop.Online(), egop.Online(tolerance=0.1)], ids=["in turn", "drifted"])
def test_slow_first_bases_show_a_progress_bar_before_the_work_starts(refresh, capsys, monkeypatch):
    def shown_before(matrix):
        assert "First bases: 4 up to 9 wide, about 0 s:   0%" in capsys.readouterr().err
        monkeypatch.setattr(eigenbases, "eigenbasis", eigenbasis)
        return eigenbasis(matrix)

    monkeypatch.setattr(eigenbases, "_PROGRESS_AFTER", 0.0)
    monkeypatch.setattr(eigenbases, "eigenbasis", shown_before)
    one_step(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 8), nn.Linear(8, 2)), refresh)
    assert "4/4" in capsys.readouterr().err


def test_fast_first_bases_show_no_progress_bar(capsys):
    one_step(nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 2)), egop.Online())
    assert capsys.readouterr().err == ""


def test_the_time_estimate_grows_with_the_work():
    def matrix(kind):
        return SimpleNamespace(shape=(6000, 6000), device=torch.device(kind))

    full = eigenbases.estimate_seconds([matrix("cpu")], is_leading=False)
    assert 10 < full < 100
    assert eigenbases.estimate_seconds([matrix("cpu")], is_leading=True) < 5
    assert eigenbases.estimate_seconds([matrix("cuda")], is_leading=False) < full


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
