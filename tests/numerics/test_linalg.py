"""Decompositions in float64 that survive bad input, with fixed signs."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from egop.numerics import linalg, precision

few = settings(deadline=None, max_examples=30, derandomize=True)


def rows_of(count, dimension, seed=0, dtype=torch.float64):
    """Gradients whose outer products have well separated eigenvalues."""
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


# --- of a matrix ---


@few
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 100), st.sampled_from([1e-12, 1.0, 1e12]))
def test_the_eigenbasis_diagonalises_the_matrix(dimension, count, seed, scale):
    matrix = scale * outer(rows_of(count, dimension, seed))
    values, vectors = linalg.eigenbasis(matrix)
    assert_is_eigenbasis(values, vectors, matrix)
    expected = np.linalg.eigvalsh(matrix.numpy())[::-1].clip(0)
    np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_decomposed_in_float64(dtype):
    matrix = outer(rows_of(10, 4)).to(dtype)
    assert_is_eigenbasis(*linalg.eigenbasis(matrix), matrix)


def test_the_zero_matrix_has_a_basis_with_eigenvalues_zero():
    values, vectors = linalg.eigenbasis(torch.zeros(4, 4))
    assert values.tolist() == [0.0] * 4
    assert linalg.orthonormality_error(vectors) == 0


def test_rounding_that_breaks_symmetry_or_positivity_does_no_harm():
    matrix = outer(rows_of(2, 5))
    matrix[0, 1] += 1e-15
    values, vectors = linalg.eigenbasis(matrix - 1e-15 * torch.eye(5))
    assert (values >= 0).all()
    assert linalg.orthonormality_error(vectors) < 1e-12


def failing(times, function):
    """A solver that does not converge the first few times."""
    calls = itertools.count(1)

    def solver(*arguments, **options):
        if next(calls) <= times:
            raise torch.linalg.LinAlgError("did not converge")
        return function(*arguments, **options)

    return solver


@pytest.mark.parametrize("times", [1, 2, 100], ids=["once", "twice", "always"])
def test_a_solver_that_does_not_converge_changes_nothing(monkeypatch, times):
    matrix = outer(rows_of(20, 6))
    expected = linalg.eigenbasis(matrix)
    monkeypatch.setattr(torch.linalg, "eigh", failing(times, torch.linalg.eigh))
    found = linalg.eigenbasis(matrix)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert_is_eigenbasis(*found, matrix)


def test_a_solver_that_never_converges_is_no_trouble_for_the_zero_matrix(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", failing(100, torch.linalg.eigh))
    values, vectors = linalg.eigenbasis(torch.zeros(3, 3))
    assert values.tolist() == [0.0] * 3
    assert linalg.orthonormality_error(vectors) < 1e-12


def test_a_solver_that_gives_nonsense_is_noticed(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (matrix.diagonal(), 2 * torch.eye(len(matrix)).double()))
    with pytest.raises(torch.linalg.LinAlgError, match=r"not orthonormal \(error 3.0e\+00\).*likely causes"):
        linalg.eigenbasis(torch.eye(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("decompose", [linalg.eigenbasis, linalg.eigenbasis_of_rows])
def test_entries_that_are_not_finite_are_refused(decompose, value):
    matrix = torch.eye(3)
    matrix[1, 1] = value
    with pytest.raises(torch.linalg.LinAlgError, match="entries that are not finite"):
        decompose(matrix)


# --- of rows ---


@few
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 100))
def test_the_eigenbasis_of_rows_is_that_of_their_mean_outer_product(dimension, count, seed):
    rows = rows_of(count, dimension, seed)
    values, vectors = linalg.eigenbasis_of_rows(rows)
    assert_is_eigenbasis(values, vectors, outer(rows))
    assert values[count:].tolist() == [0.0] * max(0, dimension - count)


@pytest.mark.parametrize("count", [2, 5, 30])
def test_both_routes_span_the_same_spaces(count):
    rows = rows_of(count, 5)
    by_rows, by_matrix = linalg.eigenbasis_of_rows(rows), linalg.eigenbasis(outer(rows))
    torch.testing.assert_close(by_rows[0], by_matrix[0], rtol=1e-8, atol=1e-15)
    rank = min(count, 5)
    torch.testing.assert_close(by_rows[1][:, :rank], by_matrix[1][:, :rank], rtol=0, atol=1e-6)
    empty = [vectors[:, rank:] @ vectors[:, rank:].mT for _, vectors in (by_rows, by_matrix)]
    torch.testing.assert_close(*empty, rtol=0, atol=1e-6)


def test_small_singular_values_survive_that_squaring_would_lose():
    rows = torch.diag(torch.tensor([1.0, 1e-6, 1e-12], dtype=torch.float64))
    rotation = torch.linalg.qr(rows_of(3, 3, seed=5))[0]
    values, vectors = linalg.eigenbasis_of_rows(rows @ rotation)
    np.testing.assert_allclose(values.numpy(), [1 / 3, 1e-12 / 3, 1e-24 / 3], rtol=1e-3)
    torch.testing.assert_close((vectors.mT @ rotation.mT).abs(), torch.eye(3).double(), rtol=0, atol=1e-3)


def test_rows_whose_decomposition_fails_are_decomposed_through_their_outer_product(monkeypatch):
    rows = rows_of(4, 6)
    expected = linalg.eigenbasis_of_rows(rows)
    monkeypatch.setattr(torch.linalg, "svd", failing(100, torch.linalg.svd))
    values, vectors = linalg.eigenbasis_of_rows(rows)
    torch.testing.assert_close(values, expected[0], rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(vectors[:, :4], expected[1][:, :4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("decomposition", ["svd", "qr"])
def test_many_rows_do_not_need_memory_for_their_number_squared(monkeypatch, decomposition):
    sizes = []
    real = getattr(torch.linalg, decomposition)

    def watched(matrix, **options):
        result = real(matrix, **options)
        sizes.append(max(each.numel() for each in result))
        return result

    monkeypatch.setattr(torch.linalg, decomposition, watched)
    rows = rows_of(500, 3)
    assert_is_eigenbasis(*linalg.eigenbasis_of_rows(rows), outer(rows))
    assert 0 < max(sizes) <= rows.numel()


@pytest.mark.parametrize(("count", "dimension"), [(40, 160), (160, 40)])
def test_the_eigenbasis_of_rows_is_as_accurate_as_their_singular_value_decomposition(count, dimension):
    generator = torch.Generator().manual_seed(0)
    left, right = (linalg.random_orthonormal(size, 40, generator) for size in (count, dimension))
    singular = 10.0 ** -torch.linspace(0, 10, 40, dtype=torch.float64)
    values, vectors = linalg.eigenbasis_of_rows(left * singular @ right.mT)
    # squared, the last of them would be lost beside the first
    assert (values[:40].sqrt() * count**0.5 - singular).abs().max() < 1e-14
    cosines = (vectors[:, :40] * right).sum(0).abs()
    assert (1 - cosines).max() < 1e-8
    assert linalg.orthonormality_error(vectors) < 1e-13


def test_rows_of_zeros_have_a_basis_with_eigenvalues_zero():
    values, vectors = linalg.eigenbasis_of_rows(torch.zeros(2, 4))
    assert values.tolist() == [0.0] * 4
    assert linalg.orthonormality_error(vectors) < 1e-12


@pytest.mark.parametrize(
    "wrong", [lambda vectors: vectors[:, 3].mul_(1 + 1e-7), lambda vectors: vectors[5, 2].add_(1e-7)]
)
@pytest.mark.parametrize("solver", ["eigh", "svd"])
def test_a_small_fault_of_a_solver_in_one_place_is_noticed(monkeypatch, wrong, solver):
    real = getattr(torch.linalg, solver)

    def faulty(matrix):
        result = real(matrix)
        wrong(result[1] if solver == "eigh" else result[2].mT)
        return result

    monkeypatch.setattr(torch.linalg, solver, faulty)
    rows = rows_of(40, 12)
    with pytest.raises(torch.linalg.LinAlgError, match="not orthonormal"):
        linalg.eigenbasis(outer(rows)) if solver == "eigh" else linalg.eigenbasis_of_rows(rows)


@pytest.mark.parametrize("route", ["eigh", "svd", "auto"])
def test_rows_may_come_in_any_chunks_and_slices(monkeypatch, route):
    rows = rows_of(30, 6, dtype=torch.float32)
    monkeypatch.setattr(linalg, "_SLICE_BYTES", 4 * 8 * 6)
    products = linalg.OuterProducts(6, route)
    for part in rows.split([1, 17, 2, 10]):
        products.add(part)
    assert_is_eigenbasis(*products.eigenbasis(), outer(rows))


# --- signs ---


def test_the_largest_entry_of_each_column_becomes_positive():
    vectors = torch.tensor([[0.5, -0.75, 2.0], [-0.75, -0.5, 1.0]])
    assert linalg.fix_signs(vectors).tolist() == [[-0.5, 0.75, 2.0], [0.75, 0.5, 1.0]]


def test_of_entries_equally_large_the_first_counts_whatever_the_rounding():
    half = 0.5**0.5
    for wobble in (0, 1e-9, -1e-9):
        column = torch.tensor([[-half], [half + wobble]], dtype=torch.float64)
        assert linalg.fix_signs(column)[0].item() > 0


@few
@given(st.integers(1, 6), st.integers(0, 100), st.integers(0, 63))
def test_flipped_columns_come_out_the_same(dimension, seed, flips):
    vectors = torch.linalg.qr(rows_of(dimension, dimension, seed))[0]
    signs = torch.tensor([1.0 if flips >> i & 1 else -1.0 for i in range(dimension)]).double()
    fixed = linalg.fix_signs(vectors)
    assert torch.equal(linalg.fix_signs(vectors * signs), fixed)
    assert torch.equal(linalg.fix_signs(fixed), fixed)
    assert torch.equal(fixed.abs(), vectors.abs())


def test_a_column_of_zeros_stays():
    assert linalg.fix_signs(torch.zeros(3, 1)).tolist() == [[0.0]] * 3


def test_the_orthonormality_error_is_the_largest_deviation_from_the_identity():
    vectors = torch.tensor([[1.0, 0.25], [0.0, 1.0]])
    assert linalg.orthonormality_error(vectors) == 0.25
    assert linalg.orthonormality_error(torch.eye(4)[:, :2]) == 0


# --- orthonormalisation and precision ---


def decaying(power, size=40, seed=0):
    """Columns whose lengths and angles both degrade, as a Gram matrix times a basis that has drifted."""
    generator = torch.Generator().manual_seed(seed)
    V, W = (linalg.random_orthonormal(size, size, generator) for _ in range(2))
    return V * torch.arange(1, size + 1, dtype=torch.float64) ** -power @ V.mT @ W


@pytest.mark.parametrize("widths", [(1024, 3072), (4, 3072), (4, 4)], ids=["narrow", "wide", "very wide"])
@pytest.mark.parametrize("power", [0.0, 2.0, 4.0, 6.0])
def test_cholesky_qr_is_the_q_of_a_qr_decomposition(power, widths, monkeypatch):
    monkeypatch.setattr(linalg, "_WIDE", widths[0])
    monkeypatch.setattr(linalg, "_VERY_WIDE", widths[1])
    matrices = torch.stack([decaying(power, seed=seed) for seed in range(3)])
    found, expected = linalg.cholesky_qr(matrices), linalg.orthonormalized(matrices)
    for each in found:
        assert linalg.orthonormality_error(each) < 2e-12
    # The directions themselves are as uncertain as the condition number makes them.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * float(torch.linalg.cond(matrices).max()) + 1e-13)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("size", [1, 2, 7, 32, 33, 64, 100, 200])
def test_the_inverse_of_a_triangle(size, batch):
    generator = torch.Generator().manual_seed(size)
    lower = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64).tril() / size
    lower.diagonal(dim1=-2, dim2=-1).add_(1)
    kept = lower.clone()
    found = linalg.inverse_of_lower(lower)
    torch.testing.assert_close(found, torch.linalg.inv(lower), rtol=1e-12, atol=1e-12)
    assert torch.equal(found, found.tril())
    assert torch.equal(lower, kept)


def test_orthonormalized_columns_keep_their_sides_and_their_spans():
    matrices = decaying(1.0)
    found = linalg.orthonormalized(matrices)
    triangle = found.mT @ matrices
    assert (triangle.diagonal() > 0).all()
    torch.testing.assert_close(triangle.tril(-1), torch.zeros_like(triangle), rtol=0, atol=1e-13)


def test_columns_that_are_not_finite_stay_so():
    matrices = decaying(1.0)
    matrices[3, 4] = torch.nan
    assert not torch.isfinite(linalg.cholesky_qr(matrices)).all()


def test_products_are_exact_within_and_as_before_after():
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    kept = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        before = [kind.fp32_precision for kind in kinds]
        with contextlib.suppress(ZeroDivisionError), precision.exact_products():
            assert [kind.fp32_precision for kind in kinds] == ["ieee", "ieee"]
            raise ZeroDivisionError
        assert [kind.fp32_precision for kind in kinds] == before
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(kept)


# --- the strongest directions of a wide matrix ---


def test_a_leading_basis_begins_with_the_eigenvectors_and_is_complete():
    rows = torch.randn(12, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = rows.mT @ rows
    vectors = linalg.leading_eigenbasis(gram, 20)
    _, expected = linalg.eigenbasis(gram)
    torch.testing.assert_close(vectors[:, :12], expected[:, :12], rtol=0, atol=1e-9)  # all that there is
    assert linalg.orthonormality_error(vectors) < 1e-12
    assert torch.equal(vectors, linalg.leading_eigenbasis(gram, 20))


def test_a_leading_basis_has_nearly_all_that_so_many_directions_can_have():
    values = torch.arange(1, 201, dtype=torch.float64) ** -1.0
    V = linalg.random_orthonormal(200, 200, torch.Generator().manual_seed(1))
    vectors = linalg.leading_eigenbasis(V * values @ V.mT, 40)
    held = (vectors * ((V * values @ V.mT) @ vectors)).sum(0)
    assert held[:40].sum() > 0.98 * values[:40].sum()
    torch.testing.assert_close(held[:10], values[:10], rtol=0.01, atol=0)
    assert linalg.orthonormality_error(vectors) < 1e-12


def test_a_leading_basis_of_what_is_not_finite_is_refused():
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        linalg.leading_eigenbasis(torch.full((4, 4), torch.inf), 2)
