"""Leading directions of many rows: randomized, streamed and merged, and reproducible."""

from __future__ import annotations

import itertools

import pytest
import torch

import cases
import egop
from egop.numerics import orthonormality_error, random_orthonormal
from egop.numerics import sketch as sketch_module
from egop.numerics.sketch import RowSketch, leading_directions, orthonormalize_columns

RANK, COUNT, DIMENSION = 10, 120, 70  # both larger than twice the rank

# Two meanings of "a 1/k spectrum". The first decays more slowly and is harder.
SPECTRA = {
    "eigenvalues 1/k": torch.arange(1, DIMENSION + 1).double() ** -0.5,
    "singular values 1/k": torch.arange(1, DIMENSION + 1).double() ** -1.0,
}

ORDERS = {
    "in order": lambda rows: rows,
    "backwards": lambda rows: rows.flip(0),
    "shortest first": lambda rows: rows[rows.norm(dim=1).argsort()],
    "longest first": lambda rows: rows[rows.norm(dim=1).argsort(descending=True)],
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_with(singular, count=COUNT, seed=0, dtype=torch.float64):
    """Draw rows with these singular values; return them and their right singular vectors (columns)."""
    left = random_orthonormal(count, len(singular), seeded(seed))
    right = random_orthonormal(DIMENSION, len(singular), seeded(seed + 1))
    return (left * singular @ right.mT).to(dtype), right


def smallest_cosine(found, expected):
    """Return the cosine of the largest angle between two subspaces: 1 if they are equal."""
    return float(torch.linalg.svdvals(found.double().mT @ expected.double()).min())


def streamed(rows, chunk, capacity=0):
    sketch = RowSketch(RANK, capacity)
    for part in rows.split(chunk):
        sketch.add(part)
    return sketch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_randomized_basis_recovers_the_leading_subspace(spectrum, dtype):
    for seed in range(5):
        rows, right = rows_with(SPECTRA[spectrum], seed=seed, dtype=dtype)
        values, found = leading_directions([rows], RANK, 4, seeded(seed))
        assert smallest_cosine(found, right[:, :RANK]) > 0.99
        assert found.dtype == dtype
        assert orthonormality_error(found.double()) < (1e-5 if dtype == torch.float32 else 1e-12)
        torch.testing.assert_close(values, SPECTRA[spectrum][:RANK].square(), rtol=0.01, atol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64, COUNT])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_streaming_basis_recovers_the_leading_subspace(spectrum, order, chunk):
    rows, right = rows_with(SPECTRA[spectrum])
    sketch = streamed(ORDERS[order](rows), chunk)
    assert sum(map(len, sketch.rows)) <= sketch.capacity == 4 * RANK < COUNT == sketch.count
    values, found = sketch.leading(4, seeded())
    assert smallest_cosine(found, right[:, :RANK]) > 0.99
    assert orthonormality_error(found) < 1e-12
    torch.testing.assert_close(values, SPECTRA[spectrum][:RANK].square() / COUNT, rtol=0.02, atol=0)


