"""torch's own way to the state of model and optimizer: ``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import egop
import runs
import training
from processes import run

HALF = 3  # right after a renewal, when coordinates and parameters agree only up to rounding
OPTIONS = {
    "plain": {},
    "full": {"full_state_dict": True},
    "full, on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
}


def made(kind, **more):
    model = training.network()
    return model, runs.optimizer_of(model, kind, **more)


def restored(kind, weights, state, options, **more):
    """Return a new model and optimizer with the saved weights and state."""
    model, optimizer = made(kind, **more)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return model, optimizer


@pytest.mark.parametrize("kind", runs.KINDS)
@pytest.mark.parametrize("style", OPTIONS)
def test_a_look_changes_nothing(kind, style):
    """Check before every step, even the first one, when torch would initialize the state by taking a step."""
    options = StateDictOptions(**OPTIONS[style])
    looked, _ = runs.loop(kind, 8, act=lambda _, model, own, __: get_optimizer_state_dict(model, own, options=options))
    assert runs.same(looked, runs.loop(kind, 8)[0])


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_look_between_backward_and_step_changes_nothing(kind):
    model, optimizer = made(kind)
    for step, pair in enumerate(runs.batches(HALF)):
        optimizer.zero_grad()
        training.loss_of(model, *pair).backward()
        if step > 0:  # torch gives no state before the first step where there are gradients
            get_optimizer_state_dict(model, optimizer)
        optimizer.step()
    assert runs.same(model, runs.loop(kind, HALF)[0])


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_look_leaves_gradients_learning_rate_and_weights_as_they_are(kind):
    model, optimizer = made(kind)
    before = runs.weights(model)
    get_optimizer_state_dict(model, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.02]
    assert runs.same(model, before)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_what_belongs_to_a_parameter_goes_by_its_name(kind):
    model, optimizer = runs.loop(kind, HALF)
    state = get_optimizer_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(state["state"]) == sorted(names)
    assert [sorted(group["params"]) for group in state["param_groups"]] == [sorted(names)]
    held = sum(value.numel() for own in state["state"].values() for value in _tensors(own))
    moments = 2 * sum(parameter.numel() for parameter in model.parameters())
    bases = sum(side * side for parameter in model.parameters() if parameter.dim() == 2 for side in parameter.shape)
    assert held >= moments + (0 if kind in ("none", "EGOP") else bases)


def _tensors(values):
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors(value)


@pytest.mark.parametrize("kind", runs.KINDS)
@pytest.mark.parametrize("style", OPTIONS)
def test_a_state_that_was_got_and_set_goes_on_bit_for_bit(kind, style, tmp_path):
    options = StateDictOptions(**OPTIONS[style])
    model, optimizer = runs.loop(kind, HALF)
    torch.save(get_optimizer_state_dict(model, optimizer, options=options), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    resumed = restored(kind, runs.weights(model), state, options)
    for one in ((model, optimizer), resumed):
        more_steps(*one)
    assert runs.same(model, resumed[0])
    assert runs.same(model, whole_run(kind))


def more_steps(model, optimizer, count=HALF):
    training.steps(model, optimizer, first=HALF, count=count)


def whole_run(kind):
    model, optimizer = made(kind)
    training.steps(model, optimizer, count=2 * HALF)
    return model


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers_go_on_bit_for_bit_too(inner):
    def made(momentum):
        model = training.network()
        settings = {"lr": 0.02} | ({"momentum": momentum} if momentum else {})
        return model, egop.ReparameterizedOptimizer(model, inner, refresh=egop.Online(every=3), **settings)

    for momentum in (0.0, 0.9) if inner is not torch.optim.Adagrad else (0.0,):
        model, optimizer = made(momentum)
        get_optimizer_state_dict(model, optimizer)
        training.steps(model, optimizer, count=HALF)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        resumed, other = made(momentum)
        resumed.load_state_dict(runs.weights(model))
        set_optimizer_state_dict(resumed, other, state)
        more_steps(model, optimizer)
        more_steps(resumed, other)
        plain = made(momentum)
        training.steps(*plain, count=2 * HALF)
        assert runs.same(model, plain[0])
        assert runs.same(model, resumed)


@pytest.mark.parametrize("kind", [*runs.KINDS, "aligned from a basis"])
def test_a_checkpoint_of_torch_is_resumed_bit_for_bit_by_objects_that_never_stepped(kind, tmp_path):
    """Loading fills in the new objects' state dict, so it must have an entry for everything that was saved."""
    model, optimizer = made(kind)
    training.steps(model, optimizer, count=HALF)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "half", no_dist=True)
    resumed, other = made(kind)
    load_checkpoint(resumed, other, tmp_path / "half", no_dist=True)
    more_steps(resumed, other)
    assert runs.same(resumed, whole_run(kind))


def load_checkpoint(model, optimizer, folder, **how):
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder, **how)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])


def test_the_state_of_another_basis_is_taken_over_with_its_basis(tmp_path):
    model, optimizer = made("fixed")
    training.steps(model, optimizer, count=HALF)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = training.network()
    other.load_state_dict(runs.weights(model))
    turned = egop.ReparameterizedOptimizer(other, torch.optim.AdamW, runs.basis(seed=1), lr=0.02, weight_decay=0.1)
    set_optimizer_state_dict(other, turned, state)
    more_steps(other, turned)
    assert runs.same(other, whole_run("fixed"))


