"""The literal f∘V: what ``ReparameterizedOptimizer`` claims to do, written out without any of its code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cases
import egop


def logistic(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Compute one logistic loss per class.

    Unlike with cross-entropy, the gradient has no direction in which it is exactly zero. There, adaptive optimizers
    divide rounding noise by its own size, and no two computations of the same thing agree.
    """
    inputs, labels = batch
    outputs = model(inputs)
    wanted = labels.unsqueeze(1) == torch.arange(outputs.shape[1])
    return F.binary_cross_entropy_with_logits(outputs, wanted.to(outputs.dtype))


def basis_of(case: cases.ModelCase, **options: Any) -> egop.Basis:
    """Estimate the basis of a model under the logistic loss."""
    objective = egop.Objective(case.build(), logistic, case.batches())
    return cases.estimate(objective, **{"sampling": "loop"} | options)


# Where the contract of an optimizer is tested: model, partition, structure.
LAYOUTS: dict[str, tuple[cases.ModelCase, Any, egop.Structure]] = {
    "blocks": (cases.MLP, "layer", egop.Full()),
    "batched": (cases.DEEP, "layer", egop.Full()),
    "global": (cases.MLP, "global", egop.Full()),
    "everything": (cases.DEEP, {"everything": ["*"]}, egop.Full()),
    "identity": (cases.MLP, "layer", egop.Identity()),
}
# A few optimizers where blocks are stacked, and one of them in every layout.
over_layouts_and_optimizers = pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        (layout, optimizer)
        for layout in LAYOUTS
        for optimizer in cases.FEW_OPTIMIZERS
        if layout == "batched" or optimizer.kind is torch.optim.AdamW
    ],
    ids=str,
)


@cache
def case_and_basis(layout: str) -> tuple[cases.ModelCase, egop.Basis]:
    """Return the model of a layout, and its basis."""
    case, partition, structure = LAYOUTS[layout]
    return case, basis_of(case, partition=partition, structure=structure)


class Wrapped:
    """A model trained through the wrapper; the same methods as :class:`Explicit`, so that one script drives both."""

    def __init__(
        self,
        model: nn.Module,
        basis: egop.Basis | None,
        optimizer: cases.OptimizerCase,
        groups: Sequence[Mapping[str, Any]] = ({"names": ["*"]},),
    ) -> None:
        self.model = copy.deepcopy(model)
        named = dict(self.model.named_parameters())
        self.optimizer: torch.optim.Optimizer = egop.ReparameterizedOptimizer(
            [
                {key: value for key, value in group.items() if key != "names"}
                | {"params": [(name, named[name]) for name in _names(group, named)]}
                for group in groups
            ],
            optimizer.kind,
            basis,
            **optimizer.arguments,
        )

    def loss(self, batch: Any) -> Tensor:
        """Compute the loss of one batch."""
        return logistic(self.model, batch)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the current parameters."""
        return cases.parameters_of(self.model)

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose ``.grad`` the backward pass fills."""
        return list(self.model.parameters())


class Explicit:
    """A plain torch optimizer over coordinates: leaf tensors ``c`` whose weights are ``(V @ c).reshape(shape)``.

    Parameters outside every block are leaf tensors themselves. ``V`` is the dense matrix of each block.
    """

    def __init__(
        self,
        model: nn.Module,
        basis: egop.Basis | None,
        optimizer: cases.OptimizerCase,
        groups: Sequence[Mapping[str, Any]] = ({"names": ["*"]},),
    ) -> None:
        self.model = copy.deepcopy(model)
        named = dict(self.model.named_parameters())
        self.blocks = {name: (change.dense(), change.block.parameters) for name, change in (basis or {}).items()}
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        inside = {name for _, members in self.blocks.values() for name in members}
        self.others = {
            name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
            for name, parameter in named.items()
            if name not in inside
        }
        self.coordinates: dict[str, Tensor] = {
            block: torch.cat([named[name].detach().flatten() for name in members]).to(V.dtype)
            for block, (V, members) in self.blocks.items()
        }
        # What a basis of fewer dimensions leaves out: it stays where it is, or is dropped, as the structure says.
        self.rest: dict[str, Tensor] = {}
        for block, (V, _) in self.blocks.items():
            start = self.coordinates[block]
            self.coordinates[block] = (V.mT @ start).requires_grad_()
            keep = basis is not None and basis[block].settings.get("keep_rest", False)
            self.rest[block] = start - V @ (V.mT @ start) if keep else torch.zeros_like(start)
        self.optimizer = optimizer.kind(
            [
                {key: value for key, value in group.items() if key != "names"}
                | {"params": self.members(_names(group, named))}
                for group in groups
            ],
            **optimizer.arguments,
        )

    def loss(self, batch: Any) -> Tensor:
        """Compute the loss of one batch as a function of the coordinates."""
        weights = self._decoded()
        return logistic(lambda x: torch.func.functional_call(self.model, weights, (x,)), batch)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters at the current coordinates."""
        return {name: tensor.detach().clone() for name, tensor in self._decoded().items()}

    def leaves(self) -> list[Tensor]:
        """Return the tensors whose ``.grad`` the backward pass fills."""
        return [*self.coordinates.values(), *self.others.values()]

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Encode new parameters; the optimizer's state stays as it is."""
        with torch.no_grad():
            for name, leaf in self.others.items():
                leaf.copy_(values[name])
            for block, (V, members) in self.blocks.items():
                self.coordinates[block].copy_(V.mT @ torch.cat([values[name].flatten() for name in members]))

    def _decoded(self) -> dict[str, Tensor]:
        decoded = dict(self.others)
        for block, (V, members) in self.blocks.items():
            parts = (V @ self.coordinates[block] + self.rest[block]).split(
                [self.shapes[name].numel() for name in members]
            )
            decoded |= {name: part.reshape(self.shapes[name]) for name, part in zip(members, parts, strict=True)}
        return decoded

    def members(self, names: Sequence[str]) -> list[Tensor]:
        """Return the leaves that represent these parameters."""
        inside = [self.coordinates[block] for block, (_, members) in self.blocks.items() if members[0] in names]
        return inside + [leaf for name, leaf in self.others.items() if name in names]


def train(side: Wrapped | Explicit, batches: Sequence[Any], steps: int) -> dict[str, Tensor]:
    """Train in a plain loop and return the final weights."""
    for step in range(steps):
        side.optimizer.zero_grad()
        side.loss(batches[step % len(batches)]).backward()
        side.optimizer.step()
    return side.weights()


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference between any two entries; the names must be the same."""
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def identical(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return True if all entries are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _names(group: Mapping[str, Any], named: Mapping[str, Tensor]) -> list[str]:
    return list(named) if group["names"] == ["*"] else list(group["names"])
