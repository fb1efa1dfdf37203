"""Blocks of parameters that start training late: unfrozen, or in a group that was added; and frozen blocks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from egop.numerics import eigenbasis
from egop.refresh.online import assign_turns
from explicit import identical

REFRESHES = [egop.Online(every=4), egop.Online(every=4, spread=False), egop.Online(every=4, tolerance=1e-3)]
IDS = ["in turn", "all at once", "drifted"]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)).double()


def make_optimizer(model, refresh, kind=torch.optim.Adam, **arguments):
    return egop.ReparameterizedOptimizer(model, kind, refresh=refresh, **{"lr": 0.01} | arguments)


def step(model, optimizer, seed):
    """Take one step with gradients that depend only on the parameter and the seed."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient if parameter.requires_grad else None
    optimizer.step()


def tensors_of(optimizer, name):
    """Copy all tensors of a block."""
    assert optimizer.basis is not None  # waits for a running renewal
    block = next(block for block in optimizer.blocks if block.name == name)
    state = optimizer.inner.state[block.coordinates[0]]
    own = {"coordinates": block.coordinates[0].detach().clone(), **block.change.tensors, **state}
    own |= {f"gram {key}": gram for key, gram in optimizer.refresher.grams.by_block[name].items()}
    return {key: value.clone() for key, value in own.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("refresh", REFRESHES, ids=IDS)
def test_a_layer_that_is_unfrozen_gets_its_basis_from_its_first_gradient(refresh):
    model = network()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, refresh)
    for seed in range(3):
        step(model, optimizer, seed)
    assert list(optimizer.basis) == ["1.weight", "2.weight", "3.weight"]
    model[0].requires_grad_(True)
    step(model, optimizer, 3)
    assert list(optimizer.basis) == ["1.weight", "2.weight", "3.weight", "0.weight"]
    gradient = model[0].weight.grad
    change = optimizer.basis["0.weight"]
    if refresh is not REFRESHES[1] and optimizer.refresher.turns.get("0.weight") != 0:
        torch.testing.assert_close(change.tensors["left"], eigenbasis(gradient @ gradient.mT)[1], rtol=0, atol=1e-12)
    for seed in range(4, 12):
        step(model, optimizer, seed)
    later = optimizer.basis["0.weight"]
    assert cases.round_trip_error(later) < 1e-12
    assert not later.equals(change)


@pytest.mark.parametrize("refresh", REFRESHES, ids=IDS)
def test_late_blocks_do_not_disturb_the_others(refresh):
    """Their bases, moments and turns equal those of a run without late blocks."""
    model, other = network(), network()
    optimizers = []
    for each in (model, other):
        each[0].requires_grad_(False)
        optimizers.append(make_optimizer(each, refresh))
    for seed in range(14):
        if seed == 5:
            model[0].requires_grad_(True)
        for each, optimizer in zip((model, other), optimizers, strict=True):
            step(each, optimizer, seed)
            before = each[0].weight.detach().clone()
        assert identical({"w": other[0].weight.detach()}, {"w": before})
    late, never = optimizers
    assert "0.weight" in late.basis
    assert "0.weight" not in never.basis
    if refresh.tolerance is None:  # otherwise a late block that has drifted renews all others, too
        for name in never.basis:
            mine, theirs = tensors_of(late, name), tensors_of(never, name)
            for key in theirs:
                torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-12)


def test_a_late_block_trains_like_one_from_the_start():
    model, other = network(), network()
    model[1].requires_grad_(False)
    late = make_optimizer(model, egop.Online(every=100), torch.optim.Adagrad)
    early = make_optimizer(other, egop.Online(every=100), torch.optim.Adagrad)
    for seed in range(3):
        step(model, late, seed)
    model[1].requires_grad_(True)
    for seed in range(3, 6):
        step(model, late, seed)
        step(other, early, seed)
    assert same(tensors_of(late, "1.weight"), tensors_of(early, "1.weight"))
    assert torch.equal(model[1].weight, other[1].weight)


@pytest.mark.parametrize("refresh", REFRESHES, ids=IDS)
@pytest.mark.parametrize("when", ["before it is unfrozen", "before its first step", "after its first step"])
def test_a_run_with_late_blocks_resumes_bit_for_bit(when, refresh):
    model = network()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = make_optimizer(model, refresh)
    for seed in range(3):
        step(model, optimizer, seed)
    if when != "before it is unfrozen":
        model[0].requires_grad_(True)
    if when == "after its first step":
        step(model, optimizer, 3)
    resumed = network()
    resumed[2].requires_grad_(False)
    resumed[0].requires_grad_(when != "before it is unfrozen")
    other = make_optimizer(resumed, refresh)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twins = copy.deepcopy((model, optimizer))
    for seed in range(4, 16):
        for each, own in ((model, optimizer), (resumed, other), twins):
            each[0].requires_grad_(True)
            each[2].requires_grad_(seed > 8)
            step(each, own, seed)
    assert set(optimizer.basis) == {f"{index}.weight" for index in range(4)}
    for each in (resumed, twins[0]):
        assert identical(dict(model.named_parameters()), dict(each.named_parameters()))


@pytest.mark.parametrize("refresh", REFRESHES, ids=IDS)
def test_a_group_added_during_training_gets_bases(refresh):
    model, extra = network(), nn.Linear(6, 4).double()
    optimizer = make_optimizer(model, refresh)
    both = nn.ModuleList([model, extra])
    step(model, optimizer, 0)
    optimizer.add_param_group({"params": [(f"extra.{name}", value) for name, value in extra.named_parameters()]})
    step(both, optimizer, 1)
    assert "extra.weight" in optimizer.basis
    assert "extra.bias" not in optimizer.basis
    for seed in range(2, 9):
        step(both, optimizer, seed)
    assert cases.round_trip_error(optimizer.basis["extra.weight"]) < 1e-12


def test_no_blocks_are_added_to_a_given_basis():
    model = network()
    first = make_optimizer(model, egop.Online())
    step(model, first, 0)
    given = egop.Basis([first.basis["1.weight"]])
    model[0].requires_grad_(False)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, given, refresh=egop.Online(every=2), lr=0.01)
    step(model, optimizer, 1)
    model[0].requires_grad_(True)
    step(model, optimizer, 2)
    assert list(optimizer.basis) == ["1.weight"]
    first.rebase(given, moments="keep")  # of some blocks; the others stay
    step(model, first, 3)
    assert len(first.basis) == 4
    first.rebase(egop.Basis([changed_to_shared(first.basis["1.weight"])]), moments="reset")
    step(model, first, 4)
    assert list(first.basis) == ["1.weight"]


def changed_to_shared(change):
    return egop.Shared().change(change.block, {"basis": change.tensors["right"]})


@pytest.mark.parametrize("refresh", REFRESHES, ids=IDS)
def test_a_frozen_layer_keeps_its_basis(refresh):
    model = network()
    optimizer = make_optimizer(model, refresh)
    for seed in range(6):
        step(model, optimizer, seed)
    model[1].requires_grad_(False)
    before, weight = tensors_of(optimizer, "1.weight"), model[1].weight.detach().clone()
    for seed in range(6, 16):
        step(model, optimizer, seed)
    assert same(tensors_of(optimizer, "1.weight"), before)
    assert torch.equal(model[1].weight, weight)
    model[1].requires_grad_(True)
    for seed in range(16, 24):
        step(model, optimizer, seed)
    assert optimizer.refresher.failures == 0
    assert not any(torch.equal(value, before[key]) for key, value in tensors_of(optimizer, "1.weight").items())


def test_structure_patterns_may_name_frozen_layers():
    model = network()
    model[0].requires_grad_(False)
    refresh = egop.Online(structure={"0.*": egop.Shared(), "1.*": egop.Kronecker()}, every=3)
    optimizer = make_optimizer(model, refresh)
    step(model, optimizer, 0)
    assert {name: change.kind for name, change in optimizer.basis.items()} == {"1.weight": "Kronecker"}
    model[0].requires_grad_(True)
    step(model, optimizer, 1)
    assert optimizer.basis["0.weight"].kind == "Shared"
    with pytest.raises(ValueError, match=r"Pattern '7\.\*' matches no block"):
        step(model, make_optimizer(model, egop.Online(structure={"7.*": egop.Shared()})), 2)


