"""On several processes the same parameters come out as on one that sees the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import egop
from processes import run
from training import WRAPPERS, batch, loss_of, network, optimizer_of, sharded, steps, weights

STRUCTURES = {"Shared": egop.Shared(), "Full": egop.Full(), "Kronecker": egop.Kronecker()}
REFRESHES = {"fixed": lambda structure: None, "online": lambda structure: egop.Online(every=3, structure=structure)}
KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
CASES = [(kind, structure, refresh) for kind in KINDS for structure in STRUCTURES for refresh in REFRESHES]


def trained(wrapper, kind, structure, refresh, rank=0, world=1):
    model = WRAPPERS[wrapper](network())
    optimizer = optimizer_of(model, KINDS[kind], STRUCTURES[structure], REFRESHES[refresh](STRUCTURES[structure]))
    steps(model, optimizer, rank=rank, world=world)
    return weights(model)


def all_cases(rank, world, wrapper):
    return {"/".join(case): trained(wrapper, *case, rank, world) for case in CASES}


@pytest.mark.parametrize(("wrapper", "world"), [("DDP", 2), ("FSDP2", 2), ("FSDP2", 4)])
def test_the_trajectory_is_that_of_one_process(wrapper, world):
    expected = all_cases(0, 1, "plain")
    for found in run(all_cases, world, wrapper):
        for case, parameters in expected.items():
            # One gradient of a block is one direction of a Full basis. The others are told apart by a shift of a
            # millionth, which makes a millionfold of the rounding in them.
            tolerance = 1e-8 if "Full/online" in case else 1e-10
            for name, value in parameters.items():
                torch.testing.assert_close(found[case][name], value, rtol=0, atol=tolerance, msg=f"{case}: {name}")


def counted(rank, world):
    """How many collectives each optimizer step makes, by structure and refresh."""
    found = {}
    for structure, refresh in (("Shared", "fixed"), ("Shared", "online"), ("Kronecker", "fixed")):
        model = sharded(network())
        optimizer = optimizer_of(
            model, torch.optim.AdamW, STRUCTURES[structure], REFRESHES[refresh](STRUCTURES[structure])
        )
        counts = []
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, *batch(step)).backward()
            with CommDebugMode() as seen:
                optimizer.step()
            counts.append(seen.get_total_counts())
        found[f"{structure} {refresh}"] = counts
    return found


def test_shared_needs_no_collective_in_a_step_and_few_at_a_refresh():
    for counts in run(counted, 2):
        assert counts["Shared fixed"] == [0] * 7
        online = counts["Shared online"]  # one sum for each of the blocks, in turn
        assert sum(online[:3]) == sum(online[3:6]) == 4
        assert all(count > 0 for count in counts["Kronecker fixed"])


def left_alone(rank, world):
    """The same model with every part in original coordinates: what the wrapper does with sharded parameters itself."""
    models = [sharded(network()) for _ in range(2)]
    optimizers = [
        egop.ReparameterizedOptimizer(models[0], torch.optim.AdamW, lr=0.02),
        torch.optim.AdamW(models[1].parameters(), lr=0.02),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, rank=rank, world=world)
    return [weights(model) for model in models]


def test_without_a_basis_sharded_parameters_are_stepped_as_by_the_plain_optimizer():
    for ours, plain in run(left_alone, 2):
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-14)
