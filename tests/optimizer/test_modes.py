"""Schedule-free optimizers: z is a point, and train() and eval() reach the model's own weights."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

import cases
import egop
from cases import DEEP, MLP, OptimizerCase
from explicit import Explicit, Wrapped, basis_of, distance, identical, logistic, train

pytest.importorskip("pytorch_optimizer")
from pytorch_optimizer import ScheduleFreeAdamW, ScheduleFreeRAdam, ScheduleFreeSGD

TOLERANCE = 1e-10
STRUCTURES = [
    egop.Full(),
    egop.Kronecker(),
    egop.Auxiliary(rank=3),
    egop.Reduced(rank=3),
    egop.Reduced(rank=3, keep_rest=False),
]


class LikeSchedulefree(torch.optim.Optimizer):
    """As the package ``schedulefree`` does it: to be switched on first, weights written in place, state made late."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        self._switch(on=False)

    @torch.no_grad()
    def train(self):
        self._switch(on=True)

    def _switch(self, on):
        for group in self.param_groups:
            if group["train_mode"] is not on:
                weight = 1 - group["momentum"] if on else 1 - 1 / group["momentum"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = on

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("Optimizer was not in train mode when step is called.")
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


OPTIMIZERS = [
    OptimizerCase("AdamW", ScheduleFreeAdamW, {"lr": 0.02, "weight_decay": 0.01}),
    OptimizerCase("AdamW-amsgrad", ScheduleFreeAdamW, {"lr": 0.02, "ams_bound": True, "warmup_steps": 5}),
    OptimizerCase("RAdam", ScheduleFreeRAdam, {"lr": 0.05}),
    OptimizerCase("SGD", ScheduleFreeSGD, {"lr": 0.1}),
    OptimizerCase("schedulefree", LikeSchedulefree),
]
ADAMW = OPTIMIZERS[0]


@cache
def two_bases(case, structure):
    return [basis_of(case, structure=structure, samples=samples) for samples in (40, 6)]


def through_both_modes(side, case):
    """What the weights are, in training and in evaluation."""
    seen = []
    for steps in (3, 4):
        side.optimizer.train()
        seen.append(train(side, case.batches(), steps))
        side.optimizer.eval()
        seen.append(side.weights())
    side.optimizer.train()
    seen.append(side.weights())
    return seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_both_modes_equal_those_of_explicit_coordinates(structure, optimizer):
    basis = two_bases(DEEP, structure)[0]
    found, expected = (through_both_modes(kind(DEEP.build(), basis, optimizer), DEEP) for kind in (Wrapped, Explicit))
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < TOLERANCE
    assert distance(found[2], found[3]) > 1e-4  # the average is another point
    assert distance(found[2], found[4]) < TOLERANCE  # and training goes on where it was


def explicitly_rebased(side, model, basis, optimizer):
    """The same training in another basis: all that is a point decoded and encoded, by dense matrices."""
    model.load_state_dict(side.weights())
    fresh = Explicit(model, basis, optimizer)
    for block, (new, _) in fresh.blocks.items():
        (old, _), own = side.blocks[block], side.optimizer.state[side.coordinates[block]]
        square = len(old) == old.shape[1]
        turned = {"z": new.mT @ (old @ own["z"] + side.rest[block])}
        for name in own.keys() & {"exp_avg_sq", "max_exp_avg_sq"}:
            turned[name] = (new.mT @ old).square() @ own[name] if square else own[name].clone()
        fresh.optimizer.state[fresh.coordinates[block]] = turned
    for name, leaf in fresh.others.items():
        fresh.optimizer.state[leaf] = {
            key: value.clone() for key, value in side.optimizer.state[side.others[name]].items()
        }
    for one, other in zip(fresh.optimizer.param_groups, side.optimizer.param_groups, strict=True):
        one.update({key: value for key, value in other.items() if key != "params"})
    return fresh


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(
    "structure", [egop.Full(), egop.Reduced(rank=3), egop.Reduced(rank=3, keep_rest=False)], ids=str
)
def test_a_change_of_basis_moves_points_as_points(structure, optimizer, mode):
    old, new = two_bases(MLP, structure)
    wrapped, explicit = (kind(MLP.build(), old, optimizer) for kind in (Wrapped, Explicit))
    for side in (wrapped, explicit):
        side.optimizer.train()
        train(side, MLP.batches(), 4)
        getattr(side.optimizer, mode)()
    wrapped.optimizer.rebase(new)
    explicit = explicitly_rebased(explicit, MLP.build(), new, optimizer)
    assert distance(wrapped.weights(), explicit.weights()) < TOLERANCE
    found, expected = through_both_modes(wrapped, MLP), through_both_modes(explicit, MLP)
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < TOLERANCE


def test_a_point_is_the_same_one_also_where_moments_are_kept():
    """Without squared moments nothing is left to differ: the same trajectory, whatever the basis."""
    bases = two_bases(MLP, egop.Full())
    found = []
    for policy in (None, "rotate", "keep"):
        side = Wrapped(MLP.build(), bases[0], OPTIMIZERS[3])
        for index in range(6):
            if policy:
                side.optimizer.rebase(bases[index % 2], moments=policy)
            train(side, MLP.batches(), 1)
        side.optimizer.eval()
        found.append(side.weights())
    assert distance(found[0], found[1]) < TOLERANCE
    assert distance(found[0], found[2]) < TOLERANCE


def test_online_follows_with_a_schedule_free_optimizer():
    """With momentum alone a renewed basis changes nothing."""
    found = []
    for refresh in (None, egop.Online(every=2)):
        model = MLP.build()
        optimizer = egop.ReparameterizedOptimizer(model, ScheduleFreeSGD, refresh=refresh, lr=0.1)
        for step in range(8):
            optimizer.train()
            optimizer.zero_grad()
            logistic(model, MLP.batches()[step % 4]).backward()
            optimizer.step()
        optimizer.eval()
        found.append(cases.parameters_of(model))
    assert distance(*found) < TOLERANCE


def test_outside_writes_are_taken_in_before_a_switch():
    basis = two_bases(MLP, egop.Full())[0]
    found = []
    for kind in (Wrapped, Explicit):
        side = kind(MLP.build(), basis, ADAMW)
        values = {name: value * 0.5 for name, value in train(side, MLP.batches(), 3).items()}
        if kind is Wrapped:
            side.model.load_state_dict(values)
        else:
            side.write(values)
        side.optimizer.eval()
        found.append(side.weights())
    assert distance(*found) < TOLERANCE


def test_a_switch_that_changes_nothing_leaves_every_bit():
    side = Wrapped(MLP.build(), two_bases(MLP, egop.Full())[0], ADAMW)
    before = side.weights()
    side.optimizer.eval()  # there is no average yet
    side.optimizer.train()
    side.optimizer.train()
    assert identical(side.weights(), before)
    trained = train(side, MLP.batches(), 2)
    side.optimizer.train()
    assert identical(side.weights(), trained)


def test_a_block_that_never_had_a_gradient_is_not_written():
    side = Wrapped(MLP.build(), two_bases(MLP, egop.Full())[0], ADAMW)
    before = side.weights()["0.weight"]
    for _ in range(3):
        side.optimizer.zero_grad()
        side.loss(MLP.batches()[0]).backward()
        side.model[0].weight.grad = None
        side.optimizer.step()
    side.optimizer.eval()
    assert torch.equal(side.weights()["0.weight"], before)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_resumed_training_goes_on_bit_for_bit_from_either_mode(mode):
    basis = two_bases(DEEP, egop.Full())[0]
    one, other = Wrapped(DEEP.build(), basis, ADAMW), Wrapped(DEEP.build(), None, ADAMW)
    train(one, DEEP.batches(), 3)
    getattr(one.optimizer, mode)()
    other.model.load_state_dict(copy.deepcopy(one.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    assert other.optimizer.param_groups[0]["train_mode"] is (mode == "train")
    for side in (one, other):
        side.optimizer.train()
    assert identical(train(one, DEEP.batches(), 3), train(other, DEEP.batches(), 3))


def test_the_mode_is_shown_in_the_groups_and_kept_in_copies():
    side = Wrapped(MLP.build(), two_bases(MLP, egop.Full())[0], ADAMW)
    train(side, MLP.batches(), 2)
    side.optimizer.eval()
    assert [group["train_mode"] for group in side.optimizer.param_groups] == [False]
    twin = copy.deepcopy(side)
    for each in (side, twin):
        each.optimizer.train()
    assert identical(side.weights(), twin.weights())


def test_an_optimizer_without_modes_has_none():
    """Trainers ask by ``hasattr`` whether there is something to call."""
    optimizer = egop.ReparameterizedOptimizer(MLP.build(), torch.optim.AdamW)
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")
    with pytest.raises(AttributeError, match=r"AdamW has no eval\(\)"):
        optimizer.eval()
    schedule_free = egop.ReparameterizedOptimizer(MLP.build(), ScheduleFreeAdamW)
    assert callable(schedule_free.train)
    assert callable(schedule_free.eval)


def test_an_error_within_a_switch_leaves_the_parameters_in_charge():
    class Failing(LikeSchedulefree):
        def eval(self):
            super().eval()
            raise RuntimeError("half way")

    side = Wrapped(MLP.build(), two_bases(MLP, egop.Full())[0], OptimizerCase("failing", Failing))
    side.optimizer.train()
    before = train(side, MLP.batches(), 3)
    with pytest.raises(RuntimeError, match="half way"):
        side.optimizer.eval()
    assert identical({"w": before["0.weight"]}, {"w": side.weights()["0.weight"]})
    assert all(stack.find_written([0]) == [0] for stack in side.optimizer.stacks)
