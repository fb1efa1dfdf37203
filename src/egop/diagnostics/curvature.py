"""How much of the curvature is on the axes: the predictor that the lab's study of prediction chose."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from egop.basis import Basis
from egop.diagnostics.short_runs import check_gradient, held_batches
from egop.estimation import Objective

__all__ = ["PROBES", "Curvature", "curvature"]

# Random directions for each of the two bases; and the batches of the loss that is looked at.
PROBES, _BATCHES = 16, 4
_LITTLE = 0.01  # of all curvature: less than this cannot be told from nothing

Vector = dict[str, Tensor]
Map = Callable[[Vector], Vector]


@dataclass(frozen=True)
class Curvature:
    """The share of the Hessian's squared entries that are on its diagonal, of all weights with a basis together.

    Attributes:
        original: in original coordinates.
        rotated: in the basis of the draws.
    """

    original: float
    rotated: float

    @property
    def promise(self) -> float:
        """log(rotated / original), what the study predicts by: above 0 the basis brings curvature to the axes."""
        return math.log((self.rotated + _LITTLE) / (self.original + _LITTLE))


def curvature(objective: Objective, basis: Basis, seed: int, tick: Callable[[], object] = lambda: None) -> Curvature:
    """Where the training stands, over the first batches; a RuntimeError if the loss has no second derivative."""
    with objective.preserve(seed=seed):
        hessian = _Hessian(objective, basis, seed)
        original = hessian.on_axes(lambda vector: vector, lambda vector: vector, tick)
        return Curvature(original, hessian.on_axes(hessian.decoded, hessian.encoded, tick))


class _Hessian:
    """Of the loss of a copy of the model, by the weights that have a basis."""

    def __init__(self, objective: Objective, basis: Basis, seed: int) -> None:
        batches = held_batches(objective, _BATCHES, seed)
        model, loss_fn = objective.trainable_copy()
        check_gradient(model, loss_fn, batches[0])
        self.basis, self.generator = basis, torch.Generator().manual_seed(seed)
        parameters = dict(model.named_parameters())
        self.names = [name for change in basis.values() for name in change.block.parameters]
        self.weights = [parameters[name] for name in self.names]
        with _twice_differentiable():
            loss = torch.stack([loss_fn(model, batch) for batch in batches]).mean()
            found = torch.autograd.grad(loss, self.weights, create_graph=True, allow_unused=True)
        self.gradients = [
            torch.zeros_like(each) if grad is None else grad for each, grad in zip(self.weights, found, strict=True)
        ]

    def product(self, direction: Vector) -> Vector:
        """The Hessian times a direction."""
        slope = sum((grad * direction[name]).sum() for name, grad in zip(self.names, self.gradients, strict=True))
        assert isinstance(slope, Tensor)
        if not slope.requires_grad:  # a loss that is linear
            return {name: torch.zeros_like(each) for name, each in zip(self.names, self.weights, strict=True)}
        with _twice_differentiable():
            found = torch.autograd.grad(slope, self.weights, retain_graph=True, allow_unused=True)
        pairs = zip(self.names, self.weights, found, strict=True)
        return {name: torch.zeros_like(each) if part is None else part for name, each, part in pairs}

    def on_axes(self, decode: Map, encode: Map, tick: Callable[[], object]) -> float:
        """The share on the axes of some coordinates, by Hutchinson's estimate of the diagonal.

        The square of a noisy estimate would be too large; the product of two independent ones is right on average.
        """
        total: Tensor | None = None
        squares = 0.0
        for _ in range(PROBES):
            signs = {name: self._signs(part) for name, part in encode(self._like()).items()}
            image = encode(self.product(decode(signs)))
            entries = torch.cat([(signs[name] * part).flatten().double() for name, part in image.items()])
            total = entries if total is None else total + entries
            squares += float(entries.square().sum())
            tick()
        assert total is not None
        pairs = (float(total.square().sum()) - squares) / (PROBES * (PROBES - 1))
        if not squares > 0:
            raise RuntimeError("the second derivative of the loss is zero here")
        return min(1.0, max(0.0, pairs / (squares / PROBES)))

    def decoded(self, coordinates: Vector) -> Vector:
        """From coordinates, by block and place, to weights, by name."""
        weights: Vector = {}
        for name, change in self.basis.items():
            count = len(change.coordinate_shapes())
            parts = change.decode([coordinates[f"{name}/{place}"] for place in range(count)])
            weights |= zip(change.block.parameters, parts, strict=True)
        return weights

    def encoded(self, weights: Mapping[str, Tensor]) -> Vector:
        """From weights, by name, to coordinates."""
        coordinates: Vector = {}
        for name, change in self.basis.items():
            parts = change.encode([weights[each].to(change.block.dtype) for each in change.block.parameters])
            coordinates |= {f"{name}/{place}": part for place, part in enumerate(parts)}
        return coordinates

    def _like(self) -> Vector:
        return {name: each.detach() for name, each in zip(self.names, self.weights, strict=True)}

    def _signs(self, like: Tensor) -> Tensor:
        return (torch.randint(0, 2, like.shape, generator=self.generator, device="cpu") * 2 - 1).to(like)


@contextlib.contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Kernels for attention and recurrent layers that have second derivatives."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield
