"""What EGOP does when gradients vanish or explode, and when others change its state, its groups or its model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cases
import egop
from egop_runs import GAINS, LAST, SETTINGS, backward, make, network, train
from explicit import identical
from processes import run

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def stop_gradients(model, optimizer, steps, weights):
    """Take steps in which the gradients of some weights are zero; return how far these move, beyond weight decay."""
    before = [weight.detach().clone() for weight in weights]
    for step in range(steps):
        backward(model, step)
        for weight in weights:
            weight.grad.zero_()
        optimizer.step()
    return [float((old - new).norm()) for old, new in zip(before, weights, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotate", [True, False])
def test_a_weight_whose_gradients_stay_zero_comes_to_rest(rotate, device):
    model = network(torch.float32).to(device)
    optimizer = make(model, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), rotate=rotate, every=20)
    train(model, optimizer, 0, 20)
    weights = [model.up.weight, model.stem.weight, model.experts]
    sizes = [1e-3 * 0.4 * weight.numel() ** 0.5 for weight in weights]  # of an update, apart from the gain
    sizes[1] *= GAINS["stem.weight"]
    for most in (100, 0.1):  # updates in all
        moved = stop_gradients(model, optimizer, 150, weights)
        assert all(one < most * size for one, size in zip(moved, sizes, strict=True))


def test_gradients_far_below_eps_move_weights_less():
    moved = {}
    for scale in (1.0, 1e-3, 1e-12):
        model = network()
        optimizer = make(model, eps=1e-6)
        before = model.up.weight.detach().clone()
        backward(model, 0)
        model.up.weight.grad.mul_(scale)
        optimizer.step()
        moved[scale] = float((model.up.weight - before * (1 - 1e-3)).norm())
    assert moved[1e-3] == pytest.approx(moved[1.0], rel=0.02)
    assert moved[1e-12] < 1e-4 * moved[1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_counted_exactly_with_a_half_precision_default(dtype):
    try:
        torch.set_default_dtype(dtype)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = egop.EGOP(model, every=64)
        for _ in range(300):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {float(state["step"]) for state in optimizer.state.values()} == {300.0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotate", [True, False])
def test_a_weight_survives_a_huge_gradient(rotate, device):
    model = network(torch.float32).to(device)
    optimizer = make(model, rotate=rotate, every=2)
    train(model, optimizer, 0, 5)
    backward(model, 5)
    model.down.weight.grad[0, 0] = 1e21  # its square overflows
    optimizer.step()
    train(model, optimizer, 6, 12)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def zero_momenta(_, state_dict):
    state_dict = copy.deepcopy(state_dict)
    for state in state_dict["state"].values():
        state["exp_avg"].zero_()
    return state_dict


def test_hooks_may_replace_the_state_dict_that_is_loaded():
    model = network()
    optimizer = make(model)
    train(model, optimizer)
    saved = optimizer.state_dict()
    handle = optimizer.register_load_state_dict_pre_hook(zero_momenta)
    optimizer.load_state_dict(saved)
    assert not any(bool(state["exp_avg"].any()) for state in optimizer.state.values())
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict["inner"])
    optimizer.load_state_dict({"inner": saved})
    index = optimizer.param_groups[0]["param_names"].index("up.weight")
    assert identical(optimizer.state[model.up.weight], saved["state"][index])
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: {})
    with pytest.raises(ValueError, match="incomplete or damaged"):
        optimizer.load_state_dict({"inner": saved})
    with pytest.raises(ValueError, match="incomplete or damaged"):
        make(model).load_state_dict([saved])


def test_a_head_that_is_frozen_at_first_is_not_rotated():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[4].requires_grad_(False)
    optimizer = egop.EGOP(model)
    model[4].requires_grad_(True)
    assert optimizer.plan.unrotated == {"4.weight": "the output head"}
    assert [block.name for block in optimizer.plan.chosen] == ["0.weight", "2.weight"]


def test_the_trained_part_of_a_model_has_a_head_of_its_own():
    """A student next to a frozen teacher."""
    model = nn.ModuleDict({
        "student": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        "teacher": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False),
    })  # fmt: skip
    assert egop.EGOP(model).plan.unrotated == {"student.2.weight": "the output head"}


def test_sets_of_weights_that_change_from_step_to_step_take_no_further_memory():
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)), nn.Linear(32, 2))
    optimizer = egop.EGOP(model, every=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        for index in torch.randperm(8, generator=generator)[:3]:  # as with dropped layers
            model[int(index)].weight.grad = None
        optimizer.step()
    held = [stack.bases for _, indexed in optimizer._engine._stacks.values() for stack, _ in indexed]
    assert not any(bases is not None for bases in held)


def test_writes_to_the_basis_are_noticed_even_if_autograd_does_not_count_them():
    results = []
    for loses_count in (False, True):
        model = network()
        optimizer = make(model, every=100)
        train(model, optimizer, 0, 7)
        basis = optimizer.state[model.up.weight]["basis"]
        (basis.data if loses_count else basis).copy_(torch.eye(8).double())
        results.append(train(model, optimizer, 7, 8))  # no renewal
    assert identical(*results)


def broadcast_state(rank, world):
    """Resume in one process and send everything to the other, which has taken a step to have a state."""
    model = network()
    optimizer = make(model, every=100)
    train(model, optimizer, 0, 7 if rank == 0 else 1)
    for parameter in model.parameters():
        for tensor in (parameter.data, *optimizer.state[parameter].values()):
            dist.broadcast(tensor, 0)
    train(DistributedDataParallel(model), optimizer, 7, 8)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_processes_agree_after_a_state_was_broadcast():
    one, two = run(broadcast_state, 2)
    assert identical(one, two)


def test_a_step_in_inference_mode_is_like_any_other():
    model, other = network(), network()
    optimizer, again = make(model), make(other)
    for step in range(LAST):
        backward(model, step)
        backward(other, step)
        optimizer.step()
        with torch.inference_mode():
            again.step()
    assert identical(cases.parameters_of(model), cases.parameters_of(other))


def test_a_copy_warns_when_it_guesses_the_roles_of_further_parameters():
    model = network()
    clone = copy.deepcopy(make(model))
    layer = nn.Linear(8, 8).double()
    with pytest.warns(UserWarning, match="roles were guessed") as caught:
        clone.add_param_group({"params": [("more.weight", layer.weight), ("more.bias", layer.bias)]})
    assert "Weights to rotate: more.weight." in str(caught[0].message)


@pytest.mark.parametrize("way", ["load_state_dict", "deepcopy"])
def test_state_follows_parameters_that_are_replaced_before_the_first_step(way):
    model, other = network(), network()
    optimizer = make(model)
    train(model, optimizer)
    if way == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    else:
        again = make(other)
        again.load_state_dict(optimizer.state_dict())
        other.load_state_dict(model.state_dict())
    fresh = {id(old): nn.Parameter(old.detach().clone()) for old in other.parameters()}
    for module in other.modules():
        for name, old in module.named_parameters(recurse=False):
            setattr(module, name, fresh[id(old)])
    for group in again.param_groups:
        group["params"] = [fresh[id(old)] for old in group["params"]]
    assert identical(train(model, optimizer, LAST, 2 * LAST), train(other, again, LAST, 2 * LAST))
    assert len(again.state) == len(fresh)


def test_one_optimizer_for_each_parameter_does_not_warn_of_biases():
    """As for steps inside the backward pass."""
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("up.bias", "norm.weight", "up.weight"):
            egop.EGOP([model.get_parameter(name)], model=model)
    with pytest.warns(UserWarning, match="found no weight matrix"):
        egop.EGOP([model.head.weight], model=model)


def test_options_that_contradict_are_refused():
    model = network()
    with pytest.raises(ValueError, match="foreach=True and fused=True exclude each other"):
        egop.EGOP(model, foreach=True, fused=True)
    with pytest.raises(ValueError, match="exclude applies to all weights: pass it to"):
        egop.EGOP([{"params": model.parameters(), "exclude": ["up"]}], model=model, **SETTINGS)


@pytest.mark.parametrize(("name", "value", "message"), [("rotate", False, "create a new"), ("every", 0, "every value")])
def test_a_group_cannot_change_what_holds_for_all(name, value, message):
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, 2, 3)
    assert identical(before, model.state_dict())
