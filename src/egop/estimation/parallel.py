"""Estimation in several processes: check that they agree, combine their samples and share the results.

Each block is decomposed by one process. An error in one process is raised in all, so that none is left waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from egop.basis import Accumulator, Block, ChangeOfBasis, Plan, Spectrum
from egop.distributed import processes
from egop.estimation.objective import Objective

Result = tuple[Spectrum | None, ChangeOfBasis]


def check_agreement(objective: Objective, plan: Plan, generator: torch.Generator, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the processes want different estimates, and set all generators to the first one's state."""
    if processes.world_size() == 1:
        return

    def describe() -> tuple[dict[str, str], Tensor]:
        objective.check_unsharded()
        module = objective.module
        others = [*module.named_parameters(), *module.named_buffers()] if module is not None else []
        tensors = [*objective.parameters.items(), *others]
        return {
            **{name: repr(value) for name, value in options.items()},
            "the model": repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]),
            "the structures": repr([(block.name, structure) for block, structure in plan.chosen.items()]),
            "the generator's device": repr(generator.device.type),
        }, generator.get_state()

    answers = processes.gather_results(describe)
    first, state = answers[0]
    for rank, (settings, _) in enumerate(answers):
        for name, value in settings.items():
            if value != first[name]:
                raise ValueError(
                    f"The processes want different estimates: {name} is {_shorten(first[name])} in process 0 and "
                    f"{_shorten(value)} in process {rank}. Call it with the same arguments in all processes."
                )
    generator.set_state(state)


def assign_blocks(plan: Plan) -> dict[Block, int]:
    """Assign each block to the process that decomposes it, so that all have about the same amount of work."""

    def estimate_work(block: Block) -> int:
        return sum(math.prod(shape) * shape[-1] for shape in plan.chosen[block].basis_shapes(block).values())

    owners = processes.assign_owners([estimate_work(block) for block in plan.chosen])
    return dict(zip(plan.chosen, owners, strict=True))


def merge_accumulators(
    accumulators: dict[Block, Accumulator],
    plan: Plan,
    owners: Mapping[Block, int],
    devices: Mapping[Block, torch.device],
) -> dict[Block, Accumulator]:
    """Merge what all processes have accumulated; return the accumulators of the blocks that this process owns."""
    if processes.world_size() == 1:
        return accumulators
    own = {}
    for block, structure in plan.chosen.items():
        accumulator, merged = accumulators.pop(block), structure.accumulator(block)
        is_owner = owners[block] == processes.rank()
        if is_owner:
            own[block] = merged
        for sender in range(processes.world_size()):
            part = processes.broadcast_object(accumulator, sender, devices[block])
            processes.run_collectively(partial(merged.merge, part) if is_owner else lambda: None)
    return own


def share_results(
    results: Mapping[Block, Result], owners: Mapping[Block, int], devices: Mapping[Block, torch.device]
) -> dict[Block, Result]:
    """Give every process the same results for all blocks, bit for bit."""
    return {
        block: cast(Result, processes.broadcast_object(results.get(block), owner, devices[block]))
        for block, owner in owners.items()
    }


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
