"""Every method that is compared, once: its label in each comparison, how its optimizer is made, and what it needs.

A comparison (an experiment, a part of the benchmark) takes the entries that have a label for it, in the order of
:data:`METHODS`. A new method to compare is one entry there. Labels are in records: they stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import egop
from egop_lab.data.missing import MissingDataError
from egop_lab.muon import Muon, NorMuon

# The comparisons: two experiments, the small problems of several, and the parts of the benchmark.
LANGUAGE, RESNET, SMALL, BENCH, COMPILED, EPOCH = "language-model", "resnet", "small", "bench", "compiled", "epoch"

RENEWED = 10  # steps between two renewals of a basis, for every method whose basis follows the gradients
RANK = 16
_ADAM = (0.9, 0.999)

# torch's own that work by coordinates, with their options: what runs in original coordinates or in a basis.
TORCH: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD+momentum": (torch.optim.SGD, {"momentum": 0.9}),
}


class MissingPackageError(MissingDataError):
    """A package is not installed; the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What optimizers are made from at the start of a training; a method takes of it what it needs.

    Attributes:
        model: what is trained, or holds it.
        options: of every optimizer: learning rate, weight decay.
        adam: further ones of AdamW, in whatever coordinates.
        every: steps between two renewals of a basis that follows the gradients.
        period: steps between two renewals of one that is sampled again.
        objective: its loss, to sample gradients of.
        init_fn: how the model is initialised, for bases from gradients at fresh initialisations.
        samples: how many gradients make such a basis.
        seed: of the sampling.
        inside: which weights get a basis; by default all that can.
        memory: what all bases together may take.
    """

    model: nn.Module
    options: Mapping[str, Any]
    adam: Mapping[str, Any] = field(default_factory=dict)
    every: int = RENEWED
    period: int | None = None
    objective: egop.Objective | None = None
    init_fn: Callable[[nn.Module], Any] | None = None
    samples: int | None = None
    seed: int = 0
    inside: str | None = None
    memory: str = "2GiB"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the model."""
        return list(self.model.parameters())

    def upfront(self, structure: egop.Structure) -> egop.Reparameterization:
        """A basis from gradients at fresh initialisations."""
        assert self.objective is not None
        return egop.estimate(
            self.objective,
            rho=egop.Initialization(init_fn=self.init_fn),
            structure=self._chosen(structure),
            samples=self.samples,
            generator=torch.Generator().manual_seed(self.seed),
            sampling="loop",
            progress=False,
        )

    def sampled_again(self) -> egop.Refresh:
        """A basis from gradients at the current point, after every period."""
        assert self.period is not None
        return egop.Every(self.period, self.objective, samples=self.samples, seed=self.seed)

    def online(self, structure: egop.Structure) -> egop.Refresh:
        """A basis that follows the gradients of the training."""
        return egop.Online(every=self.every, structure=self._chosen(structure), memory=self.memory)

    def _chosen(self, structure: egop.Structure) -> Any:
        return structure if self.inside is None else {self.inside: structure}


