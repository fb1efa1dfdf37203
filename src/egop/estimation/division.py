"""One estimation divided among processes: they agree on it, bring together what they saw, and hand out what they found.

Each block is decomposed by one process. Before every exchange of tensors the processes tell each other whether they can
go on; what may fail is done before, so that no process is left waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import Block, Plan, Summary
from egop.distributed import processes
from egop.estimation.objective import Objective


def agree(objective: Objective, plan: Plan, generator: torch.Generator, options: Mapping[str, Any]) -> None:
    """Raise an error unless all processes want the same estimate; and set all generators to the first one's state."""
    if processes.world_size() == 1:
        return

    def wanted() -> tuple[dict[str, str], Tensor]:
        objective.check_whole()
        module = objective.module
        others = [*module.named_parameters(), *module.named_buffers()] if module is not None else []
        tensors = [*objective.parameters.items(), *others]
        return {
            **{name: repr(value) for name, value in options.items()},
            "the model": repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]),
            "the structures": repr([(block.name, structure) for block, structure in plan.chosen.items()]),
            "the generator's device": repr(generator.device.type),
        }, generator.get_state()

    answers = processes.gather_results(wanted)
    first, state = answers[0]
    for place, (settings, _) in enumerate(answers):
        for name, value in settings.items():
            if value != first[name]:
                raise ValueError(
                    f"The processes do not want the same estimate: {name} is {_short(first[name])} in process 0, and "
                    f"{_short(value)} in process {place}. All of them have to call it with the same arguments."
                )
    generator.set_state(state)


def owners_of(plan: Plan) -> dict[Block, int]:
    """Which process decomposes each block, so that all have about as much to do."""

    def work(block: Block) -> int:
        return sum(math.prod(shape) * shape[-1] for shape in plan.chosen[block].basis_shapes(block).values())

    owners = processes.assign_owners([work(block) for block in plan.chosen])
    return dict(zip(plan.chosen, owners, strict=True))


def collect(
    summaries: Sequence[tuple[Block, Summary]], owners: Mapping[Block, int], devices: Mapping[Block, torch.device]
) -> None:
    """Bring together what all processes have of each block, in the process that owns it."""
    if processes.world_size() == 1:
        return
    answers = processes.gather_results(lambda: [summary.holding() for _, summary in summaries])
    everything = [
        (block, summary, [answer[place] for answer in answers]) for place, (block, summary) in enumerate(summaries)
    ]

    def prepare() -> None:
        for block, summary, holdings in everything:
            summary.prepare(holdings, devices[block])

    def bring() -> None:
        error = None
        for block, summary, holdings in everything:
            try:
                summary.collect(owners[block], holdings, devices[block])
            except Exception as raised:  # the others still count on this process for the other blocks
                error = error or raised
        if error is not None:
            raise error

    processes.run_collectively(prepare)
    processes.run_collectively(bring)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
