"""Checkpoints go on on any number of processes, and say so when they do not fit."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import egop
from egop import checkpoint
from processes import run
from resuming import CASES, SAVED, basis_of, finished, refused, resumed, training
from training import WRAPPERS, network, steps


def begun(rank, world, wrapper, folder):
    """Train some steps, save, go on; and resume beside it. Is that the same to the last bit, and where does it end?"""
    found = {}
    for structure, refresh in CASES:
        place = Path(folder) / f"{wrapper}-{structure}-{refresh}"
        model, optimizer = training(wrapper, structure, refresh)
        steps(model, optimizer, 0, SAVED, rank=rank, world=world)
        checkpoint.save(place, model, optimizer, step=SAVED)
        expected = finished(model, optimizer, SAVED, rank=rank, world=world)
        again = finished(*resumed(place, wrapper, refresh), rank=rank, world=world)
        equal = all(torch.equal(expected[name], again[name]) for name in expected)
        found[place.name] = {"equal": equal, "weights": again}
    return found


def on_four(rank, world, folder):
    return begun(rank, world, "FSDP2", folder)


def on_two(rank, world, folder):
    return {
        "goes on": goes_on_on_two(rank, world, folder),
        "refused": does_not_fit(rank, world, folder),
        "apart": see_different_ones(rank, Path(folder) / "apart"),
        "failures": fails_in_one(rank, Path(folder) / "failing"),
    }


def goes_on_on_two(rank, world, folder):
    """From four sharded processes to two, from one to two; two steps on, saved for one."""
    found = begun(rank, world, "DDP", folder)
    for source, (structure, refresh) in itertools.product(["FSDP2", "plain"], CASES):
        name = f"{source}-{structure}-{refresh}"
        model, optimizer, step = resumed(Path(folder) / name, "FSDP2", refresh)
        steps(model, optimizer, step, 2, rank=rank, world=world)
        checkpoint.save(Path(folder) / f"{name}-two", model, optimizer, step=step + 2)
        found[f"{name} on two"] = {"weights": finished(model, optimizer, step + 2, rank=rank, world=world)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone_and_on_four(folder):
    return begun(0, 1, "plain", folder) | run(on_four, 4, str(folder))[3]


@pytest.fixture(scope="module")
def two(folder, alone_and_on_four):
    """What each of two processes has to say."""
    return run(on_two, 2, str(folder))


@pytest.fixture(scope="module")
def trajectories(folder, alone_and_on_four, two):
    """What every way of going on has come to, by a name that says which."""
    found = alone_and_on_four | two[1]["goes on"]
    for source, (structure, refresh) in itertools.product(["FSDP2", "plain", "DDP"], CASES):
        name = f"{source}-{structure}-{refresh}"
        place = folder / (name if source == "DDP" else f"{name}-two")
        found[f"{name} on one"] = {"weights": finished(*resumed(place, "plain", refresh))}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["plain", "DDP", "FSDP2"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_same_number_of_processes_goes_on_bit_for_bit(trajectories, wrapper, case):
    assert trajectories["-".join((wrapper, *case))]["equal"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_any_number_of_processes_goes_on_to_rounding(trajectories, case):
    expected = trajectories["-".join(("plain", *case))]["weights"]
    ways = [name for name in trajectories if "-".join(case) in name]
    assert len(ways) == 8
    for way in ways:
        for name, value in expected.items():
            found = trajectories[way]["weights"][name]
            torch.testing.assert_close(found, value, rtol=0, atol=1e-10, msg=f"{way}: {name}")


def does_not_fit(rank, world, folder):
    """What loading says where it cannot be done, and whether model and optimizer are as they were."""
    folder = Path(folder)
    wrapper = "FSDP2" if world > 1 else "plain"
    model, optimizer = training(wrapper, "Shared", "online")
    steps(model, optimizer, 0, SAVED, rank=rank, world=world)
    checkpoint.save(folder / "good", model, optimizer, step=SAVED)
    damaged = {name: folder / name for name in ("truncated", "missing", "no index", "torn index")}
    if rank == 0:
        for place in damaged.values():
            shutil.copytree(folder / "good", place)
        data = sorted(path.name for path in (folder / "good").glob("part-*"))
        with (damaged["truncated"] / data[-1]).open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) * 2 // 3)
        (damaged["missing"] / data[-1]).unlink()
        (damaged["no index"] / "index.json").unlink()
        with (damaged["torn index"] / "index.json").open("r+b") as file:
            file.truncate(100)
    if world > 1:
        dist.barrier()
    wider = WRAPPERS[wrapper](nn.Sequential(nn.Linear(5, 8), *list(network())[1:]).double())
    other = WRAPPERS[wrapper](nn.Sequential(network()))
    adam = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis_of("Shared"))
    cases = {
        "shape": (folder / "good", wider, egop.ReparameterizedOptimizer(wider, torch.optim.AdamW)),
        "names": (folder / "good", other, egop.ReparameterizedOptimizer(other, torch.optim.AdamW)),
        "class": (folder / "good", model, adam),
        "order": (folder / "good", model, reordered(model)),
        "plain": (folder / "good", model, torch.optim.AdamW(model.parameters())),
        "one rank": (folder / ("good" if rank == 0 else "elsewhere"), model, optimizer),
    }
    cases |= {name: (place, model, optimizer) for name, place in damaged.items()}
    if world == 1:
        del cases["one rank"]
    found = {}
    for name, (place, its_model, its_optimizer) in cases.items():
        steps(model, optimizer, SAVED, 1, rank=rank, world=world)
        before = {key: value.clone() for key, value in its_model.state_dict().items()}
        coordinates = [each.clone() for block in optimizer.blocks for each in block.coordinates]
        found[name] = refused(lambda: checkpoint.load(place, its_model, its_optimizer))  # noqa: B023 - called at once
        assert all(torch.equal(value, before[key]) for key, value in its_model.state_dict().items()), name
        now = [each for block in optimizer.blocks for each in block.coordinates]
        assert all(torch.equal(*pair) for pair in zip(now, coordinates, strict=True)), name
    assert checkpoint.load(folder / "good", model, optimizer) == {"step": SAVED}
    found["extra"] = refused(lambda: checkpoint.save(folder / "new", model, optimizer, step=object()))
    found["keep"] = refused(lambda: checkpoint.save(folder / "new", model, optimizer, keep=0))
    if world > 1:
        if rank == 1:
            model.extra = nn.Parameter(torch.zeros(2))
        found["unlike"] = refused(lambda: checkpoint.save(folder / "new", model, optimizer))
    assert not (folder / "new").exists()
    return found


def reordered(model):
    return egop.ReparameterizedOptimizer(list(model.named_parameters())[::-1], torch.optim.AdamW)


def test_what_does_not_fit_is_refused_by_all_and_changes_nothing(two, folder):
    check_refusals([each["refused"] for each in two], folder)


def test_what_does_not_fit_is_refused_by_one_process_too(tmp_path):
    check_refusals([does_not_fit(0, 1, tmp_path)], tmp_path)


def check_refusals(ranks, folder):
    for said in ranks:
        assert said == ranks[0]
        assert said["shape"] == "Block '0.weight' has shape (7, 5) in the state dict, but (8, 5) here."
        assert "of another model: only it has ['0.bias'" in said["names"]
        assert "is of AdamW, this optimizer runs Adam" in said["class"]
        assert "another order" in said["order"]
        assert "got AdamW" in said["plain"]
        assert all("incomplete or damaged" in said[name] for name in ("truncated", "missing", "torn index"))
        assert f"There is no checkpoint at {folder / 'no index'}" in said["no index"]
        assert "extra/step is a object" in said["extra"]
        assert "Invalid keep value: 0" in said["keep"]
        if len(ranks) > 1:
            assert f"There is no checkpoint at {folder / 'elsewhere'}" in said["one rank"]
            assert "different tensors to save" in said["unlike"]


def see_different_ones(rank, folder):
    """What is the newest where each process sees another, and what loading says of that."""
    model, optimizer = training("DDP", "Shared", "fixed")
    for place, step in (("first", 1), ("second", 1), ("second", 2)):
        checkpoint.save(folder / place / f"step-{step:06d}", model, optimizer, place=place)
    own = folder / ("first", "second")[rank]
    return {
        "latest": checkpoint.latest(own).relative_to(folder).as_posix(),
        "none": checkpoint.latest(folder if rank == 0 else own) is None,
        "names": refused(lambda: checkpoint.load(folder / "second" / f"step-{rank + 1:06d}", model, optimizer)),
        "contents": refused(lambda: checkpoint.load(own / "step-000001", model, optimizer)),
        "one": checkpoint.load(folder / "second" / "step-000001", model, optimizer),
    }


def test_processes_do_not_go_on_from_different_checkpoints(two, folder):
    first, second = (each["apart"] for each in two)
    assert [first.pop("latest"), second.pop("latest")] == ["first/step-000001", "second/step-000001"]
    assert first == second
    one, other = folder / "apart" / "first" / "step-000001", folder / "apart" / "second"
    assert first["none"]
    assert f"process 0 {other / 'step-000001'}, process 1 {other / 'step-000002'}." in first["names"]
    assert f"different checkpoints: process 0 {one}, process 1 {other / 'step-000001'}." in first["contents"]
    assert first["one"] == {"place": "second"}


def fails_in_one(rank, folder):
    """What is said of an error in the second process alone; each time the next checkpoint is saved and loaded."""
    model, optimizer = training("FSDP2", "Shared", "fixed")
    found = []

    def failing():
        raise MemoryError("not enough")

    for step, holder in enumerate((optimizer, model)):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(holder, "state_dict", failing)
            with pytest.raises(MemoryError) as caught:
                checkpoint.save(folder / "broken", model, optimizer)
        found.append(str(caught.value))
        checkpoint.save(folder / "whole", model, optimizer, step=step)
        assert checkpoint.load(folder / "whole", model, optimizer) == {"step": step}
    assert os.listdir(folder) == ["whole"]
    return found


def test_an_error_in_one_process_is_heard_of_by_all_and_the_next_save_works(two):
    assert [each["failures"] for each in two] == [["Process 1 failed. MemoryError: not enough"] * 2, ["not enough"] * 2]
