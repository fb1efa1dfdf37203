"""Builders of the compared optimizers."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
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
    """Everything that optimizers are built from; each builder uses what it needs."""

    model: nn.Module
    options: Mapping[str, Any]  # of every optimizer: learning rate, weight decay
    every: int = REFRESH_EVERY  # steps between two refreshes of a basis that follows the gradients
    period: int | None = None  # steps between two refreshes of a basis from sampled gradients
    objective: egop.Objective | None = None  # the loss to sample gradients of
    init_fn: Callable[[nn.Module], Any] | None = None  # for bases from gradients at fresh initialisations
    samples: int | None = None  # gradients for such a basis
    seed: int = 0  # of the sampling

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
    """A builder for a class of ``pytorch_optimizer``."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # that differ from its defaults
    cadence: str | None = None  # the argument for the steps between two refreshes; None if they are fixed
    by: Literal["every", "period"] = "every"  # the field of the setup that holds this number

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
    # SGD is a control that no basis helps. It is said at the first step, so the filter has to stay.
    warnings.filterwarnings("ignore", message=".* takes the same steps in every rotation")
    return egop.ReparameterizedOptimizer(model, kind, basis, lr=lr, **options)


def build_adamw(setup: Setup) -> Optimizer:
    """Build torch's AdamW in original coordinates."""
    return torch.optim.AdamW(setup.parameters, **setup.options)


def build_rotated(
    setup: Setup,
    *,
    upfront: egop.Structure | None = None,
    renewed: bool = False,
    scale: float = 0.0,
    online: egop.Structure | None = None,
) -> Optimizer:
    """Build AdamW in rotated coordinates.

    A basis is estimated before the training (``upfront``) and, if ``renewed``, again after every period around the
    current point, with a standard deviation of ``scale``; or it follows the gradients (``online``).
    """
    refresh: egop.Refresh | None = setup.resample(scale) if renewed else None
    if online is not None:
        refresh = egop.Online(every=setup.every, structure=online)
    basis = None if upfront is None else setup.estimate(upfront)
    return egop.ReparameterizedOptimizer(setup.model, torch.optim.AdamW, basis, refresh=refresh, **setup.options)


def build_soap(setup: Setup, *, every: int) -> Optimizer:
    """Build SOAP from this library, which steps all weights of one shape at once: a faster step.

    Of a kernel it has two bases, of outputs and of inputs with the kernel, where SOAP has four (lab/notes/soap.md).
    """
    refresh = egop.Online(every=every, structure=egop.Kronecker(), spread=False)
    options = {"betas": SOAP_BETAS, **setup.options}
    return egop.ReparameterizedOptimizer(setup.model, torch.optim.AdamW, refresh=refresh, **options)


def build_muon(setup: Setup) -> Optimizer:
    """Build Muon for convolutions as matrices, with updates of AdamW's size, and AdamW for everything else."""
    kernels = {part.weight for part in setup.model.modules() if isinstance(part, nn.Conv2d)}
    others = [parameter for parameter in setup.parameters if parameter not in kernels]
    chosen = [parameter for parameter in setup.parameters if parameter in kernels]
    optimizer: Optimizer = import_pytorch_optimizer("The Muon of convolutions").Muon(
        [
            {"params": chosen, "use_muon": True, "use_adjusted_lr": True, **setup.options},
            {"params": others, "use_muon": False, "betas": ADAM, "eps": 1e-8, **setup.options},
        ]
    )
    return optimizer
