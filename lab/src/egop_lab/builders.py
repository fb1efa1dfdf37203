"""Builders of the compared optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import egop
from egop_lab.data.missing import MissingDataError

REFRESH_EVERY = 10  # steps between two refreshes, for every method whose basis follows the gradients
ADAM = (0.9, 0.999)  # Adam's defaults
SOAP_BETAS = (0.95, 0.95)  # SOAP's

# torch's own that work by coordinates, with their options: what runs in original coordinates or in a basis.
TORCH: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD+momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


class MissingPackageError(MissingDataError):
    """A package is missing; the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that optimizers are built from; each builder uses what it needs.

    Attributes:
        model: the model to train.
        options: options of every optimizer: learning rate, weight decay.
        adam: further options of AdamW, in any coordinates.
        every: steps between two refreshes of a basis that follows the gradients.
        period: steps between two refreshes of a basis from sampled gradients.
        objective: the loss to sample gradients of.
        init_fn: initialises the model, for bases from gradients at fresh initialisations.
        samples: the number of gradients for such a basis.
        seed: the seed of the sampling.
        memory: limit for all bases together.
    """

    model: nn.Module
    options: Mapping[str, Any]
    adam: Mapping[str, Any] = field(default_factory=dict)
    every: int = REFRESH_EVERY
    period: int | None = None
    objective: egop.Objective | None = None
    init_fn: Callable[[nn.Module], Any] | None = None
    samples: int | None = None
    seed: int = 0
    memory: str = "2GiB"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model."""
        return list(self.model.parameters())

    def estimate(self, structure: egop.Structure) -> egop.Basis:
        """Estimate a basis from gradients at fresh initialisations."""
        assert self.objective is not None
        return egop.estimate(
            self.objective,
            rho=egop.Initialization(init_fn=self.init_fn),
            structure=structure,
            samples=self.samples,
            generator=torch.Generator().manual_seed(self.seed),
            sampling="loop",
            progress=False,
        )

    def resample(self, scale: float = 0.0) -> egop.Refresh:
        """Return a schedule that samples gradients at or around the current point after every period."""
        assert self.period is not None
        rho = egop.Recentered(scale)
        return egop.Every(self.period, self.objective, rho, samples=self.samples, seed=self.seed)


@dataclass(frozen=True)
class PackageOptimizer:
    """A builder for a class of ``pytorch_optimizer``.

    Attributes:
        name: the name of the class.
        arguments: arguments that differ from its defaults, besides the options of the setup.
        cadence: the argument for the number of steps between two refreshes; None if it is fixed.
        by: the field of the setup that holds this number.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cadence: str | None = None
    by: Literal["every", "period"] = "every"

    def call(self, steps: int | None) -> dict[str, Any]:
        """Return the arguments for a basis that is refreshed every ``steps`` steps."""
        return {**self.arguments} if self.cadence is None else {**self.arguments, self.cadence: steps}

    def describe(self, steps: int = 1) -> str:
        """Return the call as text, for settings and configurations."""
        arguments = ", ".join(f"{key}={value}" for key, value in self.call(steps).items())
        return f"pytorch_optimizer.{self.name}({arguments})"

    def __call__(self, setup: Setup) -> Optimizer:
        """Build the optimizer."""
        kind = getattr(import_pytorch_optimizer(self.name), self.name)
        optimizer: Optimizer = kind(setup.parameters, **setup.options, **self.call(getattr(setup, self.by)))
        return optimizer


def import_pytorch_optimizer(name: str) -> Any:
    """Import the package ``pytorch_optimizer`` (which takes seconds the first time)."""
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise MissingPackageError(
            f"{name} comes from the package pytorch_optimizer, which is not installed: pip install pytorch-optimizer."
        ) from error
    return pytorch_optimizer


class CombinedOptimizer(Optimizer):
    """Several optimizers that step as one, each with its own parameters; the groups are theirs."""

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        for part in self.parts:
            part.step(closure)


def build_torch_optimizer(name: str, model: nn.Module, lr: float, basis: egop.Basis | None = None) -> Optimizer:
    """Build an optimizer of :data:`TORCH`, in original coordinates or in a basis."""
    kind, options = TORCH[name]
    if basis is None:
        return kind(model.parameters(), lr=lr, **options)  # type: ignore[call-arg]  # the base class has no lr
    with warnings.catch_warnings():  # SGD is a control: no basis helps it, as intended
        warnings.filterwarnings("ignore", message=".* takes the same steps in every rotation")
        return egop.ReparameterizedOptimizer(model, kind, basis, lr=lr, **options)


def build_adamw(setup: Setup) -> Optimizer:
    """Build torch's AdamW in original coordinates."""
    return torch.optim.AdamW(setup.parameters, **setup.options, **setup.adam)