@pytest.mark.parametrize("structure", [egop.Auxiliary(rank=RANK), egop.Reduced(rank=RANK)], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_structures_recover_the_leading_subspace(spectrum, structure):
    rows, right = rows_with(SPECTRA[spectrum])
    accumulator = structure.accumulator(cases.block("weight", weight=(7, 10)))
    for part in rows.split(50):
        accumulator.add([part.reshape(-1, 7, 10)])
    found, change = accumulator.finish()
    assert smallest_cosine(change.tensors["basis"], right[:, :RANK]) > 0.99
    torch.testing.assert_close(found.eigenvalues, SPECTRA[spectrum][:RANK].square() / COUNT, rtol=0.01, atol=0)


@pytest.mark.parametrize("count", [1, 5, 4 * RANK])
def test_few_rows_are_decomposed_exactly(count):
    rows = torch.randn(count, DIMENSION, generator=seeded(), dtype=torch.float64)
    values, found = leading_directions(list(rows.split(3)), RANK, 0, seeded())
    _, singular, right = torch.linalg.svd(rows, full_matrices=False)
    kept = min(count, RANK)
    torch.testing.assert_close(values[:kept], singular[:kept].square(), rtol=1e-10, atol=0)
    assert values[kept:].tolist() == [0.0] * (RANK - kept)
    torch.testing.assert_close((found[:, :kept] * right[:kept].mT).sum(0).abs(), torch.ones(kept).double())
    assert orthonormality_error(found) < 1e-12  # including the random directions that fill it up


@pytest.mark.parametrize("capacity", [COUNT, 0], ids=["kept", "compressed"])
def test_merged_sketches_equal_one_sketch(capacity):
    rows, right = rows_with(SPECTRA["eigenvalues 1/k"])
    one = streamed(rows, 16, capacity)
    first, second, third = (streamed(part, 16, capacity) for part in rows.split((30, 75, 15)))
    first.merge(second)
    first.merge(third)
    empty = RowSketch(RANK, capacity)
    empty.merge(first)
    for merged in (first, empty):
        assert merged.count == one.count == COUNT
        if capacity:
            assert torch.equal(torch.cat(merged.rows), torch.cat(one.rows))
        (values, found), (expected, vectors) = (each.leading(4, seeded()) for each in (merged, one))
        assert smallest_cosine(found, right[:, :RANK]) > 0.99
        assert smallest_cosine(found, vectors) > (1 - 1e-12 if capacity else 0.99)
        torch.testing.assert_close(values, expected, rtol=1e-12 if capacity else 0.02, atol=0)


def test_merge_does_not_change_the_other_sketch():
    rows, _ = rows_with(SPECTRA["eigenvalues 1/k"])
    one, other = streamed(rows[:100], 16), streamed(rows[100:], 16)
    one.merge(other)
    assert other.count == 20
    assert torch.equal(torch.cat(other.rows), rows[100:])


@pytest.mark.parametrize("chunk", [1, 13, 500])
def test_sketch_is_bounded(chunk):
    sketch = RowSketch(3, capacity=20)
    for part in torch.randn(500, 8, generator=seeded()).split(chunk):
        sketch.add(part)
        assert sum(map(len, sketch.rows)) <= 20
    assert sketch.count == 500


def test_sketch_keeps_at_least_four_times_the_rank():
    assert [RowSketch(5, capacity).capacity for capacity in (0, 19, 30)] == [20, 20, 30]


def test_same_seed_gives_the_same_directions():
    rows, _ = rows_with(SPECTRA["eigenvalues 1/k"])
    (_, one), (_, same), (_, other) = (leading_directions([rows], RANK, 1, seeded(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_more_power_iterations_improve_the_subspace():
    rows, right = rows_with(SPECTRA["eigenvalues 1/k"])
    cosines = [
        smallest_cosine(leading_directions([rows], RANK, iterations, seeded())[1], right[:, :RANK])
        for iterations in (0, 1, 4, 12)
    ]
    assert all(one < other for one, other in itertools.pairwise(cosines))


@pytest.mark.parametrize("count", [1, 100])
def test_zero_rows_give_an_orthonormal_basis(count):
    values, found = leading_directions([torch.zeros(count, 12)], 4, 2, seeded())
    assert values.tolist() == [0.0] * 4
    assert orthonormality_error(found) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_rows_are_refused(bad):
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    with pytest.raises(torch.linalg.LinAlgError, match="The gradients to decompose have entries that are not finite"):
        leading_directions([torch.ones(2, 4), rows], 2, 1, seeded())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("slice_bytes", [10**9, 640], ids=["Householder", "Cholesky"])
def test_orthonormalized_columns_keep_their_span_and_directions(slice_bytes, dtype, monkeypatch):
    monkeypatch.setattr(sketch_module, "_SLICE_BYTES", slice_bytes)
    # With a condition number of 1e5 a single pass of Cholesky-QR would not be accurate in float64.
    matrix = random_orthonormal(40, 8, seeded()) * torch.logspace(0, -5, 8).double()
    matrix = (matrix @ random_orthonormal(8, 8, seeded(1))).to(dtype)
    exact, triangle = torch.linalg.qr(matrix.double())
    found = orthonormalize_columns(matrix)
    exact = exact * triangle.diagonal().sign()
    assert found.dtype == dtype
    assert orthonormality_error(found.double()) < (1e-6 if dtype == torch.float32 else 1e-13)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-10)
