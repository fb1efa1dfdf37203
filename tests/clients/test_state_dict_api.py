"""torch's own way to the state of model and optimizer: ``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

import copy

import pytest
import torch
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

HALF = 4
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
    """A new model and optimizer with saved weights and state."""
    model, optimizer = made(kind, **more)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return model, optimizer


@pytest.mark.parametrize("kind", runs.KINDS)
@pytest.mark.parametrize("style", OPTIONS)
def test_a_look_changes_nothing(kind, style):
    """Before every step: also before the first one, when torch would begin the state by a step of its own."""
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
    assert held >= moments + (0 if kind == "none" else bases)


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


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_checkpoint_of_torch_is_resumed_bit_for_bit_by_objects_that_never_stepped(kind, tmp_path):
    """Loading fills the state dict of the new objects, so that has to have a place for all that was saved."""
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
    with pytest.raises(ValueError, match="plain optimizer"):
        set_optimizer_state_dict(other, optimizer, state)
    assert repr(optimizer.state_dict()) == repr(before)


def sharded(kind):
    model = training.sharded(training.network())
    return model, runs.optimizer_of(model, kind)


def on_two(rank, world, folder):
    """What holds, by name, and the weights at the end."""
    holds, ends = {}, {}
    place = {"rank": rank, "world": world}
    for kind in runs.DIVIDED:
        model, optimizer = sharded(kind)
        for step in range(2 * HALF):
            if step == HALF:
                weights, state = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")
                full = StateDictOptions(full_state_dict=True, cpu_offload=True)
                gathered = copy.deepcopy(get_state_dict(model, optimizer, options=full))
            get_optimizer_state_dict(model, optimizer)
            training.steps(model, optimizer, first=step, count=1, **place)
        ends[kind] = training.weights(model)

        plain, own = sharded(kind)
        training.steps(plain, own, count=2 * HALF, **place)
        holds[f"{kind}: a look changes nothing"] = runs.same(training.weights(plain), ends[kind])

        resumed, own = sharded(kind)
        load_checkpoint(resumed, own, f"{folder}/{kind}")
        training.steps(resumed, own, first=HALF, count=HALF, **place)
        holds[f"{kind}: resumed from the files"] = runs.resumed(kind, training.weights(resumed), ends[kind])

        resumed, own = sharded(kind)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        weights, state = gathered  # of the first process only
        set_model_state_dict(resumed, weights, options=options)
        set_optimizer_state_dict(resumed, own, state, options=options)
        training.steps(resumed, own, first=HALF, count=HALF, **place)
        holds[f"{kind}: resumed from one process"] = runs.resumed(kind, training.weights(resumed), ends[kind])
    return {"holds": holds, "ends": ends}


def elsewhere(rank, world, folder):
    ends = {}
    for kind in runs.DIVIDED:
        model, optimizer = sharded(kind)
        load_checkpoint(model, optimizer, f"{folder}/{kind}")
        training.steps(model, optimizer, first=HALF, count=HALF, rank=rank, world=world)
        ends[kind] = training.weights(model)
    return ends


@pytest.mark.slow
def test_sharded_states_go_on_in_two_processes_and_in_one_and_in_three(tmp_path):
    one, other = run(on_two, 2, str(tmp_path))
    assert [name for found in (one, other) for name, right in found["holds"].items() if not right] == []
    for kind in runs.DIVIDED:
        assert runs.distance(one["ends"][kind], whole_run(kind)) < 1e-9, kind
        model, optimizer = made(kind)
        load_checkpoint(model, optimizer, tmp_path / kind, no_dist=True)
        more_steps(model, optimizer)
        assert runs.distance(model, one["ends"][kind]) < 1e-9, f"{kind}, in one process"
    for found in run(elsewhere, 3, str(tmp_path)):
        for kind in runs.DIVIDED:
            assert runs.distance(found[kind], one["ends"][kind]) < 1e-9, f"{kind}, in three processes"
