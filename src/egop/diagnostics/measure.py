"""The diagnosis itself: the straight line of :func:`egop.estimate`, timed, compared in halves, and interruptible."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from tqdm.auto import tqdm

from egop.basis import (
    LEADING,
    Block,
    ChangeOfBasis,
    Full,
    Halves,
    Partition,
    Plan,
    Reparameterization,
    Shared,
    Spectrum,
    Structure,
    StructureChoice,
    make_plan,
)
from egop.diagnostics import rules
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

# Where nothing else is said, draws are doubled until the answer is clear, up to this many times the first ones.
_GROWTH = 16
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
    budget: float = 60.0,
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
        structure: how a block's basis is built; ``"auto"`` takes ``Shared`` in the place of a ``Full`` whose products
            take longer than a forward and backward pass, both measured here.
        samples: the number of points. By default what the structures ask for, then twice as many while a block needs
            more to tell, up to 16 times the first ones.
        budget: the seconds after which no more points are drawn, where ``samples`` does not say how many.
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
    if not budget >= 0:
        raise ValueError(f"Invalid budget value: {budget!r}. Must be zero seconds or more.")
    deadline = time.monotonic() + budget if samples is None else math.inf
    blocks, layers = blocks_of(objective, partition)
    plan = make_plan(blocks, layers, structure, parse_bytes(memory))
    kinds = [type(part).__name__ for part in objective.module.modules()] if objective.module is not None else []
    refresh, online = rules.refresh_advice(layers, kinds)
    known = _planned(blocks, plan)
    wanted = samples_wanted(plan) and (samples or samples_wanted(plan))
    result = Diagnosis(tuple(known.values()), None, 0, wanted, None, refresh, online)
    result = _advised(result, partial="no gradients have been sampled yet")
    if show is not None:
        show(result)
    seconds = _pass_seconds(objective)
    if structure == "auto":
        plan = _affordable(plan, objective, seconds)
        known = _planned(blocks, plan)
        wanted = samples_wanted(plan) and (samples or samples_wanted(plan))
    draws = _Draws(objective, plan, rho, generator, samples or _GROWTH * wanted, progress)
    with closing(draws.bar):
        state = _answered(draws, known, wanted, deadline, seconds, online)
    basis = Reparameterization(list(state.changes.values()), state.spectra, plan.unrotated) if state.changes else None
    result = Diagnosis(tuple(known.values()), basis, state.gathered.draws, state.wanted, seconds, refresh, online)
    return _advised(result, state.partial)


@dataclass
class _State:
    """How far a diagnosis has come."""

    gathered: Gathering
    wanted: int
    changes: dict[str, ChangeOfBasis] = field(default_factory=dict)
    spectra: dict[str, Spectrum] = field(default_factory=dict)
    partial: str = ""


def _answered(
    draws: _Draws, known: dict[str, BlockDiagnosis], wanted: int, deadline: float, pass_seconds: float, online: bool
) -> _State:
    """Draw and measure; twice as many draws for the blocks that need more, while there is time."""
    plan = draws.plan
    state = _State(Gathering(plan, stability=True), wanted)
    unclear = list(plan.chosen)
    while True:
        try:
            draws.take(state.gathered, state.wanted, deadline)
            check_reached(plan, state.gathered.draws, state.gathered.reached)
        except KeyboardInterrupt:
            if state.gathered.draws == 0:
                raise
            state.partial = f"sampling was interrupted after {state.gathered.draws} of {state.wanted} draws"
        try:
            for block in unclear:
                spectrum, change, halves = state.gathered.so_far(block)
                state.changes[block.name] = change
                known[block.name] = _measured(known[block.name], spectrum, change, halves, pass_seconds)
                if spectrum is not None:
                    state.spectra[block.name] = spectrum
        except KeyboardInterrupt:
            state.partial = f"interrupted after {len(state.changes)} of {len(plan.chosen)} blocks"
        unclear = [block for block in unclear if rules.is_open(known[block.name], online)]
        if not unclear or state.partial or state.wanted >= draws.limit or time.monotonic() > deadline:
            return state
        state.wanted = min(2 * state.wanted, draws.limit)


class _Draws:
    """Points of one stream, taken in several goes, with one progress bar for all of them."""

    def __init__(
        self,
        objective: Objective,
        plan: Plan,
        rho: Distribution,
        generator: torch.Generator,
        limit: int,
        progress: bool,
    ) -> None:
        self.objective, self.plan, self.rho, self.generator, self.limit = objective, plan, rho, generator, limit
        self.state = generator.get_state()
        self.bar = tqdm(desc="Sampling gradients", unit="draw", disable=not progress, delay=1e-9)

    def take(self, gathered: Gathering, wanted: int, deadline: float) -> None:
        """Take in the next points, until there are so many or the time is over; one chunk at least."""
        first = gathered.draws
        if wanted <= first:
            return
        self.bar.total = wanted
        # From the same state and of the same stream: what is drawn does not depend on how often it is gone on with.
        self.generator.set_state(self.state)
        share = range(first, wanted)
        arguments = self.plan, self.objective, self.rho, self.limit, self.generator, "auto", False, share
        with closing(gradients_for(*arguments)) as chunks:  # type: ignore[arg-type]
            for gradients in chunks:
                gathered.add(gradients)
                self.bar.update(gathered.draws - self.bar.n)
                if gathered.draws == wanted or time.monotonic() > deadline:
                    break  # the batches of the other draws are not gone through


def _affordable(plan: Plan, objective: Objective, pass_seconds: float) -> Plan:
    """The plan with Shared in the place of what costs more than a pass, where it applies and costs less."""
    chosen: dict[Block, Structure] = {}
    why = dict(plan.why)
    for block, structure in plan.chosen.items():
        device = objective.parameters[block.parameters[0]].device
        seconds = _structure_seconds(structure, block, device) if isinstance(structure, Full) else 0.0
        lean = Shared()
        pieces = block.divided() if len(block.shapes) > 1 else [block]
        if (
            seconds > rules.COSTLY * pass_seconds
            and _applies(lean, pieces)
            and sum(_structure_seconds(lean, piece, device) for piece in pieces) < seconds
        ):
            cost = f"Full would cost {seconds / pass_seconds:.2g} times a forward and backward pass in every step"
            chosen |= dict.fromkeys(pieces, lean)
            why |= {piece.name: cost for piece in pieces}
        else:
            chosen[block] = structure
    return replace(plan, chosen=chosen, why=why)


def _applies(structure: Structure, pieces: list[Block]) -> bool:
    try:
        for piece in pieces:
            structure.check(piece)
    except ValueError:
        return False
    return True


def _structure_seconds(structure: Structure, block: Block, device: torch.device) -> float:
    """The time of one encode and one decode in a basis of this structure."""
    shapes = structure.basis_shapes(block).items()
    tensors = {name: identity(shape, block.dtype, device) for name, shape in shapes}
    return _change_seconds(structure.change(block, tensors))


def _advised(diagnosis: Diagnosis, partial: str) -> Diagnosis:
    decided = [(block, *rules.decide(block, diagnosis.online)) for block in diagnosis.blocks]
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
    known: BlockDiagnosis, spectrum: Spectrum | None, change: ChangeOfBasis, halves: Halves | None, pass_seconds: float
) -> BlockDiagnosis:
    """A block with its times, and with all that its spectrum says."""
    seconds = _change_seconds(change)
    cost = seconds / pass_seconds
    leaner = _leaner(change, pass_seconds) if cost > rules.COSTLY else None
    known = replace(known, seconds=seconds, cost=cost, leaner=leaner)
    if spectrum is None:
        return known
    dimension = math.prod(tensor.shape[-2] for tensor in change.tensors.values())
    dimension *= math.prod(next(iter(change.tensors.values())).shape[:-2])
    density = float(spectrum.density[0])
    # Held out where there are two halves: chance makes the spectrum of few draws steeper than it is.
    seen = spectrum if halves is None else replace(spectrum, eigenvalues=halves.held_out * spectrum.eigenvalues.sum())
    return replace(
        known,
        dimension=dimension,
        samples=spectrum.samples,
        eigenvalues=tuple(seen.eigenvalues.tolist()),
        stable_rank=seen.stable_rank,
        density=density,
        ratio=seen.stable_rank / (dimension * density),
        effective_dimension=seen.effective_dimension(LEADING),
        one_norm=halves.one_norm if halves is not None else None,
        stability=spectrum.stability,
        chance=spectrum.chance,
        surprise=spectrum.surprise,
    )


def _leaner(change: ChangeOfBasis, pass_seconds: float) -> tuple[str, float] | None:
    """A leaner structure for a block whose basis is costly, and its cost: Shared, where it applies."""
    block, lean = change.block, Shared()
    if not _applies(lean, [block]) or lean.cost(block).flops >= change.cost_per_step:
        return None
    return "Shared", _structure_seconds(lean, block, change.device) / pass_seconds


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
