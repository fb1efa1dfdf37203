"""Inside Lightning's Trainer."""

from __future__ import annotations

import pytest
import torch

import runs
import training

lightning = pytest.importorskip("lightning", reason=runs.MISSING)

from lightning.pytorch import callbacks

import egop
from lightning_runs import ByHand, Module, fit, loader, schedule, trainer
from processes import run

SIX = 6


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_fit_with_clipping_and_a_schedule_is_the_plain_loop(kind):
    module = fit(Module(kind), SIX, gradient_clip_val=0.05)
    plain, _ = runs.loop(kind, SIX, clip=0.05, schedule=schedule)
    assert runs.same(module.network, plain)
    assert not runs.same(plain, runs.loop(kind, SIX, schedule=schedule)[0])  # the clipping did something


def test_nameless_parameters_beside_the_model_are_the_model():
    module = Module()
    module.made = lambda: egop.ReparameterizedOptimizer(
        module.parameters(), torch.optim.AdamW, model=module, refresh=egop.Online(every=3), lr=0.02, weight_decay=0.1
    )
    fit(module, SIX)
    assert runs.same(module.network, runs.loop("online", SIX, schedule=schedule)[0])


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_resumed_fit_ends_as_one_that_was_never_interrupted(kind, tmp_path):
    whole = Module(kind)
    trainer(max_epochs=2).fit(whole, loader(5))
    first = trainer(max_epochs=1)
    first.fit(Module(kind), loader(5))
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Module(kind)
    trainer(max_epochs=2).fit(resumed, loader(5), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert runs.same(resumed.network, whole.network)


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_two_fits_with_one_optimizer_are_one_long_run(kind):
    """Lightning moves ``optimizer.state`` to the CPU when a fit ends: entry by entry, each a new dict."""
    network = training.network()
    optimizer = runs.optimizer_of(network, kind)
    module = ByHand(kind, lambda *everything: None)
    module.network, module.made = network, lambda: optimizer
    for half in (0, 3):
        trainer().fit(module, loader(3, half))
    assert runs.same(network, runs.loop(kind, SIX)[0])


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_an_average_that_is_swapped_in_to_validate_leaves_training_alone(kind):
    seen = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            seen.append(runs.weights(module.network))

    module = Module(kind)
    average = callbacks.EMAWeightAveraging(decay=0.5)
    trainer(callbacks=[Look(), average], val_check_interval=2).fit(module, loader(SIX), loader(1, 50))
    for step, weights in enumerate(seen):
        assert runs.same(weights, runs.loop(kind, step + 1, schedule=schedule)[0]), f"step {step}"
    expected = seen[0]
    for weights in seen[1:]:
        expected = {name: expected[name] + 0.5 * (weights[name] - expected[name]) for name in weights}
    assert runs.distance(module.network, expected) < 1e-12


def test_a_resumed_fit_with_an_average_ends_as_one_that_was_never_interrupted(tmp_path):
    def part(module, epochs, **settings):
        made = trainer(max_epochs=epochs, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)])
        made.fit(module, loader(4), loader(1, 50), **settings)
        return made

    whole, resumed = Module("online"), Module("online")
    part(whole, 2)
    saving = callbacks.ModelCheckpoint(tmp_path, filename="half", save_on_train_epoch_end=True)
    first = trainer(callbacks=[callbacks.EMAWeightAveraging(decay=0.5), saving], enable_checkpointing=True)
    first.fit(Module("online"), loader(4), loader(1, 50))
    part(resumed, 2, ckpt_path=tmp_path / "half.ckpt")
    assert runs.same(resumed.network, whole.network)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_stochastic_weight_averaging_ends_at_the_mean_of_its_epochs(kind):
    seen = []

    class Look(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append(runs.weights(module.network))

    module = Module(kind)
    module.configure_optimizers = module.made  # SWA brings its own schedule
    swa = callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    trainer(max_epochs=4, callbacks=[Look(), swa]).fit(module, loader(2))
    assert runs.distance(seen[3], seen[1]) > 1e-3
    mean = {name: sum(weights[name] for weights in seen[1:]) / 3 for name in seen[0]}
    assert runs.distance(module.network, mean) < 1e-12


@pytest.mark.parametrize("action", runs.ACTIONS)
def test_what_is_done_through_the_wrapper_is_done_to_the_optimizer(action):
    kind, act = runs.ACTIONS[action]
    module = fit(ByHand(kind, act), SIX + 2)
    assert runs.same(module.network, runs.loop(kind, SIX + 2, act=act)[0])
    assert not runs.same(module.network, runs.loop(kind, SIX + 2)[0])


def test_what_the_wrapper_shows_is_what_the_optimizer_has():
    shown = []

    def look(step, network, wrapper, kept):
        original = wrapper.optimizer
        if step == 3:
            wrapper.rebase(runs.basis(seed=1))
        for name, change in original.basis.items():
            shown.append(torch.equal(wrapper.basis[name].dense(), change.dense()))
        shown.append(wrapper.param_groups is original.param_groups)
        shown.append(wrapper.state is original.state)
        shown.append(wrapper.blocks is original.blocks)

    fit(ByHand("fixed", look), SIX)
    assert shown
    assert all(shown)


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_bf16_true_is_the_plain_loop_with_float32_master_weights(kind):
    module = fit(Module(kind, network=training.network().float()), SIX, precision="bf16-true")
    assert next(module.parameters()).dtype == torch.bfloat16
    network = training.network().float().bfloat16()
    assert runs.same(module.network, runs.loop(kind, SIX, model=network, schedule=schedule)[0])


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_bf16_mixed_is_the_plain_loop_under_autocast(kind):
    data = [tuple(each.float() for each in pair) for pair in runs.batches(SIX)]
    module = Module(kind, network=training.network().float())
    trainer(precision="bf16-mixed").fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    network = training.network().float()
    with_autocast = {"context": lambda: torch.autocast("cpu", torch.bfloat16)}
    assert runs.same(module.network, runs.loop(kind, SIX, model=network, schedule=schedule, **with_autocast)[0])


def ddp(rank, world, kind):
    runs.launched(rank, world)
    share = training.BATCH // world
    data = [tuple(each[rank * share : (rank + 1) * share] for each in pair) for pair in runs.batches(SIX)]
    module = Module(kind)
    made = trainer(strategy="ddp", devices=world, use_distributed_sampler=False, gradient_clip_val=0.05)
    made.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return runs.weights(module.network)


def ddp_kinds(rank, world):
    return {kind: ddp(rank, world, kind) for kind in runs.DIVIDED}


@pytest.mark.slow
def test_two_processes_are_one():
    for kind_by_kind in zip(*(each.items() for each in run(ddp_kinds, 2)), strict=True):
        (kind, one), (_, other) = kind_by_kind
        assert runs.same(one, other), kind
        assert runs.distance(one, runs.loop(kind, SIX, clip=0.05, schedule=schedule)[0]) < 1e-9, kind