def test_partition_patterns_may_name_frozen_layers():
    model = network()
    model[0].requires_grad_(False)
    refresh = egop.Online(partition={"a": ["0.weight"], "b": ["1.weight", "1.bias"]}, structure=egop.Full())
    optimizer = make_optimizer(model, refresh)
    step(model, optimizer, 0)
    assert list(optimizer.basis) == ["b"]
    model[0].requires_grad_(True)
    step(model, optimizer, 1)
    assert list(optimizer.basis) == ["b", "0.weight"]


def test_late_blocks_beyond_the_memory_limit_are_skipped_with_a_warning():
    model = network()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, egop.Online(structure=egop.Kronecker(), memory=4 * 2 * 36 * 8))
    step(model, optimizer, 0)
    model[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"trained from now on \(0\.weight, 0\.bias\) get no basis: The bases need .*'0\.weight'"
    ):
        step(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, 2)
    assert "0.weight" not in optimizer.basis


NOTHING = {
    "biases only": (
        lambda: nn.ParameterDict({"b": nn.Parameter(torch.zeros(3))}),
        egop.Online(),
        r"egop\.Online found no weight to rotate.*Skipped weights: none\. .*Biases and norm layers are never",
    ),
    "embeddings": (
        lambda: nn.Embedding(5, 3),
        egop.Online(tolerance=0.1),
        r"egop\.Online found no weight.*Skipped weights: 'weight' \(an embedding\).*=\{'\*': egop\.Kronecker\(\)\}",
    ),
    "frozen": (
        lambda: network().requires_grad_(False),
        egop.Online(),
        r"10 parameters are frozen; weights get a basis once they are unfrozen",
    ),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_model_without_weights_to_rotate_trains_with_one_warning(what):
    make, refresh, message = NOTHING[what]
    model = make()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, refresh=refresh, lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            optimizer.step()
    texts = [str(each.message) for each in caught if "found no weight" in str(each.message)]
    assert len(texts) == 1
    with pytest.warns(UserWarning, match=message):
        warnings.warn(texts[0], stacklevel=1)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old - 1 if parameter.requires_grad else old)


def test_turns_are_kept_and_new_blocks_take_the_cheapest_steps():
    first = assign_turns({"a": 8, "b": 8, "c": 1}, 4, {})
    turns = assign_turns({"a": 8, "b": 8, "c": 1, "d": 2, "e": 2}, 4, first)
    assert {name: turns[name] for name in first} == first
    assert len({turns["d"], turns["a"], turns["b"]}) == 3
    assert turns["e"] != turns["d"]


def test_renew_basis_skips_frozen_blocks():
    model = network()
    optimizer = make_optimizer(model, egop.Online(every=100))
    for seed in range(3):
        step(model, optimizer, seed)
    model[1].requires_grad_(False)
    before = optimizer.basis
    for seed in range(3, 9):
        step(model, optimizer, seed)
    optimizer.renew_basis()
    after = optimizer.basis
    assert not after["0.weight"].equals(before["0.weight"])
    assert after["1.weight"].equals(before["1.weight"])


def test_no_blocks_are_added_after_a_user_has_replaced_them():
    model = network()
    model[2].requires_grad_(False)
    optimizer = make_optimizer(model, egop.Online(every=4))
    for seed in range(3):
        step(model, optimizer, seed)
    blocks = [block.change.block for block in optimizer.blocks]
    given = [egop.Shared().change(block, {"basis": torch.eye(6, dtype=torch.float64)}) for block in blocks]
    optimizer.rebase(egop.Basis(given), moments="reset")
    model[2].requires_grad_(True)
    for seed in range(3, 6):
        step(model, optimizer, seed)
    assert [block.name for block in optimizer.blocks] == [block.name for block in blocks]
    assert {block.change.kind for block in optimizer.blocks} == {"Shared"}
