"""The stacked Muon is torch's, weight by weight; NorMuon is its formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import egop
from egop_lab.muon import Muon, NorMuon

SHAPES = [(6, 9), (6, 9), (9, 6), (5, 5)]


def weights():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_is_torchs():
    ours, theirs = weights(), weights()
    optimizer = Muon(ours, lr=0.01, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for parameters, its_optimizer in ((ours, optimizer), (theirs, other)):
            give_gradients(parameters, step)
            its_optimizer.step()
    for parameter, expected in zip(ours, theirs, strict=True):  # torch iterates in bfloat16 also on the CPU
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-3)


def test_kernels_are_matrices():
    kernel = nn.Parameter(torch.randn(4, 2, 3, 3))
    matrix = nn.Parameter(kernel.detach().reshape(4, 18).clone())
    kernel.grad = torch.randn_like(kernel)
    matrix.grad = kernel.grad.reshape(4, 18).clone()
    for parameter in (kernel, matrix):
        Muon([parameter], lr=0.01).step()
    assert torch.equal(kernel.detach().reshape(4, 18), matrix.detach())


@pytest.mark.parametrize("steps", [1, 4])
def test_normuon_is_its_formulas(steps):
    ours, plain = weights(), weights()
    optimizer = NorMuon(ours, lr=0.01, weight_decay=0.1)
    means, squares = [0.0] * len(plain), [0.0] * len(plain)
    for step in range(steps):
        give_gradients(ours, step)
        give_gradients(plain, step)
        optimizer.step()
        with torch.no_grad():
            for place, weight in enumerate(plain):
                means[place] = 0.95 * means[place] + 0.05 * weight.grad
                factor = egop.optim.polar(0.95 * means[place] + 0.05 * weight.grad)
                squares[place] = 0.95 * squares[place] + 0.05 * factor.square().mean(1, keepdim=True)
                update = factor / (squares[place].sqrt() + 1e-8)
                update = 0.2 * update / update.square().mean().sqrt()
                weight.mul_(1 - 0.001).sub_(0.01 * update)
    for parameter, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
