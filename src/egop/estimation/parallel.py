"""Estimation in several processes: check that they agree, combine their samples and share the results.

Each block is decomposed by one process. Before tensors are exchanged, the processes tell each other whether they can
continue. Anything that may fail is done before that, so that no process is left waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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


def combine(
    accumulators: Mapping[Block, Accumulator], owners: Mapping[Block, int], devices: Mapping[Block, torch.device]
) -> None:
    """Combine what all processes have accumulated for each block in the process that owns it."""
    if processes.world_size() == 1:
        return
    statistics = [(block, statistic) for block, each in accumulators.items() for statistic in each.statistics()]
    answers = processes.gather_results(lambda: [statistic.holding() for _, statistic in statistics])
    work = [(block, statistic, [answer[i] for answer in answers]) for i, (block, statistic) in enumerate(statistics)]

    def prepare() -> None:
        for block, statistic, holdings in work:
            statistic.prepare(holdings, devices[block])

    def collect() -> None:
        error = None
        for block, statistic, holdings in work:
            try:
                statistic.collect(owners[block], holdings, devices[block])
            except Exception as raised:  # the other processes still need this one for the other blocks
                error = error or raised
        if error is not None:
            raise error

    processes.run_collectively(prepare)
    processes.run_collectively(collect)


def share_results(results: Mapping[Block, Result], owners: Mapping[Block, int]) -> dict[Block, Result]:
    """Give every process the same results for all blocks, bit for bit."""
    if processes.world_size() == 1:
        return dict(results)
    outlines = processes.gather_results(lambda: {block.name: _outline(*result) for block, result in results.items()})
    shared = processes.run_collectively(
        lambda: {
            block: results[block] if block in results else _allocate(*outlines[owner][block.name])
            for block, owner in owners.items()
        }
    )
    for block, owner in owners.items():
        spectrum, change = shared[block]
        described = [spectrum.eigenvalues, spectrum.density] if spectrum is not None else []
        for tensor in [*change.tensors.values(), *described]:
            processes.broadcast(tensor, owner)
    return shared


def _outline(spectrum: Spectrum | None, change: ChangeOfBasis) -> tuple[Spectrum | None, ChangeOfBasis, str]:
    """Describe a result without its values, together with its kind of device."""
    if spectrum is not None:
        spectrum = replace(spectrum, eigenvalues=spectrum.eigenvalues.to("meta"), density=spectrum.density.to("meta"))
    return spectrum, change.to("meta"), change.device.type


def _allocate(spectrum: Spectrum | None, change: ChangeOfBasis, device: str) -> Result:
    """Allocate memory for a result that another process has described."""
    if spectrum is not None:
        eigenvalues, density = (
            torch.empty_like(tensor, device=device) for tensor in (spectrum.eigenvalues, spectrum.density)
        )
        spectrum = replace(spectrum, eigenvalues=eigenvalues, density=density)
    tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in change.tensors.items()}
    return spectrum, change.with_tensors(tensors)


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
