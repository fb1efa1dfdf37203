"""Eigenvectors in float64: signs and null spaces are fixed, bad input and failing solvers are handled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egop.numerics import (
    OuterProducts,
    eigen,
    eigenbasis,
    leading_eigenbasis,
    orthonormality_error,
    outer_products,
    random_orthonormal,
)
from egop.numerics.eigen import eigenbasis_from_rows, fix_signs

few = settings(deadline=None, max_examples=30, derandomize=True)


def rows_of(count, dimension, seed=0, dtype=torch.float64):
    """Draw gradients whose outer products have well separated eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return (rows * 2.0 ** -torch.arange(dimension)).to(dtype)


def outer(rows):
    return rows.double().mT @ rows.double() / len(rows)


def assert_is_eigenbasis(values, vectors, matrix):
    scale = max(matrix.abs().max().item(), 1e-300)
    assert values.dtype == vectors.dtype == torch.float64
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(len(matrix)).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors * values @ vectors.mT / scale, matrix.double() / scale, rtol=0, atol=1e-12)
    assert (values >= 0).all()
    assert (values.diff() <= 0).all()
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    assert (largest > 0).all()


# --- from a matrix ---


@few
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 100), st.sampled_from([1e-12, 1.0, 1e12]))
def test_eigenbasis_diagonalizes_the_matrix(dimension, count, seed, scale):
    matrix = scale * outer(rows_of(count, dimension, seed))
    values, vectors = eigenbasis(matrix)
    assert_is_eigenbasis(values, vectors, matrix)
    expected = np.linalg.eigvalsh(matrix.numpy())[::-1].clip(0)
    np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_decomposed_in_float64(dtype):
    matrix = outer(rows_of(10, 4)).to(dtype)
    assert_is_eigenbasis(*eigenbasis(matrix), matrix)


def test_zero_matrix_has_an_orthonormal_basis():
    values, vectors = eigenbasis(torch.zeros(4, 4))
    assert values.tolist() == [0.0] * 4
    assert orthonormality_error(vectors) == 0


def test_rounding_may_break_symmetry_and_positivity():
    matrix = outer(rows_of(2, 5))
    matrix[0, 1] += 1e-15
    values, vectors = eigenbasis(matrix - 1e-15 * torch.eye(5))
    assert (values >= 0).all()
    assert orthonormality_error(vectors) < 1e-12


def failing(times, function):
    """Return a solver that does not converge the first few times."""
    calls = itertools.count(1)

    def solver(*arguments, **options):
        if next(calls) <= times:
            raise torch.linalg.LinAlgError("did not converge")
        return function(*arguments, **options)

    return solver


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_result_is_the_same_if_the_solver_does_not_converge(monkeypatch, times):
    matrix = outer(rows_of(20, 6))
    expected = eigenbasis(matrix)
    monkeypatch.setattr(torch.linalg, "eigh", failing(times, torch.linalg.eigh))
    found = eigenbasis(matrix)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert_is_eigenbasis(*found, matrix)


