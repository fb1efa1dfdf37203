"""The paper's Algorithm 1: from an objective to a basis."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.basis import (
    Accumulator,
    Basis,
    Block,
    ChangeOfBasis,
    Partition,
    Plan,
    Role,
    Spectrum,
    StructureChoice,
    find_roles,
    make_plan,
    partition_parameters,
)
from egop.estimation import processes
from egop.estimation.objective import Objective
from egop.estimation.rho import Distribution, Initialization
from egop.estimation.sampling import SamplingMethod, sample_gradients
from egop.formatting import list_first, parse_bytes
from egop.numerics import check_positive_int, outside_inference_mode

logger = logging.getLogger("egop")

_MORE_SAMPLES = 4  # if there are too few samples, advise this many times as many
_MAX_LISTED = 3  # maximum number of names in a message


@outside_inference_mode
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
    sampling: SamplingMethod = "auto",
) -> Basis:
    r"""Estimate the EGOP eigenbasis of an objective, one basis per block.

    Draws :math:`\theta_1, \dots, \theta_M \sim \rho`, computes for each block
    :math:`\hat P = \frac1M \sum_i \nabla f(\theta_i) \nabla f(\theta_i)^\top` and takes its eigenvectors. The model is
    left exactly as it was.

    In an initialized process group all processes must call this, with the same arguments and the same batches (all
    of the data, not a shard). They divide the draws and the decompositions, and all get the same basis, bit for
    bit. Up to rounding, it is the basis that a single process would get, unless a low-rank sketch overflows or
    dropout masks are drawn for a whole chunk (see :func:`egop.estimation.sample_gradients`). The first process's
    generator, parameters and buffers are used. An error in one process is raised in all of them.

    Args:
        objective: the loss, its parameters and its batches.
        rho: the distribution of the points; the network's own initialization by default.
        partition: which parameters form a block: ``"layer"``, ``"parameter"``, ``"global"`` or a mapping of block names
            to name patterns. The first three leave out biases and norm layers.
        structure: how a block's basis is built: one structure for all blocks, a mapping of block-name patterns to
            structures (the first match counts; blocks without a match stay in original coordinates), or ``"auto"``:
            ``Shared``, or ``Full`` for parameters without rows. ``"auto"`` leaves embeddings,
            output heads and very wide layers in original coordinates.
        samples: the number M of points; by default, as many as the structures need.
        memory: memory limit for all bases together.
        generator: the source of all randomness; by default one with seed 0.
        progress: show a progress bar.
        sampling: ``"loop"``, ``"vmap"`` or ``"auto"``, see :func:`egop.estimation.sample_gradients`.

    Returns:
        The change of basis of each block.

    Example:
        >>> theta = torch.zeros(3)
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
        >>> basis = egop.estimate(objective, rho=egop.Gaussian(), samples=100, progress=False)
        >>> basis["theta"].dense().shape
        torch.Size([3, 3])

    Reference: *Faster Adaptive Optimization via Expected Gradient Outer Product Reparameterization*, Algorithm 1.
    """
    rho = Initialization() if rho is None else rho
    generator = torch.Generator().manual_seed(0) if generator is None else generator

    def check_and_plan() -> Plan:
        if not isinstance(objective, Objective):
            raise TypeError(
                f"objective must be an egop.Objective, got {type(objective).__name__}. "
                "Use egop.Objective(model, loss_fn, batches)."
            )
        if not isinstance(rho, Distribution):
            raise TypeError(f"rho must be a distribution such as egop.Gaussian(), got {rho!r}.")
        if samples is not None:
            check_positive_int("samples", samples)
        return make_plan(*partition_objective(objective, partition), structure, parse_bytes(memory))

    plan = processes.run_collectively(check_and_plan)
    if progress and structure == "auto" and processes.rank() == 0:
        tqdm.write(str(plan), file=sys.stderr)
    basis = estimate_plan(objective, plan, rho, samples, generator, sampling, progress)
    _warn_if_too_few_samples(basis.spectrum)
    return basis


class NoGradientError(ValueError):
    """Error for a loss that does not depend on the parameters of any block: every sampled gradient is exactly zero."""


def partition_objective(objective: Objective, partition: Partition) -> tuple[list[Block], dict[str, Role]]:
    """Partition an objective's parameters into blocks; return the blocks and the role of each parameter."""
    roles = find_roles(objective.parameters, objective.module)
    if objective.module is None:  # every tensor of a function is a weight, even a vector
        roles = {name: Role("weight") for name in roles}
    return partition_parameters(objective.parameters, roles, partition), roles


