"""The contract of every structure on every block it fits, and the dense eigenbasis itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import cases
import egop
from egop.basis import build_change
from egop.basis.structures.views import flatten, unflatten


def fits(structure, block):
    try:
        structure.check(block)
    except ValueError:
        return False
    return True


# A randomized decomposition depends a little on the order of the gradients; a chunk that is lost changes far more.
ACCURACY = 1e-3

CROSSED = [(structure, block) for structure in cases.STRUCTURES for block in cases.BLOCKS]
FITTING = [pair for pair in CROSSED if fits(*pair)]


def crossed(pairs):
    """Make one test per structure, which goes through its blocks: most checks take less time than pytest's overhead."""

    def decorate(test):
        @pytest.mark.parametrize("structure", dict.fromkeys(structure for structure, _ in pairs), ids=str)
        def on_every_block(structure):
            for block in (block for each, block in pairs if each == structure):
                try:
                    test(structure, block)
                except BaseException as error:
                    error.add_note(f"The block is {block.name!r}.")
                    raise

        return on_every_block

    return decorate


def gradients_of(block, count=40, seed=0, dtype=torch.float64):
    """Draw stacked gradients with well separated eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, block.size, generator=generator, dtype=torch.float64)
    mixing = torch.linalg.qr(torch.randn(block.size, block.size, generator=generator, dtype=torch.float64))[0]
    return unflatten((rows * 1.5 ** -torch.arange(block.size) @ mixing).to(dtype), block)


def build(structure, block, gradients=None):
    accumulator = structure.accumulator(block)
    accumulator.add(gradients_of(block) if gradients is None else gradients)
    return accumulator.finish()


def vectors_of(shapes, *leading, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn((*leading, *shape), generator=generator, dtype=torch.float64) for shape in shapes)


def flat(tensors, shapes):
    """Flatten to one row per point, by brute force."""
    return torch.cat([each.reshape(-1, max(1, shape.numel())) for each, shape in zip(tensors, shapes, strict=True)], 1)


# --- the contract ---


@crossed(FITTING)
def test_encode_and_decode_are_the_dense_matrix_and_its_transpose(structure, block):
    _, change = build(structure, block)
    matrix, shapes = change.dense(), change.coordinate_shapes()
    assert matrix.dtype == torch.float64
    x, c = vectors_of(block.shapes), vectors_of(shapes)
    torch.testing.assert_close(flat(change.encode(x), shapes), flat(x, block.shapes) @ matrix, rtol=0, atol=1e-12)
    torch.testing.assert_close(flat(change.decode(c), block.shapes), flat(c, shapes) @ matrix.mT, rtol=0, atol=1e-12)
    assert [each.shape for each in change.encode(x)] == list(shapes)
    assert [each.shape for each in change.decode(c)] == list(block.shapes)


@crossed(FITTING)
def test_decode_inverts_encode(structure, block):
    _, change = build(structure, block)
    matrix = change.dense()
    if change.is_complete:
        x = vectors_of(block.shapes)
        torch.testing.assert_close(change.decode(change.encode(x)), x, rtol=0, atol=1e-12)
        gram = matrix @ matrix.mT
    else:  # only the span comes back
        c = vectors_of(change.coordinate_shapes())
        torch.testing.assert_close(change.encode(change.decode(c)), c, rtol=0, atol=1e-12)
        gram = matrix.mT @ matrix
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=1e-12)


@crossed(FITTING)
def test_extra_leading_dimensions_index_points(structure, block):
    _, change = build(structure, block)
    x, c = vectors_of(block.shapes, 2, 3), vectors_of(change.coordinate_shapes(), 2, 3)
    encoded, decoded = change.encode(x), change.decode(c)
    for i in range(2):
        for j in range(3):
            for found, alone in (
                (encoded, change.encode([each[i, j] for each in x])),
                (decoded, change.decode([each[i, j] for each in c])),
            ):
                torch.testing.assert_close(tuple(each[i, j] for each in found), alone, rtol=0, atol=1e-12)


@crossed(FITTING)
def test_stacked_changes_equal_single_ones(structure, block):
    changes = [build(structure, block, gradients_of(block, seed=seed))[1] for seed in range(3)]
    assert len({change.signature for change in changes}) == 1
    stacked = type(changes[0]).stack(changes)
    assert stacked.part(slice(None)) is stacked
    x, c = vectors_of(block.shapes, 3), vectors_of(changes[0].coordinate_shapes(), 3)
    encoded, decoded = stacked.encode(x), stacked.decode(c)
    for i, change in enumerate(changes):
        alone = change.encode([each[i] for each in x])
        torch.testing.assert_close(tuple(each[i] for each in encoded), alone, rtol=0, atol=1e-12)
        alone = change.decode([each[i] for each in c])
        torch.testing.assert_close(tuple(each[i] for each in decoded), alone, rtol=0, atol=1e-12)


@crossed(FITTING)
def test_change_is_rebuilt_from_its_description_and_tensors(structure, block):
    _, change = build(structure, block)
    again = build_change(json.loads(json.dumps(change.describe())), change.tensors)
    assert type(again) is type(change)
    assert again.block == change.block
    assert again.signature == change.signature
    assert torch.equal(again.dense(), change.dense())


@crossed(FITTING)
def test_predicted_cost_is_the_actual_cost(structure, block):
    _, change = build(structure, block)
    assert structure.cost(block) == (change.nbytes, change.cost_per_step)


@crossed(FITTING)
def test_changing_precision_only_rounds(structure, block):
    _, change = build(structure, block)
    single = change.to(dtype=torch.float32)
    assert {tensor.dtype for tensor in single.tensors.values()} <= {torch.float32}
    torch.testing.assert_close(single.dense(), change.dense(), rtol=0, atol=1e-6)


@crossed(FITTING)
def test_order_and_chunks_of_gradients_do_not_matter(structure, block):
    whole = gradients_of(block)
    _, expected = build(structure, block)
    chunked, backwards, alone, merged = (structure.accumulator(block) for _ in range(4))
    for start, end in ((0, 1), (1, 25), (25, 40)):
        chunked.add([each[start:end] for each in whole])
    backwards.add([each.flip(0) for each in whole])
    alone.add([each[:7] for each in whole])
    merged.add([each[7:] for each in whole])
    merged.merge(alone)
    empty = structure.accumulator(block)
    empty.merge(merged)
    for accumulator in (chunked, backwards, merged, empty):
        torch.testing.assert_close(accumulator.finish()[1].dense(), expected.dense(), rtol=0, atol=ACCURACY)


@crossed(FITTING)
def test_merged_accumulator_can_still_be_used(structure, block):
    whole = gradients_of(block)
    one, other = structure.accumulator(block), structure.accumulator(block)
    one.add([each[:30] for each in whole])
    other.add([each[30:] for each in whole])
    one.merge(other)
    one.add(gradients_of(block, seed=9))
    other.add([each[:30] for each in whole])
    torch.testing.assert_close(other.finish()[1].dense(), build(structure, block)[1].dense(), rtol=0, atol=ACCURACY)


@crossed(FITTING)
def test_gradients_may_be_overwritten_once_they_are_added(structure, block):
    gradients = gradients_of(block)
    accumulator = structure.accumulator(block)
    accumulator.add(gradients)
    for gradient in gradients:
        gradient.fill_(float("nan"))
    torch.testing.assert_close(accumulator.finish()[1].dense(), build(structure, block)[1].dense(), rtol=0, atol=1e-12)


@crossed(FITTING)
def test_the_spectrum_is_descending_and_counts_its_samples(structure, block):
    spectrum, change = build(structure, block)
    if spectrum is None:
        return
    assert spectrum.eigenvalues.dtype == torch.float64
    assert (spectrum.eigenvalues >= 0).all()
    assert (spectrum.eigenvalues.diff() <= 0).all()
    assert (spectrum.density <= 1 + 1e-12).all()
    assert (spectrum.density >= 1 / block.size - 1e-12).all()
    assert spectrum.samples >= 40
    assert len(spectrum.eigenvalues) <= change.dense().shape[1]


@crossed(FITTING)
def test_the_number_of_samples_asked_for_is_a_whole_number(structure, block):
    wanted = structure.samples(block)
    assert isinstance(wanted, int)
    assert wanted >= 0


@crossed(FITTING)
def test_tensors_of_wrong_shape_or_number_raise(structure, block):
    _, change = build(structure, block)
    x = vectors_of(block.shapes)
    with pytest.raises(ValueError, match=rf"(Block '{block.name}' has \d+ tensor|unpack)"):
        change.encode([*x, *x])
    if block.shapes[-1]:
        wrong = [*x[:-1], x[-1].repeat_interleave(2, -1)]
        with pytest.raises(
            ValueError, match=f"Block '{block.name}': '{block.parameters[-1]}' has shape .*, got a tensor of"
        ):
            change.encode(wrong)


def test_structure_names_the_block_it_does_not_fit():
    for structure, block in CROSSED:
        if not fits(structure, block):
            with pytest.raises(ValueError, match=f"'{block.name}'"):
                structure.check(block)


def test_block_of_one_tensor_accepts_the_tensor_itself():
    (block,) = (each for each in cases.BLOCKS if each.name == "matrix")
    for structure in cases.STRUCTURES:
        if fits(structure, block):
            _, change = build(structure, block)
            (x,) = vectors_of(block.shapes)
            assert torch.equal(change.encode(x)[0], change.encode([x])[0])


def test_unknown_structure_raises_with_its_name():
    _, change = build(egop.Full(), cases.BLOCKS[1])
    description = change.describe() | {"structure": "Spiral"}
    with pytest.raises(ValueError, match=r"Unknown structure 'Spiral'. This version of egop knows .*Full"):
        build_change(description, change.tensors)


# --- Identity ---


@pytest.mark.parametrize("block", cases.BLOCKS, ids=lambda block: block.name)
def test_identity_returns_its_input(block):
    spectrum, change = build(egop.Identity(), block)
    x = vectors_of(block.shapes)
    coordinates = change.encode(x)
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(coordinates, x, strict=True))
    assert [a.shape for a in coordinates] == list(change.coordinate_shapes())
    assert all(torch.equal(a, b) for a, b in zip(change.decode(coordinates), x, strict=True))
    assert torch.equal(change.dense(), torch.eye(block.size).double())
    assert spectrum is None
    assert egop.Identity().cost(block) == (0, 0)
    assert egop.Identity().samples(block) == 0


def test_identity_treats_a_kernel_as_a_matrix():
    block = cases.block("kernel", kernel=(4, 3, 2, 2))
    assert build(egop.Identity(), block)[1].coordinate_shapes() == (torch.Size((4, 12)),)


# --- Full ---


def brute_force(block, gradients):
    """Compute P̂ one gradient at a time."""
    P = np.zeros((block.size, block.size))
    for i in range(len(gradients[0])):
        g = np.concatenate([each[i].double().numpy().reshape(-1) for each in gradients])
        P += np.outer(g, g)
    return P / len(gradients[0])


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("block", cases.BLOCKS, ids=lambda block: block.name)
def test_full_is_the_eigenbasis_of_the_mean_outer_product(block, count):
    gradients = gradients_of(block, count)
    spectrum, change = build(egop.Full(), block, gradients)
    P, V = brute_force(block, gradients), change.dense().numpy()
    np.testing.assert_allclose(V * spectrum.eigenvalues.numpy() @ V.T, P, rtol=0, atol=1e-12 * np.trace(P))
    np.testing.assert_allclose(V.T @ V, np.eye(block.size), rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        spectrum.eigenvalues, np.linalg.eigvalsh(P)[::-1].clip(0), rtol=0, atol=1e-12 * np.trace(P)
    )
    np.testing.assert_allclose(spectrum.density, np.abs(V).sum(0) ** 2 / block.size, rtol=1e-12)
    assert spectrum.samples == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_low_precision_are_summed_in_float64(dtype):
    (block,) = (each for each in cases.BLOCKS if each.name == "matrix")
    gradients = gradients_of(block, dtype=dtype)
    spectrum, _ = build(egop.Full(), block, gradients)
    expected = np.linalg.eigvalsh(brute_force(block, gradients))[::-1]
    np.testing.assert_allclose(spectrum.eigenvalues, expected, rtol=1e-9)


def test_zero_gradients_give_an_orthonormal_basis():
    (block,) = (each for each in cases.BLOCKS if each.name == "matrix")
    spectrum, change = build(egop.Full(), block, unflatten(torch.zeros(5, block.size).double(), block))
    assert spectrum.eigenvalues.tolist() == [0.0] * block.size
    assert spectrum.stable_rank == 0
    torch.testing.assert_close(change.dense().mT @ change.dense(), torch.eye(block.size).double())


def test_single_precision_block_has_a_single_precision_basis():
    block = egop.basis.partition.Block.from_tensors("b", {"w": torch.zeros(3, 2)})
    _, change = build(egop.Full(), block)
    assert change.tensors["basis"].dtype == torch.float32
    assert change.nbytes == 36 * 4
    assert change.dense().dtype == torch.float64


def held_bytes(holder):
    """Count the bytes of all tensors that an object holds, also in nested containers."""
    if isinstance(holder, torch.Tensor):
        return holder.untyped_storage().nbytes()
    if isinstance(holder, dict):
        return sum(map(held_bytes, holder.values()))
    if isinstance(holder, (list, tuple)):
        return sum(map(held_bytes, holder))
    return held_bytes(vars(holder)) if type(holder).__module__.startswith("egop.") else 0


def test_memory_of_full_does_not_grow_with_samples():
    block = cases.block("wide", w=(8, 8))
    accumulator = egop.Full().accumulator(block)
    held = []
    for _ in range(20):
        accumulator.add(gradients_of(block, 16))
        held.append(held_bytes(accumulator))
    assert held[0] > 0
    assert max(held) <= 64 * 64 * 8 + 8  # and one number beside the matrix
    assert held[-1] == held[-2]


def test_full_wants_one_sample_per_dimension():
    assert [egop.Full().samples(block) for block in cases.BLOCKS] == [block.size for block in cases.BLOCKS]


def test_flatten_and_unflatten_are_inverse():
    for block in cases.BLOCKS:
        x = vectors_of(block.shapes, 2)
        torch.testing.assert_close(unflatten(flatten(x, block), block), x, rtol=0, atol=0)
        torch.testing.assert_close(flatten(x, block), flat(x, block.shapes), rtol=0, atol=0)