def build_rotated(
    setup: Setup,
    *,
    base: type[Optimizer] = torch.optim.AdamW,
    upfront: egop.Structure | None = None,
    renewed: bool = False,
    scale: float = 0.0,
    online: egop.Structure | None = None,
    aligned: bool = False,
) -> Optimizer:
    """Build an optimizer in rotated coordinates; a base other than AdamW has AdamW for the other parameters.

    Args:
        setup: what it is built from.
        base: the optimizer in these coordinates.
        upfront: the structure of a basis that is estimated before the training.
        renewed: estimate it again after every period, at the current point.
        scale: the standard deviation around that point.
        online: the structure of a basis that follows the gradients.
        aligned: align the basis to the base optimizer.
    """
    refresh: egop.Refresh | None = setup.resample(scale) if renewed else None
    if online is not None:
        refresh = egop.Online(every=setup.every, structure=online, memory=setup.memory)
    if aligned:
        refresh = egop.Aligned(memory=setup.memory)
    adam = {"outside": (torch.optim.AdamW, dict(setup.adam))} if base is not torch.optim.AdamW else setup.adam
    basis = None if upfront is None else setup.estimate(upfront)
    return egop.ReparameterizedOptimizer(setup.model, base, basis, refresh=refresh, **setup.options, **adam)


def build_soap(setup: Setup, *, every: int) -> Optimizer:
    """Build SOAP from this library, which steps all weights of one shape at once: a faster step.

    Of a kernel it has two bases, of outputs and of inputs with the kernel, where SOAP has four (lab/notes/soap.md).
    """
    return egop.ReparameterizedOptimizer(
        setup.model,
        torch.optim.AdamW,
        refresh=egop.Online(every=every, structure=egop.Kronecker(), spread=False, memory=setup.memory),
        betas=SOAP_BETAS,
        **setup.options,
    )


def build_muon(setup: Setup) -> Optimizer:
    """Build Muon for kernels, or else hidden matrices, with updates of AdamW's size; AdamW for everything else.

    torch's Muon takes no kernels, so networks with convolutions have another one, which sees them as matrices.
    """
    kernels = [part.weight for part in setup.model.modules() if isinstance(part, nn.Conv2d)]
    hidden, others = _split(setup, kernels or [weight for weight in _find_hidden(setup.model) if weight.dim() == 2])
    if not kernels:
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **setup.options)
        return CombinedOptimizer(muon, torch.optim.AdamW(others, **setup.options, **setup.adam))
    optimizer: Optimizer = import_pytorch_optimizer("The Muon of convolutions").Muon(
        [
            {"params": hidden, "use_muon": True, "use_adjusted_lr": True, **setup.options},
            {"params": others, "use_muon": False, "betas": ADAM, "eps": 1e-8, **setup.options},
        ]
    )
    return optimizer


def build_stacked(setup: Setup, *, kind: type[Optimizer]) -> Optimizer:
    """Build a matrix optimizer for hidden matrices and kernels, and AdamW for everything else."""
    hidden, others = _split(setup, _find_hidden(setup.model))
    return CombinedOptimizer(kind(hidden, **setup.options), torch.optim.AdamW(others, **setup.options, **setup.adam))


def build_egop(setup: Setup) -> Optimizer:
    """Build ``egop.EGOP``, which chooses the rotated weights and their optimizer itself."""
    return egop.EGOP(setup.model, **setup.options, fused=setup.adam.get("fused"))


def _split(setup: Setup, chosen: Iterable[Tensor]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters into the chosen ones and the others, in their own order."""
    inside = set(chosen)
    hidden, others = ([each for each in setup.parameters if (each in inside) is wanted] for wanted in (True, False))
    return hidden, others


def _find_hidden(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights for matrix optimizers: all matrices and kernels but embeddings and the last layer."""
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    ends = [*layers[-1:], *(part for part in model.modules() if isinstance(part, nn.Embedding))]
    outside = {parameter for part in ends for parameter in part.parameters()}
    return [weight for weight in model.parameters() if weight.dim() > 1 and weight not in outside]