def test_zero_matrix_is_decomposed_even_if_the_solver_never_converges(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", failing(100, torch.linalg.eigh))
    values, vectors = eigenbasis(torch.zeros(3, 3))
    assert values.tolist() == [0.0] * 3
    assert orthonormality_error(vectors) < 1e-12


def test_wrong_result_of_the_solver_is_detected(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (matrix.diagonal(), 2 * torch.eye(len(matrix)).double()))
    with pytest.raises(torch.linalg.LinAlgError, match=r"not orthonormal \(error 3.0e\+00\).*Likely causes"):
        eigenbasis(torch.eye(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("decompose", [eigenbasis, eigenbasis_from_rows])
def test_nonfinite_entries_are_refused(decompose, value):
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(torch.linalg.LinAlgError, match="entries that are not finite"):
        decompose(matrix)


# --- from rows ---


@few
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 100))
def test_eigenbasis_from_rows_diagonalizes_their_mean_outer_product(dimension, count, seed):
    rows = rows_of(count, dimension, seed)
    values, vectors = eigenbasis_from_rows(rows)
    assert_is_eigenbasis(values, vectors, outer(rows))
    assert values[count:].tolist() == [0.0] * max(0, dimension - count)


@pytest.mark.parametrize("count", [2, 5, 30])
def test_both_routes_span_the_same_spaces(count):
    rows = rows_of(count, 5)
    by_rows, by_matrix = eigenbasis_from_rows(rows), eigenbasis(outer(rows))
    torch.testing.assert_close(by_rows[0], by_matrix[0], rtol=1e-8, atol=1e-15)
    rank = min(count, 5)
    torch.testing.assert_close(by_rows[1][:, :rank], by_matrix[1][:, :rank], rtol=0, atol=1e-6)
    empty = [vectors[:, rank:] @ vectors[:, rank:].mT for _, vectors in (by_rows, by_matrix)]
    torch.testing.assert_close(*empty, rtol=0, atol=1e-6)


def test_small_singular_values_are_not_lost_by_squaring():
    rows = torch.diag(torch.tensor([1.0, 1e-6, 1e-12], dtype=torch.float64))
    rotation = torch.linalg.qr(rows_of(3, 3, seed=5))[0]
    values, vectors = eigenbasis_from_rows(rows @ rotation)
    np.testing.assert_allclose(values.numpy(), [1 / 3, 1e-12 / 3, 1e-24 / 3], rtol=1e-3)
    torch.testing.assert_close((vectors.mT @ rotation.mT).abs(), torch.eye(3).double(), rtol=0, atol=1e-3)


def test_rows_fall_back_to_their_outer_product_if_the_svd_fails(monkeypatch):
    rows = rows_of(4, 6)
    expected = eigenbasis_from_rows(rows)
    monkeypatch.setattr(torch.linalg, "svd", failing(100, torch.linalg.svd))
    values, vectors = eigenbasis_from_rows(rows)
    torch.testing.assert_close(values, expected[0], rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(vectors[:, :4], expected[1][:, :4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("decomposition", ["svd", "qr"])
def test_memory_does_not_grow_with_the_square_of_the_number_of_rows(monkeypatch, decomposition):
    sizes = []
    real = getattr(torch.linalg, decomposition)

    def watched(matrix, **options):
        result = real(matrix, **options)
        sizes.append(max(each.numel() for each in result))
        return result

    monkeypatch.setattr(torch.linalg, decomposition, watched)
    rows = rows_of(500, 3)
    assert_is_eigenbasis(*eigenbasis_from_rows(rows), outer(rows))
    assert 0 < max(sizes) <= rows.numel()


@pytest.mark.parametrize(("count", "dimension"), [(40, 160), (160, 40)])
def test_eigenbasis_from_rows_is_as_accurate_as_an_svd(count, dimension):
    generator = torch.Generator().manual_seed(0)
    left, right = (random_orthonormal(size, 40, generator) for size in (count, dimension))
    singular = 10.0 ** -torch.linspace(0, 10, 40, dtype=torch.float64)
    values, vectors = eigenbasis_from_rows(left * singular @ right.mT)
    # squared, the last of them would be lost beside the first
    assert (values[:40].sqrt() * count**0.5 - singular).abs().max() < 1e-14
    cosines = (vectors[:, :40] * right).sum(0).abs()
    assert (1 - cosines).max() < 1e-8
    assert orthonormality_error(vectors) < 1e-13


def test_zero_rows_have_an_orthonormal_basis():
    values, vectors = eigenbasis_from_rows(torch.zeros(2, 4))
    assert values.tolist() == [0.0] * 4
    assert orthonormality_error(vectors) < 1e-12


@pytest.mark.parametrize(
    "wrong", [lambda vectors: vectors[:, 3].mul_(1 + 1e-7), lambda vectors: vectors[5, 2].add_(1e-7)]
)
@pytest.mark.parametrize("solver", ["eigh", "svd"])
def test_small_error_of_the_solver_in_one_entry_is_detected(monkeypatch, wrong, solver):
    real = getattr(torch.linalg, solver)

    def faulty(matrix):
        result = real(matrix)
        wrong(result[1] if solver == "eigh" else result[2].mT)
        return result

    monkeypatch.setattr(torch.linalg, solver, faulty)
    rows = rows_of(40, 12)
    with pytest.raises(torch.linalg.LinAlgError, match="not orthonormal"):
        eigenbasis(outer(rows)) if solver == "eigh" else eigenbasis_from_rows(rows)


@pytest.mark.parametrize("dimension", [6, 40], ids=["as a matrix", "as rows"])
def test_outer_products_do_not_depend_on_chunks_and_slices(monkeypatch, dimension):
    rows = rows_of(30, dimension, dtype=torch.float32)
    monkeypatch.setattr(outer_products, "_SLICE_BYTES", 4 * 8 * dimension)
    products, other = OuterProducts(dimension), OuterProducts(dimension)
    for part in rows[:20].split([1, 17, 2]):
        products.add(part)
    other.add(rows[20:])
    products.merge(other)
    assert_is_eigenbasis(*products.eigenbasis(), outer(rows))


# --- signs ---


def test_largest_entry_of_each_column_becomes_positive():
    vectors = torch.tensor([[0.5, -0.75, 2.0], [-0.75, -0.5, 1.0]])
    assert fix_signs(vectors).tolist() == [[-0.5, 0.75, 2.0], [0.75, 0.5, 1.0]]


def test_first_of_equally_large_entries_decides_the_sign():
    half = 0.5**0.5
    for wobble in (0, 1e-9, -1e-9):
        column = torch.tensor([[-half], [half + wobble]], dtype=torch.float64)
        assert fix_signs(column)[0].item() > 0


@few
@given(st.integers(1, 6), st.integers(0, 100), st.integers(0, 63))
def test_flipped_columns_get_the_same_signs(dimension, seed, flips):
    vectors = torch.linalg.qr(rows_of(dimension, dimension, seed))[0]
    signs = torch.tensor([1.0 if flips >> i & 1 else -1.0 for i in range(dimension)]).double()
    fixed = fix_signs(vectors)
    assert torch.equal(fix_signs(vectors * signs), fixed)
    assert torch.equal(fix_signs(fixed), fixed)
    assert torch.equal(fixed.abs(), vectors.abs())


def test_zero_column_stays_zero():
    assert fix_signs(torch.zeros(3, 1)).tolist() == [[0.0]] * 3


# --- leading directions of a wide matrix ---


def test_leading_basis_begins_with_the_eigenvectors_and_is_complete():
    rows = torch.randn(12, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = rows.mT @ rows
    vectors = leading_eigenbasis(gram, 20)
    _, expected = eigenbasis(gram)
    torch.testing.assert_close(vectors[:, :12], expected[:, :12], rtol=0, atol=1e-9)  # the rank
    assert orthonormality_error(vectors) < 1e-12
    assert torch.equal(vectors, leading_eigenbasis(gram, 20))


def test_leading_basis_captures_nearly_as_much_as_the_eigenvectors():
    values = torch.arange(1, 201, dtype=torch.float64) ** -1.0
    V = random_orthonormal(200, 200, torch.Generator().manual_seed(1))
    vectors = leading_eigenbasis(V * values @ V.mT, 40)
    held = (vectors * ((V * values @ V.mT) @ vectors)).sum(0)
    assert held[:40].sum() > 0.98 * values[:40].sum()
    torch.testing.assert_close(held[:10], values[:10], rtol=0.01, atol=0)
    assert orthonormality_error(vectors) < 1e-12


def test_leading_basis_of_a_nonfinite_matrix_is_refused():
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        leading_eigenbasis(torch.full((4, 4), torch.inf), 2)


# --- null spaces: chosen by a rule, not by rounding ---


def make_deficient_rows(noise=0.0):
    """Make 6 rows of rank 4 with 40 entries, of which the first and four others are always zero."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, 40, generator=generator, dtype=torch.float64
    )
    rows[:, [0, 7, 8, 20, 39]] = 0
    return rows * (1 + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64))


ROUTES = {
    "matrix": lambda rows: eigenbasis(rows.mT @ rows)[1],
    "rows": lambda rows: eigenbasis_from_rows(rows)[1],
    "leading": lambda rows: leading_eigenbasis(rows.mT @ rows, 10),
}


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("compute", ROUTES.values(), ids=list(ROUTES))
def test_rounding_does_not_choose_a_null_space(compute, is_wide, monkeypatch):
    if is_wide:
        monkeypatch.setattr(eigen, "_WIDE_NULL_SPACE", 0)
    one, other = compute(make_deficient_rows()), compute(make_deficient_rows(1e-15))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    torch.testing.assert_close(one.mT @ one, torch.eye(40, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("compute", [ROUTES["matrix"], ROUTES["rows"]], ids=["matrix", "rows"])
def test_inputs_that_are_always_zero_keep_their_axes(compute):
    basis = compute(make_deficient_rows())
    torch.testing.assert_close(basis[[0, 7, 8, 20, 39]].abs().amax(1), torch.ones(5, dtype=torch.float64))
