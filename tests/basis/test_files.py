"""Files of a basis: damaged or forged ones are refused, in one way, with their path, before room is made for them."""

from __future__ import annotations

import json
import math
import os
import random
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import cases
import egop
from damage import WRONG, changed, paths
from egop.basis import files
from egop.basis.structures.identity import IdentityChange


@pytest.fixture(scope="module")
def basis():
    """A block of every structure, on weights that are small."""
    parts = [torch.nn.Linear(2, 2, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*parts, torch.nn.ConvTranspose2d(2, 1, 1, bias=False)).double()
    structure = {"0.*": egop.Full(), "1.*": egop.Kronecker(), "2.*": egop.Auxiliary(1), "3.*": egop.Reduced(1)}
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
    """Refused with the path, or loaded as it was saved: then None."""
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


def test_a_file_that_is_cut_off_anywhere_is_refused(path, basis):
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        assert outcome(path, basis), length


def test_a_file_with_other_bytes_is_refused(path, basis):
    chance, whole = random.Random(0), path.read_bytes()
    name = whole.index(b'"crc32"')
    for _ in range(300):
        place = chance.choice([*range(name), *range(name + 7, len(whole))])  # without it, it is an older file
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert outcome(path, basis), place


def test_a_text_with_anything_else_in_any_place_is_refused_or_about_names(path):
    header, tensors = content_of(path)
    chance, loaded = random.Random(0), set()
    for at in paths(header):
        for to in [..., *chance.sample(WRONG, 4)] if at else [None, [], {}]:
            other = changed(header, at, to)
            if other == header:
                continue
            save_file(tensors, path, metadata={"egop": json.dumps(other)})
            try:
                egop.Basis.load(path)
            except ValueError as error:
                assert f"'{path}'" in str(error)  # noqa: PT017
            else:
                loaded.add(next(key for key in reversed(at) if isinstance(key, str)))
    judged = {"draws", "held", "chance", "reliability", "surprise"}
    assert loaded <= judged | {"parameters", "left", "blocks", "shapes", "transposed", "stacked"}


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
def test_text_that_is_hard_to_read_is_refused(text, path, basis):
    save_file({}, path, metadata={"egop": text})
    assert outcome(path, basis)


LARGE = {
    "Identity": {"shapes": [[10**9]], "tensors": []},
    "Shared": {"shapes": [[10**9, 2]], "tensors": ["basis"]},
    "Kronecker": {"shapes": [[10**9, 2]], "tensors": ["left", "right"]},
    "Full": {"shapes": [[10**9]], "tensors": ["basis"]},
    "Auxiliary": {"shapes": [[2]], "tensors": ["basis"], "settings": {"rank": 10**9}},
    "Reduced": {"shapes": [[10**9]], "tensors": ["basis"], "settings": {"rank": 2, "keep_rest": True}},
}


@pytest.mark.parametrize("structure", LARGE)
def test_a_small_file_takes_little_memory(structure, path, monkeypatch):
    description = {"name": "w", "structure": structure, "parameters": ["w"], "transposed": [0], "dtype": "float64"}
    description |= {"settings": {}} | LARGE[structure]
    tensors = {f"w/{key}": torch.eye(2, dtype=torch.float64) for key in description["tensors"]}
    save_file(tensors, path, metadata={"egop": json.dumps({"version": 1, "blocks": [description], "left": {}})})
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


def write_sparse_file(path, description, shapes, extra=0):
    """Write a file whose tensors are holes: as many bytes as the header says, and none of them on the disk."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"version": 2, "blocks": [description], "left": {}})
    header = json.dumps({"__metadata__": {"egop": text}} | entries).encode().ljust(extra)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


SIDE = 20_000  # a matrix of this side takes 1.6 GB
DESCRIBED = {"name": "w", "structure": "Full", "parameters": ["w"], "transposed": [0], "dtype": "float32"}
DESCRIBED |= {"shapes": [[SIDE]], "settings": {}, "tensors": ["basis"]}
TOO_LARGE = {
    "a tensor of another shape": (DESCRIBED | {"shapes": [[4]]}, {"w/basis": (SIDE, SIDE)}, r"needs a basis of shape"),
    "a tensor of no block": (
        DESCRIBED | {"shapes": [[2]]},
        {"w/basis": (2, 2), "other": (SIDE, SIDE)},
        "'other' belongs to no block",
    ),
    "a tensor of zeros": (DESCRIBED, {"w/basis": (SIDE, SIDE)}, "the basis of block 'w' is not orthonormal"),
    "a spectrum of another length": (
        DESCRIBED | {"shapes": [[2]], "tensors": ["basis", "spectrum/eigenvalues", "spectrum/density"], "draws": 1},
        {"w/basis": (2, 2), "w/spectrum/eigenvalues": (SIDE**2,), "w/spectrum/density": (SIDE**2,)},
        "the spectrum of block 'w' is not one",
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_large_file_that_does_not_fit_is_refused_before_it_is_read(what, path, monkeypatch):
    description, shapes, message = TOO_LARGE[what]
    write_sparse_file(path, description, shapes)
    assert path.stat().st_size > 1e9
    monkeypatch.setattr(files, "_checksum", lambda *_: pytest.fail("the values were read"))
    with pytest.raises(ValueError, match=f"'{path}' cannot be read: .*{message}"):
        egop.Basis.load(path)


def test_a_header_that_is_too_large_is_refused_before_it_is_read(path, monkeypatch):
    write_sparse_file(path, DESCRIBED, {"w/basis": (SIDE, SIDE)}, extra=60_000_000)
    monkeypatch.setattr(files, "safe_open", lambda *_, **__: pytest.fail("the header was read"))
    with pytest.raises(
        ValueError, match=f"'{path}' cannot be read: its header has 60,000,000 bytes, more than 33,554,432"
    ):
        egop.Basis.load(path)


def test_a_basis_with_too_large_a_header_is_not_written(path, basis, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(files, "_LARGEST_HEADER", 1000)
    with pytest.raises(ValueError, match=r"The basis cannot be saved: its header has [\d,]+ bytes, more than 1,000"):
        basis.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_block_or_a_parameter_twice_is_refused_with_the_path(path, basis):
    header, tensors = content_of(path)
    header["blocks"].append(header["blocks"][0])
    save_file(tensors, path, metadata={"egop": json.dumps(header)})
    assert "it has one block twice" in outcome(path, basis)


def test_files_without_a_checksum_are_read(path, basis):
    header, tensors = content_of(path)
    save_file(tensors, path, metadata={"egop": json.dumps(header)})
    assert outcome(path, basis) is None


@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Shared(side="output")], ids=str)
def test_older_files_count_rows_and_are_read_as_draws(structure, path):
    objective = egop.Objective.from_function(lambda w: w.square().sum(), {"w": torch.zeros(5, 3)})
    egop.estimate(objective, rho=egop.Gaussian(), structure=structure, samples=7, progress=False).save(path)
    header, tensors = content_of(path)
    (block,) = header["blocks"]
    rows = {"Full": 1, "Shared": 3 if block["settings"] else 5}[block["structure"]]
    block["samples"] = rows * block.pop("draws")
    save_file(tensors, path, metadata={"egop": json.dumps(header)})
    assert egop.Basis.load(path).spectrum["w"].samples == 7


def test_a_link_stays_and_what_it_leads_to_is_replaced(path, basis, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(path.name)
    egop.Basis([IdentityChange(cases.block("w", w=(3,)), {})]).save(link)
    assert link.is_symlink()
    assert list(egop.Basis.load(path)) == ["w"]
    assert sorted(os.listdir(tmp_path)) == ["basis.safetensors", "link.safetensors"]


def test_a_killed_save_leaves_the_old_file(path, basis):
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


def test_a_save_during_another_save_does_no_harm(path, basis, monkeypatch):
    def save_twice(*given, **options):
        monkeypatch.setattr(files, "save_file", save_file)
        basis.save(path)
        return save_file(*given, **options)

    monkeypatch.setattr(files, "save_file", save_twice)
    basis.save(path)
    assert os.listdir(path.parent) == [path.name]
    assert outcome(path, basis) is None
