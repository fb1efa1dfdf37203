"""Properties of every structure, for random shapes, ranks, chunks and precisions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import egop
from egop.basis.partition import Block
from egop.basis.structures.views import flatten, unflatten

DTYPES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-5}  # bfloat16 has float32 coordinates

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
settled = settings(deadline=None, max_examples=200, derandomize=True)


@st.composite
def blocks(draw):
    """Draw a block of one to three tensors of one precision."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    return dtype, Block.from_tensors("block", {name: torch.zeros(draw(shapes), dtype=dtype) for name in names})


@st.composite
def structures(draw, block):
    """Draw a structure that fits the block, with a rank up to its dimension."""
    rank = draw(st.one_of(st.just(1), st.just(block.size), st.integers(1, block.size)))
    options = [
        egop.Identity(),
        egop.Full(),
        egop.Auxiliary(rank=rank, seed=draw(st.integers(0, 3))),
        egop.Reduced(rank=rank, keep_rest=draw(st.booleans())),
        egop.extras.RandomRotation(seed=draw(st.integers(0, 5))),
        egop.extras.RandomRotation(like=egop.Reduced(rank=rank)),
    ]
    if len(block.shapes) == 1 and len(block.shapes[0]) > 1:
        options += [egop.Shared(), egop.Kronecker(), egop.extras.RandomRotation(like=egop.Shared())]
    return draw(st.sampled_from(options))


@st.composite
def samples(draw):
    """Draw a block, a structure, gradients (possibly a single one, possibly all zero) and a chunk size."""
    dtype, block = draw(blocks())
    structure = draw(structures(block))
    count = draw(st.one_of(st.just(1), st.integers(1, 30)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows = torch.randn(count, block.size, generator=generator, dtype=torch.float64)
    # Well apart, so that the leading directions are the same whatever the rounding; or nothing at all.
    rows = rows * 2.0 ** -torch.arange(block.size).clamp(max=12) * draw(st.sampled_from([0.0, 1.0, 1e-4, 1e4]))
    chunk = draw(st.integers(1, count))
    return dtype, block, structure, unflatten(rows.to(dtype), block), chunk


def finished(structure, block, gradients, chunk, parts=1):
    """Compute the basis of gradients added in chunks to several accumulators, which are merged at the end."""
    accumulators = [structure.accumulator(block) for _ in range(parts)]
    for index, start in enumerate(range(0, len(gradients[0]), chunk)):
        accumulators[index % parts].add([each[start : start + chunk] for each in gradients])
    for other in accumulators[1:]:
        accumulators[0].merge(other)
    return accumulators[0].finish()


def vector(size, dtype, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(samples())
@settled
def test_every_change_of_basis_is_orthonormal(sample):
    dtype, block, structure, gradients, chunk = sample
    tolerance = DTYPES[dtype]
    _, change = finished(structure, block, gradients, chunk)
    assert {tensor.dtype for tensor in change.tensors.values()} <= {block.dtype}
    S = change.dense()
    assert torch.isfinite(S).all()
    gram = S @ S.mT if change.is_complete else S.mT @ S
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=tolerance)
    x = vector(block.size, block.dtype)
    encoded = change.encode(unflatten(x, block))
    flat = torch.cat([each.flatten() for each in encoded])
    torch.testing.assert_close(flat.double(), S.mT @ x.double(), rtol=0, atol=10 * tolerance)
    back = flatten(change.decode(encoded), block)
    expected = x.double() if change.is_complete else S @ (S.mT @ x.double())
    torch.testing.assert_close(back.double(), expected, rtol=0, atol=10 * tolerance)


@given(samples())
@settled
def test_the_leading_direction_is_that_of_the_most_gradient(sample):
    _, block, structure, gradients, chunk = sample
    spectrum, change = finished(structure, block, gradients, chunk)
    if not isinstance(structure, (egop.Full, egop.Auxiliary, egop.Reduced)) or spectrum.eigenvalues[0] == 0:
        return
    rows = flatten(gradients, block).double()
    exact = torch.linalg.svdvals(rows).square() / len(rows)
    torch.testing.assert_close(spectrum.eigenvalues[0], exact[0], rtol=0.02, atol=0)
    along = (rows @ change.dense()[:, 0]).square().mean()
    torch.testing.assert_close(along, exact[0], rtol=0.02, atol=0)
    assert spectrum.eigenvalues.sum() <= rows.square().sum() / len(rows) * (1 + 1e-4)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_one_row_and_one_sample_are_enough(structure, rows):
    block = Block.from_tensors("w", {"w": torch.zeros(rows, 6, dtype=torch.float64)})
    gradient = vector(block.size, torch.float64).reshape(1, rows, 6)
    spectrum, change = finished(structure, block, [gradient], 1)
    S = change.dense()
    torch.testing.assert_close(S.mT @ S, torch.eye(block.size).double(), rtol=0, atol=1e-12)
    assert spectrum.samples == 1
    shared = rows if isinstance(structure, egop.Shared) else 1  # the mean over all rows that share the basis
    assert math.isclose(float(spectrum.eigenvalues.sum()), float(gradient.square().sum()) / shared)
