"""FSDP2 trains like one process, for every base optimizer, refresh and structure."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import egop
from egop.basis.structures.views import matrix_shape
from egop.estimation import partition_objective
from processes import run

ELEMENTWISE = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "Adagrad": torch.optim.Adagrad}
MATRIX = {"Sign": egop.optim.Sign, "Sinkhorn": egop.optim.Sinkhorn, "PolarAdam": egop.optim.PolarAdam}
BASES = ELEMENTWISE | MATRIX
STRUCTURES = {f"Shared {side}": egop.Shared(side=side) for side in ("input", "output", "smaller")}
STRUCTURES |= {"Kronecker": egop.Kronecker(), "Full": egop.Full()}
OWN = "chosen by the refresh"  # in the place of a structure: there is no basis to start from
SMALLER = egop.Shared(side="smaller")
REFRESHES = {
    "fixed": None,
    "Online": egop.Online(every=2, spread=False, structure=SMALLER),
    "drifted": egop.Online(every=2, tolerance=0.01, structure=SMALLER),
    "Aligned": egop.Aligned(),
    "Aligned every 2": egop.Aligned(every=2),
}
STEPS = 5
BATCH = 8


def is_valid(base, refresh, structure):
    if structure == "Full":  # few gradients leave most directions of such a basis to rounding
        return refresh == "fixed" and base in ELEMENTWISE
    if refresh.startswith("Aligned"):  # which needs the map of the base optimizer
        singular = base == "Sign" and structure == OWN  # the signs of a square gradient
        return base not in ("Adagrad", "PolarAdam") and structure != "Kronecker" and not singular
    return refresh != "fixed" or structure != OWN


CASES = tuple(
    (base, refresh, structure)
    for base in BASES
    for refresh in REFRESHES
    for structure in (*STRUCTURES, OWN)
    if is_valid(base, refresh, structure)
)
FEW = tuple(case for case in CASES if case[0] in ("AdamW", "Sinkhorn") and case[1] in ("Online", "Aligned"))
REST = tuple(case for case in CASES if case not in FEW)


class Weights(nn.Module):
    """Tall, wide and square weights, two of each shape, a convolution and experts, whose gradients have full rank."""

    def __init__(self):
        super().__init__()
        sizes = [(4, 13), (13, 4), (5, 5)]
        self.layers = nn.Sequential(*[nn.Linear(*size) for size in sizes for _ in range(2)])
        self.convolution = nn.Conv1d(2, 11, 2)
        self.experts = nn.Parameter(torch.randn(3, 9, 4))

    def forward(self, samples):
        """Return the sum of tanh(<weight, sample>) over all weights."""
        parameters = list(self.parameters())
        parts = samples.split([parameter.numel() for parameter in parameters], dim=1)
        products = [part @ parameter.flatten() for part, parameter in zip(parts, parameters, strict=True)]
        return torch.tanh(torch.stack(products) / 4).sum(0)


def build():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Weights().double()


def draw_samples(step):
    generator = torch.Generator().manual_seed(step)
    size = sum(parameter.numel() for parameter in build().parameters())
    return torch.randn(BATCH, size, generator=generator, dtype=torch.float64)


def draw_basis(structure, refresh):
    """Draw a random basis for each weight that is long enough for its gradients to span that basis."""
    objective = egop.Objective(build(), lambda model, samples: model(samples).mean(), [draw_samples(0)])
    generator = torch.Generator().manual_seed(1)
    changes = []
    for block in partition_objective(objective, "parameter")[0]:
        shapes = structure.basis_shapes(block)
        narrow, wide = sorted(matrix_shape(block))
        spanned = wide // 2 if refresh.startswith("Aligned") else narrow  # signs of a square matrix may be singular
        if refresh != "fixed" and max(shape[-1] for shape in shapes.values()) > spanned:
            continue
        draws = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}
        changes.append(structure.change(block, {key: torch.linalg.qr(draw).Q for key, draw in draws.items()}))
    return egop.Basis(changes)


def train(model, base, refresh, structure, rank=0, world=1):
    basis = None if structure == OWN else draw_basis(STRUCTURES[structure], refresh)
    outside = {"outside": torch.optim.AdamW} if base in MATRIX else {}
    optimizer = egop.ReparameterizedOptimizer(model, BASES[base], basis, refresh=REFRESHES[refresh], lr=0.01, **outside)
    share = BATCH // world
    for step in range(STEPS):
        optimizer.zero_grad()
        model(draw_samples(step)[rank * share : (rank + 1) * share]).mean().backward()
        optimizer.step()
    values = {name: gather(value) for name, value in model.state_dict().items()}
    bases = {f"basis of {name}": next(iter(change.tensors.values())) for name, change in optimizer.basis.items()}
    return values | bases


def gather(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def train_sharded(rank, world, cases):
    mesh = init_device_mesh("cpu", (world,))
    return {case: train(fully_shard(build(), mesh=mesh), *case, rank, world) for case in cases}


@functools.cache
def train_in_processes(world, cases):
    return run(train_sharded, world, cases)


def check(world, cases, case):
    expected = train(build(), *case)
    for found in train_in_processes(world, cases):
        assert found[case].keys() == expected.keys()
        for name, value in found[case].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("case", FEW, ids="/".join)
def test_two_processes_train_like_one(case):
    check(2, FEW, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids="/".join)
def test_two_processes_train_like_one_in_all_other_combinations(case):
    check(2, REST, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids="/".join)
def test_four_processes_train_like_one(case):
    """The last process has no row of a weight with five rows."""
    check(4, FEW, case)