@dataclass(frozen=True)
class Foreign:
    """A class of ``pytorch_optimizer``, as a way to make an optimizer.

    Attributes:
        name: of the class.
        arguments: all that differ from its defaults, besides the options of the start.
        cadence: the argument that says after how many steps a basis is renewed; none where that is fixed.
        by: which of the start's steps that is.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cadence: str | None = None
    by: Literal["every", "period"] = "every"

    def call(self, steps: int | None) -> dict[str, Any]:
        """The arguments for a basis that is renewed after so many steps."""
        return {**self.arguments} if self.cadence is None else {**self.arguments, self.cadence: steps}

    def describe(self, steps: int = 1) -> str:
        """The call, for settings and configurations."""
        arguments = ", ".join(f"{key}={value}" for key, value in self.call(steps).items())
        return f"pytorch_optimizer.{self.name}({arguments})"

    def __call__(self, start: Start) -> Optimizer:
        """The optimizer."""
        kind = getattr(foreign(self.name), self.name)
        optimizer: Optimizer = kind(start.parameters, **start.options, **self.call(getattr(start, self.by)))
        return optimizer


@dataclass(frozen=True)
class Method:
    """One that is compared.

    Attributes:
        name: what code calls it; no two have the same.
        labels: what it is called in records, tables and pictures, by comparison.
        build: makes its optimizer.
        needs: what the start must have besides a model and options.
        follows: whether its work repeats after ``start.every`` steps, with a renewal of its basis, rather than each.
        package: whether it comes from ``pytorch_optimizer``, or does so for networks with convolutions.
    """

    name: str
    labels: Mapping[str, str]
    build: Callable[[Start], Optimizer]
    needs: tuple[str, ...] = ()
    follows: bool = False
    package: Literal["always", "convolutions"] | None = None

    def make(self, start: Start) -> Optimizer:
        """Its optimizer for a training."""
        if lacking := [need for need in self.needs if getattr(start, need) is None]:
            raise ValueError(f"The method {self.name} needs a start with {' and '.join(lacking)}.")
        return self.build(start)


def foreign(name: str) -> Any:
    """The package that an optimizer comes from, imported (which takes seconds the first time)."""
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise MissingPackageError(
            f"{name} comes from the package pytorch_optimizer, which is not installed: pip install pytorch-optimizer."
        ) from error
    return pytorch_optimizer


class Together(Optimizer):
    """Optimizers that step as one, each over parameters of its own; the groups are theirs.

    Args:
        *parts: the optimizers.
    """

    def __init__(self, *parts: Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for part in self.parts:
            part.step(closure)


def torch_optimizer(name: str, model: nn.Module, lr: float, basis: egop.Reparameterization | None = None) -> Optimizer:
    """One of :data:`TORCH`, in original coordinates or in those of a basis."""
    kind, options = TORCH[name]
    if basis is None:
        return kind(model.parameters(), lr=lr, **options)  # type: ignore[call-arg]  # the base class has no lr
    return egop.ReparameterizedOptimizer(model, kind, basis, lr=lr, **options)


def _adamw(start: Start) -> Optimizer:
    return torch.optim.AdamW(start.parameters, **start.options, **start.adam)


def _turned(
    start: Start,
    *,
    upfront: egop.Structure | None = None,
    renewed: bool = False,
    online: egop.Structure | None = None,
    compile: bool = False,
) -> Optimizer:
    """AdamW in a basis: one from before the training, which may be sampled again, or one that follows the gradients."""
    basis = None if upfront is None else start.upfront(upfront)
    refresh = start.online(online) if online is not None else start.sampled_again() if renewed else None
    return egop.ReparameterizedOptimizer(
        start.model, torch.optim.AdamW, basis, refresh=refresh, compile=compile, **start.options, **start.adam
    )


def _muon(start: Start) -> Optimizer:
    """Kernels, or else hidden matrices, by Muon with updates of AdamW's size; everything else by AdamW.

    torch's Muon takes no kernels, so networks with convolutions have another one, which sees them as matrices.
    """
    kernels = [part.weight for part in start.model.modules() if isinstance(part, nn.Conv2d)]
    ends = set(_ends(start.model))
    inside = set(kernels or [tensor for tensor in start.parameters if tensor.dim() == 2 and tensor not in ends])
    hidden, others = ([each for each in start.parameters if (each in inside) is wanted] for wanted in (True, False))
    if not kernels:
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **start.options)
        return Together(muon, torch.optim.AdamW(others, **start.options, **start.adam))
    optimizer: Optimizer = foreign("The Muon of convolutions").Muon(
        [
            {"params": hidden, "use_muon": True, "use_adjusted_lr": True, **start.options},
            {"params": others, "use_muon": False, "betas": _ADAM, "eps": 1e-8, **start.options},
        ]
    )
    return optimizer


def _stacked(start: Start, *, kind: type[Optimizer]) -> Optimizer:
    """Hidden matrices and kernels by an optimizer of :mod:`egop_lab.muon`, everything else by AdamW."""
    ends = set(_ends(start.model))
    hidden = [weight for weight in start.parameters if weight.dim() > 1 and weight not in ends]
    others = [parameter for parameter in start.parameters if parameter.dim() < 2 or parameter in ends]
    return Together(kind(hidden, **start.options), torch.optim.AdamW(others, **start.options, **start.adam))


def _crossed(start: Start, *, base: type[Optimizer], online: egop.Structure | None = None) -> Optimizer:
    """A base optimizer that sees matrices in a basis that follows the gradients, or serves it; AdamW outside."""
    refresh = egop.Aligned(memory=start.memory) if online is None else start.online(online)
    outside = (torch.optim.AdamW, dict(start.adam))
    return egop.ReparameterizedOptimizer(start.model, base, refresh=refresh, outside=outside, **start.options)


def _ends(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that Muon is not for: embeddings and the last layer."""
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for part in [*layers[-1:], *(part for part in model.modules() if isinstance(part, nn.Embedding))]:
        yield from part.parameters()


def _upfront(name: str, labels: Mapping[str, str], structure: egop.Structure, **options: Any) -> Method:
    needs = ("objective", "period") if options.get("renewed") else ("objective",)
    return Method(name, labels, functools.partial(_turned, upfront=structure, **options), needs)


def _online(name: str, labels: Mapping[str, str], structure: egop.Structure, **options: Any) -> Method:
    return Method(name, labels, functools.partial(_turned, online=structure, **options), follows=True)


def _foreign(name: str, labels: Mapping[str, str], build: Foreign, needs: tuple[str, ...] = ()) -> Method:
    return Method(name, labels, build, needs, build.cadence is not None, package="always")


_SOAP = functools.partial(Foreign, "SOAP", cadence="precondition_frequency")

