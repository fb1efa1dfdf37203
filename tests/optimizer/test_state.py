"""What belongs to a parameter is in ``optimizer.state[parameter]``, where torch's own tools look for it."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import cases
import egop
from cases import MLP
from explicit import basis_of, identical, logistic

STRUCTURES = {"none": None, "full": egop.Full(), "auxiliary": egop.Auxiliary(rank=4), "reduced": egop.Reduced(rank=3)}
CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.02}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
REFRESHES = {
    "never": lambda model: None,
    "online": lambda model: egop.Online(every=2),
    "drifted": lambda model: egop.Online(every=2, tolerance=0.05),
    "every": lambda model: egop.Every(3, egop.Objective(model, logistic, MLP.batches()), samples=6),
}


@functools.cache
def basis(structure):
    return None if STRUCTURES[structure] is None else basis_of(MLP, structure=STRUCTURES[structure])


def started(structure="full", kind="AdamW", refresh="never"):
    model = MLP.build()
    optimizer_class, arguments = CLASSES[kind]
    options = {"refresh": REFRESHES[refresh](model)}
    return model, egop.ReparameterizedOptimizer(model, optimizer_class, basis(structure), **options, **arguments)


def steps(model, optimizer, count, first=0, look=lambda: None):
    for step in range(first, first + count):
        look()
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        look()
        optimizer.step()
    look()
    return cases.parameters_of(model)


WAYS = [
    *[(structure, "AdamW", "never") for structure in STRUCTURES],
    *[("full", kind, "never") for kind in CLASSES if kind != "AdamW"],
    *[("none", "momentum", refresh) for refresh in ("online", "drifted", "every")],
    ("none", "AdamW", "online"),
]
over_ways = pytest.mark.parametrize(("structure", "kind", "refresh"), WAYS)


@over_ways
def test_a_look_changes_nothing(structure, kind, refresh):
    straight = steps(*started(structure, kind, refresh), 6)
    for name in ("state", "state_dict", "torch"):
        model, optimizer = started(structure, kind, refresh)
        look = {
            "state": lambda optimizer=optimizer: dict(optimizer.state),
            "state_dict": optimizer.state_dict,
            "torch": lambda model=model, optimizer=optimizer: get_optimizer_state_dict(model, optimizer),
        }[name]
        assert identical(steps(model, optimizer, 6, look=look), straight), name


OPTIONS = {
    "as it is": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "on the cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("options", OPTIONS)
@over_ways
def test_torchs_own_state_dicts_resume_bit_for_bit(structure, kind, refresh, options, before):
    model, optimizer = started(structure, kind, refresh)
    steps(model, optimizer, 3)
    if before == 0 and refresh == "every":
        pytest.skip("before its first estimate such an optimizer has no blocks; see below")
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=OPTIONS[options]))
    other, loaded = started(structure, kind, refresh)
    steps(other, loaded, before)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, loaded, state, options=OPTIONS[options])
    assert identical(steps(other, loaded, 4, first=3), steps(model, optimizer, 4, first=3))


@over_ways
def test_a_distributed_checkpoint_is_read_into_an_optimizer_that_has_taken_no_step(structure, kind, refresh, tmp_path):
    model, optimizer = started(structure, kind, refresh)
    steps(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = started(structure, kind, refresh)
    if refresh == "every":
        loaded.renew_basis()  # which makes its blocks
    weights, state = get_state_dict(other, loaded)
    both = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, loaded, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    assert identical(steps(other, loaded, 4, first=3), steps(model, optimizer, 4, first=3))


def test_a_checkpoint_with_blocks_is_not_read_into_an_optimizer_without(tmp_path):
    model, optimizer = started()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other, without = started("none")
    with pytest.raises(dcp.CheckpointException, match=r"egop/about|[Ss]ize"):
        dcp.load({"optimizer": get_optimizer_state_dict(other, without)}, checkpoint_id=tmp_path, no_dist=True)


def test_names_count_and_not_the_order_in_torchs_own_state_dicts():
    model, optimizer = started()
    steps(model, optimizer, 3)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = MLP.build()
    other.load_state_dict(model.state_dict())
    loaded = egop.ReparameterizedOptimizer(list(other.named_parameters())[::-1], torch.optim.AdamW, lr=0.5)
    set_optimizer_state_dict(other, loaded, state)
    assert identical(steps(other, loaded, 4, first=3), steps(model, optimizer, 4, first=3))


def test_frozen_parameters_keep_their_state_when_torchs_tools_leave_them_out():
    model, optimizer = started(refresh="online")
    steps(model, optimizer, 3)
    other, loaded = copy.deepcopy((model, optimizer))
    for each in (model, other):
        each[0].weight.requires_grad_(False)
    set_optimizer_state_dict(other, loaded, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    for each in (model, other):
        each[0].weight.requires_grad_(True)
    assert identical(steps(other, loaded, 4, first=3), steps(model, optimizer, 4, first=3))


# --- what is written to it ---


@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_moments_are_taken_at_the_next_step(structure):
    ends = []
    for write in ("in place", "replaced", "whole entry", "by the optimizer inside"):
        model, optimizer = started(structure)
        steps(model, optimizer, 2)
        for parameter, entry in optimizer.state.items():
            moments = [key for key in entry if "exp_avg" in key]
            if write == "in place":
                for key in moments:
                    entry[key].mul_(2)
            elif write == "replaced":
                entry.update({key: 2 * entry[key] for key in moments})
            elif write == "whole entry":
                optimizer.state[parameter] = entry | {key: 2 * entry[key] for key in moments}
        if write == "by the optimizer inside":
            for state in optimizer.inner.state.values():
                state["exp_avg"].mul_(2)
                state["exp_avg_sq"].mul_(2)
        ends.append(steps(model, optimizer, 3, first=2))
    assert all(identical(end, ends[0]) for end in ends)
    assert not identical(ends[0], steps(*started(structure), 5))


@pytest.mark.parametrize("how", ["clear", "assign"])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("structure", ["none", "full"])
def test_moments_begin_anew_when_the_state_is_emptied(structure, kind, how):
    model, optimizer = started(structure, kind)
    steps(model, optimizer, 2)
    other, reset = copy.deepcopy((model, optimizer))
    if how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    reset.inner.state.clear()
    for group in reset.inner.param_groups:  # as a new inner optimizer has it
        fresh = type(reset.inner)([group], **CLASSES[kind][1])
        reset.inner.state.update(fresh.state)
    assert identical(steps(model, optimizer, 3, first=2), steps(other, reset, 3, first=2))


@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_state_that_is_moved_elsewhere_and_back_is_the_same(kind, before):
    straight = steps(*started(kind=kind, refresh="online"), 5)
    model, optimizer = started(kind=kind, refresh="online")
    steps(model, optimizer, before)
    for parameter, entry in optimizer.state.items():  # as Lightning does when a training is over
        optimizer.state[parameter] = {key: value.clone() for key, value in entry.items()}
    assert identical(steps(model, optimizer, 5 - before, first=before), straight)


def test_moments_that_are_written_before_the_first_step_count():
    model, optimizer = started()
    other, plain = copy.deepcopy((model, optimizer))
    for entry in optimizer.state.values():
        if "exp_avg" in entry:
            entry["exp_avg"] = torch.ones_like(entry["exp_avg"])
    for group in plain.inner.param_groups:
        for tensor in group["params"]:
            ones, zeros = torch.ones_like(tensor.detach()), torch.zeros_like(tensor.detach())
            plain.inner.state[tensor] = {"step": torch.tensor(0.0), "exp_avg": ones, "exp_avg_sq": zeros}
    assert identical(steps(model, optimizer, 3), steps(other, plain, 3))


def test_a_basis_cannot_be_changed_there():
    model, optimizer = started()
    steps(model, optimizer, 2)
    before = cases.parameters_of(model)
    entry = optimizer.state[model[0].weight]
    entry["egop/basis/basis"] = torch.eye(30).double()
    entry["exp_avg"] = torch.zeros(30).double()
    with pytest.raises(ValueError, match=r"'egop/basis/basis' was changed.*rebase\(basis\)"):
        steps(model, optimizer, 1)
    assert identical(cases.parameters_of(model), before)


def test_loading_shares_no_memory_with_what_was_loaded():
    model, optimizer = started()
    steps(model, optimizer, 2)
    other, loaded = copy.deepcopy(model), egop.ReparameterizedOptimizer(MLP.build(), torch.optim.AdamW)
    loaded = egop.ReparameterizedOptimizer(other, torch.optim.AdamW)
    loaded.load_state_dict(optimizer.state_dict())
    straight = steps(*copy.deepcopy((other, loaded)), 3, first=2)
    steps(model, optimizer, 3)
    assert identical(steps(other, loaded, 3, first=2), straight)


def test_a_state_dict_that_was_kept_stands_for_the_weights_it_was_kept_with():
    """Its coordinates must still match when the weights of that time are restored."""
    model, optimizer = started()
    steps(model, optimizer, 2)
    state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    steps(model, optimizer, 5, first=2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    steps(model, optimizer, 1)
    assert all(torch.allclose(value, weights[name], atol=1e-12) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["itself", "merged"])
def test_a_state_that_is_assigned_to_itself_is_the_same(how):
    straight = steps(*started(), 5)
    model, optimizer = started()
    steps(model, optimizer, 2)
    if how == "itself":
        optimizer.state = optimizer.state
    else:
        optimizer.state |= {}
    assert identical(steps(model, optimizer, 3, first=2), straight)


def jointly(**options):
    model = MLP.build()
    basis = basis_of(MLP, partition={"all": ["*"]}, structure=egop.Full())
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.01, **options)


def test_copies_of_the_entries_of_a_block_of_several_parameters_change_nothing():
    straight = steps(*jointly(), 5)
    model, optimizer = jointly()
    steps(model, optimizer, 2)
    for parameter, entry in optimizer.state.items():
        optimizer.state[parameter] = {key: value.clone() for key, value in entry.items()}
    assert identical(steps(model, optimizer, 3, first=2), straight)


WRITES = {
    "other coordinates": ("egop/coordinates/0", lambda: torch.zeros(30), "'egop/coordinates/0' was changed"),
    "a moment of another shape": ("exp_avg", lambda: torch.zeros(2, 2), r"'exp_avg' of .* of shape \(2, 2\)"),
    "a moment that is none": ("exp_avg", lambda: "x", r"'exp_avg' of block '0\.weight' is 'x'"),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_cannot_be_written_is_refused_and_nothing_else_is_taken(what):
    key, value, message = WRITES[what]
    straight = steps(*started(), 5)
    model, optimizer = started()
    steps(model, optimizer, 2)
    optimizer.state[model[2].weight]["exp_avg"] = torch.zeros(15).double()
    optimizer.state[model[0].weight][key] = value()
    with pytest.raises(ValueError, match=f"{message}.*Nothing"):
        optimizer.step()
    assert identical(steps(model, optimizer, 3, first=2), straight)


def test_other_writes_that_cannot_be_kept_are_refused():
    model, optimizer = jointly()
    steps(model, optimizer, 2)
    optimizer.state[model[2].bias]["mine"] = 3
    with pytest.raises(ValueError, match=r"block 'all', whose state is stored with its first parameter, '0\.weight'"):
        optimizer.step()
    optimizer.state[model[0].weight] = "x"
    with pytest.raises(ValueError, match="must be a dict, got 'x'"):
        optimizer.step()
    model = MLP.build()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis_of(MLP), lr=0.01)
    optimizer.state[model[0].weight]["egop/basis/basis"].mul_(2)
    with pytest.raises(ValueError, match="'egop/basis/basis' was changed"):
        steps(model, optimizer, 1)


def test_what_is_of_no_parameter_is_kept_saved_and_loaded():
    model, optimizer = started()
    optimizer.state["mine"], optimizer.state["number"] = {"count": 3}, 7
    steps(model, optimizer, 2)
    assert (optimizer.state["mine"], optimizer.state["number"]) == ({"count": 3}, 7)
    other, loaded = started()
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.state["mine"] == {"count": 3}
    del loaded.state["mine"]
    steps(other, loaded, 1)
    assert "mine" not in loaded.state


@pytest.mark.parametrize("look", [lambda each: each.state_dict(), lambda each: each.state, lambda each: each.basis])
@pytest.mark.parametrize("before", [0, 2])
def test_a_look_from_inside_inference_mode_changes_nothing(look, before):
    """Lightning does this when it saves a checkpoint after a validation."""
    straight = steps(*started("none", refresh="online"), 5)
    model, optimizer = started("none", refresh="online")
    steps(model, optimizer, before)
    model, optimizer = copy.deepcopy((model, optimizer))
    with torch.inference_mode():
        look(optimizer)
    assert identical(steps(model, optimizer, 5 - before, first=before), straight)


@pytest.mark.parametrize("refresh", ["online", "drifted"])
def test_a_look_before_a_rebase_changes_nothing(refresh):
    ends = []
    for look in (True, False):
        model, optimizer = started("none", refresh=refresh)
        if look:
            optimizer.state_dict()
        optimizer.rebase(basis_of(MLP, structure=egop.Kronecker()), moments="reset")
        ends.append(steps(model, optimizer, 5))
        ends.append(optimizer.refresher.counts())
    assert identical(ends[0], ends[2])
    assert ends[1] == ends[3]


# --- hooks ---


def test_hooks_see_the_state_that_is_saved_and_loaded():
    model, optimizer = started()
    steps(model, optimizer, 2)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append(sorted(state["state"][0])))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(sorted(state["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda each: seen.append(float(each.inner.param_groups[0]["lr"])))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen[0] == seen[1]
    assert {"exp_avg", "step", "egop/coordinates/0", "egop/basis/basis", "egop/about"} <= set(seen[0])
    assert seen[2] == 0.01


def test_a_hook_that_changes_the_state_is_heeded():
    model, optimizer = started()
    steps(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    other, loaded = copy.deepcopy((model, optimizer))

    def doubled(_, given):
        return given | {"state": {k: e | {"exp_avg": 2 * e["exp_avg"]} for k, e in given["state"].items()}}

    loaded.register_load_state_dict_pre_hook(doubled)
    loaded.load_state_dict(state)
    optimizer.load_state_dict(doubled(None, state))
    assert identical(steps(other, loaded, 3, first=2), steps(model, optimizer, 3, first=2))
