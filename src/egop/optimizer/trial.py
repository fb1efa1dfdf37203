"""Whether an optimizer works coordinate by coordinate: found by trying it on a few numbers, not by a list of names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import RandomStream, seed_everything
from egop.optimizer.hooks import step_inner
from egop.optimizer.moments import keeps_only_vectors, leaves

_ENTRIES, _STEPS = 12, 3
_MORE_STEPS = 12  # some begin as plain momentum does
_MATRIX, _OTHER_MATRIX, _VECTOR = (4, 3), (3, 4), (12,)
# Of the largest step: sums in another order differ by rounding, which is 1e-16 of the weights.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Findings:
    """What became of the same numbers, arranged in different ways."""

    needs_closure: bool = False
    # Why it does not work coordinate by coordinate, if it was seen not to.
    whole: str | None = None
    # Whether it does on matrices, and does something else with vectors.
    other_on_vectors: bool = False
    # Whether rotated numbers got rotated steps, so that no rotation makes a difference.
    same_in_every_rotation: bool = field(default=False, compare=False)


def tried(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> Findings:
    """Try an optimizer with these settings of a group and these arguments of the class; nothing global changes.

    An optimizer that treats every coordinate alike does not see how they are arranged: numbers that are shuffled into
    another shape get the same steps. Norms of the whole tensor are allowed to matter, since a rotation keeps them.
    Where the trial itself does not run (another first argument, needs of its own), nothing is found.
    """
    try:
        return _remembered((optimizer_class, tuple(settings.items()), tuple(hyperparameters.items())))
    except TypeError:  # something that cannot be hashed: a list of betas
        return _tried(optimizer_class, settings, hyperparameters)


@functools.lru_cache(maxsize=64)
def _remembered(key: tuple[Any, ...]) -> Findings:
    optimizer_class, settings, hyperparameters = key
    return _tried(optimizer_class, dict(settings), dict(hyperparameters))


def _tried(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> Findings:
    def build(parameter: Tensor) -> Optimizer:
        return optimizer_class([{**settings, "params": [parameter]}], **hyperparameters)

    # Compiled parts would be compiled for these few numbers alone. The default device may be another one than theirs.
    with warnings.catch_warnings(), RandomStream(0), torch.compiler.set_stance("force_eager"), torch.device("cpu"):
        warnings.simplefilter("ignore")
        matrix = _outcome(build, _MATRIX)
        if matrix is None:
            return Findings(needs_closure=_outcome(build, _MATRIX, closure=True) is not None)
        other_matrix, vector = _outcome(build, _OTHER_MATRIX, shuffled=True), _outcome(build, _VECTOR, shuffled=True)
        rotates = _same_in_every_rotation(build)
    if not matrix.same_as(other_matrix):
        return Findings(whole="the same numbers, arranged as another matrix, got other steps")
    if matrix.not_by_coordinate:
        return Findings(whole=f"it keeps {matrix.not_by_coordinate} for a weight of shape {_MATRIX}")
    return Findings(other_on_vectors=not matrix.same_as(vector), same_in_every_rotation=rotates)


@dataclass(frozen=True)
class _Outcome:
    """How far each number was moved, and what of the state is not by coordinate."""

    moved: Tensor
    not_by_coordinate: str

    def same_as(self, other: _Outcome | None) -> bool:
        if other is None:
            return False
        largest = torch.maximum(self.moved.abs().max(), other.moved.abs().max())
        return not (self.moved - other.moved).abs().max() > _TOLERANCE * largest  # no difference in what is not finite


def _outcome(
    build: Callable[[Tensor], Optimizer], shape: tuple[int, ...], *, shuffled: bool = False, closure: bool = False
) -> _Outcome | None:
    """What becomes of the numbers in this shape; None if the optimizer does not run on them."""
    numbers, order = _numbers(shuffled=shuffled)
    start, *gradients = numbers[:, order].unflatten(1, shape).unbind()
    parameter = start.clone().requires_grad_()

    def loss() -> float:
        return 1.0

    seed_everything(0)
    try:
        optimizer = build(parameter)
        getattr(optimizer, "train", lambda: None)()  # schedule-free ones do not step before
        for gradient in gradients:
            parameter.grad = gradient.clone()
            step_inner(optimizer, loss) if closure else step_inner(optimizer)
    except Exception:  # whatever it is, it is said again where it matters: in the first step of a training
        return None
    moved = torch.empty_like(numbers[0])
    moved[order] = (parameter.detach() - start).flatten()
    return _Outcome(moved, _not_by_coordinate(optimizer.state.get(parameter, {})))


def _same_in_every_rotation(build: Callable[[Tensor], Optimizer]) -> bool:
    """Whether steps from a rotated start along rotated gradients are the rotated steps, rows and columns rotated.

    One that keeps squares of gradients is not asked: it may use them later.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(1 + _MORE_STEPS, *_MATRIX, generator=generator, dtype=torch.float64, device="cpu")
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")).Q
        for size in _MATRIX
    )
    moved = []
    try:
        for start, *gradients in (numbers, left @ numbers @ right.mT):
            parameter = start.clone().requires_grad_()
            optimizer = build(parameter)
            getattr(optimizer, "train", lambda: None)()
            for gradient in gradients:
                parameter.grad = gradient.clone()
                step_inner(optimizer)
            if not keeps_only_vectors(optimizer.state.get(parameter, {})):
                return False
            moved.append(parameter.detach() - start)
    except Exception:  # as in :func:`_outcome`
        return False
    largest = moved[0].abs().max()
    return bool(largest > 0 and (left @ moved[0] @ right.mT - moved[1]).abs().max() <= _TOLERANCE * largest)


def _numbers(*, shuffled: bool) -> tuple[Tensor, Tensor]:
    """A weight and its gradients, always the same ones, and their order.

    In their own order the gradients are orthogonal to the rows of the weight, as where a normalisation follows: there
    are optimizers that look at rows only then.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(1 + _STEPS, *_MATRIX, generator=generator, dtype=torch.float64, device="cpu")
    weight, gradients = rows[0], rows[1:]
    along = (gradients * weight).sum(-1, keepdim=True) / weight.square().sum(-1, keepdim=True)
    numbers = torch.cat([weight.unsqueeze(0), gradients - along * weight]).flatten(1)
    order = torch.randperm(_ENTRIES, generator=generator, device="cpu")
    return numbers, order if shuffled else order.sort().values


def _not_by_coordinate(state: Mapping[str, Any]) -> str:
    """What of a state is neither a single number nor of the size of the weight: factors of rows and columns."""
    for key, value in state.items():
        for where, leaf in leaves(key, value):
            if not isinstance(leaf, Tensor):
                return f"'{where}' (a {type(leaf).__name__})"
            if leaf.numel() not in (0, 1, _ENTRIES):
                return f"'{where}' of shape {tuple(leaf.shape)}"
    return ""
