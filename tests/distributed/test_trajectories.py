"""Several processes train like one that sees the whole batch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import egop
from processes import run
from training import WRAPPERS, basis, batch, loss_of, network, optimizer_of, sharded, steps, weights

STRUCTURES = {"Shared": egop.Shared(), "Full": egop.Full(), "Kronecker": egop.Kronecker()}
STRUCTURES |= {side: egop.Shared(side=side) for side in ("output", "smaller")}
REFRESHES = {"fixed": lambda structure: None, "online": lambda structure: egop.Online(every=3, structure=structure)}
REFRESHES["aligned"] = lambda structure: egop.Aligned()
KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
MATRICES = {"PolarAdam": egop.optim.PolarAdam, "Sinkhorn": egop.optim.Sinkhorn, "Sign": egop.optim.Sign}
CASES = [
    ("AdamW", structure, refresh) for structure in ("Shared", "Full", "Kronecker") for refresh in ("fixed", "online")
]
CASES += [("Adam", "Shared", "fixed"), ("Adam", "Kronecker", "online"), ("AdamW", "output", "online")]
CASES += [("PolarAdam", "Shared", "online"), ("Sinkhorn", "smaller", "aligned")]  # which see whole matrices
CASES += [("Sign", "Kronecker", "online")]
FEW = [("AdamW", "Shared", "online"), ("AdamW", "Full", "fixed"), ("PolarAdam", "Shared", "online")]


@functools.cache
def basis_of(structure):
    return basis(STRUCTURES[structure])


def started(model, kind, structure, refresh):
    options = {"outside": torch.optim.AdamW} if kind in MATRICES else {}
    renewed = REFRESHES[refresh](STRUCTURES[structure])
    return optimizer_of(model, (KINDS | MATRICES)[kind], None, renewed, basis_of(structure), **options)


def trained(wrapper, kind, structure, refresh, rank=0, world=1):
    model = WRAPPERS[wrapper](network())
    optimizer = started(model, kind, structure, refresh)
    steps(model, optimizer, rank=rank, world=world)
    return weights(model)


def all_cases(rank, world, wrapper, cases=CASES):
    return {"/".join(case): trained(wrapper, *case, rank, world) for case in cases}


def all_of_two(rank, world):
    return {
        "DDP": all_cases(rank, world, "DDP"),
        "FSDP2": all_cases(rank, world, "FSDP2"),
        "collectives": counted(),
        "left alone": left_alone(rank, world),
    }


@pytest.fixture(scope="module")
def two():
    """Return the results of two processes."""
    return run(all_of_two, 2)


@pytest.fixture(scope="module")
def alone():
    return all_cases(0, 1, "plain")


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_two_processes_train_like_one(wrapper, two, alone):
    check([found[wrapper] for found in two], alone)


@pytest.mark.slow
def test_four_processes_train_like_one(alone):
    check(run(all_cases, 4, "FSDP2", FEW), alone)


def check(ranks, expected):
    for found in ranks:
        for case, parameters in found.items():
            # One gradient of a block is one direction of a Full basis. The others are told apart by a shift of a
            # millionth, which makes a millionfold of the rounding in them.
            tolerance = 1e-8 if "Full/online" in case else 1e-10
            for name, value in expected[case].items():
                torch.testing.assert_close(parameters[name], value, rtol=0, atol=tolerance, msg=f"{case}: {name}")


def counted():
    """Count the collectives of each optimizer step, by structure and refresh."""
    found = {}
    for structure, refresh in (("Shared", "fixed"), ("Shared", "online"), ("Kronecker", "fixed")):
        model = sharded(network())
        optimizer = started(model, "AdamW", structure, refresh)
        counts = []
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, *batch(step)).backward()
            with CommDebugMode() as seen:
                optimizer.step()
            counts.append(seen.get_total_counts())
        found[f"{structure} {refresh}"] = counts
    return found


def test_shared_needs_no_collective_in_a_step_and_few_at_a_refresh(two):
    for counts in (found["collectives"] for found in two):
        assert counts["Shared fixed"] == [0] * 7
        online = counts["Shared online"]  # one sum for each of the blocks, in turn
        assert sum(online[:3]) == sum(online[3:6]) == 4
        assert all(count > 0 for count in counts["Kronecker fixed"])


def left_alone(rank, world):
    """Train the model in original coordinates, where all sharded parameters are outside every block."""
    models = [sharded(network()) for _ in range(2)]
    optimizers = [
        egop.ReparameterizedOptimizer(models[0], torch.optim.AdamW, lr=0.02),
        torch.optim.AdamW(models[1].parameters(), lr=0.02),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, rank=rank, world=world)
    return [weights(model) for model in models]


def test_sharded_parameters_without_a_basis_are_stepped_as_by_the_plain_optimizer(two):
    for ours, plain in (found["left alone"] for found in two):
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-14)
