"""Step hooks: torch's global ones run for the user's step alone, those of an inner optimizer for its own."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import egop


class Lion(torch.optim.Optimizer):
    """An optimizer that torch knows nothing of."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * mean.lerp_(parameter.grad, 0.1).sign())


class Inheriting(torch.optim.AdamW):
    """A class without a step of its own."""


OPTIMIZERS = {
    "EGOP": egop.EGOP,
    "AdamW": lambda model: wrap(model, torch.optim.AdamW, refresh=egop.Online()),
    "SGD": lambda model: wrap(model, torch.optim.SGD, refresh=egop.Online(structure=egop.Shared())),
    "Aligned": lambda model: wrap(
        model, egop.optim.Sinkhorn, refresh=egop.Aligned(), outside=torch.optim.Adam, weight_decay=0.1
    ),
    "another library's": lambda model: wrap(model, Lion, refresh=egop.Online()),
    "a subclass": lambda model: wrap(model, Inheriting, refresh=egop.Online()),
    "without a basis": lambda model: wrap(model, torch.optim.AdamW),
}


def wrap(model, kind, **options):
    return egop.ReparameterizedOptimizer(model, kind, lr=0.01, **options)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def compute_gradients(model, scale=1.0):
    model.zero_grad()
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    (scale * model(inputs).square().mean()).backward()


@contextlib.contextmanager
def count_global_hooks():
    """Yield a list that gets the optimizer of every call of a global hook."""
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(("before", optimizer))),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(("after", optimizer))),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_global_hooks_run_once_in_a_step(make):
    model = build()
    optimizer = make(model)
    for _ in range(3):
        compute_gradients(model)
        with count_global_hooks() as seen:
            optimizer.step()
        assert seen == [("before", optimizer), ("after", optimizer)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_global_hooks_run_in_nothing_but_a_step(make):
    model = build()
    with count_global_hooks() as seen:
        optimizer = make(model)
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(4, 3)))]})
        fresh = optimizer.state_dict()
        assert isinstance(optimizer.state, dict)
        assert str(optimizer.plan)
        assert str(optimizer)
        optimizer.load_state_dict(fresh)
    assert seen == []


def wrap_and_step(model, **options):
    optimizer = wrap(model, torch.optim.AdamW, refresh=egop.Online(structure=egop.Shared()), **options)
    compute_gradients(model)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_global_hook_that_halves_gradients_halves_them_once(make):
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    hooked, expected = build(), build()
    optimizers = make(hooked), make(expected)
    for _ in range(2):
        compute_gradients(expected, scale=0.5)
        optimizers[1].step()
        handle = register_optimizer_step_pre_hook(halve)
        try:
            compute_gradients(hooked)
            optimizers[0].step()
        finally:
            handle.remove()
    for one, other in zip(hooked.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
        torch.testing.assert_close(one, other)


def test_hooks_of_the_inner_optimizer_run_in_its_step():
    model = build()
    optimizer = wrap_and_step(model)
    seen = []

    def replace_arguments(own, arguments, keywords):
        seen.append(("before", own))
        return arguments, {"closure": lambda: seen.append(("closure", own))}

    optimizer.inner.register_step_pre_hook(replace_arguments)
    optimizer.inner.register_step_post_hook(lambda own, *_: seen.append(("after", own)))
    compute_gradients(model)
    optimizer.step()
    assert seen == [("before", optimizer.inner), ("closure", optimizer.inner), ("after", optimizer.inner)]


def test_a_step_that_was_replaced_on_the_inner_optimizer_is_called():
    model = build()
    optimizer = wrap_and_step(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.inner)  # marks the steps that it sees
    compute_gradients(model)
    optimizer.step()
    assert optimizer.inner._opt_called
    scheduler.step()  # would warn otherwise


def test_a_step_that_was_replaced_on_the_class_is_called(monkeypatch):
    model = build()
    optimizer, calls = wrap_and_step(model), []
    original = torch.optim.AdamW.step

    @functools.wraps(original)  # which copies torch's marks, too
    def counted(self, *arguments):
        calls.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    compute_gradients(model)
    optimizer.step()
    assert calls == [optimizer.inner]
