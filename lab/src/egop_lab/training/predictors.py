"""What can be known of a problem before it is trained: spectra, Gram matrices, curvature, each beside white noise.

Numbers of single weights are averaged by how many entries these have. Those of white noise are simulated with as many
draws: a draw counts as often as its gradient has directions of its own, not as often as it has rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import egop
from egop.estimation import sample_gradients
from egop_lab.training.prediction import ORIGINAL, Start, one_step, optimizer

__all__ = ["Grams", "predictors"]

_PROBES = 16  # random directions for the curvature
_POWER = 8  # steps of the power iteration
_RANDOM = 2 / math.pi  # the density of a random direction
_TINY = 1e-30
_LEADING = 0.9  # share of the trace that leading directions hold


def predictors(start: Start, draws: int, early: int, lr: float) -> dict[str, float]:
    """All of them, by name; those of training gradients at the start and along a few steps of AdamW.

    Args:
        start: the problem.
        draws: how many batches at the start.
        early: how many steps of AdamW.
        lr: their learning rate.
    """
    at_start = _at_start(start, draws)
    along = _along(start, early, lr)
    return {
        **_spectral(start),
        **{f"start: {name}": value for name, value in _of_grams(at_start, start.seed).items()},
        **{f"early: {name}": value for name, value in _of_grams(along, start.seed).items()},
        **_curvature(start, along),
    }


# --- spectra of draws -------------------------------------------------------------------------------------------------


def _spectral(start: Start) -> dict[str, float]:
    """Of the basis from before the training."""
    rows, agreement = [], _compare_halves(start)
    for name, spectrum in start.basis.spectrum.items():
        values, width = spectrum.eigenvalues, len(spectrum.eigenvalues)
        leading = spectrum.effective_dimension()
        if leading == 0 or width == 1:
            continue
        noise = _noise_spectrum(spectrum.samples, width, start.seed)
        density = float(spectrum.density[:leading].mean())
        rank = spectrum.stable_rank / width
        corrected = _stable_rank(values / noise.clamp_min(noise[0] * 1e-6)) / width
        entries = start.basis[name].block.size
        rows.append(
            (
                entries,
                {
                    "decay beyond noise": 1 - rank * width / _stable_rank(noise),
                    "density": density / _RANDOM,
                    "agreement above chance": agreement[name],
                    "density by rank": math.log(density / rank),
                    "density by corrected rank": math.log(density / corrected),
                },
            )
        )
    return _averaged(rows)


def _compare_halves(start: Start) -> dict[str, float]:
    """Return for each weight how well the bases of the even and the odd draws agree: 0 is chance, 1 is perfect."""
    halves = {name: [egop.Shared().accumulator(change.block) for _ in range(2)] for name, change in start.basis.items()}
    chunks = sample_gradients(
        start.objective,
        start.task.rho,
        start.problem.draws,
        names=list(halves),
        generator=torch.Generator().manual_seed(start.seed),
        method="loop",
    )
    draws = 0
    for gradients in chunks:
        for name, pair in halves.items():
            for index, half in enumerate(pair):
                rows = gradients[name][(index - draws) % 2 :: 2]
                if len(rows):
                    half.add([rows])
        draws += len(next(iter(gradients.values())))
    return {name: _agreement(*(half.eigenbases()[0] for half in pair)) for name, pair in halves.items()}


def _agreement(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Compare eigenvalues and eigenvectors of two halves; a stack of matrices is averaged."""
    shapes = [
        (values.reshape(-1, values.shape[-1]), vectors.reshape(-1, *vectors.shape[-2:]))
        for values, vectors in (one, other)
    ]
    found = [_agree(pair) for pair in zip(*(zip(*stack, strict=True) for stack in shapes), strict=True)]
    known = [pair for pair in found if pair is not None]
    if not known:
        return 0.0
    held, chance = (sum(numbers) / len(known) for numbers in zip(*known, strict=True))
    return 0.0 if chance == 1 else (held - chance) / (1 - chance)


def _agree(halves: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float] | None:
    """Return the share of one half's energy in the leading directions of the other, and what chance would give."""
    if not all(values.sum() > 0 for values, _ in halves):
        return None
    shares, bases = ([tensor.double() for tensor in each] for each in zip(*halves, strict=True))
    shares = [share / share.sum() for share in shares]
    cosines = (bases[0].mT @ bases[1]).square()
    held, chances = [], []
    for share, others in zip(shares, (cosines @ shares[1], shares[0] @ cosines), strict=True):
        leading = int((share.cumsum(0) < _LEADING * (1 - 1e-12)).sum()) + 1
        own = float(share[:leading].sum())
        held.append(float(others[:leading].sum()) / own)
        chances.append(leading / len(bases[0]) / own)
    return min(1.0, sum(held) / 2), min(1.0, sum(chances) / 2)


