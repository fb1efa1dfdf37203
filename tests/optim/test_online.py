"""Matrix optimizers in an online basis, compared with references that treat each weight separately.

``Online(Kronecker) × Sign`` is SPlus. The references keep the momentum in the original coordinates and rotate it in
every step, where the optimizer carries it from basis to basis.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import egop
from egop.basis import Block
from matrix_updates import CASES

LR, WEIGHT_DECAY, DECAY, STEPS = 0.01, 0.1, 0.9, 50


# The rotated side is never the wider one, which would have directions without any gradient, but for rounding.
WIDTHS = {"input": (5, 6, 6, 7), "output": (7, 6, 6, 5), "smaller": (6, 5, 5, 7), "both": (5, 5, 5, 5)}


def network(side):
    torch.manual_seed(0)
    first, *others, last = [nn.Linear(*pair, bias=False) for pair in pairwise(WIDTHS[side])]
    return nn.Sequential(first, nn.Tanh(), *others, nn.Tanh(), last).double()


def backward(model, side, step):
    """Set gradients of full rank; occasionally one is missing."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(40, WIDTHS[side][end], generator=generator, dtype=torch.float64) for end in (0, -1))
    (model(inputs) - targets).square().mean().backward()
    if step % 4 == 2:
        model[2].weight.grad = None


def descending_eigenvectors(gram):
    vectors = torch.linalg.eigh(gram)[1].flip(1)
    largest = vectors.abs().argmax(0)
    return vectors * vectors[largest, torch.arange(len(vectors))].sign()


def iterated(gram, basis):
    """Take one step of orthogonal iteration, strongest direction first."""
    image = gram @ basis
    order = (basis * image).sum(0).argsort(descending=True)
    columns = (image + 1e-6 * gram.diagonal().mean() * basis)[:, order]
    Q, R = torch.linalg.qr(columns)
    return Q * R.diagonal().sign()


class Reference:
    """One weight with the Gram matrices of its rotated sides, their bases, and its momentum in original coordinates."""

    def __init__(self, function, settings, sides, every, bases=None):
        self.function, self.settings, self.sides, self.every, self.bases = function, settings, sides, every, bases
        self.M = self.V = self.grams = None
        self.steps = 0

    def encode(self, matrix):
        for side, Q in zip(self.sides, self.bases, strict=True):
            matrix = Q.mT @ matrix if side == "output" else matrix @ Q
        return matrix

    def decode(self, matrix):
        for side, Q in zip(self.sides, self.bases, strict=True):
            matrix = Q @ matrix if side == "output" else matrix @ Q.mT
        return matrix

    @torch.no_grad()
    def step(self, weight):
        group, G = self.settings, weight.grad
        if G is not None:
            grams = [G @ G.mT if side == "output" else G.mT @ G for side in self.sides]
            if self.grams is None:
                self.grams, self.bases = grams, self.bases or [descending_eigenvectors(gram) for gram in grams]
                self.M, self.V = torch.zeros_like(G), torch.zeros_like(G)
            else:
                pairs = zip(self.grams, grams, strict=True)
                self.grams = [DECAY * old + (1 - DECAY) * new for old, new in pairs]
            self.update(weight, G, group)
        self.steps += 1
        if self.steps % self.every == 0 and self.grams is not None:
            self.renew()

    def update(self, weight, G, group):
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        self.M = beta * self.M + (1 - beta) * G
        N = self.encode(beta * self.M + (1 - beta) * G)
        if "betas" in group:
            self.V = group["betas"][1] * self.V + (1 - group["betas"][1]) * self.encode(G) ** 2
            N = N / (self.V.sqrt() + group["eps"])
        update = self.function(N, group)
        update = self.decode(group["update_rms"] * update / update.square().mean().sqrt())
        weight.mul_(1 - LR * WEIGHT_DECAY).sub_(LR * update)

    def renew(self):
        fresh = [iterated(*pair) for pair in zip(self.grams, self.bases, strict=True)]
        for side, old, new in zip(self.sides, self.bases, fresh, strict=True):
            rotation = (new.mT @ old) ** 2
            self.V = rotation @ self.V if side == "output" else self.V @ rotation.mT
        self.bases = fresh


STRUCTURES = {
    "input": (egop.Shared(), lambda shape: ["input"]),
    "output": (egop.Shared(side="output"), lambda shape: ["output"]),
    "smaller": (egop.Shared(side="smaller"), lambda shape: ["output" if shape[0] < shape[1] else "input"]),
    "both": (egop.Kronecker(), lambda shape: ["output", "input"]),
}


@pytest.mark.parametrize("side", STRUCTURES)
@pytest.mark.parametrize("case", ["Sign", "Sinkhorn", "PolarAdam"])
def test_steps_equal_the_reference(case, side):
    kind, function, _ = CASES[case]
    structure, sides_of = STRUCTURES[side]
    model, plain = network(side), network(side)
    refresh = egop.Online(every=3, decay=DECAY, structure=structure, spread=False)
    basis, bases = None, {}
    if side == "both":  # where the first gradient alone is diagonal in both of its bases, and all else in it rounding
        pair = [descending_eigenvectors(gram @ gram.mT) for gram in torch.randn(2, 5, 5, dtype=torch.float64)]
        blocks = [Block.from_tensors(name, {name: weight}) for name, weight in plain.named_parameters()]
        tensors = dict(zip(("left", "right"), pair, strict=True))
        basis = egop.Basis([structure.change(block, tensors) for block in blocks])
        bases = {"bases": pair}
    optimizer = egop.ReparameterizedOptimizer(model, kind, basis, refresh=refresh, lr=LR, weight_decay=WEIGHT_DECAY)
    settings = optimizer.param_groups[0]
    literals = [Reference(function, settings, sides_of(weight.shape), 3, **bases) for weight in plain.parameters()]
    for step in range(STEPS):
        backward(model, side, step)
        backward(plain, side, step)
        optimizer.step()
        for literal, weight in zip(literals, plain.parameters(), strict=True):
            literal.step(weight)
    assert optimizer.refresher.failures == 0
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-10)