def test_the_state_of_a_plain_optimizer_is_refused():
    model = training.network()
    plain = torch.optim.AdamW(model.parameters(), lr=0.02)
    training.steps(model, plain, count=2)
    state = get_optimizer_state_dict(model, plain)
    other, optimizer = made("fixed")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="saved by another optimizer"):
        set_optimizer_state_dict(other, optimizer, state)
    assert repr(optimizer.state_dict()) == repr(before)


def sharded(kind):
    model = training.sharded(training.network())
    return model, runs.optimizer_of(model, kind)


def save_checkpoint(model, optimizer, folder):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def on_four(rank, world, folder):
    """Save in the middle; return what holds, by name, and the final weights."""
    holds, ends = {}, {}
    share = {"rank": rank, "world": world}
    for kind in runs.SHARDED:
        model, optimizer = sharded(kind)
        training.steps(model, optimizer, count=HALF, **share)
        save_checkpoint(model, optimizer, f"{folder}/{kind}")
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        gathered = copy.deepcopy(get_state_dict(model, optimizer, options=full))
        training.steps(model, optimizer, first=HALF, count=HALF, **share)
        ends[kind] = training.weights(model)

        plain, own = sharded(kind)
        training.steps(plain, own, count=2 * HALF, **share)
        # A save adds up the Gram matrices of the rows, which rounds differently.
        equal = runs.same if kind != "online by rows" else lambda one, other: runs.distance(one, other) < 1e-9
        holds[f"{kind}: saving changes nothing"] = equal(training.weights(plain), ends[kind])

        resumed, own = sharded(kind)
        load_checkpoint(resumed, own, f"{folder}/{kind}")
        training.steps(resumed, own, first=HALF, count=HALF, **share)
        holds[f"{kind}: resumed from the files"] = runs.same(training.weights(resumed), ends[kind])

        resumed, own = sharded(kind)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        weights, state = gathered  # of the first process only
        set_model_state_dict(resumed, weights, options=options)
        set_optimizer_state_dict(resumed, own, state, options=options)
        training.steps(resumed, own, first=HALF, count=HALF, **share)
        holds[f"{kind}: resumed from one process"] = runs.same(training.weights(resumed), ends[kind])
    return {"holds": holds, "ends": ends}


def on_two(rank, world, folder):
    """Load what four processes have saved, take a step and save for a single process."""
    ends = {}
    share = {"rank": rank, "world": world}
    for kind in runs.SHARDED:
        model, optimizer = sharded(kind)
        load_checkpoint(model, optimizer, f"{folder}/{kind}")
        training.steps(model, optimizer, first=HALF, count=1, **share)
        save_checkpoint(model, optimizer, f"{folder}/{kind}, two")
        training.steps(model, optimizer, first=HALF + 1, count=HALF - 1, **share)
        ends[kind] = training.weights(model)
    return {"ends": ends, "damaged": damaged_checkpoints(Path(folder), **share)}


def damaged_checkpoints(folder, **share):
    """Load damaged checkpoints, then a good one; return the errors, and whether training continues exactly."""
    kind, errors = "EGOP", {}
    good = folder / f"{kind}, two"
    names = ["truncated", "missing", "incomplete"]
    if share["rank"] == 0:
        for name in names:
            shutil.copytree(good, folder / name)
        os.truncate(folder / "truncated" / "__1_0.distcp", 1000)
        (folder / "missing" / "__1_0.distcp").unlink()
        (folder / "incomplete" / ".metadata").unlink()
    dist.barrier()
    expected = sharded(kind)
    load_checkpoint(*expected, good)
    training.steps(*expected, first=HALF, count=2, **share)
    model, optimizer = sharded(kind)
    for name in names:
        try:
            load_checkpoint(model, optimizer, folder / name)
        except (dcp.CheckpointException, ValueError) as error:
            errors[name] = type(error).__name__
    load_checkpoint(model, optimizer, good)
    training.steps(model, optimizer, first=HALF, count=2, **share)
    return {"errors": errors, "exact": runs.same(training.weights(model), training.weights(expected[0]))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder):
    return run(on_four, 4, str(folder), timeout=300)


@pytest.fixture(scope="module")
def two(folder, four):
    return run(on_two, 2, str(folder), timeout=300)


@pytest.mark.slow
def test_sharded_states_resume_bit_for_bit_on_as_many_processes(four):
    assert [name for found in four for name, right in found["holds"].items() if not right] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", runs.SHARDED)
def test_what_four_processes_saved_is_resumed_by_two_and_by_one(kind, four, two, folder):
    whole = whole_run(kind)
    model, optimizer = made(kind)
    load_checkpoint(model, optimizer, folder / f"{kind}, two", no_dist=True)
    training.steps(model, optimizer, first=HALF + 1, count=HALF - 1)
    assert runs.distance(model, whole) < 1e-9, "one"
    for found in (*four, *two):
        assert runs.distance(found["ends"][kind], whole) < 1e-9, len(found)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_an_error_on_all_processes_and_an_older_one_still_loads(two):
    for found in two:
        assert list(found["damaged"]["errors"]) == ["truncated", "missing", "incomplete"]
        assert found["damaged"]["exact"]
