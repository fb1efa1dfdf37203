"""The straight line from an objective to a basis, as one function."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.basis import (
    Basis,
    Block,
    ChangeOfBasis,
    Halves,
    Layer,
    Partition,
    Plan,
    Spectrum,
    StructureChoice,
    Summary,
    compare,
    layers_of,
    make_plan,
    partition_parameters,
)
from egop.distributed import processes
from egop.estimation import division
from egop.estimation.chunks import Sampling
from egop.estimation.objective import Objective
from egop.estimation.rho import Distribution, Initialization
from egop.estimation.sampling import check_samples, sample_gradients
from egop.formatting import parse_bytes

logger = logging.getLogger("egop")

# Where there were too few draws, this many times as many are advised.
MORE = 4


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
    sampling: Sampling = "auto",
    stability: bool = False,
    shard_bases: bool = False,
) -> Basis:
    r"""Estimate the EGOP eigenbasis of an objective, one basis per block.

    Draws :math:`\theta_1, \dots, \theta_M \sim \rho`, forms for each block
    :math:`\hat P = \frac1M \sum_i \nabla f(\theta_i) \nabla f(\theta_i)^\top` and takes its eigenvectors.

    In an initialised process group all processes have to call this, with the same arguments and the same batches (the
    whole data, not a part for each). They divide the draws and the decompositions and get the same basis, bit for bit;
    up to rounding it is that of one process. (Not where more gradients are sketched than a sketch holds, nor where
    dropout masks are drawn for a whole chunk, see :func:`egop.estimation.sample_gradients`.) The first process's
    generator, parameters and buffers count. An error in one process is raised in all of them.

    Args:
        objective: the loss, its parameters and the batches it sees.
        rho: where the points are drawn; the network's own initialisation by default.
        partition: which parameters form a block: ``"layer"``, ``"parameter"``, ``"global"`` or a mapping of block names
            to name patterns. The first three leave biases and norm layers alone.
        structure: how a block's basis is built: one structure for all, a mapping of block-name patterns to structures
            (the first that matches counts; blocks without a match stay in original coordinates), or ``"auto"``:
            ``Shared``, and ``Full`` for what has no rows, printed as a table. It leaves embeddings, output heads and
            very wide layers in original coordinates.
        samples: the number M of points; by default what the structures ask for.
        memory: what all bases together may take.
        generator: the source of all randomness; one with seed 0 by default.
        progress: show a progress bar.
        sampling: ``"loop"``, ``"vmap"`` or ``"auto"``, see :func:`egop.estimation.sampling.sample_gradients`.
        stability: also find how far two bases agree that are each made from every other draw, see
            :attr:`egop.Spectrum.stability`. This takes two more decompositions of every block, of half the samples.
        shard_bases: let each process keep only the blocks that it has decomposed, with their spectra, not all blocks;
            ``basis.gathered()`` brings them together, which an optimizer needs.

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

    def planned() -> tuple[Distribution, torch.Generator, Plan]:
        pair = checked(objective, rho, samples, generator)
        return *pair, make_plan(*blocks_of(objective, partition), structure, parse_bytes(memory))

    where, source, plan = processes.run_collectively(planned)
    if progress and structure == "auto" and processes.rank() == 0:
        tqdm.write(str(plan), file=sys.stderr)
    basis = estimate_plan(objective, plan, where, samples, source, sampling, progress, stability, shard_bases)
    _look_for_support(basis.spectrum)
    return basis


class NoGradientError(ValueError):
    """The loss does not reach what is to be reparameterised: every gradient sampled is exactly zero."""


def checked(
    objective: Objective, rho: Distribution | None, samples: int | None, generator: torch.Generator | None
) -> tuple[Distribution, torch.Generator]:
    """The distribution and the generator, with their defaults; an error that says what to do for what cannot be."""
    if not isinstance(objective, Objective):
        raise TypeError(
            f"objective must be an egop.Objective, got {type(objective).__name__}. "
            "Use egop.Objective(model, loss_fn, batches)."
        )
    if samples is not None:
        check_samples(samples)
    rho = Initialization() if rho is None else rho
    if not isinstance(rho, Distribution):
        raise TypeError(f"rho must be a distribution such as egop.Gaussian(), got {rho!r}.")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {generator!r}. Use torch.Generator().manual_seed(0)."
        )
    return rho, generator


