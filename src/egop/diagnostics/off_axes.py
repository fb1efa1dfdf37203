"""How far training gradients lie off the axes, beyond what noise would show: here, and along a few steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from egop.basis import Block, as_matrix
from egop.diagnostics.short_runs import check_gradient, held_batches, trained_parameters
from egop.estimation import Objective
from egop.formatting import mask_layer_numbers

__all__ = ["OffAxes", "along", "here"]

# Of layers of one place and shape so many are looked at; sides wider than this are not: decompositions take too long.
_ALIKE, _WIDEST = 3, 2048
# Noise is simulated so many times, and with so many draws to a direction at most.
_SIMULATED, _MOST = 4, 16
# A number is that of noise where it is less than this, or than so many standard deviations of simulated noise.
_NOTHING, _DEVIATIONS = 0.02, 4.0
_TINY = 1e-30

Progress = Callable[[], object]  # called after each gradient


@dataclass(frozen=True)
class OffAxes:
    """A number of all weights together, in proportion to their entries.

    Attributes:
        value: log(Σ√diagonal / Σ√eigenvalues) of the gradients' Gram matrices, added over both sides of a weight, less
            what white noise of the same diagonal and as many draws shows. 0 where the axes are as good as any basis.
        chance: how large it may be by chance.
        draws: how many gradients it comes from.
    """

    value: float
    chance: float
    draws: int

    @property
    def is_seen(self) -> bool:
        """Whether it is told from noise."""
        return self.value > max(_NOTHING, self.chance)


def here(objective: Objective, blocks: Sequence[Block], draws: int, seed: int, tick: Progress) -> OffAxes | None:
    """At the current parameters, over so many batches, fewer where they repeat; None without a gradient to look at."""
    grams = _grams_of(blocks)
    if not grams:
        return None
    names = list(grams)
    with objective.preserve(seed=seed):
        values = objective.current
        first: list[Tensor] = []
        for batch in objective.move_batches(itertools.islice(objective.batches(), draws)):
            _, gradients = objective.gradients(values, batch, names)
            if first and all(map(torch.equal, first, gradients)):
                break  # from here on the same again
            first = first or gradients
            for name, gradient in zip(names, gradients, strict=True):
                grams[name].add(gradient)
            tick()
    return _together(grams, seed)


def along(
    objective: Objective, blocks: Sequence[Block], steps: int, lr: float, seed: int, tick: Progress
) -> OffAxes | None:
    """Over the gradients of some steps of AdamW: what a basis that follows the training would see."""
    grams = _grams_of(blocks)
    if not grams:
        return None
    batches = held_batches(objective, steps, seed)
    with objective.preserve(seed=seed):
        model, loss_fn = objective.trainable_copy()
        check_gradient(model, loss_fn, batches[0])
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(trained_parameters(model), lr=lr)
        for batch in itertools.islice(itertools.cycle(batches), steps):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            for name, gram in grams.items():
                gradient = parameters[name].grad
                gram.add(torch.zeros_like(parameters[name]) if gradient is None else gradient)
            optimizer.step()
            tick()
    return _together(grams, seed)


class _Grams:
    """The Gram matrices of some gradients of one weight: of its inputs and of its outputs."""

    def __init__(self, block: Block) -> None:
        self.block, self.draws = block, 0
        self.sides: list[Tensor] = []
        self._ranks = 0.0

    def add(self, gradient: Tensor) -> None:
        """Take in one gradient; of a stack of matrices the first stands for the others."""
        matrix = as_matrix(gradient, self.block) if gradient.dim() > 1 else gradient.unsqueeze(0)
        matrix = matrix.detach().reshape(-1, *matrix.shape[-2:])[0].double()
        sides = [(each.mT @ each).cpu() for each in (matrix, matrix.mT) if each.shape[1] <= _WIDEST]
        self.sides = [old + new for old, new in zip(self.sides, sides, strict=True)] if self.sides else sides
        smaller = min(sides, key=len)
        self._ranks += max(1.0, float(smaller.trace()) ** 2 / max(float(smaller.square().sum()), _TINY))
        self.draws += 1

    def off_axes(self, generator: torch.Generator) -> tuple[float, float]:
        """The number of both sides together, and how far it varies by chance."""
        # The rows of one gradient may all be alike: it counts as often as it has directions of its own.
        found = [_off_axes(side, max(1, round(self._ranks)), generator) for side in self.sides]
        return sum(value for value, _ in found), math.hypot(*(deviation for _, deviation in found))


def _grams_of(blocks: Sequence[Block]) -> dict[str, _Grams]:
    """For some of each place and shape: the first, the last and one between them."""
    groups: dict[tuple[object, ...], list[Block]] = {}
    for block in itertools.chain(*(block.per_tensor() if len(block.shapes) > 1 else [block] for block in blocks)):
        if min(_sides(block)) <= _WIDEST:
            groups.setdefault((mask_layer_numbers(block.name), block.shapes), []).append(block)
    chosen = []
    for group in groups.values():
        last = len(group) - 1
        chosen += [group[index] for index in sorted({round(last * k / (_ALIKE - 1)) for k in range(_ALIKE)})]
    return {block.parameters[0]: _Grams(block) for block in chosen}


def _sides(block: Block) -> tuple[int, int]:
    """How many rows and columns it has as a matrix; a vector is one row."""
    (shape,) = block.shapes
    if len(shape) < 2:
        return 1, block.size
    rows, columns = as_matrix(torch.empty(shape, device="meta"), block).shape[-2:]
    return rows, columns


def _together(grams: Mapping[str, _Grams], seed: int) -> OffAxes | None:
    """The number; None where all gradients are zero, which says nothing."""
    if not any(bool(side.any()) for gram in grams.values() for side in gram.sides):
        return None
    generator = torch.Generator().manual_seed(seed)
    found = [(gram.block.size, *gram.off_axes(generator)) for gram in grams.values()]
    total = sum(size for size, _, _ in found)
    value = sum(size * each for size, each, _ in found) / total
    deviation = math.sqrt(sum((size * each) ** 2 for size, _, each in found)) / total
    return OffAxes(value, _DEVIATIONS * deviation, next(iter(grams.values())).draws)


def _off_axes(gram: Tensor, draws: int, generator: torch.Generator) -> tuple[float, float]:
    """Of one Gram matrix: how much more than noise it is off the axes, and the noise's standard deviation."""
    diagonal = gram.diagonal().clamp_min(0)
    width = len(gram)
    if width == 1 or not float(diagonal.sum()) > 0:
        return 0.0, 0.0
    count = min(draws, _MOST * width)
    noise = []
    for _ in range(_SIMULATED):
        rows = torch.randn(count, width, generator=generator, dtype=gram.dtype, device="cpu") * diagonal.sqrt()
        noise.append(_roots(rows.mT @ rows))
    return _roots(gram) - statistics.mean(noise), statistics.stdev(noise)


def _roots(gram: Tensor) -> float:
    """log(Σ√diagonal / Σ√eigenvalues): what Adam has to live with in these coordinates, over what it could have."""
    values, diagonal = torch.linalg.eigvalsh(gram), gram.diagonal()
    eigen = values.clamp_min(float(values.max()) * 1e-9).sqrt().sum()
    return float((diagonal.clamp_min(float(diagonal.max()) * 1e-9).sqrt().sum() / eigen).log())
