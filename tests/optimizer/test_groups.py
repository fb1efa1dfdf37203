"""Parameter groups as frameworks make them, with the names that the model has."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import cases
import egop
from egop.optimizer import stacks
from egop.optimizer.groups import name_groups

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class Wrapper(nn.Module):
    """As DistributedDataParallel, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "none": lambda model: model,
    "module": Wrapper,
    "compiled": torch.compile,
    "compiled module": lambda model: torch.compile(Wrapper(model)),
    "module of a compiled one": lambda model: Wrapper(torch.compile(model)),
}

# What frameworks give for a model: all tensors, groups of them, one tensor a group, submodules, and names as well.
GIVEN = {
    "parameters": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "groups": lambda model: [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": model[2].parameters()}],
    "one a group": lambda model: [{"params": each} for each in model.parameters()],
    "submodules": lambda model: [{"params": model[0]}, {"params": model[2]}],
    "the module": lambda model: model,
    "names too": lambda model: model.named_parameters(),
    "some names": lambda model: [("0.weight", model[0].weight), model[0].bias, *model[2].parameters()],
    "param_names": lambda model: [{"params": list(model.parameters()), "param_names": NAMES}],
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("given", GIVEN)
def test_parameters_have_the_names_of_the_model(given, wrapper):
    model = cases.mlp()
    groups = name_groups(GIVEN[given](model), model=WRAPPERS[wrapper](model))
    assert [name for group in groups for name in group["param_names"]] == NAMES
    found = [parameter for group in groups for parameter in group["params"]]
    assert all(one is other for one, other in zip(found, model.parameters(), strict=True))


def test_groups_keep_their_options():
    model = cases.mlp()
    groups = name_groups(GIVEN["groups"](model), model=model)
    assert [group.get("lr") for group in groups] == [0.1, None]


def test_names_with_a_wrappers_prefix_are_those_of_the_model():
    model = cases.mlp()
    wrapped = Wrapper(model)
    for outer in (model, wrapped):
        groups = name_groups(wrapped.named_parameters(), model=outer)
        assert groups[0]["param_names"] == NAMES


def test_a_tied_parameter_may_have_any_of_its_names():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert name_groups([model[1].weight], model=model)[0]["param_names"] == ["0.weight"]
    assert name_groups([("1.weight", model[1].weight)], model=model)[0]["param_names"] == ["1.weight"]


def test_a_parameter_of_a_loss_has_a_name_of_its_own():
    model, temperature = cases.mlp(), nn.Parameter(torch.zeros(()))
    groups = name_groups([*model.parameters(), ("temperature", temperature)], model=model)
    assert groups[0]["param_names"] == [*NAMES, "temperature"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda m, o: o.parameters(),
            r"A parameter of shape \(5, 6\) does not belong to the model \(Sequential\), so it has no",
        ),
        (
            lambda m, o: o.named_parameters(),
            r"given as '0.weight' is not the model's parameter of this name",
        ),
        (
            lambda m, o: [("weight", m[0].weight)],
            r"given as 'weight' is called '0.weight' in the model \(Sequential\)\. Pass the module that owns these",
        ),
        (lambda m, o: [("2.weight", m[0].weight)], "given as '2.weight' is called '0.weight' in the model"),
        (lambda m, o: [m[0].weight, m[0].weight], "The parameter name '0.weight' is given twice"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(given, message):
    model, other = cases.mlp(), cases.mlp()
    with pytest.raises(ValueError, match=message):
        name_groups(given(model, other), model=model)


def test_what_is_no_model_or_no_parameter_is_refused():
    model = cases.mlp()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list\."):
        egop.ReparameterizedOptimizer(model.parameters(), torch.optim.SGD, model=[model])
    with pytest.raises(TypeError, match=r"Parameters must come with their names, got str.*add model=model"):
        egop.ReparameterizedOptimizer(["0.weight"], torch.optim.SGD, model=model)


# --- the optimizer ---


def trained(model, optimizer, steps=3):
    cases.train(model, optimizer, cases.DEEP.batches(), steps)
    return cases.parameters_of(model)


@pytest.mark.parametrize("basis", [False, True], ids=["online", "basis"])
def test_groups_without_names_train_as_those_with_names(basis):
    results = []
    for named in (False, True):
        model = cases.DEEP.build()
        found = cases.estimate(cases.DEEP.objective(model), structure=egop.Shared()) if basis else None
        refresh = None if basis else egop.Online()
        pairs = list(model.named_parameters())
        decayed, rest = ([pair for pair in pairs if (pair[1].dim() > 1) is kind] for kind in (True, False))
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if not named:
            groups = [group | {"params": [each for _, each in group["params"]]} for group in groups]
        optimizer = egop.ReparameterizedOptimizer(
            groups, torch.optim.AdamW, found, model=model, refresh=refresh, lr=0.01
        )
        results.append(trained(model, optimizer))
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


def test_roles_are_those_of_the_model_whatever_the_groups():
    model = cases.DEEP.build()
    groups = [{"params": [model[6].weight]}, {"params": model[:6].parameters()}]
    optimizer = egop.ReparameterizedOptimizer(groups, torch.optim.AdamW, model=model, refresh=egop.Online(), lr=0.01)
    trained(model, optimizer)
    assert list(optimizer.basis) == ["0.weight", "2.weight", "4.weight"]
    assert optimizer.refresher.unrotated == {"6.weight": "the output head"}


@pytest.mark.parametrize("given", ["model=", "the model itself"])
def test_a_group_that_is_added_needs_no_names_where_the_model_is_known(given):
    model = cases.DEEP.build()
    if given == "model=":
        optimizer = egop.ReparameterizedOptimizer(model[0].parameters(), torch.optim.AdamW, model=model, lr=0.01)
        optimizer.add_param_group({"params": model[2:].parameters()})
        assert optimizer._engine.layers["6.weight"].kind == "head"
        before = cases.parameters_of(model)
        assert all(not torch.equal(before[name], value) for name, value in trained(model, optimizer).items())
    else:
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.01)
        model.added = nn.Linear(3, 3)
        optimizer.add_param_group({"params": list(model.added.parameters())})
    assert not any(layer.is_guess for layer in optimizer._engine.layers.values())
    assert [name for group in optimizer.param_groups for name in group["param_names"]] == [
        name for name, _ in model.named_parameters()
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_does_not_take_the_model_along(copied):
    model = cases.DEEP.build()
    optimizer = egop.ReparameterizedOptimizer(model.parameters(), torch.optim.AdamW, model=model, lr=0.01)
    twin = copied(optimizer)
    with pytest.raises(TypeError, match="Parameters must come with their names"):
        twin.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    twin.add_param_group({"params": [("more", nn.Parameter(torch.zeros(3)))]})
    assert twin.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]


def test_many_groups_that_are_added_are_stacked_once(monkeypatch):
    """Stacking all blocks for each of n groups made the time grow with n²: 19 seconds for 800 of them."""
    stacked = []
    original = stacks.Stack.__init__
    monkeypatch.setattr(
        stacks.Stack,
        "__init__",
        lambda self, blocks, *rest: stacked.append(len(blocks)) or original(self, blocks, *rest),
    )
    layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(20))
    optimizer = egop.ReparameterizedOptimizer([layers[0].weight], torch.optim.SGD, model=layers, lr=0.1)
    for index, layer in enumerate(layers[1:], 1):
        block = egop.basis.partition.Block.from_tensors(f"{index}.weight", {f"{index}.weight": layer.weight})
        basis = egop.Basis([egop.Shared().change(block, {"basis": torch.eye(3)})])
        optimizer.add_param_group({"params": [layer.weight], "basis": basis})
    sum(layer.weight.square().sum() for layer in layers).backward()
    optimizer.step()
    assert stacked == [19]