def estimate_plan(
    objective: Objective,
    plan: Plan,
    rho: Distribution,
    samples: int | None,
    generator: torch.Generator,
    sampling: SamplingMethod,
    progress: bool,
) -> Basis:
    """Estimate the basis of each block of a plan. In a process group all processes must call this."""
    draws = max((structure.samples(block) for block, structure in plan.chosen.items()), default=0)
    draws = draws and (samples or draws)  # none if no structure needs gradients
    options = {"samples": draws, "rho": type(rho).__name__, "sampling": sampling}
    _check_agreement(objective, plan, generator, options)
    accumulators = {block: structure.accumulator(block) for block, structure in plan.chosen.items()}

    def accumulate() -> bool:
        return draws > 0 and _accumulate(accumulators, objective, rho, draws, generator, sampling, progress)

    with objective.synchronize():
        has_gradient = any(processes.gather_results(accumulate))
    if draws and not has_gradient:
        names = [f"'{name}'" for block in plan.chosen for name in block.parameters]
        raise NoGradientError(
            f"The gradient of {list_first(names, _MAX_LISTED)} is exactly zero at "
            f"all {draws} draws: the loss does not reach these parameters. Check that the loss function uses the model "
            "it is given, not another one, and does not detach. If a layer after them starts at zero, sample where it "
            "does not: rho=egop.Recentered(scale) once it has been trained, or egop.Gaussian(scale)."
        )
    # Each block is decomposed by one process.
    owners = {block: index % processes.world_size() for index, block in enumerate(plan.chosen)}
    devices = {block: objective.parameters[block.parameters[0]].device for block in plan.chosen}
    own = _merge_accumulators(accumulators, plan, owners, devices)
    # Each accumulator is dropped once it is finished, to free its memory.
    finished = processes.run_collectively(lambda: {block: own.pop(block).finish() for block in list(own)})
    changes, spectra = [], {}
    for block, owner in owners.items():  # now all processes get the same results, bit for bit
        result = processes.broadcast_object(finished.get(block), owner, devices[block])
        spectrum, change = cast(tuple[Spectrum | None, ChangeOfBasis], result)
        changes.append(change)
        if spectrum is not None:
            spectra[block.name] = spectrum
    return Basis(changes, spectra, plan.unrotated)


def _check_agreement(objective: Objective, plan: Plan, generator: torch.Generator, options: Mapping[str, Any]) -> None:
    """Raise ValueError if the processes' arguments differ, and set all generators to the first one's state."""
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
                    f"The processes were given different arguments: {name} is {first[name]:.200} in process 0 and "
                    f"{value:.200} in process {rank}. Use the same arguments in all processes."
                )
    generator.set_state(state)


def _merge_accumulators(
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


def _warn_if_identical(gradients: Mapping[str, Tensor]) -> None:
    """Log a warning if all gradients of a chunk are the same: one point and one batch, without noise."""
    count = len(next(iter(gradients.values())))
    if count > 1 and all(bool((gradient == gradient[:1]).all()) for gradient in gradients.values()):
        logger.warning(
            "egop has sampled the same gradient %d times, so the basis contains only one direction. Give the objective "
            "more than one batch, or use a rho that draws different points, such as egop.Recentered(scale).",
            count,
        )


def _accumulate(
    accumulators: Mapping[Block, Accumulator],
    objective: Objective,
    rho: Distribution,
    draws: int,
    generator: torch.Generator,
    sampling: SamplingMethod,
    progress: bool,
) -> bool:
    """Sample this process's share of the draws; return True if any gradient is not zero."""
    chunks = sample_gradients(
        objective,
        rho,
        draws,
        names=[name for block in accumulators for name in block.parameters],
        generator=generator,
        method=sampling,
        progress=progress and processes.rank() == 0,
        share=processes.local_share(draws),
    )
    has_gradient = False
    with closing(chunks):  # restores the model immediately if sampling is interrupted
        for index, gradients in enumerate(chunks):
            if index == 0:
                _warn_if_identical(gradients)
            has_gradient = has_gradient or any(bool(gradient.any()) for gradient in gradients.values())
            for block, accumulator in accumulators.items():
                accumulator.add([gradients[name] for name in block.parameters])
    return has_gradient


def _warn_if_too_few_samples(spectra: Mapping[str, Spectrum]) -> None:
    unsupported = {name: spectrum for name, spectrum in spectra.items() if not spectrum.is_supported}
    if not unsupported or processes.rank() != 0:
        return
    samples = max(spectrum.samples for spectrum in unsupported.values())
    logger.warning(
        "%s too few for the basis of %s: more than half of the spectrum is sampling noise. Use samples=%d. If "
        "more samples have not helped, the spectrum may be flat: leave the weight in original coordinates by naming "
        "only the others in structure=, as in {'0.weight': egop.Shared()}.",
        "1 draw is" if samples == 1 else f"{samples} draws are",
        list_first([f"'{name}'" for name in unsupported], _MAX_LISTED),
        _MORE_SAMPLES * samples,
    )
