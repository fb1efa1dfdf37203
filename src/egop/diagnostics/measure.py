"""The diagnosis itself: the straight line of :func:`egop.estimate`, timed, compared in halves, and interruptible."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch

from egop.basis import (
    LEADING,
    Block,
    ChangeOfBasis,
    Partition,
    Plan,
    Reparameterization,
    Shared,
    Spectrum,
    StructureChoice,
    make_plan,
)
from egop.diagnostics.rules import COSTLY, decide, noise_stable_rank, refresh_advice
from egop.diagnostics.values import BlockDiagnosis, Diagnosis
from egop.estimation import (
    Distribution,
    Gathering,
    Gaussian,
    Objective,
    blocks_of,
    check_reached,
    checked,
    gradients_for,
    samples_wanted,
)
from egop.numerics import identity
from egop.runs import parse_bytes

# A time is the median of this many, or of fewer where they take long.
_REPEATS = 9
_SECONDS = 1.0


def diagnose(
    objective: Objective,
    *,
    rho: Distribution | None = None,
    partition: Partition = "layer",
    structure: StructureChoice = "auto",
    samples: int | None = None,
    memory: int | str = "2GiB",
    generator: torch.Generator | None = None,
    progress: bool = True,
    show: Callable[[Diagnosis], object] | None = None,
) -> Diagnosis:
    """Say whether a change of basis is likely to help here, what it would cost, and how sure that is.

    Samples gradients as :func:`egop.estimate` does, and takes the same arguments. The basis it finds is in the result,
    so nothing has to be sampled twice. ``docs/diagnostics.md`` says how to read it, and the rules behind the advice.

    Ctrl-C while sampling ends with a partial diagnosis of what was sampled until then, if that is at least one chunk.

    Args:
        objective: the loss, its parameters and the batches it sees.
        rho: where the points are drawn; the network's own initialisation by default, a standard normal distribution
            for an objective that is a plain function.
        partition: which parameters form a block.
        structure: how a block's basis is built.
        samples: the number of points; by default what the structures ask for.
        memory: what all bases together may take.
        generator: the source of all randomness; one with seed 0 by default.
        progress: show a progress bar.
        show: called with what is known before the first gradient is sampled: the blocks, their structures and sizes.

    Returns:
        A diagnosis, to be printed or looked at. The model is left exactly as it was.

    Example:
        >>> scales = torch.tensor([1.0, 0.1, 0.01])
        >>> rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))[0]
        >>> objective = egop.Objective.from_function(
        ...     lambda theta: (scales * (rotation @ theta).square()).sum(), {"theta": torch.zeros(3)}
        ... )
        >>> egop.diagnose(objective, samples=300, progress=False).blocks[0].stable_rank < 1.2
        True
    """
    if rho is None and isinstance(objective, Objective) and objective.module is None:
        rho = Gaussian()
    rho, generator = checked(objective, rho, samples, generator)
    blocks, layers = blocks_of(objective, partition)
    plan = make_plan(blocks, layers, structure, parse_bytes(memory))
    kinds = [type(part).__name__ for part in objective.module.modules()] if objective.module is not None else []
    refresh, online = refresh_advice(layers, kinds)
    wanted = samples_wanted(plan) and (samples or samples_wanted(plan))
    known = _planned(blocks, plan)
    result = Diagnosis(tuple(known.values()), None, 0, wanted, None, refresh, online)
    result = _advised(result, partial="no gradients have been sampled yet")
    if show is not None:
        show(result)
    seconds = _pass_seconds(objective)
    gathered = Gathering(plan, stability=True)
    partial = ""
    try:
        with closing(gradients_for(plan, objective, rho, samples, generator, "auto", progress)) as chunks:
            for gradients in chunks:
                gathered.add(gradients)
    except KeyboardInterrupt:
        if gathered.draws == 0:
            raise
        partial = f"sampling was interrupted after {gathered.draws} of {wanted} draws"
    if not partial:
        check_reached(plan, gathered.draws, gathered.reached)
    changes: list[ChangeOfBasis] = []
    spectra: dict[str, Spectrum] = {}
    try:
        for block in plan.chosen:
            spectrum, change = gathered.finish(block)
            changes.append(change)
            known[block.name] = _measured(known[block.name], spectrum, change, seconds)
            if spectrum is not None:
                spectra[block.name] = spectrum
    except KeyboardInterrupt:
        partial = f"interrupted after {len(changes)} of {len(plan.chosen)} blocks"
    basis = Reparameterization(changes, spectra, plan.unrotated) if changes else None
    result = replace(result, blocks=tuple(known.values()), basis=basis, draws=gathered.draws, pass_seconds=seconds)
    return _advised(result, partial)


def _advised(diagnosis: Diagnosis, partial: str) -> Diagnosis:
    decided = [(block, *decide(block, diagnosis.draws, diagnosis.online)) for block in diagnosis.blocks]
    blocks = tuple(replace(block, verdict=verdict, advice=advice) for block, verdict, advice in decided)
    return replace(diagnosis, blocks=blocks, partial=partial)


def _planned(blocks: list[Block], plan: Plan) -> dict[str, BlockDiagnosis]:
    """What is known of each block before anything is sampled, in the model's order."""
    order = {name: place for place, name in enumerate(itertools.chain(*(block.parameters for block in blocks)))}
    chosen = {block.name: structure for block, structure in plan.chosen.items()}
    everything = [*plan.chosen, *(block for block in blocks if block.name in plan.unrotated)]
    known = {}
    for block in sorted(everything, key=lambda block: order[block.parameters[0]]):
        structure = chosen.get(block.name)
        known[block.name] = BlockDiagnosis(
            name=block.name,
            shapes=tuple(tuple(shape) for shape in block.shapes),
            size=block.size,
            structure=type(structure).__name__ if structure is not None else None,
            why=plan.unrotated.get(block.name) or plan.why[block.name],
            bytes=structure.cost(block).bytes if structure is not None else 0,
        )
    return known


