"""EGOP whose groups or parameters are edited by hand: each parameter keeps its own state and its own role."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import cases
import egop
from egop_runs import LAST, make, network, train
from explicit import identical


def build(layers=3, bias=False):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, bias=bias) for _ in range(layers)), nn.Linear(6, 2))


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def reverse(optimizer):
    optimizer.param_groups[0]["params"].reverse()


def exchange(optimizer):
    """Move a parameter to the other group and another one back."""
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def move(optimizer):
    """Move a parameter to the other group, without its name."""
    first, second = (group["params"] for group in optimizer.param_groups)
    second.append(first.pop(0))


@pytest.mark.parametrize("edit", [reverse, exchange, move])
def test_parameters_may_be_moved_within_and_between_groups(edit):
    results = []
    for edits in (False, True):
        model = network()
        named = list(model.named_parameters())
        optimizer = make([{"params": named[::2]}, {"params": named[1::2]}], model=model)
        train(model, optimizer)
        if edits:
            edit(optimizer)
        results.append(train(model, optimizer, LAST, 2 * LAST))
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    assert identical(*results)


def test_each_layer_keeps_its_own_state_if_layers_take_turns():
    model = build()
    optimizer = egop.EGOP([model[0].weight], model=model, lr=1e-2)
    for seed in range(6):
        optimizer.param_groups[0]["params"] = [model[seed % 3].weight]
        step(model, optimizer, seed)
    assert [float(optimizer.state[model[index].weight]["step"]) for index in range(3)] == [2, 2, 2]
    assert optimizer.param_groups[0]["param_names"] == ["2.weight"]


def test_parameters_may_be_taken_out_of_a_group():
    model = build(bias=True)
    optimizer = egop.EGOP(model, lr=1e-2)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    assert [block.name for block in optimizer.plan.chosen] == ["0.weight"]
    step(model, optimizer, 1)
    assert float(optimizer.state[model[1].weight]["step"]) == 1
    assert float(optimizer.state[model[0].weight]["step"]) == 2


def test_a_parameter_that_nobody_has_named_is_refused():
    model = build()
    optimizer = egop.EGOP(model)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    for use in (optimizer.step, lambda: optimizer.plan, optimizer.metrics):
        with pytest.raises(ValueError, match=r"of shape \(2, 2\) .*add_param_group"):
            use()


def test_parameters_that_are_replaced_with_their_state_are_freed():
    model = build()
    optimizer = egop.EGOP(model, lr=1e-2)
    replaced = []
    for seed in range(5):
        step(model, optimizer, seed)
        old = model[0].weight
        model[0].weight = nn.Parameter(old.detach().clone())
        optimizer.state[model[0].weight] = optimizer.state.pop(old)
        optimizer.param_groups[0]["params"][0] = model[0].weight
        replaced.append(weakref.ref(old))
        del old
    step(model, optimizer, 5)
    gc.collect()
    assert not any(each() is not None for each in replaced)
    assert float(optimizer.state[model[0].weight]["step"]) == 6


@pytest.mark.parametrize("steps", [0, 2])
def test_a_flattened_weight_is_refused(steps):
    model = build()
    optimizer = egop.EGOP(model)
    for seed in range(steps):
        step(model, optimizer, seed)
    model[1].weight.data = model[1].weight.data.flatten()
    with pytest.raises(ValueError, match=r"'1.weight' of shape \(6, 6\) was replaced by one of shape \(36,\)"):
        step(model, optimizer, steps)


def test_a_table_that_grows_with_its_state_gets_the_size_of_updates_that_fits():
    model = nn.Module()
    model.points = nn.Parameter(torch.randn(10, 3))
    model.weight = nn.Parameter(torch.randn(4, 4))
    optimizer = egop.EGOP(model)
    step(model, optimizer, 0)
    state = optimizer.state.pop(model.points)
    moments = {name: torch.cat([state[name], torch.zeros(5, 3)]) for name in ("exp_avg", "exp_avg_sq")}
    model.points = nn.Parameter(torch.cat([model.points.detach(), torch.randn(5, 3)]))
    optimizer.state[model.points] = state | moments
    optimizer.param_groups[0]["params"][0] = model.points
    step(model, optimizer, 1)
    assert optimizer._choice.matrices["points"] == egop.EGOP(model)._choice.matrices["points"]


def estimate_basis(model):
    objective = egop.Objective(model, lambda model, inputs: model(inputs).square().mean(), [torch.randn(8, 6)])
    return egop.estimate(objective, samples=64, progress=False)


def tie_data(model):
    model[1].weight.data = model[0].weight.data


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_share_memory_are_refused(late):
    model = build()
    if not late:
        tie_data(model)
        for make_optimizer in (
            egop.EGOP,
            lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, estimate_basis(model)),
        ):
            with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share memory"):
                make_optimizer(model)
    else:
        optimizer = egop.EGOP(model)
        model[1].weight = nn.Parameter(model[0].weight.data)
        optimizer.param_groups[0]["params"][1] = model[1].weight
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share memory"):
                step(model, optimizer, 0)


@pytest.mark.parametrize("option", ["maximize", "amsgrad", "capturable", "differentiable"])
def test_adamws_other_options_are_accepted_if_they_are_off(option):
    model = build()
    optimizer = egop.EGOP(model, **{option: False})
    assert option not in optimizer.param_groups[0]
    optimizer.param_groups[0][option] = True
    with pytest.raises(ValueError, match=f"no option {option}"):
        step(model, optimizer, 0)
    with pytest.raises(ValueError, match=f"no option {option}"):
        egop.EGOP(model, **{option: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        egop.EGOP(model, speed=1)


def test_exclude_may_be_none():
    assert egop.EGOP(build(), exclude=None).plan == egop.EGOP(build()).plan


class FullyShardedDataParallel(nn.Module):
    """As torch's FSDP1 does, keeps all parameters in one vector."""

    def __init__(self, module):
        super().__init__()
        self._flat_param = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))


