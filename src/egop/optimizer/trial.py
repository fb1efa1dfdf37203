"""Find out whether an optimizer works coordinate by coordinate, by trying it on a few numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import RandomStream, seed_everything
from egop.optimizer.hooks import step_inner
from egop.optimizer.moments import find_leaves

_ENTRIES, _STEPS = 12, 3
_MATRIX, _OTHER_MATRIX, _VECTOR = (4, 3), (3, 4), (12,)
# Relative to the largest step. Sums in another order differ by rounding, about 1e-16 of the weights.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Trial:
    """Result of stepping the same numbers, arranged in different shapes."""

    needs_closure: bool = False
    # Why the optimizer does not work coordinate by coordinate, if it does not.
    reason: str | None = None
    # Whether it works coordinate by coordinate on matrices, but differently on vectors.
    differs_on_vectors: bool = False


def try_optimizer(
    optimizer_class: type[Optimizer], settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> Trial:
    """Try an optimizer on a few numbers, without changing any global state.

    The steps of an optimizer that treats all coordinates alike do not depend on their arrangement: numbers that are
    shuffled into another shape get the same steps. Norms of the whole tensor may matter, since a rotation preserves
    them. If the optimizer does not run here, because it is called differently or needs more, the trial finds nothing.
    """
    try:
        return _try_cached((optimizer_class, tuple(settings.items()), tuple(hyperparameters.items())))
    except TypeError:  # not hashable, such as a list of betas
        return _try(optimizer_class, settings, hyperparameters)


@functools.lru_cache(maxsize=64)
def _try_cached(key: tuple[Any, ...]) -> Trial:
    optimizer_class, settings, hyperparameters = key
    return _try(optimizer_class, dict(settings), dict(hyperparameters))


def _try(optimizer_class: type[Optimizer], settings: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> Trial:
    def build(parameter: Tensor) -> Optimizer:
        return optimizer_class([{**settings, "params": [parameter]}], **hyperparameters)

    # Do not compile anything for these few numbers, and ignore the default device.
    with warnings.catch_warnings(), RandomStream(0), torch.compiler.set_stance("force_eager"), torch.device("cpu"):
        warnings.simplefilter("ignore")
        matrix = _run(build, _MATRIX)
        if matrix is None:
            return Trial(needs_closure=_run(build, _MATRIX, closure=True) is not None)
        other_matrix, vector = _run(build, _OTHER_MATRIX, shuffled=True), _run(build, _VECTOR, shuffled=True)
    if not matrix.matches(other_matrix):
        return Trial(reason="the same numbers, arranged as another matrix, got other steps")
    if matrix.other_state:
        return Trial(reason=f"it keeps {matrix.other_state} for a weight of shape {_MATRIX}")
    return Trial(differs_on_vectors=not matrix.matches(vector))


@dataclass(frozen=True)
class _Outcome:
    """How far each number was moved, and state that is not per coordinate."""

    moved: Tensor
    other_state: str

    def matches(self, other: _Outcome | None) -> bool:
        if other is None:
            return False
        largest = torch.maximum(self.moved.abs().max(), other.moved.abs().max())
        return not (self.moved - other.moved).abs().max() > _TOLERANCE * largest  # not finite: no difference


def _run(
    build: Callable[[Tensor], Optimizer], shape: tuple[int, ...], *, shuffled: bool = False, closure: bool = False
) -> _Outcome | None:
    """Step the numbers in this shape; return None if the optimizer does not run."""
    numbers, order = _draw_numbers(shuffled=shuffled)
    seed_everything(0)
    start, *gradients = numbers[:, order].unflatten(1, shape).unbind()
    parameter = start.clone().requires_grad_()
    try:
        optimizer = build(parameter)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            step_inner(optimizer, *([lambda: 1.0] if closure else []))
    except Exception:  # if it matters, the first training step raises it again
        return None
    moved = torch.empty_like(start.flatten())
    moved[order] = (parameter.detach() - start).flatten()
    return _Outcome(moved, _find_other_state(optimizer.state.get(parameter, {})))


def _draw_numbers(*, shuffled: bool) -> tuple[Tensor, Tensor]:
    """Return a fixed weight, its gradients, and the order of their entries.

    Unshuffled, the gradients are orthogonal to the rows of the weight, as before a normalization layer. Some optimizers
    treat rows specially only in that case.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(1 + _STEPS, *_MATRIX, generator=generator, dtype=torch.float64, device="cpu")
    weight, gradients = rows[0], rows[1:]
    along = (gradients * weight).sum(-1, keepdim=True) / weight.square().sum(-1, keepdim=True)
    numbers = torch.cat([weight.unsqueeze(0), gradients - along * weight]).flatten(1)
    order = torch.randperm(_ENTRIES, generator=generator, device="cpu")
    return numbers, order if shuffled else order.sort().values


def _find_other_state(state: Mapping[str, Any]) -> str:
    """Describe state that is neither a single number nor of the weight's size, such as row and column factors."""
    for key, value in state.items():
        for path, leaf in find_leaves(key, value):
            if not isinstance(leaf, Tensor):
                return f"'{path}' (a {type(leaf).__name__})"
            if leaf.numel() not in (0, 1, _ENTRIES):
                return f"'{path}' of shape {tuple(leaf.shape)}"
    return ""
