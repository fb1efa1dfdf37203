"""Writes to sharded parameters are noticed, even where values are not compared, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import egop
from egop.optimizer import binding, stacks
from processes import run
from training import batch, loss_of, network, optimizer_of, sharded, steps, weights

STRUCTURES = {"Shared": egop.Shared(), "Kronecker": egop.Kronecker()}


def written(rank, world):
    """Return the weights after a write before the first step and between two steps, and the number of comparisons."""
    stacks.compares_values = lambda device: False  # in this process alone
    follow, looks = binding.BoundBlock.follow_parameters, []
    binding.BoundBlock.follow_parameters = lambda self, decoded, **how: (
        looks.append(self.name),
        follow(self, decoded, **how),
    )[1]
    found = {}
    for name, structure in STRUCTURES.items():
        model = sharded(network())
        optimizer = optimizer_of(model, torch.optim.SGD, structure, None, weight_decay=0.0)
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        steps(model, optimizer, count=1, rank=rank, world=world)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        steps(model, optimizer, first=1, count=1, rank=rank, world=world)
        looks.clear()
        steps(model, optimizer, first=2, count=2, rank=rank, world=world)
        found[name] = weights(model) | {"looks": torch.tensor(len(looks))}
    return found


def test_writes_to_sharded_parameters_are_noticed_by_their_counter():
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02)
    for first, count in ((0, 1), (1, 1), (2, 2)):
        if first < 2:
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(0.5)
        steps(plain, optimizer, first=first, count=count)
    for found in run(written, 2):
        for name in STRUCTURES:
            assert found[name].pop("looks") == 0, "nothing was written, so there was nothing to look at"
            for key, value in weights(plain).items():
                torch.testing.assert_close(found[name][key], value, rtol=0, atol=1e-12, msg=f"{name}: {key}")


@pytest.fixture
def group_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("wrapped", ["DDP", "compile(DDP)", "DDP(compile)"])
def test_names_do_not_depend_on_wrappers(wrapped):
    model = network()
    if wrapped == "DDP(compile)":
        model = torch.compile(model, backend="eager")
    model = DistributedDataParallel(model)
    if wrapped == "compile(DDP)":
        model = torch.compile(model, backend="eager")
    optimizer = optimizer_of(model, torch.optim.AdamW, egop.Shared(), None)
    plain = optimizer_of(network(), torch.optim.AdamW, egop.Shared(), None)
    assert [block.name for block in optimizer.blocks] == [block.name for block in plain.blocks]
    plain.load_state_dict(optimizer.state_dict())  # and the other way
    optimizer.load_state_dict(plain.state_dict())


def objective_of(model):
    return egop.Objective(model, lambda model, pair: loss_of(model, *pair), [batch(0)])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("of", ["plain", "wrapped"])
def test_objective_of_the_wrapped_model_fits_the_trained_model(of):
    model = network()
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    every = egop.Every(1, objective_of(model if of == "plain" else wrapped), samples=2)
    optimizer = optimizer_of(wrapped, torch.optim.AdamW, egop.Shared(), every)
    steps(wrapped, optimizer, count=2)
    assert optimizer.refresher.renewals == 1
    with pytest.raises(ValueError, match="has parameters of its own"):
        optimizer_of(wrapped, torch.optim.AdamW, egop.Shared(), egop.Every(1, objective_of(network())))


@pytest.mark.usefixtures("group_of_one")
def test_sharded_model_can_be_sampled_only_through_a_full_copy():
    model = network()
    inside, beside = objective_of(model), objective_of(network())
    model = sharded(model)
    with pytest.raises(TypeError, match="is sharded over processes by fully_shard, and points cannot be sampled there"):
        optimizer_of(model, torch.optim.AdamW, egop.Shared(), egop.Every(1, inside))
    optimizer_of(model, torch.optim.AdamW, egop.Shared(), egop.Every(1, beside))
