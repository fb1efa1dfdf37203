"""Helpers for tests of gradient sampling."""

from __future__ import annotations

import torch
from torch import nn

import cases
import egop

METHODS = ["loop", "vmap"]
GAUSSIAN = egop.Gaussian(scale=0.5)


def assert_same(found, expected, tolerance=1e-12):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def sample_both(objective, samples=7, rho=GAUSSIAN, **options):
    return [cases.sample(objective, rho, samples, method=method, **options) for method in METHODS]


class Recorder(egop.Distribution):
    """Records the draws of another distribution."""

    def __init__(self, rho):
        self.rho, self.points = rho, []

    def check(self, objective):
        self.rho.check(objective)

    def draw(self, objective, generator):
        self.points.append(self.rho.draw(objective, generator))
        return self.points[-1]


def dropping():
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)).double()
