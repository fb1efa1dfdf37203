"""Build the optimizer of each method.

Every method steps the hidden matrices; AdamW with betas ``(0.9, beta2 of the task)`` steps everything else
(embeddings, head, norms), with the same learning rate and weight decay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import egop
from egop_lab.muon import Muon, NorMuon

BASELINE = "AdamW"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an optimizer is built from.

    Attributes:
        model: the model to train.
        hidden: names of the weights that the method steps.
        lr: learning rate.
        beta: the method's tuned decay.
        beta2: AdamW's, for all other parameters.
        weight_decay: decoupled, for all parameters.
    """

    model: nn.Module
    hidden: Sequence[str]
    lr: float
    beta: float
    beta2: float
    weight_decay: float

    @property
    def shared(self) -> dict[str, Any]:
        """Settings of every optimizer."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}

    def adamw(self, beta2: float) -> dict[str, Any]:
        """Return AdamW's own settings, in its fastest form."""
        is_cuda = next(self.model.parameters()).is_cuda
        return {"betas": (0.9, beta2), **({"fused": True} if is_cuda else {})}


class Together(Optimizer):
    """Optimizers that step as one, each with its own parameters; its groups are theirs.

    Args:
        *parts: the optimizers.
    """

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer once."""
        for part in self.parts:
            part.step(closure)


def build_adamw(setup: Setup) -> Optimizer:
    """Build AdamW for all parameters; ``beta`` is its beta2."""
    return AdamW(setup.model.parameters(), **setup.shared, **setup.adamw(setup.beta))


def build_stacked(kind: Callable[..., Optimizer], setup: Setup) -> Optimizer:
    """Build an optimizer for the hidden matrices, with AdamW outside; ``beta`` is its momentum."""
    parameters = dict(setup.model.named_parameters())
    hidden = [parameters.pop(name) for name in setup.hidden]
    inside = kind(hidden, momentum=setup.beta, **setup.shared)
    return Together(inside, AdamW(parameters.values(), **setup.shared, **setup.adamw(setup.beta2)))


def build_soap(setup: Setup) -> Optimizer:
    """Build SOAP in our fast form: AdamW in two-sided eigenbases, refreshed every 10 steps; ``beta`` is its beta2."""
    structure = dict.fromkeys(setup.hidden, egop.Kronecker())
    return egop.ReparameterizedOptimizer(
        setup.model,
        torch.optim.AdamW,
        refresh=egop.Online(every=10, structure=structure, spread=False, memory="8GiB"),
        outside=(AdamW, setup.adamw(setup.beta2)),
        betas=(0.95, setup.beta),
        **setup.shared,
    )


METHODS: dict[str, Callable[[Setup], Optimizer]] = {
    BASELINE: build_adamw,
    "Muon": functools.partial(build_stacked, Muon),
    "NorMuon": functools.partial(build_stacked, NorMuon),
    "SOAP": build_soap,
}