@pytest.mark.parametrize("make_optimizer", [
    egop.EGOP,
    lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online()),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_models_whose_layers_are_hidden_are_refused(make_optimizer):
    with pytest.raises(TypeError, match="fully_shard"):
        make_optimizer(FullyShardedDataParallel(build()))
    with pytest.raises(TypeError, match=r"before torch\.jit\.script"):
        make_optimizer(torch.jit.script(build()))


def test_a_whole_checkpoint_in_half_precision_leaves_no_copies_in_a_float32_model():
    model, other = network(torch.bfloat16), network(torch.float32)
    optimizer, again = make(model), make(other)
    train(model, optimizer)
    again.load_state_dict(optimizer.state_dict())
    train(other, again, LAST, LAST + 1)
    assert not any("master" in state for state in again.state.values())
    assert len(cases.parameters_of(other)) == len(again.state)


def test_the_plan_says_why_matrices_of_norm_layers_and_biases_are_not_rotated():
    model = nn.Module()
    model.norm = nn.LayerNorm((4, 4))
    model.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_parameter("bias_table", nn.Parameter(torch.zeros(5, 3)))
    assert egop.EGOP(model).plan.unrotated == {
        "bias_table": "a bias",
        "norm.weight": "part of a normalization layer",
        "norm.bias": "part of a normalization layer",
        "layers.1.weight": "the output head",
    }


def test_norms_may_be_excluded_and_typing_errors_get_suggestions():
    assert egop.EGOP(network(), exclude=["norm"]).plan == egop.EGOP(network()).plan
    with pytest.raises(ValueError, match=r"'upp.weight' in exclude matches no parameter. Closest: up.weight, "):
        egop.EGOP(network(), exclude=["upp.weight"])


def test_text_shows_the_settings_of_each_group():
    model = build(bias=True)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.5}]
    text = str(egop.EGOP(groups, model=model))
    assert "group 0: 4 tensors, lr 0.001, betas (0.9, 0.95), eps 1e-08, weight_decay 0.01, " in text
    assert "group 1: 4 tensors, weight_decay 0, lr 0.5, " in text


def swap(optimizer):
    parameters = optimizer.param_groups[0]["params"]
    parameters[0], parameters[1] = parameters[1], parameters[0]


@pytest.mark.parametrize("way", ["state_dict", "load_state_dict", "deepcopy", "pickle"])
def test_an_edit_is_followed_before_anything_is_saved_loaded_or_copied(way):
    model, other = build(), build()
    optimizer, again = (egop.EGOP(each, lr=1e-2) for each in (model, other))
    for seed in range(4):
        step(model, optimizer, seed)
        step(other, again, seed)
    saved = copy.deepcopy(optimizer.state_dict())
    swap(again)
    if way == "state_dict":
        state = again.state_dict()
        again = egop.EGOP([(name, other.get_parameter(name)) for name in state["param_groups"][0]["param_names"]],
                          model=other)  # fmt: skip
        again.load_state_dict(state)
    elif way == "load_state_dict":
        with pytest.raises(ValueError, match=r"other parameters than this optimizer: '0\.weight' instead"):
            again.load_state_dict(saved)
    else:
        make_copy = copy.deepcopy if way == "deepcopy" else lambda pair: pickle.loads(pickle.dumps(pair))
        other, again = make_copy((other, again))
    for seed in range(4, 8):
        step(model, optimizer, seed)
        step(other, again, seed)
    assert identical(cases.parameters_of(model), cases.parameters_of(other))


def test_a_refused_edit_changes_nothing():
    model = build()
    optimizer = egop.EGOP(model, lr=1e-2)
    step(model, optimizer, 0)
    parameters = optimizer.param_groups[0]["params"]
    before = list(parameters)
    parameters[0] = nn.Parameter(before[0].detach().clone())
    parameters[1] = nn.Parameter(torch.ones(3, 3))
    for _ in range(2):
        with pytest.raises(ValueError, match="was replaced by one of shape"):
            optimizer.step()
    parameters[:] = before
    step(model, optimizer, 1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_a_copy_remembers_roles():
    model = build()
    other, optimizer = copy.deepcopy((model, egop.EGOP(model)))
    (group,) = optimizer.param_groups
    place = group["param_names"].index("3.weight")
    head, _ = group["params"].pop(place), group["param_names"].pop(place)
    step(other, optimizer, 0)
    group["params"].append(head)
    group["param_names"].append("3.weight")
    step(other, optimizer, 1)
    assert optimizer.plan.unrotated["3.weight"] == "the output head"


def test_a_tied_weight_keeps_the_name_it_was_given():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = egop.EGOP(model["c"].named_parameters("c"), model=model)
    optimizer.add_param_group({"params": [("b.weight", model["a"].weight)]})
    step(model, optimizer, 0)
    assert optimizer.param_groups[1]["param_names"] == ["b.weight"]