def blocks_of(objective: Objective, partition: Partition) -> tuple[list[Block], dict[str, Layer]]:
    """The blocks of an objective's parameters, and what each parameter is."""
    layers = layers_of(objective.parameters, objective.module)
    if objective.module is None:  # of a function every tensor is a weight, also a vector
        layers = {name: Layer("weight") for name in layers}
    return partition_parameters(objective.parameters, layers, partition), layers


def estimate_plan(
    objective: Objective,
    plan: Plan,
    rho: Distribution,
    samples: int | None,
    generator: torch.Generator,
    sampling: Sampling,
    progress: bool,
    stability: bool = False,
    shard_bases: bool = False,
) -> Basis:
    """The basis of each block of a plan; in a process group all processes have to call this."""
    count = samples_wanted(plan) and (samples or samples_wanted(plan))
    asked = {"samples": count, "rho": type(rho).__name__, "sampling": sampling, "stability": stability}
    division.agree(objective, plan, generator, asked | {"shard_bases": shard_bases})
    share = processes.local_share(count)
    gathered = Gathering(plan, stability=stability, first=share.start)
    progress = progress and processes.rank() == 0

    def sample() -> None:
        # Closed at once when something is interrupted: the model is put back where sampling ends.
        with closing(gradients_for(plan, objective, rho, samples, generator, sampling, progress, share)) as chunks:
            for gradients in chunks:
                gathered.add(gradients)

    with objective.as_in_first():
        processes.run_collectively(sample)
    check_reached(plan, count, any(processes.gather_results(lambda: gathered.reached)))
    owners = division.owners_of(plan)
    devices = {block: objective.parameters[block.parameters[0]].device for block in plan.chosen}
    division.collect(gathered.summaries(), owners, devices)
    blocks = [block for block in plan.chosen if owners[block] == processes.rank()]
    gathered.collected(blocks, count)
    finished = processes.run_collectively(lambda: {block: gathered.finish(block) for block in blocks})
    spectra = {block.name: spectrum for block, (spectrum, _) in finished.items() if spectrum is not None}
    changes = [change for _, change in finished.values()]
    if processes.world_size() == 1:
        return Basis(changes, spectra, plan.unrotated)
    elsewhere = {block.name: f"kept by process {owner}" for block, owner in owners.items() if block not in blocks}
    kept_by = {block.name: owner for block, owner in owners.items()}
    basis = Basis(changes, spectra, plan.unrotated | elsewhere, kept_by)
    return basis if shard_bases else basis.gathered()


def gradients_for(
    plan: Plan,
    objective: Objective,
    rho: Distribution,
    samples: int | None,
    generator: torch.Generator,
    sampling: Sampling,
    progress: bool,
    share: range | None = None,
) -> Generator[dict[str, Tensor], None, None]:
    """The gradients that the blocks of a plan need, in chunks; none for a random or identical basis."""
    wanted = samples_wanted(plan)
    names = [name for block in plan.chosen for name in block.parameters]
    if wanted:
        yield from sample_gradients(
            objective,
            rho,
            samples or wanted,
            names=names,
            generator=generator,
            method=sampling,
            progress=progress,
            share=share,
        )


def _look_for_differences(gradients: dict[str, Tensor], count: int) -> None:
    """Log it when draws do not differ: at one point, with one batch and no noise, all gradients are the same."""
    if count > 1 and all(bool((gradient == gradient[:1]).all()) for gradient in gradients.values()):
        logger.warning(
            "egop has sampled the same gradient %d times, so the basis knows one direction only. Give the objective "
            "more than one batch, or a rho that draws different points, such as egop.Recentered(scale).",
            count,
        )


def _look_for_support(spectra: Mapping[str, Spectrum]) -> None:
    """Log it once when there were too few draws for what is returned."""
    doubtful = {name: spectrum for name, spectrum in spectra.items() if not spectrum.is_supported}
    if not doubtful or processes.rank() != 0:
        return
    names = [f"'{name}'" for name in doubtful]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    drawn = max(spectrum.samples for spectrum in doubtful.values())
    logger.warning(
        "%s too few for the basis of %s: more than half of what the spectrum shows is chance. Ask for samples=%d, or "
        "where that does not help leave the weight in original coordinates (egop.diagnose tells).",
        "1 draw is" if drawn == 1 else f"{drawn} draws are",
        listed,
        MORE * drawn,
    )


