"""A checkpoint is there whole or not at all, and holds what it was given."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import egop
from egop import checkpoint
from egop.checkpoint import files, folders
from egop.distributed import locks
from resuming import SAVED, finished, refused, resumed, training
from training import steps


def forked(action):
    """A process that does something and ends, with 0 if it went well."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(wanted, action, *arguments):
    """Let a process die in the so-and-so-manieth moment in which it changes something on the disk; whether it did."""
    moments = itertools.count()

    def counted_to_death():
        changes = [(os, "fsync"), (shutil, "rmtree")]
        changes += [(Path, name) for name in ("rename", "replace", "mkdir", "rmdir", "unlink")]
        for holder, name in changes:
            own = getattr(holder, name)

            def counted(*given, own=own, **options):
                if next(moments) == wanted:
                    os._exit(9)
                return own(*given, **options)

            setattr(holder, name, counted)  # in the other process only
        action(*arguments)

    end = end_of(forked(counted_to_death))
    assert end in (0, 9)
    return end == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step-000001", "step-000002"], ids=["replaced", "new"])
def test_a_death_at_any_moment_leaves_a_whole_checkpoint(name, tmp_path):
    model, optimizer = training("plain", "Shared", "online")

    def write(place, text="new"):
        checkpoint.save(place, model, optimizer, text=text, keep=1)

    for moment in itertools.count():
        folder = tmp_path / str(moment)
        write(folder / "step-000001", "old")
        killed = killed_at(moment, write, folder / name)
        # What clears away must not take the last whole one along, also if it dies itself, early or late.
        for again in (moment % 6, 6 + moment % 6):
            newest = checkpoint.latest(folder)
            assert newest in (folder / "step-000001", folder / name, folder / "step-000003")
            assert checkpoint.load(newest, model, optimizer)["text"] in ("old", "new")
            killed_at(again, write, folder / "step-000003")
        write(folder / "step-000003")
        assert os.listdir(folder) == ["step-000003"]
        assert len(os.listdir(folder / "step-000003")) == 2  # the index and the part that it names
        if not killed:
            break
    assert moment > 6


@pytest.mark.parametrize("name", ["again", "step-000001"])
def test_a_killed_replacement_leaves_nothing_that_the_next_save_does_not_clear(name, tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    following = name if name == "again" else "step-000002"
    for moment in itertools.count():
        checkpoint.save(tmp_path / name, model, optimizer)
        killed = killed_at(moment, checkpoint.save, tmp_path / name, model, optimizer)
        checkpoint.save(tmp_path / following, model, optimizer)
        assert set(os.listdir(tmp_path)) == {name, following}
        assert len(os.listdir(tmp_path / name)) == 2
        if not killed:
            break
    assert moment > 6


@pytest.mark.parametrize("lockable", [True, False])
def test_of_two_runs_that_save_to_one_name_the_last_one_stays_whole(lockable, tmp_path, monkeypatch):
    if not lockable:
        monkeypatch.setattr(locks, "fcntl", None)
    model, optimizer = training("plain", "Shared", "fixed")

    def writer(number):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        for _ in range(20):
            checkpoint.save(tmp_path / "here", model, optimizer, number=number)

    children = [forked(lambda number=number: writer(number)) for number in (1, 2, 3)]
    assert [end_of(child) for child in children] == [0, 0, 0]
    number = checkpoint.load(tmp_path / "here", model, optimizer)["number"]
    assert all(torch.equal(parameter, torch.full_like(parameter, number)) for parameter in model.parameters())
    assert os.listdir(tmp_path) == ["here"]
    if lockable:
        assert len(os.listdir(tmp_path / "here")) == 2


def half_written(directory, begun, go):
    """Begin a save as the first process does, and finish it when told to."""
    save = locks.new_name()
    unfinished = folders.Unfinished(directory, save)
    unfinished.begin()
    files.write(unfinished.path, save, files.with_text({}, {"version": 1, "values": {"extra": "of the other"}}))
    os.write(begun, b".")
    os.read(go, 1)
    unfinished.finish()
    unfinished.close()


@pytest.mark.parametrize("name", ["here", "step-000001"])
@pytest.mark.parametrize("killed", [True, False])
def test_only_what_dead_saves_have_left_is_cleared_away(name, killed, tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    begun, go = os.pipe(), os.pipe()
    child = forked(lambda: half_written(tmp_path / name, begun[1], go[0]))
    os.read(begun[0], 1)
    checkpoint.save(tmp_path / name, model, optimizer)
    assert len(os.listdir(tmp_path)) == 2  # the other one lives
    if killed:
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        checkpoint.save(tmp_path / name, model, optimizer, mine=1)
        assert checkpoint.extra(tmp_path / name) == {"mine": 1}
    else:
        os.write(go[1], b".")
        assert end_of(child) == 0
        assert checkpoint.extra(tmp_path / name) == "of the other"
    assert os.listdir(tmp_path) == [name]
    assert len(os.listdir(tmp_path / name)) == 2
    for each in (*begun, *go):
        os.close(each)


def test_without_locks_only_what_is_old_counts_as_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    model, optimizer = training("plain", "Shared", "fixed")
    (tmp_path / "here.1-00000000.unfinished").mkdir()
    checkpoint.save(tmp_path / "here", model, optimizer)
    assert len(os.listdir(tmp_path)) == 2
    two_hours_later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: two_hours_later)
    checkpoint.save(tmp_path / "here", model, optimizer)
    assert os.listdir(tmp_path) == ["here"]


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    lock = locks.Lock(tmp_path)
    assert lock.take()
    with pytest.raises(TimeoutError, match="Another process has been busy in"):
        checkpoint.save(tmp_path / "here", *training("plain", "Shared", "fixed"))
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", ["nothing", "empty", "a checkpoint"])
def test_a_link_stays_and_what_it_leads_to_is_replaced(there, tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    (tmp_path / "run").mkdir()
    link, target = tmp_path / "run" / "step-000001", tmp_path / "elsewhere" / "data"
    if there == "empty":
        target.mkdir(parents=True)
    elif there == "a checkpoint":
        checkpoint.save(target, model, optimizer, number=0)
    link.symlink_to(Path("..") / "elsewhere" / "data")
    for number in (1, 2):
        checkpoint.save(link, model, optimizer, number=number)
        assert link.is_symlink()
        assert checkpoint.load(link, model, optimizer) == checkpoint.extra(target) == {"number": number}
        assert os.listdir(target.parent) == ["data"]
        assert checkpoint.latest(tmp_path / "run") == link
    checkpoint.save(tmp_path / "run" / "step-000002", model, optimizer, keep=1)
    assert os.listdir(tmp_path / "run") == ["step-000002"]
    assert checkpoint.extra(target) == {"number": 2}  # only the link was this run's


def test_a_folder_of_checkpoints_may_be_a_link(tmp_path):
    model, optimizer = training("plain", "Shared", "fixed")
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / "run" / f"step-{step:06d}", model, optimizer, keep=2)
    assert sorted(os.listdir(tmp_path / "disk")) == ["step-000002", "step-000003"]
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "step-000003"


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
        (data,) = (tmp_path / f"step-{step:06d}").glob("part-*")
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
