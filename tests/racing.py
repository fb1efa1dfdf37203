"""Small problems for races."""

import torch
from torch import nn

import egop


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make_objective(loss=squares, *, dropout=0.2, batches=4):
    """Build a regression with batch norm and dropout, or with neither if ``dropout`` is 0."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16 * batches, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    norm = [nn.BatchNorm1d(5), nn.Dropout(dropout)] if dropout else []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), *norm, nn.Linear(5, 3))
    return egop.Objective(model, loss, list(zip(inputs.split(16), targets.split(16), strict=True)))


def make_quadratic(scales=(1.0, 0.02)):
    curvatures = torch.tensor(scales, dtype=torch.float64)
    theta = torch.ones(len(scales), dtype=torch.float64)
    return egop.Objective.from_function(lambda theta: (curvatures * theta.square()).sum() / 2, {"theta": theta})
