"""Setups that the measured optimizers are built from: the same learning rate and interval, each in its fastest form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import egop
from egop_lab import builders, methods
from egop_lab.bench.networks import Network
from egop_lab.builders import REFRESH_EVERY
from egop_lab.methods import BENCH, Method, get_label

MEMORY = "64GiB"
ADAMW, SOAP, SHAMPOO = (get_label(BENCH, name) for name in ("adamw", "soap", "shampoo-blocks"))
SHARED, SHARED_ONLINE = get_label(BENCH, "shared-fixed"), get_label(BENCH, "shared-online")
KRONECKER, KRONECKER_ONLINE = get_label(BENCH, "kronecker-fixed"), get_label(BENCH, "kronecker-online")
INSTALL = f"{SOAP}, {SHAMPOO} and the Muon of ResNets are left out: pip install pytorch-optimizer for them."


class Setup(builders.Setup):
    """A setup whose bases cost nothing before the training."""

    def upfront(self, structure: egop.Structure) -> egop.Basis:
        """Return an arbitrary basis: the time of a step does not depend on which one it is."""
        return make_basis(self.model, structure)


def make_setup(model: nn.Module, network: Network, batches: Iterable[Any] = (None,), **options: Any) -> Setup:
    """Build the setup of an optimizer for a model of a network; methods that sample gradients use the batches."""
    return Setup(
        # So small that weights hardly move, and gradients stay realistic for a thousand steps.
        options={"lr": 1e-6, "weight_decay": 0.0},
        adam={"fused": True},  # torch's fastest
        model=model,
        objective=egop.Objective(model, network.loss, list(batches)),
        memory=MEMORY,
        **options,
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
                {key: _reflection(shape, device) for key, shape in structure.basis_shapes(change.block).items()},
            )
            for change in identity.values()
        ]
    )


def _reflection(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first columns of a reflection, which is orthonormal and has no zeros; the same throughout a stack."""
    *_, rows, columns = shape
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(0)).to(device)
    normal /= torch.linalg.vector_norm(normal)
    matrix = torch.eye(rows, columns, device=device) - 2 * torch.outer(normal, normal[:columns])
    return matrix.expand(shape).clone()


def period(method: Method) -> int:
    """Return the number of steps after which the method's work repeats."""
    return REFRESH_EVERY if method.follows_gradients else 1


def find_available(network: Network) -> tuple[dict[str, Method], bool]:
    """Return the methods that can run here for a network, and whether a missing package leaves some out."""
    choices = methods.get_methods(BENCH)
    try:
        builders.import_pytorch_optimizer(SOAP)
    except builders.MissingPackageError:
        foreign = {"always", "convolutions"} if network.images else {"always"}
        return {name: method for name, method in choices.items() if method.package not in foreign}, True
    return choices, False