def _measured(
    known: BlockDiagnosis, spectrum: Spectrum | None, change: ChangeOfBasis, pass_seconds: float
) -> BlockDiagnosis:
    """A block with its times, and with all that its spectrum says."""
    seconds = _change_seconds(change)
    cost = seconds / pass_seconds
    known = replace(known, seconds=seconds, cost=cost, leaner=_leaner(change, pass_seconds) if cost > COSTLY else None)
    if spectrum is None:
        return known
    sides = [tensor.shape[-2] for tensor in change.tensors.values()]
    size, stack = math.prod(sides), math.prod(next(iter(change.tensors.values())).shape[:-2])
    dimension = size * stack
    density = float(spectrum.density[0])
    leading = spectrum.effective_dimension(LEADING)
    weights = spectrum.eigenvalues[:leading] / spectrum.eigenvalues[:leading].sum()
    # A basis of several sides counts gradients; each side has seen all the rows, or columns, of each of them.
    rows = [spectrum.samples * (size // side if len(sides) > 1 else 1) for side in sides]
    noise = stack * math.prod(noise_stable_rank(side, count) for side, count in zip(sides, rows, strict=True))
    return replace(
        known,
        dimension=dimension,
        samples=spectrum.samples,
        eigenvalues=tuple(spectrum.eigenvalues.tolist()),
        stable_rank=spectrum.stable_rank,
        noise_rank=min(noise, len(spectrum.eigenvalues)),
        density=density,
        axes=float((weights * spectrum.density[:leading]).sum()) * dimension if leading else None,
        ratio=spectrum.stable_rank / (dimension * density),
        effective_dimension=leading,
        stability=spectrum.stability,
    )


def _leaner(change: ChangeOfBasis, pass_seconds: float) -> tuple[str, float] | None:
    """A leaner structure for a block whose basis is costly, and its cost: Shared, where it applies."""
    block, lean = change.block, Shared()
    try:
        lean.check(block)
    except ValueError:
        return None
    if lean.cost(block).flops >= change.cost_per_step:
        return None
    shapes = lean.basis_shapes(block).items()
    tensors = {name: identity(shape, block.dtype, change.device) for name, shape in shapes}
    return "Shared", _change_seconds(lean.change(block, tensors)) / pass_seconds


def _change_seconds(change: ChangeOfBasis) -> float:
    """The time of one encode and one decode."""
    block = change.block
    tensors = [torch.ones(shape, dtype=block.dtype, device=change.device) for shape in block.shapes]
    with torch.no_grad():
        return _median_seconds(lambda: change.decode(change.encode(tensors)))


def _pass_seconds(objective: Objective) -> float:
    """The time of one forward and backward pass at the current parameters, on one batch."""
    names = list(objective.parameters)
    with objective.preserved(seed=0):
        batch = objective.placed([next(objective.batches())])[0]
        values = objective.current
        return _median_seconds(lambda: objective.gradients(values, batch, names))


def _median_seconds(function: Callable[[], object]) -> float:
    times: list[float] = []
    function()  # the first call may compile, allocate and load
    while len(times) < _REPEATS and (not times or sum(times) < _SECONDS):
        _synchronize()
        start = time.perf_counter()
        function()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize() -> None:
    if torch.accelerator.is_available():  # kernels may still be running
        torch.accelerator.synchronize()
