"""It behaves like every other torch optimizer; what it does in coordinates is compared with f∘V written out."""

import pytest
import torch
from torch.optim import lr_scheduler

import cases
import egop
from cases import FEW_OPTIMIZERS, OptimizerCase
from explicit import (
    LAYOUTS,
    Explicit,
    Wrapped,
    case_and_basis,
    distance,
    identical,
    over_layouts_and_optimizers,
    train,
)

TOLERANCE = 1e-10
ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})


def agree(layout, optimizer, script, **options):
    """Return True if a training script, called with a side and its batches, ends at the same weights on both sides."""
    case, basis = case_and_basis(layout)
    ends = []
    for kind in (Wrapped, Explicit):
        side = kind(case.build(), basis, optimizer, **options)
        script(side, case.batches())
        ends.append(side.weights())
    assert distance(ends[0], cases.parameters_of(case.build())) > 1e-4  # it did train
    return distance(*ends) < TOLERANCE


def backward(side, batch):
    side.optimizer.zero_grad()
    loss = side.loss(batch)
    loss.backward()
    return loss


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@over_layouts_and_optimizers
def test_schedulers_set_the_learning_rate(optimizer, layout, scheduler):
    rates = []

    def script(side, batches):
        schedule = SCHEDULERS[scheduler](side.optimizer)
        for step in range(12):
            backward(side, batches[step % 4])
            side.optimizer.step()
            schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
            rates.append(side.optimizer.param_groups[0]["lr"])

    assert agree(layout, optimizer, script)
    assert rates[:12] == rates[12:]
    assert rates[11] < rates[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("optimizer", "key"),
    [(FEW_OPTIMIZERS[0], "momentum"), (ADAMW, "betas")],
    ids=["momentum", "betas"],
)
def test_one_cycle_cycles_momentum_too(optimizer, key, layout):
    seen = []

    def script(side, batches):
        schedule = lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.05, total_steps=20)
        for step in range(20):
            backward(side, batches[step % 4])
            side.optimizer.step()
            seen.append(side.optimizer.param_groups[0][key])
            if step < 19:
                schedule.step()

    assert agree(layout, optimizer, script)
    assert len(set(seen)) > 10


@over_layouts_and_optimizers
def test_the_clipped_norm_is_the_norm_in_coordinates(optimizer, layout):
    norms = []

    def script(side, batches):
        for step in range(10):
            backward(side, batches[step % 4])
            norms.append(torch.nn.utils.clip_grad_norm_(side.leaves(), 0.1).item())
            side.optimizer.step()

    assert agree(layout, optimizer, script)
    assert norms[:10] == pytest.approx(norms[10:])
    assert max(norms) > 0.1


@over_layouts_and_optimizers
def test_grad_scaler_unscales_and_skips_steps_with_inf(optimizer, layout):
    def script(side, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(8):
            side.optimizer.zero_grad()
            scaler.scale(side.loss(batches[step % 4])).backward()
            if step == 3:
                side.leaves()[0].grad.fill_(torch.inf)
            before = side.weights()
            if step % 2:
                scaler.unscale_(side.optimizer)
                torch.nn.utils.clip_grad_norm_(side.leaves(), 0.1)
            scaler.step(side.optimizer)
            scaler.update()
            assert identical(before, side.weights()) == (step == 3)
        assert scaler.get_scale() == 512.0

    assert agree(layout, optimizer, script)


@over_layouts_and_optimizers
def test_gradients_accumulate(optimizer, layout):
    def script(side, batches):
        for step in range(12):
            (side.loss(batches[step % 4]) / 3).backward()
            if step % 3 == 2:
                side.optimizer.step()
                side.optimizer.zero_grad()

    assert agree(layout, optimizer, script)


@over_layouts_and_optimizers
def test_closures_run_with_gradients_and_their_loss_is_returned(optimizer, layout):
    losses = []

    def script(side, batches):
        for step in range(6):

            def closure(batch=batches[step % 4]):
                assert torch.is_grad_enabled()
                return backward(side, batch)

            with torch.no_grad():
                losses.append(side.optimizer.step(closure).item())

    assert agree(layout, optimizer, script)
    assert losses[:6] == pytest.approx(losses[6:])


@pytest.mark.parametrize("layout", ["blocks", "batched", "identity"])  # a block of everything cannot be in two groups
@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS, ids=str)
def test_several_groups_have_their_own_learning_rate_and_decay(optimizer, layout):
    case, _ = case_and_basis(layout)
    names = list(dict(case.build().named_parameters()))
    groups = [{"names": names[:2], "lr": 0.03, "weight_decay": 0.1}, {"names": names[2:]}]

    def script(side, batches):
        train(side, batches, 10)
        side.optimizer.param_groups[1]["lr"] = 0.001
        side.optimizer.param_groups[0]["weight_decay"] = 0.0
        train(side, batches, 10)

    assert agree(layout, optimizer, script, groups=groups)


