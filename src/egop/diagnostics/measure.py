"""The diagnosis itself: draws, gradients where the training stands, times, a learning rate; each stage is shown."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from egop.basis import (
    LEADING,
    Basis,
    Block,
    ChangeOfBasis,
    HalfComparison,
    Partition,
    Plan,
    Spectrum,
    StructureChoice,
    compare_halves,
    make_plan,
)
from egop.diagnostics import costs, rules
from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.following import Following, rotatable
from egop.diagnostics.short_runs import clock
from egop.diagnostics.values import BlockDiagnosis
from egop.estimation import (
    Distribution,
    Gaussian,
    Objective,
    count_draws,
    partition_objective,
    require_gradient,
    resolve_arguments,
    sample_gradients,
    warn_if_identical,
)
from egop.formatting import parse_bytes

# Where nothing else is said, draws are doubled until the answer is clear, up to this many times the first ones.
_GROWTH = 16
# A time is the median of this many, or of fewer where they take long.
_REPEATS = 9
_SECONDS = 1.0


def diagnose(
    objective: Objective,
    *,
    steps: int | None = None,
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
    """Say what to use here, what to expect of it, what it takes, and at which learning rate.

    In this order: samples gradients as :func:`egop.estimate` does, which says whether a basis from before the training
    is promising; looks at the gradients of the training, here and along a few steps; times the steps of every form
    beside AdamW's; and looks for a learning rate for the form that is advised, if any. What to expect comes from
    similar problems of a study. ``docs/diagnostics.md`` says how to read it.

    The basis is in the result, so nothing has to be sampled twice. Ctrl-C ends with a partial diagnosis of what is
    known until then, if at least one chunk was sampled. The model is left exactly as it was.

    Args:
        objective: the loss, its parameters (where the training stands) and the batches it sees.
        steps: of the training that is planned, if known: what comes before it is then counted.
        rho: where the points are drawn; the network's own initialisation by default, a standard normal distribution
            for an objective that is a plain function.
        partition: which parameters form a block.
        structure: how a block's basis is built.
        samples: the number of points. By default what the structures ask for, then twice as many while a block needs
            more to tell, up to 16 times the first ones.
        budget: the seconds after which no more points are drawn, where ``samples`` does not say how many; and about how
            many the search for a learning rate may take.
        memory: what all bases together may take.
        generator: the source of all randomness; one with seed 0 by default.
        progress: show a progress bar, one for everything.
        show: called with what is known, before the first gradient is sampled and after every stage.

    Returns:
        A diagnosis, to be printed or looked at.

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
    rho, generator = resolve_arguments(objective, rho, samples, generator)
    if not budget >= 0:
        raise ValueError(f"Invalid budget value: {budget!r}. Must be zero seconds or more.")
    if steps is not None and steps < 1:
        raise ValueError(f"Invalid steps value: {steps}. Must be at least 1.")
    deadline = time.monotonic() + budget if samples is None else math.inf
    show = show or (lambda diagnosis: None)
    blocks, layers = partition_objective(objective, partition)
    plan = make_plan(blocks, layers, structure, parse_bytes(memory))
    known = _planned(blocks, plan)
    wanted = count_draws(plan, samples)
    result = Diagnosis(tuple(known.values()), None, 0, wanted, None)
    show(_worded(replace(result, partial="no gradients have been sampled yet")))
    seconds = _pass_seconds(objective)
    draws = _Draws(objective, plan, rho, generator, samples or _GROWTH * wanted, progress)
    with closing(draws.bar):
        state = _answered(draws, known, wanted, deadline, seconds)
        basis = Basis(list(state.changes.values()), state.spectra, plan.unrotated) if state.changes else None
        result = Diagnosis(tuple(known.values()), basis, state.gathered.draws, state.wanted, seconds)
        result = _worded(replace(result, partial=state.partial))
        if state.partial:
            return result
        weights, seed = rotatable(objective, layers, parse_bytes(memory)), generator.initial_seed() % 2**31
        return Following(objective, weights, steps, budget, seed, draws.bar, show).of(result)


@dataclass
class _State:
    """How far a diagnosis has come."""

    gathered: Gathering
    wanted: int
    changes: dict[str, ChangeOfBasis] = field(default_factory=dict)
    spectra: dict[str, Spectrum] = field(default_factory=dict)
    partial: str = ""


