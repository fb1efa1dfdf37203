"""A refresh that replaces the blocks during a step."""

from __future__ import annotations

import torch

import cases
import egop
from cases import DEEP
from egop.refresh import Refresher
from explicit import logistic


class Replacing(egop.Refresh):
    """Changes the structure of all blocks in the second step, after the gradients have been collected."""

    def start(self, optimizer):
        return Replacer()


class Replacer(Refresher):
    def before_step(self, optimizer):
        pass

    def observe(self, optimizer):
        if self.steps == 1:
            changes = []
            for block in [block.change.block for block in optimizer.blocks]:
                width = block.shapes[0].numel() // block.shapes[0][0]
                changes.append(egop.Shared().change(block, {"basis": torch.eye(width, dtype=block.dtype)}))
            optimizer.rebase(egop.Basis(changes), moments="reset")

    def after_step(self, optimizer):
        self.steps += 1

    def renew(self, optimizer):
        pass


def step(model, optimizer, number):
    optimizer.zero_grad()
    logistic(model, DEEP.batches()[number % 4]).backward()
    optimizer.step()


def test_blocks_that_are_replaced_during_a_step_take_that_step():
    model = DEEP.build()
    basis = egop.estimate(
        egop.Objective(model, logistic, DEEP.batches()),
        partition="parameter",
        structure=egop.Identity(),
        progress=False,
    )
    weights = {name: change for name, change in basis.items() if len(change.block.shapes[0]) > 1}
    optimizer = egop.ReparameterizedOptimizer(
        model, torch.optim.SGD, egop.Basis(weights.values()), refresh=Replacing(), lr=0.1
    )
    plain = DEEP.build()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        step(model, optimizer, number)
        step(plain, other, number)
    assert {block.change.kind for block in optimizer.blocks} == {"Shared"}
    expected = cases.parameters_of(plain)
    for name, found in cases.parameters_of(model).items():
        torch.testing.assert_close(found, expected[name])
