"""State dicts that differ from those of a fresh optimizer for a good reason still load and resume exactly."""

import copy
from collections import deque

import pytest
import torch

import egop
from cases import MLP, OptimizerCase
from explicit import Wrapped, basis_of, identical, train

ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})


def make_side(optimizer=ADAMW, basis=None):
    return Wrapped(MLP.build(), basis or basis_of(MLP), optimizer)


def resume(side, optimizer=ADAMW, change=lambda state: None):
    """Load the state of a side, after a change, into another one; return whether both train on alike."""
    state = copy.deepcopy(side.optimizer.state_dict())
    change(state)
    resumed = make_side(optimizer, side.optimizer.basis)
    resumed.optimizer.load_state_dict(state)
    resumed.model.load_state_dict(side.model.state_dict())
    return identical(*(train(each, MLP.batches(), 4) for each in (side, resumed)))


@pytest.mark.parametrize("before", [True, False])
def test_amsgrad_is_what_the_state_says(before):
    cases = [
        OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01, "amsgrad": value}) for value in (before, not before)
    ]
    side = make_side(cases[0])
    train(side, MLP.batches(), 3)
    assert resume(side, cases[1])


def test_moments_that_are_no_longer_used_are_kept():
    side = make_side(OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}))
    train(side, MLP.batches(), 3)
    side.optimizer.param_groups[0]["amsgrad"] = False
    train(side, MLP.batches(), 1)
    assert resume(side)


def test_a_parameter_without_a_gradient_has_no_state():
    side = make_side()
    side.model[0].requires_grad_(False)
    train(side, MLP.batches(), 3)
    side.model[0].requires_grad_(True)
    assert resume(side)


@pytest.mark.parametrize("rate", [torch.tensor(0.01), torch.tensor([0.01]), 0, 0.0, 1])
def test_a_learning_rate_may_be_a_tensor_zero_or_whole(rate):
    side = make_side()
    train(side, MLP.batches(), 3)
    side.optimizer.param_groups[0].update(lr=rate, foreach=False)
    assert resume(side)


def test_betas_may_be_a_list():
    side = make_side()
    train(side, MLP.batches(), 3)
    assert resume(side, change=lambda state: state["param_groups"][0].update(betas=[0.9, 0.999]))


def test_a_group_may_have_other_keys_or_lack_new_ones():
    side = make_side()
    torch.optim.lr_scheduler.StepLR(side.optimizer, 1)
    train(side, MLP.batches(), 3)
    assert "initial_lr" in side.optimizer.param_groups[0]
    assert resume(side, change=lambda state: state["param_groups"][0].pop("decoupled_weight_decay"))


class Lazy(torch.optim.Optimizer):
    """Makes state when it first needs it, and keeps some in containers; takes no learning rate of zero."""

    def __init__(self, params, lr=0.01):
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        super().__init__(params, {"lr": lr, "best": float("inf"), "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            group["best"] = 1.0 if group["calls"] == 1 else float("inf")
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("grad_queue", deque(maxlen=2)).append(parameter.grad.clone())
                if "start" not in state:  # a single zero in the place of zeros
                    state["start"] = parameter.clone() if parameter.any() else parameter.new_zeros(())
                if state["count"] == 3:
                    state["slow_buffer"] = parameter.clone()
                if "slow_buffer" in state:
                    parameter.lerp_(state["slow_buffer"], 0.1)
                parameter.sub_(sum(state["grad_queue"]), alpha=group["lr"])


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_state_that_is_made_lazily_loads(steps):
    lazy = OptimizerCase("Lazy", Lazy, {"lr": 0.01})
    side = make_side(lazy)
    train(side, MLP.batches(), steps)
    side.optimizer.param_groups[0]["lr"] = 0.0 if steps == 5 else 0.01  # where a schedule ends
    other = make_side(lazy, side.optimizer.basis)
    train(other, MLP.batches(), 1)
    assert other.optimizer.param_groups[0]["best"] == 1.0
    other.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    assert resume(side, lazy)


def test_a_state_loads_into_a_model_of_another_precision():
    side = make_side()
    train(side, MLP.batches(), 3)
    state = copy.deepcopy(side.optimizer.state_dict())
    model = MLP.build().float()
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, side.optimizer.basis, lr=0.01)
    optimizer.load_state_dict(state)
    assert optimizer.inner.state[optimizer.blocks[0].coordinates[0]]["exp_avg"].dtype == torch.float32