METHODS: tuple[Method, ...] = (
    Method("adamw", {LANGUAGE: "AdamW", RESNET: "AdamW", BENCH: "AdamW", EPOCH: "AdamW"}, _adamw),
    _upfront(
        "shared-fixed",
        {LANGUAGE: "EGOP fixed", RESNET: "EGOP up-front", BENCH: "Shared, fixed", EPOCH: "Shared, fixed"},
        egop.Shared(),
    ),
    _upfront(
        "shared-renewed",
        {LANGUAGE: "EGOP periodic", RESNET: "EGOP each epoch", EPOCH: "Shared, each epoch"},
        egop.Shared(),
        renewed=True,
    ),
    _online("shared-online", {LANGUAGE: "EGOP online", RESNET: "EGOP online", BENCH: "Shared, online"}, egop.Shared()),
    _upfront("kronecker-fixed", {BENCH: "Kronecker, fixed"}, egop.Kronecker()),
    _online(
        "kronecker-online",
        {LANGUAGE: "EGOP online, two-sided", RESNET: "EGOP online, two-sided", BENCH: "Kronecker, online"},
        egop.Kronecker(),
    ),
    _upfront("auxiliary-fixed", {BENCH: f"Auxiliary({RANK}), fixed"}, egop.Auxiliary(RANK)),
    _upfront("shared-fixed-compiled", {COMPILED: "Shared, fixed, compiled"}, egop.Shared(), compile=True),
    _online("shared-online-compiled", {COMPILED: "Shared, online, compiled"}, egop.Shared(), compile=True),
    # SOAP's own momentum constants are (0.95, 0.95). On small problems it has Adam's too, as every method there, and no
    # weight decay; its own are a row of their own: which of the two is better depends on the problem.
    _foreign("soap-once", {RESNET: "SOAP once"}, Foreign("SOAP", {"precondition_frequency": 10**9})),
    _foreign("soap-period", {RESNET: "SOAP each epoch"}, _SOAP(by="period"), ("period",)),
    _foreign("soap", {LANGUAGE: "SOAP", RESNET: "SOAP every 10", BENCH: "SOAP"}, _SOAP()),
    _foreign("soap-adam", {SMALL: "SOAP"}, _SOAP({"betas": _ADAM, "weight_decay": 0.0})),
    _foreign("soap-0.95", {SMALL: "SOAP (0.95)"}, _SOAP({"betas": (0.95, 0.95), "weight_decay": 0.0})),
    _foreign("shampoo", {SMALL: "Shampoo"}, Foreign("Shampoo", {}, "preconditioning_compute_steps")),
    # With blocks of 512, as it is used: the inverse root of a wider matrix takes seconds.
    _foreign(
        "shampoo-blocks",
        {BENCH: "Shampoo"},
        Foreign("ScalableShampoo", {"start_preconditioning_step": 1}, "preconditioning_compute_steps"),
    ),
    # No reduction: what is left is its change of basis. Its moments do not follow a new projection, so that one every
    # step would make them meaningless: its authors' 200 steps. The class's eps is a hundred times Adam's.
    _foreign(
        "galore",
        {SMALL: "GaLore"},
        Foreign(
            "GaLore",
            {"betas": _ADAM, "eps": 1e-8, "rank": None, "scale": 1.0, "projection_type": "std", "update_proj_gap": 200},
        ),
    ),
    Method(
        "polar-online",
        {BENCH: "PolarAdam, online, smaller"},
        functools.partial(_crossed, base=egop.optim.PolarAdam, online=egop.Shared(side="smaller")),
        follows=True,
    ),
    Method(
        "sinkhorn-online",
        {BENCH: "Sinkhorn, online, both"},
        functools.partial(_crossed, base=egop.optim.Sinkhorn, online=egop.Kronecker()),
        follows=True,
    ),
    Method("sinkhorn-aligned", {BENCH: "Sinkhorn, aligned"}, functools.partial(_crossed, base=egop.optim.Sinkhorn)),
    Method("muon-stacked", {BENCH: "Muon, stacked"}, functools.partial(_stacked, kind=Muon)),
    Method("normuon", {BENCH: "NorMuon, stacked"}, functools.partial(_stacked, kind=NorMuon)),
    Method("muon", {LANGUAGE: "Muon", RESNET: "Muon", BENCH: "Muon"}, _muon, package="convolutions"),
)


def compared(where: str) -> dict[str, Method]:
    """The methods of a comparison by their labels there."""
    return {method.labels[where]: method for method in METHODS if where in method.labels}


def label(where: str, name: str) -> str:
    """What a method is called in a comparison."""
    return next(method.labels[where] for method in METHODS if method.name == name)


def describe(optimizer: str) -> str | None:
    """The call that makes an optimizer of small problems; none for those of :data:`TORCH`."""
    method = compared(SMALL).get(optimizer)
    return method.build.describe() if method is not None and isinstance(method.build, Foreign) else None
