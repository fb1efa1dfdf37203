"""A checkpoint is there whole or not at all, and holds what it was given."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from resuming import SAVED, finished, refused, resumed, training
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from training import steps

import egop
from egop import checkpoint


class CrashError(Exception):
    """In place of a power cut."""


def crash_at(monkeypatch, wanted, action, *arguments):
    """Fail in the so-and-so-manieth moment in which something is made to last; whether it came to that."""
    moments = itertools.count()
    with monkeypatch.context() as patch:
        for holder, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree"), (Path, "mkdir")):
            own = getattr(holder, name)

            def failing(*given, own=own, **options):
                if next(moments) == wanted:
                    raise CrashError
                return own(*given, **options)

            patch.setattr(holder, name, failing)
        try:
            action(*arguments)
        except (ValueError, CrashError):
            return True
    assert next(moments) <= wanted
    return False


@pytest.mark.parametrize("name", ["step-000001", "step-000002"], ids=["replaced", "new"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(name, tmp_path, monkeypatch):
    model, optimizer = training("plain", "Shared", "online")

    def write(place, text="new"):
        checkpoint.save(place, model, optimizer, text=text, keep=1)

    for moment in itertools.count():
        folder = tmp_path / str(moment)
        write(folder / "step-000001", "old")
        crashed = crash_at(monkeypatch, moment, write, folder / name)
        for again in range(7):  # what clears away must not take the last whole one along, also if it crashes itself
            newest = checkpoint.latest(folder)
            assert newest in (folder / "step-000001", folder / name, folder / "step-000003")
            assert checkpoint.load(newest, model, optimizer)["text"] in ("old", "new")
            crash_at(monkeypatch, again, write, folder / "step-000003")
        write(folder / "step-000003")
        assert os.listdir(folder) == ["step-000003"]
        if not crashed:
            break
    assert moment > 6


def test_the_newest_whole_one_is_found_and_old_ones_go(tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    assert checkpoint.latest(tmp_path) is checkpoint.latest(tmp_path / "nowhere") is None
    for step in (8, 9, 10, 1_000_000):
        checkpoint.save(tmp_path / f"step-{step:06d}", model, optimizer, keep=3)
    for name in ("step-2000000.unfinished", "step-3000000", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "best" / "mine.txt").write_text("kept")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"
    checkpoint.save(tmp_path / "step-000011", model, optimizer, keep=1)  # older than the newest, which stays
    assert sorted(os.listdir(tmp_path)) == ["best", "step-000011", "step-1000000", "step-3000000"]
    said = refused(lambda: checkpoint.save(tmp_path / "best", model, optimizer))
    assert "exists and is not a checkpoint" in said
    assert (tmp_path / "best" / "mine.txt").read_text() == "kept"


def test_what_was_written_to_a_parameter_is_kept_over_the_coordinates(tmp_path):
    """The coordinates do not stand for weights that someone has changed since the last step."""
    model, optimizer = training("plain", "Shared", "fixed")
    steps(model, optimizer, 0, SAVED)
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    checkpoint.save(tmp_path / "here", model, optimizer, step=SAVED)
    again = finished(*resumed(tmp_path / "here", "plain", "fixed", trusted=False))
    for name, value in finished(model, optimizer, SAVED).items():
        assert torch.equal(again[name], value)


def test_names_with_and_without_a_wrapper_are_the_same(tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    steps(model, optimizer, 0, SAVED)
    checkpoint.save(tmp_path / "here", torch.compile(model, backend="eager"), optimizer, step=SAVED)
    again = finished(*resumed(tmp_path / "here", "plain", "fixed"))
    for name, value in finished(model, optimizer, SAVED).items():
        assert torch.equal(again[name], value)


def test_extras_come_back_as_they_were(tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    given = {"step": 3, "best": (0.1, [None, True]), "table": {1: "one", "1": float("inf")}, "state": torch.arange(4)}
    checkpoint.save(tmp_path / "here", model, optimizer, **given)
    found = checkpoint.load(tmp_path / "here", model, optimizer)
    assert torch.equal(found.pop("state"), given.pop("state"))
    assert found == given
    assert isinstance(found["best"], tuple)


def test_extras_can_be_read_without_a_model(tmp_path):
    checkpoint.save(tmp_path / "here", *training("plain", "Shared", "fixed"), width=3, state=torch.arange(4))
    found = checkpoint.extra(tmp_path / "here")
    assert torch.equal(found.pop("state"), torch.arange(4))
    assert found == {"width": 3}
    assert "There is no checkpoint" in refused(lambda: checkpoint.extra(tmp_path / "nowhere"))


def test_a_damaged_newest_one_says_which_is_next(tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    for step in (8, 9, 10):
        checkpoint.save(tmp_path / f"step-{step:06d}", model, optimizer)
        (data,) = (tmp_path / f"step-{step:06d}").glob("*.distcp")
        data.write_bytes(data.read_bytes()[:100])
    newest = refused(lambda: checkpoint.load(checkpoint.latest(tmp_path), model, optimizer))
    assert newest.startswith(f"The checkpoint {tmp_path / 'step-000010'} is incomplete or damaged (")
    assert newest.endswith("). If it stays so, remove that folder: step-000009 is then the newest.")
    for step in (8, 9):  # the newest is another
        said = refused(lambda step=step: checkpoint.load(tmp_path / f"step-{step:06d}", model, optimizer))
        assert said.endswith(").")


def test_buffers_are_saved_and_compared_too(tmp_path):
    def normed(size):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(size, affine=False))
        return model, egop.ReparameterizedOptimizer(model, torch.optim.SGD, lr=0.1)

    model, optimizer = normed(2)
    model(torch.randn(5, 3))
    checkpoint.save(tmp_path / "here", model, optimizer)
    same, its_optimizer = normed(2)
    checkpoint.load(tmp_path / "here", same, its_optimizer)
    assert torch.equal(same[1].running_mean, model[1].running_mean)
    assert same[1].num_batches_tracked == 1
    said = refused(lambda: checkpoint.load(tmp_path / "here", *normed(4)))
    assert said == "The checkpoint is of another model: '1.running_mean' has shape (2,) there, but (4,) here."


class Command:
    """As a pickle, a call of some function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def forged(folder, change):
    """Write another index in the place of a checkpoint's."""
    path = folder / ".metadata"
    path.write_bytes(change(path.read_bytes()))


def by_a_name_with_dots(trace):
    """``os.mkdir`` by way of the module that an index is made of."""
    words = [b"torch.distributed.checkpoint.metadata", b"os.mkdir", str(trace).encode()]
    module, name, argument = (b"\x8c" + bytes([len(word)]) + word for word in words)
    return b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R."


@pytest.mark.parametrize("way", ["call", "dotted", "entry"])
def test_a_forged_index_runs_nothing(way, tmp_path):
    model, optimizer = training("plain", "Shared", "online")
    folder, trace = tmp_path / "step-000001", tmp_path / "trace"
    checkpoint.save(folder, model, optimizer)
    if way == "call":
        forged(folder, lambda _: pickle.dumps(Command(os.mkdir, str(trace))))
    elif way == "dotted":
        forged(folder, lambda _: by_a_name_with_dots(trace))
    else:  # torch would unpickle what such an entry stands for
        index = pickle.loads((folder / ".metadata").read_bytes())
        index.state_dict_metadata["text"] = BytesStorageMetadata()
        forged(folder, lambda _: pickle.dumps(index))
    with pytest.raises(ValueError, match="is incomplete or damaged"):
        checkpoint.load(folder, model, optimizer)
    assert not trace.exists()
