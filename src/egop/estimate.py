"""The straight line from an objective to a basis, as one function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from egop.distributions import Distribution, Initialization
from egop.objective import Objective
from egop.partition import Block, Partition, match, partition_parameters
from egop.reparameterization import Reparameterization
from egop.sampling import Method, sample_gradients
from egop.structures import Full, Structure
from egop.units import format_bytes, parse_bytes

StructureChoice = Literal["auto"] | Structure | Mapping[str, Structure]

# "auto" builds no dense basis beyond this size: the decomposition alone would take minutes.
FULL_LIMIT = 4096


def estimate(
    objective: Objective,
    *,
    rho: Distribution | None = None,
    partition: Partition = "layer",
    structure: StructureChoice = "auto",
    samples: int | None = None,
    memory: int | str = "2GiB",
    generator: torch.Generator | None = None,
    progress: bool = True,
    sampling: Method = "auto",
) -> Reparameterization:
    r"""Estimate the EGOP eigenbasis of an objective, one basis per block.

    Draws :math:`\theta_1, \dots, \theta_M \sim \rho`, forms for each block
    :math:`\hat P = \frac1M \sum_i \nabla f(\theta_i) \nabla f(\theta_i)^\top` and takes its eigenvectors.

    Args:
        objective: the loss, its parameters and the batches it sees.
        rho: where the points are drawn; the network's own initialisation by default.
        partition: which parameters form a block: ``"layer"``, ``"parameter"``, ``"global"`` or a mapping of block names
            to name patterns. The first three leave biases and norm layers alone.
        structure: how a block's basis is built: one structure for all, a mapping of block-name patterns to structures
            (the first that matches counts; blocks without a match stay in original coordinates), or ``"auto"``.
        samples: the number M of points; by default what the structures ask for.
        memory: what all bases together may take.
        generator: the source of all randomness; one with seed 0 by default.
        progress: show a progress bar.
        sampling: ``"loop"``, ``"vmap"`` or ``"auto"``, see :func:`egop.sampling.sample_gradients`.

    Returns:
        The change of basis of each block. The model is left exactly as it was.

    Example:
        >>> theta = torch.zeros(3)
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), samples=100, progress=False)
        >>> basis["theta"].dense().shape
        torch.Size([3, 3])

    Reference: *Faster Adaptive Optimization via Expected Gradient Outer Product Reparameterization*, Algorithm 1.
    """
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be an egop.Objective, got {type(objective).__name__}. "
            "Use egop.Objective(model, loss_fn, batches)."
        )
    if samples is not None and samples < 1:
        raise ValueError(f"Invalid samples value: {samples}. Must be at least 1.")
    rho = Initialization() if rho is None else rho
    if not isinstance(rho, Distribution):
        raise TypeError(f"rho must be a distribution such as egop.Gaussian(), got {rho!r}.")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    rho.check(objective)
    plan, left = plan_structures(partition_parameters(objective, partition), structure, parse_bytes(memory))
    accumulators = {block: chosen.accumulator(block) for block, chosen in plan.items()}
    count = samples or max((chosen.samples(block) for block, chosen in plan.items()), default=0)
    names = [name for block in plan for name in block.parameters]
    if count and names:
        for gradients in sample_gradients(
            objective, rho, count, names=names, generator=generator, method=sampling, progress=progress
        ):
            for block, accumulator in accumulators.items():
                accumulator.add([gradients[name] for name in block.parameters])
    finished = {block.name: accumulator.finish() for block, accumulator in accumulators.items()}
    spectra = {name: spectrum for name, (spectrum, _) in finished.items() if spectrum is not None}
    return Reparameterization([change for _, change in finished.values()], spectra, left)


def plan_structures(
    blocks: list[Block], structure: StructureChoice, memory: int
) -> tuple[dict[Block, Structure], dict[str, str]]:
    """Which structure each block gets, and why the others stay in original coordinates."""
    plan: dict[Block, Structure] = {}
    left: dict[str, str] = {}
    if isinstance(structure, Structure):
        plan = dict.fromkeys(blocks, structure)
    elif isinstance(structure, Mapping):
        names = [block.name for block in blocks]
        matched = {pattern: set(match([pattern], names, "block")) for pattern in structure}
        for block in blocks:
            found = [structure[pattern] for pattern in structure if block.name in matched[pattern]]
            if found:
                plan[block] = found[0]
            else:
                left[block.name] = "no pattern names it"
    elif structure == "auto":
        return _automatic(blocks, memory)
    else:
        raise TypeError(
            f"Invalid structure value: {structure!r}. Must be 'auto', a structure such as egop.Full(), or a mapping of "
            "block-name patterns to structures."
        )
    _check_memory(plan, memory)
    return plan, left


def _automatic(blocks: list[Block], memory: int) -> tuple[dict[Block, Structure], dict[str, str]]:
    plan: dict[Block, Structure] = {}
    left: dict[str, str] = {}
    for block in sorted(blocks, key=lambda block: block.size):
        needed = Full().cost(block).bytes
        if block.size > FULL_LIMIT:
            left[block.name] = f"left: {block.size} entries, more than {FULL_LIMIT}"
        elif needed > memory:
            left[block.name] = f"left: {format_bytes(needed)} do not fit the memory"
        else:
            plan[block] = Full()
            memory -= needed
    return {block: plan[block] for block in blocks if block in plan}, left


def _check_memory(plan: Mapping[Block, Structure], memory: int) -> None:
    for block, chosen in plan.items():
        needed = chosen.cost(block).bytes
        if needed > memory:
            raise MemoryError(
                f"Block '{block.name}' needs a {block.size} x {block.size} basis ({format_bytes(needed)}), "
                f"more than what is left of the memory ({format_bytes(memory)}). Raise memory=, "
                "choose a finer partition, or leave the block out with structure={...}."
            )
        memory -= needed
