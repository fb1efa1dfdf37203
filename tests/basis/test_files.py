"""Basis files: damaged and forged ones raise a ValueError with the path."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import cases
import egop
from damage import WRONG, changed, forge, paths
from egop.basis import files
from egop.basis.structures.unsampled import IdentityChange


@pytest.fixture(scope="module")
def basis():
    """Return a basis with a block of every structure, for small weights."""
    parts = [torch.nn.Linear(2, 2, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*parts, torch.nn.ConvTranspose2d(2, 1, 1, bias=False)).double()
    structure = {
        "0.*": egop.Full(),
        "1.*": egop.Kronecker(),
        "2.*": egop.Auxiliary(rank=1),
        "3.*": egop.Reduced(rank=1),
    }
    structure |= {"4.*": egop.Shared()}
    objective = egop.Objective(model, lambda model, batch: model[:4](batch).square().sum() + model[4].weight.sum(), [
        torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ])  # fmt: skip
    return egop.estimate(objective, structure=structure, samples=4, progress=False)


@pytest.fixture
def path(tmp_path, basis):
    basis.save(tmp_path / "basis.safetensors")
    return tmp_path / "basis.safetensors"


def outcome(path, basis):
    """Load a file; return the error message, or None if the basis equals the saved one."""
    said = None
    try:
        found = egop.Basis.load(path)
    except ValueError as error:
        said = str(error)
    if said is not None:
        assert f"'{path}'" in said
        return said
    assert list(found) == list(basis)
    for name, change in basis.items():
        assert found[name].block == change.block
        assert all(torch.equal(found[name].tensors[key], tensor) for key, tensor in change.tensors.items())
    return None


def content_of(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["egop"]), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def test_truncated_file_raises(path, basis):
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        assert "is not a complete safetensors file" in outcome(path, basis), length


def test_flipped_bits_raise(path, basis):
    chance, whole = random.Random(0), path.read_bytes()
    for _ in range(300):
        place = chance.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert outcome(path, basis), place


def test_changed_header_raises_unless_it_is_equivalent(path):
    header, tensors = content_of(path)
    chance, loaded = random.Random(0), set()
    for at in paths(header):
        for to in [..., *chance.sample(WRONG, 4)] if at else [None, [], {}]:
            other = changed(header, at, to)
            if other == header:
                continue
            forge(path, other, tensors)
            try:
                egop.Basis.load(path)
            except ValueError as error:
                assert f"'{path}'" in str(error)  # noqa: PT017
            else:
                loaded.add(next(key for key in reversed(at) if isinstance(key, str)))
    judgments = {"samples", "reliability", "keep_rest"}
    assert loaded <= judgments | {"parameters", "unrotated", "blocks", "shapes", "transposed", "stacked"}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 150 + "]" * 150,
        f"[{'[],' * 100}[]]",
        '"' * 400 + "[" * 150,
        "1" * 5000,
        '{"version": 1, "version": 1}',
        "",
        "\0",
    ],
)
def test_malformed_json_raises(text, path, basis):
    forge(path, text, {})
    assert outcome(path, basis)


LARGE = {
    "Identity": {"shapes": [[10**9]], "tensors": []},
    "Shared": {"shapes": [[10**9, 2]], "tensors": ["basis"]},
    "Kronecker": {"shapes": [[10**9, 2]], "tensors": ["left", "right"]},
    "Full": {"shapes": [[10**9]], "tensors": ["basis"]},
    "Auxiliary": {"shapes": [[2]], "tensors": ["basis"], "settings": {"rank": 10**9}},
    "Reduced": {"shapes": [[10**9]], "tensors": ["basis"], "settings": {"rank": 2, "keep_rest": True}},
    "an empty stack": {"structure": "Shared", "shapes": [[0, 2, 10**9]], "stacked": [1], "tensors": ["basis"]},
}


@pytest.mark.parametrize("structure", LARGE)
def test_small_file_takes_little_memory(structure, path, monkeypatch):
    description = {"name": "w", "structure": structure, "parameters": ["w"], "transposed": [0], "dtype": "float64"}
    description |= {"stacked": [0]}
    description |= {"settings": {}} | LARGE[structure]
    tensors = {f"w/{key}": torch.eye(2, dtype=torch.float64) for key in description["tensors"]}
    forge(path, {"version": 3, "blocks": [description], "unrotated": {}}, tensors)
    for name in ("randn", "empty", "zeros", "full"):
        own = getattr(torch, name)

        def watched(*given, own=own, **options):
            found = own(*given, **options)
            assert found.numel() < 1000
            return found

        monkeypatch.setattr(torch, name, watched)
    try:
        found = egop.Basis.load(path)
    except ValueError as error:
        assert structure not in ("Identity", "Shared"), error  # noqa: PT017
    else:
        assert found["w"].block.size >= 10**9


def test_repeated_block_raises_with_the_path(path, basis):
    header, tensors = content_of(path)
    header["blocks"].append(header["blocks"][0])
    forge(path, header, tensors)
    assert "Two blocks are named" in outcome(path, basis)


def test_wrong_or_missing_checksum_raises(path, basis):
    header, tensors = content_of(path)
    for metadata in ({}, {"crc32": "1"}):
        save_file(tensors, path, metadata={"egop": json.dumps(header)} | metadata)
        assert "checksum is wrong" in outcome(path, basis)


def test_sizes_that_exceed_the_file_raise(path):
    header = {"w": {"dtype": "F64", "shape": [10**6, 10**6], "data_offsets": [0, 8 * 10**12]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        egop.Basis.load(path)


def test_saving_to_a_link_replaces_its_target(path, basis, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(path.name)
    egop.Basis([IdentityChange(cases.block("w", w=(3,)), {})]).save(link)
    assert link.is_symlink()
    assert list(egop.Basis.load(path)) == ["w"]
    assert sorted(os.listdir(tmp_path)) == ["basis.safetensors", "link.safetensors"]


def test_killed_save_leaves_the_old_file(path, basis):
    child = os.fork()
    if child == 0:
        try:
            files.save_file = lambda *given, **options: os.kill(os.getpid(), signal.SIGKILL)
            basis.save(path)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert outcome(path, basis) is None
    basis.save(path)
    assert outcome(path, basis) is None


def test_overlapping_saves_do_no_harm(path, basis, monkeypatch):
    def save_twice(*given, **options):
        monkeypatch.setattr(files, "save_file", save_file)
        basis.save(path)
        return save_file(*given, **options)

    monkeypatch.setattr(files, "save_file", save_twice)
    basis.save(path)
    assert os.listdir(path.parent) == [path.name]
    assert outcome(path, basis) is None
