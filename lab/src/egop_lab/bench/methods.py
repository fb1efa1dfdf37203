"""The optimizers that are compared, each in its fastest form, with the same learning rate and cadence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import egop
from egop_lab.bench.networks import Network
from egop_lab.training import residual

PERIOD = 10  # steps between two renewals of a basis, for every method that has one
RANK = 16
MEMORY = "64GiB"

ADAMW, SOAP, SHAMPOO, MUON = "AdamW", "SOAP", "Shampoo", "Muon"
SHARED, SHARED_ONLINE = "Shared, fixed", "Shared, online"
KRONECKER, KRONECKER_ONLINE = "Kronecker, fixed", "Kronecker, online"
AUXILIARY = f"Auxiliary({RANK}), fixed"
INSTALL = f"{SOAP}, {SHAMPOO} and the Muon of ResNets are left out: pip install pytorch-optimizer for them."

# So small that weights hardly move: after a thousand steps the gradients are still those of a network.
_OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.0}


@dataclass(frozen=True)
class Method:
    """An optimizer.

    Attributes:
        name: as shown.
        build: makes it for a model of a network.
        period: after how many steps its work repeats.
    """

    name: str
    build: Callable[[nn.Module, Network], Optimizer]
    period: int = 1


def adamw(model: nn.Module, network: Network | None = None) -> Optimizer:
    """The fastest AdamW that torch has."""
    return torch.optim.AdamW(model.parameters(), fused=True, **_OPTIONS)


def reparameterized(
    model: nn.Module,
    network: Network | None = None,
    *,
    fixed: egop.Structure | None = None,
    online: egop.Structure | None = None,
    refresh: egop.Refresh | None = None,
    compile: bool = False,
) -> Optimizer:
    """AdamW in a basis: a fixed one, or one that follows the gradients."""
    basis = None if fixed is None else some_basis(model, fixed)
    if online is not None:
        refresh = egop.Online(every=PERIOD, structure=online, memory=MEMORY)
    return egop.ReparameterizedOptimizer(
        model, torch.optim.AdamW, basis, refresh=refresh, compile=compile, fused=True, **_OPTIONS
    )


def some_basis(model: nn.Module, structure: egop.Structure) -> egop.Reparameterization:
    """A dense orthonormal basis of every weight, at no cost: the time of a step does not depend on which one it is."""
    objective = egop.Objective(model, lambda model, batch: batch, [None])  # nothing is sampled for the identity
    identity = egop.estimate(objective, partition="parameter", structure=egop.Identity(), progress=False)
    device = next(model.parameters()).device
    return egop.Reparameterization(
        [
            structure.change(
                change.block,
                {key: _reflection(shape, device) for key, shape in structure.basis_shapes(change.block).items()},
            )
            for change in identity.values()
        ]
    )


def _reflection(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The first columns of a reflection, which is orthonormal and has no zeros; the same throughout a stack."""
    *_, rows, columns = shape
    normal = torch.randn(rows, generator=torch.Generator().manual_seed(0)).to(device)
    normal /= torch.linalg.vector_norm(normal)
    found = torch.eye(rows, columns, device=device) - 2 * torch.outer(normal, normal[:columns])
    return found.expand(shape).clone()


def _soap(model: nn.Module, network: Network) -> Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), precondition_frequency=PERIOD, **_OPTIONS)


def _shampoo(model: nn.Module, network: Network) -> Optimizer:
    """With blocks of 512, as it is used: the inverse root of a wider matrix takes seconds."""
    from pytorch_optimizer import ScalableShampoo

    options: dict[str, Any] = {"preconditioning_compute_steps": PERIOD, "start_preconditioning_step": 1}
    return ScalableShampoo(model.parameters(), **options, **_OPTIONS)


class Several(Optimizer):
    """Several optimizers of one model, stepped one after the other.

    Args:
        *members: the optimizers.
    """

    def __init__(self, *members: Optimizer) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for member in self.members:
            member.step()


def _muon(model: nn.Module, network: Network) -> Optimizer:
    """Hidden matrices by Muon, everything else by AdamW; torch's Muon takes no kernels, so ResNets have another one."""
    if network.images:
        nothing = egop.Objective(model, network.loss, [None])
        start = residual.Start(model, nothing, _OPTIONS["lr"], _OPTIONS["weight_decay"], PERIOD, seed=0)
        return residual.METHODS[residual.MUON](start)
    outside = set(_ends(model))
    hidden = [each for each in model.parameters() if each.dim() == 2 and each not in outside]
    inside = set(hidden)
    others = [each for each in model.parameters() if each not in inside]
    return Several(torch.optim.Muon(hidden, **_OPTIONS), torch.optim.AdamW(others, fused=True, **_OPTIONS))


def _ends(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that Muon is not for: embeddings and the last layer."""
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for part in [*layers[-1:], *(part for part in model.modules() if isinstance(part, nn.Embedding))]:
        yield from part.parameters()


def _fixed(name: str, structure: egop.Structure, *, compile: bool = False) -> Method:
    return Method(name, functools.partial(reparameterized, fixed=structure, compile=compile))


def _online(name: str, structure: egop.Structure, *, compile: bool = False) -> Method:
    return Method(name, functools.partial(reparameterized, online=structure, compile=compile), PERIOD)


METHODS = {
    method.name: method
    for method in (
        Method(ADAMW, adamw),
        _fixed(SHARED, egop.Shared()),
        _online(SHARED_ONLINE, egop.Shared()),
        _fixed(KRONECKER, egop.Kronecker()),
        _online(KRONECKER_ONLINE, egop.Kronecker()),
        _fixed(AUXILIARY, egop.Auxiliary(RANK)),
        Method(SOAP, _soap, PERIOD),
        Method(SHAMPOO, _shampoo, PERIOD),
        Method(MUON, _muon),
    )
}


# Compiling takes long, so these run on one network only.
COMPILED = [
    _fixed(f"{SHARED}, compiled", egop.Shared(), compile=True),
    _online(f"{SHARED_ONLINE}, compiled", egop.Shared(), compile=True),
]


def available(network: Network) -> tuple[list[Method], bool]:
    """The methods that can be had here for a network, and whether some are left out for want of a package."""
    try:
        import pytorch_optimizer  # noqa: F401
    except ImportError:
        foreign = {SOAP, SHAMPOO, *([MUON] if network.images else [])}
        return [method for name, method in METHODS.items() if name not in foreign], True
    return list(METHODS.values()), False