def samples_wanted(plan: Plan) -> int:
    """How many draws the structures of a plan ask for."""
    return max((structure.samples(block) for block, structure in plan.chosen.items()), default=0)


def check_reached(plan: Plan, draws: int, reached: bool) -> None:
    """Raise an error when all gradients of all draws are zero: that is no basis, and a mistake in all likelihood."""
    if reached or draws == 0:
        return
    names = [f"'{name}'" for block in plan.chosen for name in block.parameters]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise NoGradientError(
        f"The gradient of {listed} is exactly zero at all {draws} draws: the loss does not reach these parameters. "
        "Check that the loss function uses the model it is given, not another one, and does not detach. If a layer "
        "after them starts at zero, sample where it does not: rho=egop.Recentered(scale) once it has been trained, or "
        "egop.Gaussian(scale)."
    )


class Gathering:
    """The gradients of a plan's blocks, taken in chunk by chunk: all together, or in two halves that are compared.

    Args:
        plan: the structure of each block.
        stability: whether to keep halves. Every other draw goes to the same half, whatever the chunks are.
        first: the number of the first draw, where other processes have those before.
    """

    def __init__(self, plan: Plan, *, stability: bool, first: int = 0) -> None:
        self.parts = [
            {block: structure.accumulator(block) for block, structure in plan.chosen.items()}
            for _ in range(2 if stability else 1)
        ]
        self.plan = plan
        self.draws = 0
        self.first = first
        self.reached = False  # whether any gradient was not zero

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Take in a chunk: for each parameter a stack of gradients."""
        count = len(next(iter(gradients.values())))
        # Asked of the device until the answer is yes, so of one gradient as a rule.
        self.reached = self.reached or any(bool(gradient.any()) for gradient in gradients.values())
        if self.draws == 0:
            _look_for_differences(gradients, count)
        for index, accumulators in enumerate(self.parts):
            rows = slice((index - self.first - self.draws) % len(self.parts), None, len(self.parts))
            if not range(count)[rows]:
                continue
            for block, accumulator in accumulators.items():
                accumulator.add([gradients[name][rows] for name in block.parameters])
        self.draws += count

    def summaries(self) -> list[tuple[Block, Summary]]:
        """All that was taken in, in parts that processes can bring together; not asked for where there is only one."""
        return [
            (block, summary)
            for accumulators in self.parts
            for block, accumulator in accumulators.items()
            for summary in (accumulator.summaries() if processes.world_size() > 1 else [])
        ]

    def collected(self, own: Collection[Block], draws: int) -> None:
        """Keep only what this process is to finish, now that this has seen all draws."""
        self.parts = [{block: accumulators[block] for block in own} for accumulators in self.parts]
        self.draws = draws

    def finish(self, block: Block) -> tuple[Spectrum | None, ChangeOfBasis]:
        """The spectrum and the change of basis of one block; each block can be finished once, which frees its parts."""
        halves = self._compared(block)
        whole, *others = [accumulators.pop(block) for accumulators in self.parts]
        for other in others:
            whole.merge(other)
        return _judged(*whole.finish(), halves)

    def so_far(self, block: Block) -> tuple[Spectrum | None, ChangeOfBasis, Halves | None]:
        """The same while more gradients may come, and what the halves say of each other."""
        halves = self._compared(block)
        whole = self.plan.chosen[block].accumulator(block)
        for accumulators in self.parts:
            whole.merge(accumulators[block])
        return *_judged(*whole.finish(), halves), halves

    def _compared(self, block: Block) -> Halves | None:
        if len(self.parts) < 2 or self.draws < 2:
            return None
        one, other = (accumulators[block].eigenbases() for accumulators in self.parts)
        return compare(one, other)


def _judged(
    spectrum: Spectrum | None, change: ChangeOfBasis, halves: Halves | None
) -> tuple[Spectrum | None, ChangeOfBasis]:
    if spectrum is not None and halves is not None:
        spectrum = replace(spectrum, stability=halves.stability, chance=halves.chance)
    return spectrum, change
