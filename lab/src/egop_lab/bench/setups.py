"""Setups that the measured optimizers are built from: the same learning rate and interval, each in its fastest form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import egop
from egop_lab import builders

MEMORY = "64GiB"


class Setup(builders.Setup):
    """A setup whose bases cost nothing before the training."""

    def estimate(self, structure: egop.Structure) -> egop.Basis:
        """Return an arbitrary basis: the time of a step does not depend on which one it is."""
        return make_basis(self.model, structure)


def make_setup(model: nn.Module) -> Setup:
    """Build the setup of an optimizer for a model."""
    return Setup(
        # So small that weights hardly move, and gradients stay realistic for a thousand steps.
        options={"lr": 1e-6, "weight_decay": 0.0},
        adam={"fused": True},  # torch's fastest
        model=model,
        memory=MEMORY,
    )


def make_basis(model: nn.Module, structure: egop.Structure) -> egop.Basis:
    """Build a dense orthonormal basis of every weight without estimating it."""
    objective = egop.Objective(model, lambda model, batch: batch, [None])  # nothing is sampled for the identity
    identity = egop.estimate(objective, partition="parameter", structure=egop.Identity(), progress=False)
    device = next(model.parameters()).device
    return egop.Basis(
        [
            structure.change(
                change.block,
                {key: _make_reflection(shape, device) for key, shape in structure.basis_shapes(change.block).items()},
            )
            for change in identity.values()
        ]
    )


def _make_reflection(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first columns of a reflection, which is orthonormal and has no zeros; the same throughout a stack."""
    *_, rows, columns = shape
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(0)).to(device)
    normal /= torch.linalg.vector_norm(normal)
    matrix = torch.eye(rows, columns, device=device) - 2 * torch.outer(normal, normal[:columns])
    return matrix.expand(shape).clone()
