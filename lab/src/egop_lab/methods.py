"""Every compared method, once: its label in each comparison, its builder, and what the builder needs.

A comparison (an experiment, a part of the benchmark) takes the entries that have a label for it, in the order of
:data:`METHODS`. A new method to compare is one entry there. Labels are in records: they stay as they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

import egop
from egop_lab.builders import (
    ADAM,
    SOAP_BETAS,
    PackageOptimizer,
    Setup,
    build_adamw,
    build_egop,
    build_in_coordinates,
    build_muon,
    build_rotated,
    build_soap,
    build_stacked,
)
from egop_lab.muon import Muon, NorMuon

# The comparisons: three experiments, the small problems of several, and the parts of the benchmark.
LANGUAGE, RESNET, COORDINATES, SMALL = "language-model", "resnet", "coordinates", "small"
BENCH, COMPILED, EPOCH = "bench", "compiled", "epoch"

RANK = 16


@dataclass(frozen=True)
class Method:
    """A compared method.

    Attributes:
        name: unique name in the code.
        labels: its label in records, tables and pictures, by comparison.
        build: builds its optimizer.
        needs: fields of the setup that must be given besides the model and the options.
        follows_gradients: whether its basis follows the gradients: its work then repeats every ``setup.every`` steps.
        package: whether it needs ``pytorch_optimizer`` always, or only for networks with convolutions.
    """

    name: str
    labels: Mapping[str, str]
    build: Callable[[Setup], Optimizer]
    needs: tuple[str, ...] = ()
    follows_gradients: bool = False
    package: Literal["always", "convolutions"] | None = None

    def make(self, setup: Setup) -> Optimizer:
        """Build its optimizer for a training."""
        if lacking := [need for need in self.needs if getattr(setup, need) is None]:
            raise ValueError(f"The method {self.name} needs a setup with {' and '.join(lacking)}.")
        return self.build(setup)


def _upfront(name: str, labels: Mapping[str, str], structure: egop.Structure, **options: Any) -> Method:
    needs = ("objective", "period") if options.get("renewed") else ("objective",)
    return Method(name, labels, functools.partial(build_rotated, upfront=structure, **options), needs)


def _online(name: str, labels: Mapping[str, str], structure: egop.Structure, **options: Any) -> Method:
    return Method(name, labels, functools.partial(build_rotated, online=structure, **options), follows_gradients=True)


def _package(name: str, labels: Mapping[str, str], build: PackageOptimizer, needs: tuple[str, ...] = ()) -> Method:
    return Method(name, labels, build, needs, build.cadence is not None, package="always")


_SOAP = functools.partial(PackageOptimizer, "SOAP", cadence="precondition_frequency")

# The grid of the comparison COORDINATES: base optimizers, and the coordinates they run in.
BASES: Mapping[str, type[Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Sign": egop.optim.Sign,
    "Sinkhorn": egop.optim.Sinkhorn,
    "PolarAdam": egop.optim.PolarAdam,
}
_SMALLER = egop.Shared(side="smaller")
COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "original": {},
    "random rotation": {"random": _SMALLER},
    "EGOP up front": {"upfront": _SMALLER},
    "online input": {"online": egop.Shared()},
    "online smaller": {"online": _SMALLER},
    "online both": {"online": egop.Kronecker()},
    "aligned": {"aligned": True},
}
# Cells that the benchmark measures too.
_BENCHED = {
    ("PolarAdam", "online smaller"): "PolarAdam, online, smaller",
    ("Sinkhorn", "online both"): "Sinkhorn, online, both",
    ("Sinkhorn", "aligned"): "Sinkhorn, aligned",
}


def cell(base: str, coordinates: str) -> str:
    """Return the label of a base in some coordinates in the comparison COORDINATES; AdamW in its own is AdamW."""
    return base if (base, coordinates) == ("AdamW", "original") else f"{base}, {coordinates}"


def _crossings() -> Iterator[Method]:
    """Yield every base in all coordinates except AdamW in its own; PolarAdam has no momentum map to align to."""
    for base, (coordinates, options) in itertools.product(BASES, COLUMNS.items()):
        if (base, coordinates) in (("AdamW", "original"), ("PolarAdam", "aligned")):
            continue
        labels = {COORDINATES: cell(base, coordinates)}
        if (base, coordinates) in _BENCHED:
            labels[BENCH] = _BENCHED[base, coordinates]
        yield Method(
            f"{base}-{coordinates}".lower().replace(" ", "-"),
            labels,
            functools.partial(build_in_coordinates, base=BASES[base], **options),
            ("objective",) if "upfront" in options or "random" in options else (),
            follows_gradients="online" in options,
        )


METHODS: tuple[Method, ...] = (
    Method(
        "adamw", {LANGUAGE: "AdamW", RESNET: "AdamW", COORDINATES: "AdamW", BENCH: "AdamW", EPOCH: "AdamW"}, build_adamw
    ),
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
    # The scale is about how far a weight of the residual network moves in an epoch.
    _upfront(
        "shared-renewed-around",
        {RESNET: "EGOP each epoch, scale 0.01"},
        egop.Shared(),
        renewed=True,
        scale=0.01,
    ),
    _online("shared-online", {LANGUAGE: "EGOP online", RESNET: "EGOP online", BENCH: "Shared, online"}, egop.Shared()),
    _upfront("kronecker-fixed", {BENCH: "Kronecker, fixed"}, egop.Kronecker()),
    _online(
        "kronecker-online",
        {LANGUAGE: "EGOP online, two-sided", RESNET: "EGOP online, two-sided", BENCH: "Kronecker, online"},
        egop.Kronecker(),
    ),
    _upfront("auxiliary-fixed", {BENCH: f"Auxiliary({RANK}), fixed"}, egop.Auxiliary(rank=RANK)),
    _upfront("shared-fixed-compiled", {COMPILED: "Shared, fixed, compiled"}, egop.Shared(), compile=True),
    _online("shared-online-compiled", {COMPILED: "Shared, online, compiled"}, egop.Shared(), compile=True),
    # SOAP's own momentum constants are (0.95, 0.95). On small problems it has Adam's too, as every method there, and no
    # weight decay; its own are a row of their own: which of the two is better depends on the problem.
    _package("soap-once", {RESNET: "SOAP once"}, PackageOptimizer("SOAP", {"precondition_frequency": 10**9})),
    _package("soap-100", {RESNET: "SOAP 100"}, PackageOptimizer("SOAP", {"precondition_frequency": 100})),
    Method("soap-100-ours", {RESNET: "SOAP 100, ours"}, functools.partial(build_soap, every=100)),
    _package("soap-period", {RESNET: "SOAP each epoch"}, _SOAP(by="period"), ("period",)),
    _package("soap", {LANGUAGE: "SOAP", RESNET: "SOAP every 10", COORDINATES: "SOAP", BENCH: "SOAP"}, _SOAP()),
    _package("soap-adam", {SMALL: "SOAP"}, _SOAP({"betas": ADAM, "weight_decay": 0.0})),
    _package("soap-0.95", {SMALL: "SOAP (0.95)"}, _SOAP({"betas": SOAP_BETAS, "weight_decay": 0.0})),
    _package("shampoo", {SMALL: "Shampoo"}, PackageOptimizer("Shampoo", {}, "preconditioning_compute_steps")),
    # With blocks of 512, as in practice: the inverse root of a wider matrix takes seconds.
    _package(
        "shampoo-blocks",
        {BENCH: "Shampoo"},
        PackageOptimizer("ScalableShampoo", {"start_preconditioning_step": 1}, "preconditioning_compute_steps"),
    ),
    # No reduction: what is left is its change of basis. Its moments do not follow a new projection, so that one every
    # step would make them meaningless: its authors' 200 steps. The class's eps is a hundred times Adam's.
    _package(
        "galore",
        {SMALL: "GaLore"},
        PackageOptimizer(
            "GaLore",
            {"betas": ADAM, "eps": 1e-8, "rank": None, "scale": 1.0, "projection_type": "std", "update_proj_gap": 200},
        ),
    ),
    *_crossings(),
    Method("egop", {COORDINATES: "EGOP"}, build_egop),
    Method("muon-stacked", {COORDINATES: "Muon", BENCH: "Muon, stacked"}, functools.partial(build_stacked, kind=Muon)),
    Method(
        "normuon", {COORDINATES: "NorMuon", BENCH: "NorMuon, stacked"}, functools.partial(build_stacked, kind=NorMuon)
    ),
    Method("muon", {LANGUAGE: "Muon", RESNET: "Muon", BENCH: "Muon"}, build_muon, package="convolutions"),
)


def get_methods(where: str) -> dict[str, Method]:
    """Return the methods of a comparison by their labels there."""
    return {method.labels[where]: method for method in METHODS if where in method.labels}


def get_label(where: str, name: str) -> str:
    """Return the label of a method in a comparison."""
    return next(method.labels[where] for method in METHODS if method.name == name)


def describe(optimizer: str) -> str | None:
    """Return the call that builds an optimizer of small problems as text; None for those of :data:`TORCH`."""
    method = get_methods(SMALL).get(optimizer)
    return method.build.describe() if method is not None and isinstance(method.build, PackageOptimizer) else None
