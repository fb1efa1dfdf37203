"""With Hugging Face's Accelerate: in one process, in two, and with sharded parameters."""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch

import runs
import training
from processes import run

pytest.importorskip("accelerate", reason=runs.MISSING)

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import fsdp_utils

SIX = 6
CLIP = 0.05


@pytest.fixture(autouse=True)
def _no_traces():
    """Reset the class attributes and environment variables in which Accelerate keeps its state."""
    kept = dict(os.environ)
    yield
    forget()
    os.environ.clear()
    os.environ.update(kept)


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def prepared(kind, accelerator=None):
    accelerator = Accelerator(cpu=True) if accelerator is None else accelerator
    model = training.network()
    return accelerator, *accelerator.prepare(model, runs.optimizer_of(model, kind))


def steps(accelerator, model, optimizer, first=0, count=SIX):
    rank, share = accelerator.process_index, training.BATCH // accelerator.num_processes
    for inputs, targets in runs.batches(count, first):
        mine = slice(rank * share, (rank + 1) * share)
        with accelerator.accumulate(model):
            accelerator.backward(training.loss_of(model, inputs[mine], targets[mine]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", runs.KINDS)
def test_one_process_is_the_plain_loop(kind):
    accelerator, model, optimizer = prepared(kind)
    steps(accelerator, model, optimizer)
    assert runs.same(model, runs.loop(kind, SIX, clip=CLIP)[0])


@pytest.mark.parametrize("kind", runs.KINDS)
def test_accumulated_gradients_are_those_of_one_large_batch(kind):
    accelerator, model, optimizer = prepared(kind, Accelerator(cpu=True, gradient_accumulation_steps=2))
    steps(accelerator, model, optimizer)
    plain = training.network()
    expected = runs.optimizer_of(plain, kind)
    pairs = runs.batches(SIX)
    for one, other in zip(pairs[::2], pairs[1::2], strict=True):
        expected.zero_grad()
        for pair in (one, other):
            (training.loss_of(plain, *pair) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        expected.step()
    assert runs.same(model, plain)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_saved_state_is_resumed_bit_for_bit(kind, tmp_path):
    first = prepared(kind)
    steps(*first, count=4)
    first[0].save_state(tmp_path)
    forget()
    accelerator, model, optimizer = prepared(kind)
    accelerator.load_state(tmp_path)
    steps(accelerator, model, optimizer, first=4, count=4)
    assert runs.same(model, runs.loop(kind, 8, clip=CLIP)[0])


def test_replaced_parameters_are_noticed_by_the_next_step():
    """Call the functions that ``Accelerator.prepare`` uses on a TPU and under FSDP2."""
    for kind in runs.KINDS:
        network = training.network()
        accelerator, _, optimizer = prepared(kind)  # of parameters that are then given up
        old = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer._switch_parameters(dict(zip(old, network.parameters(), strict=True)))
        steps(accelerator, network, optimizer)
        assert runs.same(network, runs.loop(kind, SIX, clip=CLIP)[0]), kind
        forget()


def test_parameters_replaced_in_the_middle_of_a_run_go_on_with_their_moments():
    for kind in runs.KINDS:
        accelerator, model, optimizer = prepared(kind)
        steps(accelerator, model, optimizer, count=4)
        network = copy.deepcopy(model)
        old = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer._switch_parameters(dict(zip(old, network.parameters(), strict=True)))
        steps(accelerator, network, optimizer, first=4, count=4)
        assert runs.same(network, runs.loop(kind, 8, clip=CLIP)[0]), kind
        forget()


def ddp(rank, world):
    runs.launched(rank, world)
    found = {}
    for kind in runs.DIVIDED:
        accelerator, model, optimizer = prepared(kind)
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
        steps(accelerator, model, optimizer)
        found[kind] = training.weights(model)
    return found


def test_two_processes_are_one():
    one, other = run(ddp, 2)
    for kind in runs.DIVIDED:
        assert runs.same(one[kind], other[kind]), kind
        assert runs.distance(one[kind], runs.loop(kind, SIX, clip=CLIP)[0]) < 1e-9, kind


def sharding(state_dict_type="SHARDED_STATE_DICT"):
    """Return an accelerator with FSDP2, enabled by hand because Accelerate allows it on GPUs only."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy=functools.partial(_is_linear),
        cpu_ram_efficient_loading=False,
        state_dict_type=state_dict_type,
        reshard_after_forward=True,
    )
    # Every new AcceleratorState copies what the PartialState says.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def _is_linear(module, recurse=False, nonwrapped_numel=0):
    return isinstance(module, torch.nn.Linear)


def fsdp2(rank, world):
    runs.launched(rank, world)
    found = {}
    for kind in runs.DIVIDED:
        accelerator, model, optimizer = prepared(kind, sharding())
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        before = training.weights(model)
        steps(accelerator, model, optimizer)
        found[kind] = training.weights(model)
        assert runs.distance(found[kind], before) > 1e-2, f"{kind}: the parameters do not move"
        forget()
    return found


def test_parameters_that_prepare_shards_move_as_the_whole_ones_would():
    one, other = run(fsdp2, 2)
    for kind in runs.DIVIDED:
        assert runs.same(one[kind], other[kind]), kind
        assert runs.distance(one[kind], runs.loop(kind, SIX, clip=CLIP)[0]) < 1e-9, kind


def fsdp2_checkpoints(rank, world, folder):
    runs.launched(rank, world)
    found = {}
    cases = [("SHARDED_STATE_DICT", kind) for kind in runs.DIVIDED] + [("FULL_STATE_DICT", runs.DIVIDED[-1])]
    for style, kind in cases:
        accelerator, model, optimizer = prepared(kind, sharding(style))
        steps(accelerator, model, optimizer, count=4)
        accelerator.save_state(f"{folder}/{style}-{kind}")
        steps(accelerator, model, optimizer, first=4, count=4)
        whole = training.weights(model)
        forget()
        accelerator, model, optimizer = prepared(kind, sharding(style))
        accelerator.load_state(f"{folder}/{style}-{kind}")
        steps(accelerator, model, optimizer, first=4, count=4)
        found[f"{style}, {kind}"] = runs.same(training.weights(model), whole)
        forget()
    return found


def test_a_saved_state_of_sharded_parameters_is_resumed(tmp_path):
    for found in run(fsdp2_checkpoints, 2, str(tmp_path)):
        assert len(found) == 4
        assert [name for name, right in found.items() if not right] == []


def test_the_functions_that_are_forced_are_still_there():
    assert callable(fsdp_utils.fsdp2_switch_optimizer_parameters)
    assert callable(Accelerator._prepare_fsdp2)
