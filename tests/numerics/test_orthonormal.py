"""Orthonormalization by Householder and by Cholesky decompositions."""

from __future__ import annotations

import pytest
import torch

from egop.numerics import orthonormal, orthonormality_error, orthonormalize, random_orthonormal
from egop.numerics.orthonormal import cholesky_qr, invert_lower_triangular


def test_orthonormality_error_is_the_largest_deviation_from_the_identity():
    vectors = torch.tensor([[1.0, 0.25], [0.0, 1.0]])
    assert orthonormality_error(vectors) == 0.25
    assert orthonormality_error(torch.eye(4)[:, :2]) == 0


def decaying(power, size=40, seed=0):
    """Return nearly dependent columns of decreasing length, like a Gram matrix times a basis that has drifted."""
    generator = torch.Generator().manual_seed(seed)
    V, W = (random_orthonormal(size, size, generator) for _ in range(2))
    return V * torch.arange(1, size + 1, dtype=torch.float64) ** -power @ V.mT @ W


@pytest.mark.parametrize("widths", [(1024, 3072), (4, 3072), (4, 4)], ids=["narrow", "wide", "very wide"])
@pytest.mark.parametrize("power", [0.0, 2.0, 4.0, 6.0])
def test_cholesky_qr_equals_householder_qr(power, widths, monkeypatch):
    monkeypatch.setattr(orthonormal, "_WIDE", widths[0])
    monkeypatch.setattr(orthonormal, "_VERY_WIDE", widths[1])
    matrices = torch.stack([decaying(power, seed=seed) for seed in range(3)])
    found, expected = cholesky_qr(matrices), orthonormalize(matrices)
    for each in found:
        assert orthonormality_error(each) < 2e-12
    # The condition number limits the accuracy of the directions.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * float(torch.linalg.cond(matrices).max()) + 1e-13)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("size", [1, 2, 7, 32, 33, 64, 100, 200])
def test_inverse_of_a_triangle(size, batch):
    generator = torch.Generator().manual_seed(size)
    lower = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64).tril() / size
    lower.diagonal(dim1=-2, dim2=-1).add_(1)
    kept = lower.clone()
    found = invert_lower_triangular(lower)
    torch.testing.assert_close(found, torch.linalg.inv(lower), rtol=1e-12, atol=1e-12)
    assert torch.equal(found, found.tril())
    assert torch.equal(lower, kept)


def test_orthonormalize_keeps_the_orientation_and_the_span_of_the_columns():
    matrices = decaying(1.0)
    found = orthonormalize(matrices)
    triangle = found.mT @ matrices
    assert (triangle.diagonal() > 0).all()
    torch.testing.assert_close(triangle.tril(-1), torch.zeros_like(triangle), rtol=0, atol=1e-13)


def test_nonfinite_columns_stay_nonfinite():
    matrices = decaying(1.0)
    matrices[3, 4] = torch.nan
    assert not torch.isfinite(cholesky_qr(matrices)).all()
