"""One small training, as one process and as several: what tests on several processes compare."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import egop

STEPS = 7
BATCH = 24  # of all processes together; can be divided by 2 and 4


def network():
    """Build layers of which two have one shape and are batched; 2 and 4 do not divide their row counts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = [(5, 7), (7, 7), (7, 7), (7, 3)]
        layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).double()


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(3 * inputs[:, :3])


def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()


def basis(structure, partition="parameter"):
    objective = egop.Objective(network(), lambda model, pair: loss_of(model, *pair), [batch(99)])
    return egop.estimate(objective, structure=structure, partition=partition, samples=12, progress=False)


def sharded(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {"plain": lambda model: model, "DDP": DistributedDataParallel, "FSDP2": sharded}


def optimizer_of(model, kind, structure, refresh, found=None, **arguments):
    """Build an optimizer that starts from a basis: the first gradient alone would leave some directions to rounding."""
    arguments = {"lr": 0.02, "weight_decay": 0.1} | arguments
    return egop.ReparameterizedOptimizer(model, kind, found or basis(structure), refresh=refresh, **arguments)


def steps(model, optimizer, first=0, count=STEPS, rank=0, world=1):
    share = BATCH // world
    for step in range(first, first + count):
        inputs, targets = (each[rank * share : (rank + 1) * share] for each in batch(step))
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()


def weights(model):
    """Return all weights, gathered if sharded, by the names of the plain model."""
    state = model.state_dict()
    return {name.removeprefix("module."): _whole(value).clone() for name, value in state.items()}


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value
