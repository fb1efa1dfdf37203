"""The state of EGOP: saving, loading and editing it, in any precision and on several processes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import cases
import egop
from egop_runs import LAST, backward, make, make_groups, network, train
from explicit import distance, identical
from processes import run
from training import WRAPPERS, steps, weights
from training import network as sharded_network

# --- state ---

WAYS = ["state", "torch's tools", "deepcopy", "pickle", "inference mode"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("saved", [1, 3, 4])  # before and after a renewal
@pytest.mark.parametrize("way", WAYS)
def test_training_resumes_exactly(way, saved, dtype, tmp_path):
    model, other = network(dtype), network(dtype)
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, saved)
    if way == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    elif way == "torch's tools":
        other.load_state_dict(model.state_dict())
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(other, again, state)
    else:
        with torch.inference_mode(way == "inference mode"):
            torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
        model_state, state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(model_state)
        again.load_state_dict(state)
    assert identical(train(model, optimizer, saved, LAST), train(other, again, saved, LAST))


def test_state_of_a_compiled_model_fits_the_plain_one():
    model, other = network(), network()
    compiled = torch.compile(model, backend="eager")
    optimizer, again = make(compiled, exclude=["up.weight"]), make(other, exclude=["up.weight"])
    train(compiled, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert identical(train(model, optimizer, 3, LAST), train(other, again, 3, LAST))


def test_loaded_state_is_a_copy():
    model, other = network(), network()
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    first = train(model, optimizer, 3, LAST)
    assert identical(first, train(other, again, 3, LAST))


def snapshot(model, optimizer):
    return copy.deepcopy([cases.parameters_of(model), optimizer.state_dict()])


REFUSED = {
    "AdamW": (
        lambda model: torch.optim.AdamW(model.parameters()),
        "was saved by another optimizer",
    ),
    "AdamW with groups": (
        lambda model: torch.optim.AdamW([{"params": [each]} for each in model.parameters()]),
        "was saved by another optimizer",
    ),
    "no rotation": (lambda model: make(model, rotate=False), "saved with rotate=False, and this optimizer has"),
    "fewer groups": (lambda model: make(make_groups(model), model=model), "has 2 parameter groups"),
    "another choice": (lambda model: make(model, exclude=["up.weight"]), r"'up.weight' has .*Must be .*'basis'"),
}


SCHEDULERS = [
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 30, cycle_momentum=False),
]


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_a_state_saved_without_a_scheduler_loads_with_one(schedule):
    model, other = network(), network()
    train(model, optimizer := make(model), 0, 3)
    schedule(again := make(other))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    schedule(rotated := make(other))
    with pytest.raises(ValueError, match="saved with rotate=False"):
        rotated.load_state_dict(make(model, rotate=False).state_dict())


@pytest.mark.parametrize("kind", REFUSED)
def test_state_of_another_optimizer_is_refused_and_nothing_changes(kind):
    build, message = REFUSED[kind]
    model, other = network(), network()
    train(other, saved := build(other), 0, 2)
    train(model, optimizer := make(model), 3, 5)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())
    now = snapshot(model, optimizer)
    assert identical(before[0], now[0])
    for key, state in before[1]["state"].items():
        assert identical(state, now[1]["state"][key])


def test_state_of_another_model_is_refused_with_both_shapes():
    model, other = nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)
    saved, optimizer = egop.EGOP(other), egop.EGOP(model)
    other(torch.ones(2, 4)).square().sum().backward()
    saved.step()
    with pytest.raises(ValueError, match=r"'weight' has a tensor of shape \(5, 4\) .*Must be .* \(3, 4\)"):
        optimizer.load_state_dict(saved.state_dict())
    renamed = nn.ParameterDict({"other": model.weight})
    with pytest.raises(ValueError, match="other parameters than this optimizer: 'weight' instead of 'other'"):
        egop.EGOP(renamed).load_state_dict(optimizer.state_dict())


def test_state_follows_a_replaced_parameter():
    """Frameworks that wrap, move or shard a model after the optimizer was built do this."""
    model, other = network(), network()
    optimizer = make(model)
    train(model, optimizer, 0, 4)
    moved = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["params"] = [moved.get_parameter(name) for name in group["param_names"]]
    assert identical(train(moved, optimizer, 4, LAST), train(other, make(other)))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 2).double())
    with pytest.raises(ValueError, match=r"'experts' of shape \(3, 8, 10\) was replaced by one of shape \(2, 2\)"):
        train(moved, optimizer, 4, 5)


def test_edited_state_is_used():
    model, other = network(), network()
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, 4)
    train(other, again, 0, 4)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    assert not identical(train(model, optimizer, 4, 6), train(other, again, 4, 6))


# --- precision ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_half_precision_would_round_away_add_up(dtype):
    model, start = network(dtype), network(dtype)
    optimizer = make(model, lr=1e-5, weight_decay=0.0)
    train(model, optimizer, 0, 30)
    master = optimizer.state[model.up.weight]["master"]
    assert master.dtype is torch.float32
    assert torch.equal(master.to(dtype), model.up.weight)
    assert (master - start.up.weight.float()).abs().mean() > 1e-5


def test_a_weight_in_half_precision_that_was_written_to_is_read_again():
    model = network(torch.bfloat16)
    optimizer = make(model, lr=0.0)
    train(model, optimizer, 0, 2)
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    train(model, optimizer, 2, 3)
    assert (model.up.weight == 0.5).all()


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_state_follows_a_model_that_is_cast(dtypes, rotate):
    """The optimizer goes on as a new one does that loads its state for the cast model."""
    model = network(dtypes[0])
    optimizer = make(model, rotate=rotate)
    train(model, optimizer, 0, 4)
    for number, dtype in enumerate(dtypes[1:], start=1):
        model.to(dtype)
        other = copy.deepcopy(model)
        again = make(other, rotate=rotate)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found = train(model, optimizer, 4 * number, 4 * number + 4)
        assert identical(found, train(other, again, 4 * number, 4 * number + 4))
        assert all(value.isfinite().all() for value in found.values())
    state = optimizer.state[model.up.weight]
    assert {value.dtype for value in state.values()} <= {torch.float32, dtype}
    assert ("master" in state) == (dtype in (torch.bfloat16, torch.float16))


def test_gradient_scaler_and_autocast():
    model, other = network(torch.float32), network(torch.float32)
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = make(other)
    for step in range(5):
        before = cases.parameters_of(model)
        backward(model, step)
        scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad.mul_(1024.0 if step != 2 else torch.inf)
        with torch.autocast("cpu", torch.bfloat16):
            scaler.step(optimizer)
        scaler.update(1024.0)
        if step == 2:
            assert identical(before, cases.parameters_of(model))
            continue
        backward(other, step)
        plain.step()
    assert distance(cases.parameters_of(model), cases.parameters_of(other)) < 1e-5


def test_gradient_that_is_not_finite_does_not_spoil_the_basis():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    backward(model, 3)
    model.up.weight.grad[0, 0] = torch.nan
    optimizer.step()
    train(model, optimizer, 4, LAST)
    assert model.up.weight.isnan().all()
    assert optimizer.state[model.up.weight]["basis"].isfinite().all()


# --- several processes ---


def train_wrapped(rank, world, kind):
    """Train with FSDP2 or DDP; return the weights, and whether the moments are sharded."""
    model = WRAPPERS[kind](sharded_network())
    optimizer = egop.EGOP(model, lr=0.02, every=3)
    steps(model, optimizer, rank=rank, world=world)
    is_sharded = all(hasattr(state["exp_avg"], "placements") for state in optimizer.state.values())
    return weights(model) | {"sharded": torch.tensor(is_sharded)}


def resume_sharded(rank, world, dtype):
    """Save in the middle with torch's tools, continue in a fresh model, and compare with going on."""
    model, other = (WRAPPERS["FSDP2"](sharded_network().to(dtype)) for _ in range(2))
    optimizer, again = egop.EGOP(model, lr=0.02, every=3), egop.EGOP(other, lr=0.02, every=3)
    run_steps(model, optimizer, 0, 4, rank, world)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (other, again)):
        run_steps(each, its, 4, 4, rank, world)
    return weights(model), weights(other)


def run_steps(model, optimizer, first, count, rank, world):
    dtype = next(model.parameters()).dtype
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(world * step + rank)
        inputs = torch.randn(6, 5, generator=generator).to(dtype)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :3].sin()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_train_like_one(kind):
    two = run(train_wrapped, 2, kind)
    (one,) = run(train_wrapped, 1, "plain")
    assert all(bool(each.pop("sharded")) == (kind == "FSDP2") for each in two)
    one.pop("sharded")
    for each in two:
        assert distance(each, one) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sharded_training_resumes_exactly(dtype):
    for one, other in run(resume_sharded, 2, dtype):
        assert identical(one, other)