@pytest.mark.parametrize("in_basis", [True, False], ids=["with-basis", "without-basis"])
@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS[:2], ids=str)  # Adagrad of older torch takes no later groups
def test_groups_are_added_later(optimizer, in_basis):
    case, basis = case_and_basis("batched")
    names = list(dict(case.build().named_parameters()))
    early, late = names[:4], names[4:]
    one, other = (egop.Basis([change for name, change in basis.items() if name in part]) for part in (early, late))
    wrapped = Wrapped(case.build(), one, optimizer, [{"names": early}])
    explicit = Explicit(case.build(), basis if in_basis else one, optimizer, [{"names": early}])
    for side in (wrapped, explicit):
        train(side, case.batches(), 5)
    later = {"params": [(name, wrapped.model.get_parameter(name)) for name in late], "lr": 0.004}
    wrapped.optimizer.add_param_group(later | ({"basis": other} if in_basis else {}))
    explicit.optimizer.add_param_group({"params": explicit.members(late), "lr": 0.004})
    assert distance(*(train(side, case.batches(), 10) for side in (wrapped, explicit))) < TOLERANCE
    assert list(wrapped.optimizer.basis) == list(basis if in_basis else one)
    assert "basis" not in wrapped.optimizer.param_groups[1]


def test_a_group_may_bring_its_basis_at_construction():
    case, basis = case_and_basis("blocks")
    model = case.build()
    groups = [{"params": model.named_parameters(), "basis": basis}]
    side = Wrapped(case.build(), basis, ADAMW)
    expected = train(side, case.batches(), 5)
    side.model, side.optimizer = model, egop.ReparameterizedOptimizer(groups, torch.optim.AdamW, lr=0.01)
    assert identical(train(side, case.batches(), 5), expected)
    assert "basis" not in side.optimizer.param_groups[0]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_grad_clears_the_gradients_of_the_model(layout, set_to_none):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, ADAMW)
    side.loss(case.batches()[0]).backward()
    side.optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in side.model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
    before = side.weights()
    side.optimizer.step()
    # No gradient: no step. A gradient of zero: a step, in which AdamW decays the weights.
    assert identical(side.weights(), before) == set_to_none


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_leaves_the_gradients_of_the_model_alone(layout):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, ADAMW)
    side.loss(case.batches()[0]).backward()
    before = [parameter.grad.clone() for parameter in side.model.parameters()]
    side.optimizer.step()
    assert all(torch.equal(p.grad, kept) for p, kept in zip(side.model.parameters(), before, strict=True))


def test_hooks_run_before_and_after_a_step():
    case, basis = case_and_basis("batched")
    side = Wrapped(case.build(), basis, ADAMW)
    start, seen = side.weights(), []
    side.optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", identical(side.weights(), start))))
    side.optimizer.register_step_post_hook(lambda *_: seen.append(("post", identical(side.weights(), start))))
    backward(side, case.batches()[0])
    side.optimizer.step()
    assert seen == [("pre", True), ("post", False)]