def _answered(
    draws: _Draws, known: dict[str, BlockDiagnosis], wanted: int, deadline: float, pass_seconds: float
) -> _State:
    """Draw and measure; twice as many draws for the blocks that need more, while there is time."""
    plan = draws.plan
    state = _State(Gathering(plan), wanted)
    unclear = list(plan.chosen)
    while True:
        try:
            draws.take(state.gathered, state.wanted, deadline)
            require_gradient(plan, state.gathered.draws, state.gathered.reached)
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
        unclear = [block for block in unclear if rules.is_open(known[block.name])]
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
        self.bar = tqdm(desc="Sampling gradients", unit=" parts", disable=not progress, delay=1e-9)

    def take(self, gathered: Gathering, wanted: int, deadline: float) -> None:
        """Take in the next points, until there are so many or the time is over; one chunk at least."""
        first = gathered.draws
        if wanted <= first:
            return
        self.bar.total = wanted
        # From the same state and of the same stream: what is drawn does not depend on how often it is gone on with.
        self.generator.set_state(self.state)
        share = range(first, wanted)
        names = [name for block in self.plan.chosen for name in block.parameters]
        chunks = sample_gradients(
            self.objective, self.rho, self.limit, names=names, generator=self.generator, share=share
        )
        with closing(chunks):
            for gradients in chunks:
                gathered.add(gradients)
                self.bar.update(gathered.draws - self.bar.n)
                if gathered.draws == wanted or time.monotonic() > deadline:
                    break  # the batches of the other draws are not gone through


class Gathering:
    """Sampled gradients of a plan's blocks in two halves, which are compared; every other draw goes to each half."""

    def __init__(self, plan: Plan) -> None:
        self.halves = [
            {block: structure.accumulator(block) for block, structure in plan.chosen.items()} for _ in range(2)
        ]
        self.plan, self.draws, self.reached = plan, 0, False

    def add(self, gradients: dict[str, Tensor]) -> None:
        """Take in a chunk: for each parameter a stack of gradients."""
        count = len(next(iter(gradients.values())))
        self.reached = self.reached or any(bool(gradient.any()) for gradient in gradients.values())
        if self.draws == 0:
            warn_if_identical(gradients)
        for index, accumulators in enumerate(self.halves):
            rows = slice((index - self.draws) % 2, None, 2)
            if range(count)[rows]:
                for block, accumulator in accumulators.items():
                    accumulator.add([gradients[name][rows] for name in block.parameters])
        self.draws += count

    def so_far(self, block: Block) -> tuple[Spectrum | None, ChangeOfBasis, HalfComparison | None]:
        """The spectrum and the basis of a block from all draws so far, and what the halves say of each other."""
        halves = None
        if self.draws >= 2:
            one, other = (accumulators[block].eigenbases() for accumulators in self.halves)
            halves = compare_halves(one, other)
        whole = self.plan.chosen[block].accumulator(block)
        for accumulators in self.halves:
            whole.merge(accumulators[block])
        spectrum, change = whole.finish()
        if spectrum is not None and halves is not None:
            spectrum = replace(spectrum, stability=halves.stability, chance=halves.chance)
        return spectrum, change, halves


def _worded(diagnosis: Diagnosis) -> Diagnosis:
    decided = [(block, *rules.decide(block)) for block in diagnosis.blocks]
    blocks = tuple(replace(block, verdict=verdict, advice=advice) for block, verdict, advice in decided)
    return replace(diagnosis, blocks=blocks)


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
    known: BlockDiagnosis,
    spectrum: Spectrum | None,
    change: ChangeOfBasis,
    halves: HalfComparison | None,
    pass_seconds: float,
) -> BlockDiagnosis:
    """A block with its times, and with all that its spectrum says."""
    seconds = _change_seconds(change)
    known = replace(
        known, seconds=seconds, cost=seconds / pass_seconds, predicted=costs.of_block(change) / pass_seconds
    )
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


def _change_seconds(change: ChangeOfBasis) -> float:
    """The time of one encode and one decode."""
    block = change.block
    tensors = [torch.ones(shape, dtype=block.dtype, device=change.device) for shape in block.shapes]
    with torch.no_grad():
        return _median_seconds(lambda: change.decode(change.encode(tensors)))


def _pass_seconds(objective: Objective) -> float:
    """The time of one forward and backward pass at the current parameters, on one batch."""
    names = list(objective.parameters)
    with objective.preserve(seed=0):
        batch = objective.move_batches([next(objective.batches())])[0]
        values = objective.current
        return _median_seconds(lambda: objective.gradients(values, batch, names))


def _median_seconds(function: Callable[[], object]) -> float:
    times: list[float] = []
    function()  # the first call may compile, allocate and load
    while len(times) < _REPEATS and (not times or sum(times) < _SECONDS):
        began = clock()
        function()
        times.append(clock() - began)
    return statistics.median(times)
