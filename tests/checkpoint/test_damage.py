"""Damaged and forged checkpoints are refused, all in the same words; nothing in them runs or takes much memory."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from torch import nn

import egop
from damage import WRONG, changed, paths
from egop import checkpoint
from egop.checkpoint import files
from resuming import refused


def small():
    """A model and its optimizer, with state of every kind that is saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(), lr=0.1)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def trained():
    return small()


@pytest.fixture
def folder(tmp_path, trained):
    checkpoint.save(tmp_path / "step-000001", *trained, number=3, list=[torch.arange(3), {"a": (None, 0.5)}])
    return tmp_path / "step-000001"


def outcome(folder, trained):
    """Refused in the words for damaged files, or loaded as it was saved: then None."""
    model, optimizer = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = None
    try:
        found = checkpoint.load(folder, model, optimizer)
    except ValueError as error:
        said = str(error)
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in before.items())
    if said is not None:
        assert said.startswith(f"The checkpoint {folder} is incomplete or damaged"), said
        return said
    assert found["number"] == 3
    assert torch.equal(found["list"][0], torch.arange(3))
    assert found["list"][1:] == [{"a": (None, 0.5)}]
    return None


class Command:
    """As a pickle, a call of some function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_the_index_of_an_old_checkpoint_is_never_read(folder, tmp_path, trained):
    trace = tmp_path / "trace"
    evil = pickle.dumps(Command(os.mkdir, str(trace)))
    old = tmp_path / "step-000009"
    old.mkdir()
    for place in (folder, old):
        (place / ".metadata").write_bytes(evil)
        (place / "__0_0.distcp").write_bytes(evil)
    assert outcome(folder, trained) is None  # what is not named by the index is not looked at
    assert checkpoint.latest(tmp_path) == old  # so that nobody begins again without a word
    for action in (lambda: checkpoint.load(old, *trained), lambda: checkpoint.extra(old)):
        said = refused(action)
        assert said.startswith(f"The checkpoint {old} is of egop 0.1.0. Its index is a pickle")
    assert "exists and is not a checkpoint of this egop" in refused(lambda: checkpoint.save(old, *trained))
    assert not trace.exists()


@pytest.mark.parametrize("kind", ["index.json", "part"])
def test_a_file_that_is_cut_off_anywhere_is_refused(kind, folder, trained):
    (path,) = folder.glob(f"{kind}*")
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        assert outcome(folder, trained), length
    path.write_bytes(whole + b" " * 8)
    assert bool(outcome(folder, trained)) == (kind == "part")
    path.unlink()
    assert kind == "index.json" or outcome(folder, trained)
    path.write_bytes(whole)
    assert outcome(folder, trained) is None


@pytest.mark.parametrize("kind", ["index.json", "part"])
def test_a_file_with_other_bytes_is_refused(kind, folder, trained):
    chance = random.Random(0)
    (path,) = folder.glob(f"{kind}*")
    whole = path.read_bytes()
    refusals = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        refusals += outcome(folder, trained) is not None
    assert refusals == 200


def test_an_index_with_anything_else_in_any_place_is_refused(folder, trained):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    chance, loaded = random.Random(0), []
    for at in paths(index):
        for to in [..., *chance.sample(WRONG, 2)]:
            other = changed(index, at, to) if at or to is not ... else None
            if other != index:
                path.write_text(json.dumps(other))
                if outcome(folder, trained) is None:
                    loaded.append((at, to))
    assert loaded == []


FORGED = {
    "huge": lambda entry: (
        entry | {"shape": [2**31], "pieces": [{"part": 0, "offset": [0], "shape": [2**31], "crc32": 0}]}
    ),
    "huge and empty": lambda entry: entry | {"shape": [0, 2**62, 2**62], "pieces": []},
    "overlapping": lambda entry: entry | {"pieces": entry["pieces"] * 2},
    "elsewhere": lambda entry: changed(entry, ("pieces", 0, "offset"), [1, 0]),
    "no pieces": lambda entry: entry | {"pieces": []},
    "another part": lambda entry: changed(entry, ("pieces", 0, "part"), 10**7),
    "of other numbers": lambda entry: entry | {"dtype": "int32"},
}


@pytest.mark.parametrize("way", FORGED)
def test_a_forged_index_is_refused(way, folder, trained):
    path = folder / "index.json"
    index = json.loads(path.read_text())
    index["tensors"]["model/0.weight"] = FORGED[way](index["tensors"]["model/0.weight"])
    path.write_text(json.dumps(index))
    assert outcome(folder, trained)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 150 + "]" * 150, "1" * 5000, "\udcff", '{"a": 1, "a": 2}']
)
def test_text_that_is_hard_to_read_is_refused(text, folder, trained):
    data = text.encode(errors="surrogateescape")
    (folder / "index.json").write_bytes(data)
    assert outcome(folder, trained)
    (folder / "index.json").unlink()
    for part in folder.glob("part-*"):
        part.unlink()
    files.write(folder, "1-00000000", {"text": torch.frombuffer(bytearray(data), dtype=torch.uint8)})
    assert outcome(folder, trained)


def test_a_name_twice_in_the_index_is_refused(folder, trained):
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"tensors": {', '"tensors": {"text": null, ', 1))
    assert "one name twice" in outcome(folder, trained)


def test_files_of_another_save_are_not_mixed_in(folder, tmp_path, trained):
    checkpoint.save(tmp_path / "other", *trained)
    ((path,), (other,)) = (place.glob("part-*") for place in (folder, tmp_path / "other"))
    shutil.copy(other, path)
    assert outcome(folder, trained)


def rewritten(folder, content, tensors):
    """A checkpoint with all checksums right."""
    shutil.rmtree(folder)
    folder.mkdir()
    files.write(folder, "1-00000000", files.with_text(tensors, content))


def test_a_text_with_anything_else_in_any_place_never_gives_another_kind_of_error(folder, trained):
    saved = files.Saved(folder)
    tensors = {name: saved.place(name, torch.empty) for name in saved._entries if name != "text"}
    saved.read()
    chance = random.Random(0)
    everywhere = list(paths(saved.content))
    for at in chance.sample(everywhere, 150):
        to = chance.choice([..., *WRONG])
        rewritten(folder, changed(saved.content, at, to) if at else None, tensors)
        with contextlib.suppress(ValueError):
            checkpoint.load(folder, *small())


def test_a_text_that_names_a_tensor_many_times_takes_no_memory_for_it(folder, trained):
    saved = files.Saved(folder)
    content = saved.content
    content["values"]["extra"] = [{"tensor": "large"}] * 1000
    rewritten(folder, content, {"large": torch.zeros(1000)})
    with pytest.raises(ValueError, match=f"The checkpoint {folder} is incomplete or damaged.* names 'large' twice"):
        checkpoint.extra(folder)


def test_what_could_not_be_read_is_not_written(tmp_path, trained):
    deep = []
    for _ in range(200):
        deep = [deep]
    said = refused(lambda: checkpoint.save(tmp_path / "here", *trained, deep=deep))
    assert "nested more than 100 levels deep" in said
    assert os.listdir(tmp_path) == []
