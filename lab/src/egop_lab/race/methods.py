"""Build the optimizer of each method.

Every method steps the hidden weights; AdamW with betas ``(0.9, beta2 of the task)`` steps everything else (embeddings,
head, norms), with the same learning rate and weight decay. AdamW and SGD as methods step all parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import egop
from egop.optim import PolarAdam, RotatedPolarAdam
from egop_lab.builders import CombinedOptimizer
from egop_lab.muon import Muon, NorMuon
from egop_lab.race.tasks import ADAMW_OUTSIDE, MUON_SIZED
from egop_lab.race.variants import VariantPolarAdam

BASELINE = "AdamW"
_MEMORY = "8GiB"  # for all bases: no method is to lack one
_SMALLER = egop.Shared(side="smaller")
_UPDATE_RMS = 0.4  # of a square matrix, as egop.EGOP chooses for networks with normalization layers, as all tasks have
_MUON_RMS = 0.2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an optimizer is built from.

    Attributes:
        model: the model to train.
        hidden: names of the weights that the method steps.
        lr: learning rate.
        beta: the method's tuned decay.
        beta2: AdamW's, for all other parameters.
        weight_decay: decoupled, for all parameters; SGD's is not.
        seed: of a random rotation.
        overlapping: least factor of EGOP's updates of convolutions, whose windows all overlap here.
    """

    model: nn.Module
    hidden: Sequence[str]
    lr: float
    beta: float
    beta2: float
    weight_decay: float
    seed: int
    overlapping: float = 3.0

    @property
    def shared(self) -> dict[str, Any]:
        """Settings of every optimizer."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def adamw(self, beta2: float) -> dict[str, Any]:
        """Return AdamW's own settings, in its fastest form."""
        is_cuda = next(self.model.parameters()).is_cuda
        return {"betas": (0.9, beta2), **({"fused": True} if is_cuda else {})}


def build_adamw(setup: Setup) -> Optimizer:
    """Build AdamW for all parameters; ``beta`` is its beta2."""
    return AdamW(setup.model.parameters(), **setup.shared, **setup.adamw(setup.beta))


def build_sgd(setup: Setup) -> Optimizer:
    """Build SGD for all parameters; ``beta`` is its momentum."""
    return SGD(setup.model.parameters(), momentum=setup.beta, **setup.shared)


def build_beside(setup: Setup, kind: Callable[..., Optimizer], outside_scale: float = 1.0, **options: Any) -> Optimizer:
    """Build an optimizer for the hidden weights, with AdamW outside; its learning rate may be a multiple."""
    parameters = dict(setup.model.named_parameters())
    hidden = [parameters.pop(name) for name in setup.hidden]
    inside = kind(hidden, **setup.shared, **options)
    groups = [{"params": list(parameters.values()), "scale": outside_scale}]
    return CombinedOptimizer(inside, AdamW(groups, **setup.shared, **setup.adamw(setup.beta2)))


def build_rotated(
    setup: Setup, kind: type[Optimizer], basis: Any = None, params: Any = None, **options: Any
) -> Optimizer:
    """Build an optimizer in the coordinates of a basis or of one that ``refresh`` keeps current, with AdamW outside."""
    outside, params = (AdamW, setup.adamw(setup.beta2)), setup.model if params is None else params
    return egop.ReparameterizedOptimizer(
        params, kind, basis, model=setup.model, outside=outside, **setup.shared, **options
    )


def refresh_online(setup: Setup, structure: egop.Structure, every: int) -> egop.Online:
    """Return the refresh for bases of the hidden weights from their gradients."""
    return egop.Online(every=every, structure=dict.fromkeys(setup.hidden, structure), spread=False, memory=_MEMORY)


def build_soap(setup: Setup) -> Optimizer:
    """Build SOAP in our fast form: AdamW in two-sided eigenbases, refreshed every 10 steps; ``beta`` is its beta2."""
    refresh = refresh_online(setup, egop.Kronecker(), every=10)
    return build_rotated(setup, torch.optim.AdamW, refresh=refresh, betas=(0.95, setup.beta))


def build_package_soap(setup: Setup) -> Optimizer:
    """Build SOAP of the package pytorch_optimizer, for times only."""
    from pytorch_optimizer import SOAP

    return build_beside(setup, SOAP, betas=(0.95, setup.beta), precondition_frequency=10)


