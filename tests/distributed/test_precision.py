"""Mixed precision, compiled models and accumulated gradients work on two processes as on one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import egop
from processes import run
from training import BATCH, STEPS, WRAPPERS, basis, batch, loss_of, network, optimizer_of, weights

PARTS = 3  # batches whose gradients are added up before a step
BF16 = 0.01  # half of one step of Adam, after seven: what rounding activations to eight bits may do
EXACT = 1e-10  # in float64


def policy(model):
    """Shard with weights and activations in bfloat16 and gradients summed in float32; the shards stay in float32."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=mixed)


def trained(model, rank, world, *, autocast=False, scaler=None, compiled=False, parts=1):
    """Train with an online basis, accumulating the gradients of ``parts`` pieces of each batch."""
    found = basis(egop.Shared())
    optimizer = optimizer_of(model, torch.optim.AdamW, None, egop.Online(every=3), found)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    half = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        optimizer.zero_grad()
        share = BATCH // world
        mine = [each[rank * share : (rank + 1) * share].to(dtype) for each in batch(step)]
        for index, piece in enumerate(zip(*(each.chunk(parts) for each in mine), strict=True)):
            with accumulating(model, index == parts - 1), half:
                loss = loss_of(called, *piece) / parts
                if scaler and step == 2 and rank == world - 1:
                    loss = loss * torch.inf  # as an overflow in one process, of which all must hear
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    return {name: value.double() for name, value in weights(model).items()}


def accumulating(model, last):
    """Synchronize gradients only for the last micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def all_cases(rank, world, names):
    found = {}
    for name in names:
        wrap = WRAPPERS[name]
        found[f"{name} as it is"] = trained(wrap(network()), rank, world)
        found[f"{name} scaled"] = trained(wrap(network()), rank, world, scaler=scaler())
        found[f"{name} compiled"] = trained(wrap(network()), rank, world, compiled=True)
        found[f"{name} parts"] = trained(wrap(network()), rank, world, parts=PARTS)
        found[f"{name} autocast"] = trained(wrap(network().float()), rank, world, autocast=True)
    if world > 1:
        found["FSDP2 policy"] = trained(policy(network().float()), rank, world)
    return found


@pytest.fixture(scope="module")
def found():
    return {"plain": all_cases(0, 1, ["plain"]), "two": run(all_cases, 2, ["DDP", "FSDP2"])}


def distance(ours, theirs):
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [("as it is", EXACT), ("scaled", EXACT), ("compiled", EXACT), ("parts", EXACT), ("autocast", BF16)],
)
def test_two_processes_train_like_one_with_the_whole_batch(found, wrapper, case, tolerance):
    expected = found["plain"][f"plain {case}"]
    for each in found["two"]:
        assert distance(each[f"{wrapper} {case}"], expected) < tolerance


@pytest.mark.parametrize("case", ["compiled", "parts"])
def test_compiling_and_accumulating_change_only_rounding(found, case):
    assert distance(found["plain"][f"plain {case}"], found["plain"]["plain as it is"]) < EXACT


@pytest.mark.parametrize("name", ["DDP autocast", "FSDP2 autocast", "FSDP2 policy"])
def test_half_precision_is_close_to_double_precision(found, name):
    for each in found["two"]:
        assert 0 < distance(each[name], found["plain"]["plain as it is"]) < BF16


def test_all_processes_end_with_the_same_weights(found):
    first, second = found["two"]
    for name in first:
        assert distance(first[name], second[name]) == 0, name
