"""Inside Lightning Fabric."""

from __future__ import annotations

import pytest
import torch

import runs
import training

lightning = pytest.importorskip("lightning", reason=runs.MISSING)

import egop

SIX = 6


def prepared(kind="fixed", network=None, **settings):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
    network = training.network() if network is None else network
    return fabric, *fabric.setup(network, runs.optimizer_of(network, kind))


def steps(fabric, model, optimizer, first=0, count=SIX, act=None, clip=None):
    kept = {}
    for step, (inputs, targets) in enumerate(runs.batches(count, first)):
        if act is not None:
            act(step, model, optimizer, kept)
        optimizer.zero_grad()
        fabric.backward(training.loss_of(model, inputs, targets))
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_run_with_clipping_is_the_plain_loop(kind):
    fabric, model, optimizer = prepared(kind)
    steps(fabric, model, optimizer, clip=0.05)
    assert runs.same(model.module, runs.loop(kind, SIX, clip=0.05)[0])


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_saved_run_is_resumed_bit_for_bit(kind, tmp_path):
    fabric, model, optimizer = prepared(kind)
    steps(fabric, model, optimizer, count=4)
    fabric.save(tmp_path / "half", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer = prepared(kind)
    fabric.load(tmp_path / "half", {"model": model, "optimizer": optimizer}, weights_only=True)
    steps(fabric, model, optimizer, first=4, count=4)
    assert runs.same(model.module, runs.loop(kind, 8)[0])


@pytest.mark.parametrize("action", runs.ACTIONS)
def test_what_is_done_through_the_wrapper_is_done_to_the_optimizer(action):
    kind, act = runs.ACTIONS[action]
    fabric, model, optimizer = prepared(kind)
    steps(fabric, model, optimizer, count=SIX + 2, act=lambda step, model, *rest: act(step, model.module, *rest))
    assert runs.same(model.module, runs.loop(kind, SIX + 2, act=act)[0])
    assert not runs.same(model.module, runs.loop(kind, SIX + 2)[0])


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_a_model_that_setup_casts_below_the_optimizer_is_trained_or_refused(kind):
    """``bf16-true`` casts the model after the optimizer was built: it must train correctly or raise a clear error."""
    right = prepared(kind, training.network().float().bfloat16(), precision="bf16-true")
    steps(*right)
    cast = prepared(kind, training.network().float(), precision="bf16-true")
    refused = None
    try:
        steps(*cast)
    except (TypeError, ValueError) as error:
        refused = str(error)
    # The master weights may be those from before the cast, so the two may differ by how bfloat16 rounds.
    assert runs.distance(cast[1].module, right[1].module) < 0.01 if refused is None else "bfloat16" in refused


def test_a_schedule_made_before_setup_goes_on_after_it():
    network = training.network()
    optimizer = runs.optimizer_of(network, "online")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, wrapped = fabric.setup(network, optimizer)
    for inputs, targets in runs.batches(SIX):
        wrapped.zero_grad()
        fabric.backward(training.loss_of(model, inputs, targets))
        wrapped.step()
        scheduler.step()
    schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    assert runs.same(network, runs.loop("online", SIX, schedule=schedule)[0])
    assert isinstance(wrapped, egop.ReparameterizedOptimizer)