def build_polar(setup: Setup, kind: type[Optimizer] = PolarAdam, **options: Any) -> Optimizer:
    """Build PolarAdam with updates of EGOP's size; ``beta`` is its beta2."""

    def build(weights: Sequence[Tensor], **shared: Any) -> Optimizer:
        return kind(group_by_shape(weights, weights, setup.overlapping), **shared)

    return build_beside(setup, build, **{"betas": (0.9, setup.beta), **options})


def build_sized_muon(setup: Setup) -> Optimizer:
    """Build Muon with updates of EGOP's relative sizes; ``beta`` is its momentum."""

    def build(weights: Sequence[Tensor], **options: Any) -> Optimizer:
        return Muon(group_by_shape(weights, weights, setup.overlapping, _MUON_RMS), **options)

    return build_beside(setup, build, momentum=setup.beta)


def group_by_shape(
    weights: Sequence[Tensor], members: Sequence[Any], overlapping: float, rms: float = _UPDATE_RMS
) -> list[dict[str, Any]]:
    """Group weights by shape, with EGOP's update size for each group; put ``members`` in place of the weights."""
    groups: dict[torch.Size, dict[str, Any]] = {}
    for weight, member in zip(weights, members, strict=True):
        least = overlapping if math.prod(weight.shape[2:]) > 1 else 1.0
        gain = max(least, math.sqrt(weight.shape[0] / math.prod(weight.shape[1:])))
        group = groups.setdefault(weight.shape, {"params": [], "update_rms": rms * gain})
        group["params"].append(member)
    return list(groups.values())


def build_egop(setup: Setup, **options: Any) -> Optimizer:
    """Build EGOP, with the same outside betas as every other method; ``beta`` is PolarAdam's beta2."""
    return build_polar(setup, RotatedPolarAdam, **options)


def build_with_factor(setup: Setup, factor: float) -> Optimizer:
    """Build EGOP with another factor for convolutions."""
    return build_egop(replace(setup, overlapping=factor))


def build_of_momentum(setup: Setup) -> Optimizer:
    """Build EGOP with the running mean of the momentum's squares, which forgets twice as fast."""
    betas = (0.9, 2 * setup.beta - 1)
    return build_polar(setup, VariantPolarAdam, betas=betas, of_momentum=True)


def build_random(setup: Setup) -> Optimizer:
    """Build EGOP's control: the same in a random rotation of the same structure, which stays as it is."""
    structure = dict.fromkeys(setup.hidden, egop.extras.RandomRotation(seed=setup.seed, like=_SMALLER))
    objective = egop.Objective(setup.model, lambda model, batch: torch.zeros(()), [None])  # no gradient is sampled
    basis = egop.estimate(objective, rho=egop.Initialization(), structure=structure, memory=_MEMORY, progress=False)
    named = dict(setup.model.named_parameters())
    hidden = [(name, named.pop(name)) for name in setup.hidden]
    groups = group_by_shape([weight for _, weight in hidden], hidden, setup.overlapping)
    return build_rotated(setup, PolarAdam, basis, [*groups, {"params": list(named.items())}], betas=(0.9, setup.beta))


METHODS: dict[str, Callable[[Setup], Optimizer]] = {
    BASELINE: build_adamw,
    ADAMW_OUTSIDE: lambda setup: build_beside(setup, AdamW, outside_scale=4.0, **setup.adamw(setup.beta)),
    MUON_SIZED: build_sized_muon,
    "Muon": lambda setup: build_beside(setup, Muon, momentum=setup.beta),
    "NorMuon": lambda setup: build_beside(setup, NorMuon, momentum=setup.beta),
    "SOAP": build_soap,
    "SGD": build_sgd,
    "PolarAdam": build_polar,
    "EGOP": build_egop,
    "EGOP, random rotation": build_random,
    "EGOP, squared momentum": build_of_momentum,
    "EGOP, momentum 0.95": lambda setup: build_egop(setup, betas=(0.95, setup.beta)),
    **{f"EGOP, outside rate x {k}": functools.partial(build_egop, outside_scale=float(k)) for k in (2, 4, 8)},
    **{f"EGOP, convolutions x {k}": functools.partial(build_with_factor, factor=float(k)) for k in (1, 2, 4)},
    "EGOP, both sides": lambda setup: build_polar(setup, VariantPolarAdam, both_sides=True),
    "EGOP, renewed every 20 steps": functools.partial(build_egop, every=20),
    "SOAP, package": build_package_soap,
}
