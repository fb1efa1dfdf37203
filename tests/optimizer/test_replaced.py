"""Parameters that a framework has put in the place of others, or cast or moved, are noticed at the next step."""

import copy

import pytest
import torch
from torch import nn

import cases
import egop
from cases import MLP
from explicit import case_and_basis, distance, identical, logistic

KINDS = {
    "no basis": dict,
    "fixed": lambda: {"basis": case_and_basis("blocks")[1]},
    "online": lambda: {"refresh": egop.Online(every=2)},
}


def started(kind):
    model = MLP.build()
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.01, **KINDS[kind]())


def steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        batch = [
            each.to(model[0].weight.dtype) if each.is_floating_point() else each for each in MLP.batches()[step % 4]
        ]
        logistic(model, batch).backward()
        optimizer.step()
    return cases.parameters_of(model)


def replace(model, optimizer, make=lambda parameter: nn.Parameter(parameter.detach().clone())):
    """Give the model and the groups other parameters, as accelerate's FSDP2 does."""
    new = {}
    for name, parameter in list(model.named_parameters()):
        module, _, own = name.rpartition(".")
        new[parameter] = make(parameter)
        setattr(model.get_submodule(module), own, new[parameter])
    for group in optimizer.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_were_replaced_train_on_as_those_before(kind, after):
    straight = steps(*started(kind), 6)
    model, optimizer = started(kind)
    steps(model, optimizer, after)
    old = list(model.parameters())
    replace(model, optimizer)
    assert identical(steps(model, optimizer, 6 - after, first=after), straight)
    assert not any(one is other for block in optimizer.blocks for one in block.originals for other in old)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_came_with_the_new_parameters_hold(kind):
    model, optimizer = started(kind)
    steps(model, optimizer, 3)
    other, written = copy.deepcopy((model, optimizer))
    replace(model, optimizer, lambda parameter: nn.Parameter(parameter.detach() + 0.1))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert distance(steps(model, optimizer, 3, 3), steps(other, written, 3, 3)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_was_cast_trains_on_in_its_new_precision(kind):
    model, optimizer = started(kind)
    model.float()
    steps(model, optimizer, 3)
    assert {block.change.block.dtype for block in optimizer.blocks} <= {torch.float32}
    other, single = copy.deepcopy((model, optimizer))
    model.double()
    end = steps(model, optimizer, 3, 3)
    assert {value.dtype for value in end.values()} == {torch.float64}
    assert {block.change.block.dtype for block in optimizer.blocks} <= {torch.float64}
    straight = {name: value.double() for name, value in steps(other, single, 3, 3).items()}
    assert 0 < distance(end, straight) < 1e-4


SQUARE = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize("between_groups", [False, True])
@pytest.mark.parametrize("kind", ["no basis", "online"])
def test_parameters_that_change_places_keep_what_is_theirs(kind, between_groups):
    def trained(swapped):
        model = copy.deepcopy(SQUARE)
        named = list(model.named_parameters())
        parts = [named[:2], named[2:]] if between_groups else [named]
        optimizer = egop.ReparameterizedOptimizer(
            [{"params": part} for part in parts], torch.optim.AdamW, lr=0.01, model=model, **KINDS[kind]()
        )
        for step in range(6):
            if step == 3 and swapped:
                first, last = optimizer.param_groups[0]["params"], optimizer.param_groups[-1]["params"]
                first[0], last[-2] = last[-2], first[0]
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 8).reshape(2, 4) + step).square().sum().backward()
            optimizer.step()
        return cases.parameters_of(model), optimizer

    (straight, _), (swapped, optimizer) = trained(False), trained(True)
    assert identical(straight, swapped)
    assert optimizer.param_groups[0]["param_names"][0] == "2.weight"


def test_a_state_that_is_given_to_the_new_parameter_is_its():
    """Programs that grow and prune points do this."""
    straight = steps(*started("no basis"), 5)
    model, optimizer = started("no basis")
    steps(model, optimizer, 2)
    old = model[0].weight
    state = optimizer.state.pop(old)
    model[0].weight = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = model[0].weight
    optimizer.state[model[0].weight] = state
    assert identical(steps(model, optimizer, 3, first=2), straight)


def test_a_single_number_is_cast_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

    model = Scaled()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.scale.square().backward()
        optimizer.step()
        model.double()
    assert optimizer.inner.state[model.scale]["exp_avg"].dtype is torch.float64


