"""What a refresh may see of a step: gradients, momentum, and what the base optimizer would do with them."""

from __future__ import annotations

import pytest
import torch

import cases
import egop
from cases import DEEP
from egop.refresh import Refresher
from explicit import identical, logistic

BASES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, "exp_avg"),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "momentum_buffer"),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, None),
}


class Watching(egop.Refresh):
    """Looks at everything it may look at, and renews nothing."""

    def start(self, optimizer):
        return Watcher()


class Watcher(Refresher):
    def __init__(self):
        super().__init__()
        self.momenta, self.proposals = {}, {}

    def before_step(self, optimizer):
        pass

    def observe(self, optimizer):
        self.momenta, self.proposals = {}, {}
        for stack in optimizer.stacks:
            momentum, proposed = optimizer.momentum(stack), optimizer.proposed(stack)
            for place, index in enumerate(stack.active):
                block = stack.blocks[index]
                self.momenta[block.name] = momentum and [part[place].clone() for part in momentum]
                self.proposals[block.name] = [part[place] for part in proposed]

    def after_step(self, optimizer):
        self.steps += 1

    def renew(self, optimizer):
        pass


def step(model, optimizer, number, frozen=()):
    optimizer.zero_grad()
    logistic(model, DEEP.batches()[number % 4]).backward()
    for name in frozen:
        model.get_parameter(name).grad = None
    optimizer.step()


def made(base, refresh):
    kind, arguments, _ = BASES[base]
    model = DEEP.build()
    objective = egop.Objective(model, logistic, DEEP.batches())
    basis = egop.estimate(objective, structure=egop.Kronecker(), samples=20, progress=False)
    return model, egop.ReparameterizedOptimizer(model, kind, basis, refresh=refresh, **arguments)


@pytest.mark.parametrize("base", BASES)
def test_what_is_proposed_is_what_the_step_then_does(base):
    model, optimizer = made(base, Watching())
    frozen = [name for name, _ in model.named_parameters() if name.endswith("weight")][:1]
    for number in range(4):
        blocks = {block.name: block for block in optimizer.blocks}
        before = {name: [each.detach().clone() for each in block.coordinates] for name, block in blocks.items()}
        key = BASES[base][2]
        means = {
            name: [optimizer.inner.state[each][key].clone() for each in block.coordinates]
            for name, block in blocks.items()
            if key is not None and all(key in optimizer.inner.state.get(each, {}) for each in block.coordinates)
        }
        step(model, optimizer, number, frozen if number == 2 else ())
        watcher = optimizer.refresher
        assert len(watcher.proposals) == len(blocks) - (number == 2)
        for name, parts in watcher.proposals.items():
            for part, now, was in zip(parts, blocks[name].coordinates, before[name], strict=True):
                torch.testing.assert_close(was + part, now.detach(), rtol=1e-12, atol=1e-14)
            if (
                name in means and number != 3
            ):  # in the last a block of the stack has a mean, as always from the second on
                assert watcher.momenta[name] is not None
                assert all(map(torch.equal, watcher.momenta[name], means[name]))
            if number == 0 or key is None:
                assert watcher.momenta[name] is None


@pytest.mark.parametrize("base", BASES)
def test_a_look_changes_nothing(base):
    ends = []
    for refresh in (None, Watching()):
        model, optimizer = made(base, refresh)
        for number in range(5):
            step(model, optimizer, number)
        ends.append(cases.parameters_of(model))
    assert identical(*ends)


class Rebasing(Watching):
    """Goes on in another structure from the second step on, when the gradients have been seen."""

    def start(self, optimizer):
        return Rebaser()


class Rebaser(Watcher):
    def observe(self, optimizer):
        if self.steps == 1:
            changes = []
            for block in [block.change.block for block in optimizer.blocks]:
                width = block.shapes[0].numel() // block.shapes[0][0]
                changes.append(egop.Shared().change(block, {"basis": torch.eye(width, dtype=block.dtype)}))
            optimizer.rebase(egop.Basis(changes), moments="reset")
        super().observe(optimizer)


def test_other_blocks_that_are_given_while_a_step_is_under_way_take_that_step():
    model, optimizer = made("SGD", Rebasing())
    plain = DEEP.build()
    other = torch.optim.SGD(plain.parameters(), **BASES["SGD"][1])
    step(model, optimizer, 0)
    step(plain, other, 0)
    before = cases.parameters_of(model)
    step(model, optimizer, 1)
    assert {block.change.kind for block in optimizer.blocks} == {"Shared"}
    for name in before:
        assert not torch.equal(model.get_parameter(name), before[name])
    assert optimizer.refresher.proposals == {}  # their gradients come after it has looked


def test_what_is_proposed_counts_with_weights_that_someone_else_has_written():
    model, optimizer = made("AdamW", Watching())
    step(model, optimizer, 0)
    with torch.no_grad():
        model[0].weight.mul_(10)
    block = next(block for block in optimizer.blocks if "0.weight" in block.change.block.parameters)
    tensors = [model.get_parameter(name).detach().clone() for name in block.change.block.parameters]
    start = block.change.encode(tensors)
    step(model, optimizer, 1)
    for was, part, now in zip(start, optimizer.refresher.proposals[block.name], block.coordinates, strict=True):
        torch.testing.assert_close(was + part, now.detach(), rtol=1e-12, atol=1e-14)