def _noise_spectrum(draws: int, width: int, seed: int) -> Tensor:
    """The eigenvalues of a Gram matrix of white noise, descending."""
    noise = torch.randn(draws, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.eigvalsh(noise.mT @ noise / draws).flip(0).clamp_min(0)


def _stable_rank(values: Tensor) -> float:
    roots = values.clamp_min(0).sqrt()
    return float(roots.sum() / roots.max().clamp_min(_TINY))


# --- Gram matrices of training gradients ------------------------------------------------------------------------------


@dataclass
class Grams:
    """The Gram matrices of some gradients of one weight, seen as a matrix: of its inputs and of its outputs.

    Attributes:
        right: the mean of GᵀG.
        left: the mean of GGᵀ.
        draws: how many gradients.
        rank: about how many directions one of them has.
    """

    right: Tensor
    left: Tensor
    draws: int
    rank: float

    @classmethod
    def of(cls, gradients: Tensor) -> Grams:
        """Of stacked gradients, (draws, outputs, inputs)."""
        squares = gradients.mT @ gradients
        energy = squares.diagonal(dim1=1, dim2=2).sum(1).square()
        ranks = energy / squares.square().sum((1, 2)).clamp_min(_TINY)
        left = (gradients @ gradients.mT).mean(0)
        return cls(squares.mean(0), left, len(gradients), float(ranks.clamp_min(1).mean()))

    @property
    def entries(self) -> int:
        """Of the weight."""
        return len(self.left) * len(self.right)


def _of_grams(grams: Mapping[str, Grams], seed: int) -> dict[str, float]:
    """How far Gram matrices are from diagonal, less what white noise of the same diagonal would show."""
    rows = []
    for gram in grams.values():
        numbers: dict[str, float] = {}
        for side, matrix in (("inputs", gram.right), ("outputs", gram.left)):
            numbers |= {f"{what}, {side}": value for what, value in _off_axes(matrix, gram, seed).items()}
        for what in ("off-diagonal share", "roots"):
            numbers[f"{what}, both"] = numbers[f"{what}, inputs"] + numbers[f"{what}, outputs"]
        rows.append((gram.entries, numbers))
    return _averaged(rows)


def _off_axes(matrix: Tensor, gram: Grams, seed: int) -> dict[str, float]:
    diagonal = matrix.diagonal()
    count = max(1, round(gram.draws * gram.rank))
    if len(matrix) == 1 or not float(diagonal.sum()) > 0:
        return {"off-diagonal share": 0.0, "roots": 0.0}
    noise = torch.randn(count, len(matrix), generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype)
    noise *= diagonal.clamp_min(0).sqrt()
    other = noise.mT @ noise / count
    return {
        "off-diagonal share": _off_diagonal(matrix) - _off_diagonal(other),
        "roots": _roots(matrix) - _roots(other),
    }


def _off_diagonal(matrix: Tensor) -> float:
    """The share of the energy that is off the diagonal."""
    return float(1 - matrix.diagonal().square().sum() / matrix.square().sum())


def _roots(matrix: Tensor) -> float:
    """How much larger the sum of the diagonal's roots is than that of the eigenvalues' roots, as a logarithm.

    The first is what Adam has to live with in these coordinates, the second what it would have in the eigenbasis.
    """
    values = torch.linalg.eigvalsh(matrix)
    eigen = values.clamp_min(values.max() * 1e-9).sqrt().sum()
    diagonal = matrix.diagonal()
    return float((diagonal.clamp_min(diagonal.max() * 1e-9).sqrt().sum() / eigen).log())


def _at_start(start: Start, draws: int) -> dict[str, Grams]:
    """Of the gradients of some batches where the training begins."""
    model = copy.deepcopy(start.task.model)
    task, count = start.task, min(draws, len(start.task.batches))
    stacks: dict[str, list[Tensor]] = {name: [] for name in start.weights}
    for batch in task.batches[:count]:
        model.zero_grad()
        task.loss(model, batch).backward()
        _keep(stacks, model)
    return {name: Grams.of(torch.stack(stack)) for name, stack in stacks.items()}


def _along(start: Start, steps: int, lr: float) -> dict[str, Grams]:
    """Of the gradients of the first steps of AdamW: what ``Online`` would see."""
    model = copy.deepcopy(start.task.model)
    made = optimizer(ORIGINAL, start, model, lr)
    stacks: dict[str, list[Tensor]] = {name: [] for name in start.weights}
    for step in range(steps):
        one_step(start.task, model, made, step)
        _keep(stacks, model)
    return {name: Grams.of(torch.stack(stack)) for name, stack in stacks.items()}


def _keep(stacks: Mapping[str, list[Tensor]], model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for name, stack in stacks.items():
        gradient = parameters[name].grad
        weight = torch.zeros_like(parameters[name]) if gradient is None else gradient
        stack.append(weight.detach().flatten(1).double())


# --- curvature --------------------------------------------------------------------------------------------------------

Rotate = Callable[[str, Tensor], Tensor]  # coordinates of the weight of a name, to the weight or back


def _curvature(start: Start, grams: Mapping[str, Grams]) -> dict[str, float]:
    """The share of the Hessian's energy on the axes, here and in two bases; the density of its sharpest direction."""
    hessian = _Hessian(start)
    sides = {name: (_vectors(gram.left), _vectors(gram.right)) for name, gram in grams.items()}

    def two_sided(name: str, weight: Tensor) -> Tensor:
        left, right = sides[name]
        return (left @ weight.flatten(1) @ right.mT).view_as(weight)

    def back(name: str, weight: Tensor) -> Tensor:
        left, right = sides[name]
        return (left.mT @ weight.flatten(1) @ right).view_as(weight)

    here = hessian.on_axes(_same, _same)
    fixed = hessian.on_axes(_decoder(start.basis), _encoder(start.basis))
    online = hessian.on_axes(two_sided, back)
    return {
        "curvature off axes": 1 - here,
        "curvature, fixed basis": math.log((fixed + 0.01) / (here + 0.01)),
        "curvature, early basis": math.log((online + 0.01) / (here + 0.01)),
        "sharpest direction's density": hessian.sharpest_density() / _RANDOM,
    }


def _vectors(matrix: Tensor) -> Tensor:
    return torch.linalg.eigh(matrix)[1]


def _same(name: str, weight: Tensor) -> Tensor:
    return weight


def _decoder(basis: egop.Basis) -> Rotate:
    def decode(name: str, weight: Tensor) -> Tensor:
        change = basis[name].to(dtype=torch.float64)
        (shape,) = change.coordinate_shapes()
        return change.decode([weight.reshape(shape)])[0].view_as(weight)

    return decode


def _encoder(basis: egop.Basis) -> Rotate:
    return lambda name, weight: basis[name].to(dtype=torch.float64).encode([weight])[0].reshape(weight.shape)


class _Hessian:
    """Of the judged loss by the weights that would get a basis: products by differences of gradients, in float64."""

    def __init__(self, start: Start) -> None:
        self.model = copy.deepcopy(start.task.model).double()
        self.loss, self.batch = start.task.loss, _double(start.task.judged)
        named = dict(self.model.named_parameters())
        self.weights = {name: named[name] for name in start.weights}
        self.origin = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.generator = torch.Generator().manual_seed(start.seed)

    def product(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        length = math.sqrt(sum(float(part.square().sum()) for part in direction.values()))
        size = 1e-4 / max(length, _TINY)
        ahead, behind = self._gradient(direction, size), self._gradient(direction, -size)
        return {name: (ahead[name] - behind[name]) / (2 * size) for name in ahead}

    def _gradient(self, direction: Mapping[str, Tensor], size: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.origin[name] + size * direction[name])
        loss = self.loss(self.model, self.batch)
        gradients = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        pairs = zip(self.weights.items(), gradients, strict=True)
        return {name: torch.zeros_like(weight) if part is None else part for (name, weight), part in pairs}

    def on_axes(self, decode: Rotate, encode: Rotate) -> float:
        """The share of the energy that is on the axes of some coordinates, by Hutchinson's estimate of the diagonal.

        The square of a noisy estimate would be too large; the product of two independent ones is right on average.
        """
        found, energies = [], []
        for _ in range(_PROBES):
            signs = {name: self._signs(weight) for name, weight in self.weights.items()}
            product = self.product({name: decode(name, sign) for name, sign in signs.items()})
            turned = {name: encode(name, part) for name, part in product.items()}
            found.append(torch.cat([(signs[name] * turned[name]).flatten() for name in signs]))
            energies.append(float(found[-1].square().sum()))
        stack = torch.stack(found)
        total = stack.sum(0)
        pairs = float(total.square().sum() - stack.square().sum()) / (_PROBES * (_PROBES - 1))
        return min(1.0, max(0.0, pairs / max(sum(energies) / _PROBES, _TINY)))

    def sharpest_density(self) -> float:
        direction = {name: torch.randn(weight.shape, generator=self.generator).double() for name, weight in self._all}
        for _ in range(_POWER):
            direction = self.product(direction)
            length = math.sqrt(sum(float(part.square().sum()) for part in direction.values()))
            direction = {name: part / max(length, _TINY) for name, part in direction.items()}
        entries = torch.cat([part.flatten() for part in direction.values()])
        return float(entries.abs().sum().square() / len(entries))

    @property
    def _all(self) -> Iterable[tuple[str, Tensor]]:
        return self.weights.items()

    def _signs(self, weight: Tensor) -> Tensor:
        return torch.randint(0, 2, weight.shape, generator=self.generator).double() * 2 - 1


def _double(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    return tuple(_double(part) for part in batch)


def _averaged(rows: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Means over weights, by their entries."""
    total = sum(entries for entries, _ in rows)
    names = rows[0][1] if rows else ()
    return {name: sum(entries * numbers[name] for entries, numbers in rows) / total for name in names}