@pytest.mark.parametrize("what", ["twice", "computed", "shape", "fewer", "another kind"])
def test_parameters_that_do_not_fit_are_refused_and_nothing_moves(what):
    model, optimizer = started("fixed")
    steps(model, optimizer, 2)
    state, before = copy.deepcopy(optimizer.inner.state), cases.parameters_of(model)
    group = optimizer.param_groups[0]
    kept = group["params"]
    if what == "shape":
        group["params"] = [nn.Parameter(torch.zeros(2, 2)), *kept[1:]]
    elif what == "fewer":
        group["params"] = kept[1:]
    elif what == "twice":
        group["params"] = [kept[0], kept[0], *kept[2:]]
    elif what == "computed":
        group["params"] = [kept[0] * 1, *kept[1:]]
    else:
        group["params"] = [nn.Parameter(torch.zeros(5, 6, dtype=torch.cfloat)), *kept[1:]]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="The parameters in param_groups were replaced, and training cannot continue"):
        optimizer.step()
    group["params"] = kept
    assert identical(cases.parameters_of(model), before)
    assert all(
        torch.equal(one["exp_avg"], other["exp_avg"])
        for one, other in zip(optimizer.inner.state.values(), state.values(), strict=True)
    )


def started_with_every(objective_of):
    model = MLP.build()
    refresh = egop.Every(2, objective_of(model), samples=4, structure=egop.Full())
    return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh)


def test_an_objective_of_the_model_follows_it():
    def whole(model):
        return egop.Objective(model, logistic, MLP.batches())

    straight = steps(*started_with_every(whole), 6)
    model, optimizer = started_with_every(whole)
    steps(model, optimizer, 3)
    replace(model, optimizer)
    assert identical(steps(model, optimizer, 3, first=3), straight)


def test_an_objective_of_the_parameters_before_is_refused():
    def of_tensors(model):
        tensors = dict(model.named_parameters())
        return egop.Objective.from_function(
            lambda batch, **values: logistic(lambda x: torch.func.functional_call(model, values, (x,)), batch),
            tensors,
            MLP.batches(),
        )

    model, optimizer = started_with_every(of_tensors)
    steps(model, optimizer, 3)
    replace(model, optimizer)
    with pytest.raises(ValueError, match=r"The objective of egop\.Every has parameters of its own"):
        steps(model, optimizer, 1)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_moved_elsewhere_trains_on_there(kind, dtype):
    def trained(moves):
        model, optimizer = started(kind)
        model.to(dtype)
        for step in range(8):
            model.to(moves.get(step, next(model.parameters()).device))
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 12).reshape(2, 6).roll(step, 1)
            model(x.to(model[0].weight)).square().sum().backward()
            optimizer.step()
        return {name: value.float().cpu() for name, value in cases.parameters_of(model).items()}

    straight = trained({})
    for moves in ({2: "cuda"}, {0: "cuda", 4: "cpu"}, {1: "cuda", 3: "cpu", 5: "cuda"}):
        end = trained(moves)
        if kind == "online":  # the first gradient leaves directions open, which rounding fills
            assert all(value.isfinite().all() for value in end.values())
        else:
            assert distance(end, straight) < (1e-3 if dtype is torch.float32 else 2e-2), moves


def make_groups(model, refresh=None):
    """Put half of the layers in a group of its own, with another learning rate."""
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2:].parameters()), "lr": 0.001}]
    return egop.ReparameterizedOptimizer(groups, torch.optim.AdamW, egop.Basis([]) if refresh is None else None,
                                         model=model, refresh=refresh)  # fmt: skip


def take_to_the_second_group(optimizer):
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        second[key].insert(0, first[key].pop())


def merge_groups(optimizer):
    first, second = optimizer.param_groups
    for key in ("params", "param_names"):
        first[key] += second[key]
    del optimizer.param_groups[1]


@pytest.mark.parametrize("refresh", [None, egop.Online(every=2)])
@pytest.mark.parametrize("edit", [take_to_the_second_group, merge_groups])
def test_parameters_that_move_to_another_group_get_its_settings(edit, refresh):
    model = MLP.build()
    optimizer = make_groups(model, refresh)
    steps(model, optimizer, 3)
    edit(optimizer)
    expected = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps(model, optimizer, 1, first=3)
    for name, parameter in model.named_parameters():
        size = float((parameter - before[name]).abs().max())
        assert 0.02 * expected[name] < size < 3 * expected[name], (name, size)


def test_an_exchange_before_the_first_step_rotates_the_right_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    groups = [{"params": [model[0].weight]}, {"params": [model[2].weight]}]
    optimizer = egop.ReparameterizedOptimizer(groups, torch.optim.Adam, model=model, refresh=egop.Online(), lr=0.01)
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    (block,) = optimizer.blocks
    assert block.name == "0.weight"
    assert block.originals[0] is model[0].weight
