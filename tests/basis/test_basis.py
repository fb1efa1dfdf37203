"""All blocks together: encode, decode, save, load, print."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import cases
import egop
from damage import forge
from egop.basis import files
from egop.basis.structures.full import FullChange


def orthogonal(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def by_hand(*blocks, spectrum=None, unrotated=None):
    """Build a basis of random rotations."""
    changes = [FullChange(block, {"basis": orthogonal(block.size, seed)}) for seed, block in enumerate(blocks)]
    return egop.Basis(changes, spectrum, unrotated)


def random_tensors(basis, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for change in basis.values()
        for name, shape in zip(change.block.parameters, change.block.shapes, strict=True)
    }


@pytest.fixture
def basis():
    return cases.estimate(cases.MODELS[3].objective(), partition="layer")  # one block of two tensors, one of one


def test_bases_are_equal_if_their_tensors_are(basis, tmp_path):
    basis.save(tmp_path / "basis.safetensors")
    assert egop.Basis.load(tmp_path / "basis.safetensors") == basis == copy.deepcopy(basis)
    other = copy.deepcopy(basis)
    next(iter(next(iter(other.values())).tensors.values()))[0, 0] += 1e-6
    assert other != basis
    assert egop.Basis([*basis.values()][:1]) != basis
    assert basis != dict(basis)


# --- encode and decode ---


@pytest.mark.parametrize("partition", cases.PARTITIONS, ids=str)
@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_encode_and_decode_are_the_dense_matrices_of_the_blocks(case, partition):
    basis = cases.estimate(case.objective(), partition=partition)
    tensors = random_tensors(basis)
    coordinates = basis.encode(tensors | {"another": torch.zeros(1)})
    assert list(coordinates) == list(basis)
    for name, change in basis.items():
        whole = torch.cat([tensors[each].flatten() for each in change.block.parameters])
        found = torch.cat([each.flatten() for each in coordinates[name]])
        torch.testing.assert_close(found, change.dense().mT @ whole, rtol=0, atol=1e-12)
    decoded = basis.decode(coordinates)
    assert list(decoded) == list(tensors)
    torch.testing.assert_close(decoded, tensors, rtol=0, atol=1e-12)


def test_blocks_can_be_decoded_separately(basis):
    size = basis["head.weight"].block.size
    decoded = basis.decode({"head.weight": torch.zeros(size).double()})
    assert {name: value.shape for name, value in decoded.items()} == {"head.weight": (3, 4)}


def test_half_precision_tensors_have_single_precision_coordinates():
    model = cases.mlp().bfloat16()
    batches = [(x.bfloat16(), y) for x, y in cases.MLP.batches()]
    basis = cases.estimate(egop.Objective(model, cases.cross_entropy, batches))
    coordinates = basis.encode(dict(model.named_parameters()))
    assert coordinates["0.weight"][0].dtype == torch.float32
    decoded = basis.decode(coordinates)["0.weight"]
    torch.testing.assert_close(decoded, model[0].weight.float(), rtol=0, atol=1e-5)


def test_basis_is_a_mapping_of_names_to_changes(basis):
    assert list(basis) == ["rnn", "head.weight"]
    assert len(basis) == 2
    assert "rnn" in basis
    assert isinstance(basis["rnn"], egop.ChangeOfBasis)
    assert list(basis.spectrum) == ["rnn", "head.weight"]
    assert len(basis.spectrum["rnn"].eigenvalues) == basis["rnn"].block.size


def test_copies_equal_the_basis(basis):
    for copied in (copy.deepcopy(basis), pickle.loads(pickle.dumps(basis)), basis.to("cpu")):
        assert str(copied) == str(basis)
        assert all(torch.equal(copied[name].dense(), basis[name].dense()) for name in basis)


# --- printing ---


def test_basis_prints_as_a_table():
    spectrum = egop.Spectrum(torch.tensor([4.0, 1.0]).double(), torch.ones(2).double(), 10)
    basis = by_hand(
        cases.block("w", w=(20, 5)),
        cases.block("pair", a=(1, 2), b=(3,)),
        spectrum={"w": spectrum},
        unrotated={"big": "too wide"},
    )
    table = str(basis)
    assert [re.split(r" {2,}", line) for line in table.splitlines()[:-1]] == [
        ["block", "structure", "shape", "basis", "stable rank"],
        ["-----", "---------", "---------", "--------", "-----------"],
        ["w", "Full", "20 x 5", "78.1 KiB", "1.5 of 2"],
        ["pair", "Full", "1 x 2 + 3", "200 B"],
        ["total", "78.3 KiB"],
    ]
    assert table.splitlines()[-1] == "big is not rotated: too wide"


def test_estimated_basis_prints_every_block(basis):
    table = str(basis)
    assert [line.split()[0] for line in table.splitlines()] == [
        "block",
        "-----------",
        "rnn",
        "head.weight",
        "total",
    ]
    assert "12 x 3 + 12 x 4" in table
    assert re.search(r"\d+\.\d of 84$", table.splitlines()[2])


def test_empty_basis_can_be_printed():
    assert "total" in str(egop.Basis([]))


# --- files ---


def assert_same_basis(found, expected):
    assert list(found) == list(expected)
    for name, change in expected.items():
        assert type(found[name]) is type(change)
        assert found[name].block == change.block
        assert list(found[name].tensors) == list(change.tensors)
        for key, tensor in change.tensors.items():
            assert found[name].tensors[key].dtype == tensor.dtype
            assert torch.equal(found[name].tensors[key], tensor)
    assert list(found.spectrum) == list(expected.spectrum)
    for name, spectrum in expected.spectrum.items():
        assert torch.equal(found.spectrum[name].eigenvalues, spectrum.eigenvalues)
        assert torch.equal(found.spectrum[name].density, spectrum.density)
        assert found.spectrum[name].samples == spectrum.samples
    assert found.unrotated == expected.unrotated
    assert str(found) == str(expected)


@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
def test_saved_basis_loads_bit_for_bit(tmp_path, structure):
    basis = cases.estimate(cases.DEEP.objective(), structure={"[02].*": structure})
    path = tmp_path / "basis.safetensors"
    basis.save(path)
    loaded = egop.Basis.load(path)
    assert_same_basis(loaded, basis)
    loaded.save(path)  # over the file it was read from
    assert_same_basis(egop.Basis.load(str(path)), basis)
    assert list(tmp_path.iterdir()) == [path]


@given(st.lists(st.text("ab/. é", min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_block_names_may_be_anything(tmp_path_factory, names):
    basis = by_hand(*(cases.block(name, **{f"{name}w": (2,), f"{name}v": (1,)}) for name in names))
    path = tmp_path_factory.mktemp("names") / "basis.safetensors"
    basis.save(path)
    assert_same_basis(egop.Basis.load(path), basis)


def test_blocks_may_share_the_memory_of_their_bases(tmp_path):
    shared, stack = orthogonal(3).contiguous(), torch.stack([orthogonal(3, 1), orthogonal(3, 2)])
    bases = {"a": shared, "b": shared, "c": stack[0], "d": stack[1], "e": orthogonal(3).mT}
    changes = [FullChange(cases.block(name, **{name: (3,)}), {"basis": V}) for name, V in bases.items()]
    egop.Basis(changes).save(tmp_path / "basis.safetensors")
    loaded = egop.Basis.load(tmp_path / "basis.safetensors")
    assert all(torch.equal(loaded[name].tensors["basis"], V) for name, V in bases.items())


def test_the_file_is_plain_safetensors_with_a_version_and_the_blocks_in_it(tmp_path, basis):
    basis.save(tmp_path / "basis.safetensors")
    with safe_open(tmp_path / "basis.safetensors", framework="pt") as file:
        content = json.loads(file.metadata()["egop"])
        assert torch.equal(file.get_tensor("rnn/basis"), basis["rnn"].tensors["basis"])
    assert content["version"] == 3
    assert [block["name"] for block in content["blocks"]] == ["rnn", "head.weight"]
    assert content["blocks"][0]["parameters"] == ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    assert content["blocks"][0]["shapes"] == [[12, 3], [12, 4]]
    assert content["blocks"][0]["dtype"] == "float64"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("existing", [True, False])
def test_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, basis, error, existing):
    path = tmp_path / "basis.safetensors"
    if existing:
        basis.save(path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    def half(tensors, target, metadata):
        save_file(tensors, target, metadata=metadata)
        with open(target, "r+b") as file:
            file.truncate(100)
        raise error

    monkeypatch.setattr(files, "save_file", half)
    with pytest.raises(type(error)):
        by_hand(cases.block("other", w=(3,))).save(path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_readers_never_see_a_partial_file(tmp_path, monkeypatch, basis):
    path = tmp_path / "basis.safetensors"
    basis.save(path)
    seen = []

    def watched(tensors, target, metadata):
        save_file(tensors, target, metadata=metadata)
        seen.append(list(egop.Basis.load(path)))

    monkeypatch.setattr(files, "save_file", watched)
    by_hand(cases.block("other", w=(3,), v=(2,))).save(path)
    assert seen == [["rnn", "head.weight"]]
    assert list(egop.Basis.load(path)) == ["other"]


def altered(path, basis, content=lambda content: content, tensors=lambda tensors: tensors):
    """Return the file of a basis with a change in it."""
    basis.save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["egop"])
        data = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header, data = content(header), tensors(data)
    forge(path, header, data)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file '.*nothing\.safetensors'"):
        egop.Basis.load(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        egop.Basis.load(tmp_path)


def test_file_without_a_basis_raises(tmp_path):
    path = tmp_path / "basis.safetensors"
    path.write_text("Dear diary, today I trained a network.")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        egop.Basis.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="it is a safetensors file, but not one that egop saved"):
        egop.Basis.load(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="but not one that egop saved"):
        egop.Basis.load(path)


def test_file_of_another_version_raises_with_both_versions(tmp_path, basis):
    path = tmp_path / "basis.safetensors"
    altered(path, basis, content=lambda content: content | {"version": 99})
    with pytest.raises(ValueError, match="has format version 99; this egop reads version 3"):
        egop.Basis.load(path)


@pytest.mark.parametrize(
    "damage", [lambda V: V + 0.1, lambda V: V * 1.01, lambda V: V * float("nan"), torch.zeros_like]
)
def test_basis_that_is_not_orthonormal_raises(tmp_path, basis, damage):
    path = tmp_path / "basis.safetensors"
    altered(path, basis, tensors=lambda tensors: tensors | {"rnn/basis": damage(tensors["rnn/basis"])})
    with pytest.raises(
        ValueError, match=r"'.*basis.safetensors' cannot be loaded: The basis of block 'rnn' is not ortho"
    ):
        egop.Basis.load(path)


def test_basis_of_wrong_size_raises(tmp_path, basis):
    path = tmp_path / "basis.safetensors"
    altered(path, basis, tensors=lambda tensors: tensors | {"rnn/basis": torch.eye(3).double()})
    with pytest.raises(ValueError, match=r"Block 'rnn' .*needs a basis of shape \(84, 84\), got \(3, 3\)"):
        egop.Basis.load(path)


def test_missing_tensor_and_unknown_structure_are_named(tmp_path, basis):
    path = tmp_path / "basis.safetensors"
    altered(path, basis, tensors=lambda tensors: {k: v for k, v in tensors.items() if k != "rnn/basis"})
    with pytest.raises(ValueError, match=r"KeyError: 'rnn/basis'"):
        egop.Basis.load(path)

    def rename(content):
        content["blocks"][0]["structure"] = "Spiral"
        return content

    altered(path, basis, content=rename)
    with pytest.raises(ValueError, match="Unknown structure 'Spiral'"):
        egop.Basis.load(path)


# --- bad input ---


def test_unknown_block_or_missing_tensor_is_named(basis):
    with pytest.raises(KeyError, match="body"):
        basis.decode({"body": torch.zeros(3)})
    with pytest.raises(KeyError, match=r"rnn.weight_hh_l0"):
        basis.encode({"rnn.weight_ih_l0": torch.zeros(12, 3), "head.weight": torch.zeros(3, 4)})


def test_tensor_of_wrong_shape_is_named_with_both_shapes(basis):
    tensors = random_tensors(basis) | {"head.weight": torch.zeros(4, 3)}
    with pytest.raises(
        ValueError, match=r"Block 'head.weight': 'head.weight' has shape \(3, 4\), got a tensor of \(4, 3\)"
    ):
        basis.encode(tensors)


@pytest.mark.parametrize("wrong", [torch.zeros(85), torch.zeros(()), [torch.zeros(84), torch.zeros(84)], []])
def test_coordinates_of_wrong_shape_or_number_raise(basis, wrong):
    with pytest.raises((RuntimeError, ValueError)):
        basis.decode({"rnn": wrong})


def test_blocks_with_a_common_name_or_parameter_raise():
    with pytest.raises(ValueError, match="Two blocks are named 'a'"):
        by_hand(cases.block("a", w=(2,)), cases.block("a", v=(2,)))
    with pytest.raises(ValueError, match="Parameter 'w' is in two blocks, 'a' and 'b'"):
        by_hand(cases.block("a", w=(2,)), cases.block("b", w=(2,), v=(1,)))
