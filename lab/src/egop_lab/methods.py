"""The compared methods: for each comparison the builders by label.

A new method to compare is one entry. Labels are in records: they stay as they are.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

import egop
from egop_lab.builders import (
    ADAM,
    SOAP_BETAS,
    PackageOptimizer,
    Setup,
    build_adamw,
    build_muon,
    build_rotated,
    build_soap,
)

Builder = Callable[[Setup], Optimizer]

_SHARED, _BOTH_SIDES = egop.Shared(), egop.Kronecker()
_SOAP = functools.partial(PackageOptimizer, "SOAP", cadence="precondition_frequency")


def _rotated(**options: Any) -> Builder:
    return functools.partial(build_rotated, **options)


# The experiment on residual networks. SOAP has its own momentum constants, (0.95, 0.95). A scale of 0.01 is about how
# far a weight moves in an epoch.
RESNET: dict[str, Builder] = {
    "AdamW": build_adamw,
    "EGOP up-front": _rotated(upfront=_SHARED),
    "EGOP each epoch": _rotated(upfront=_SHARED, renewed=True),
    "EGOP each epoch, scale 0.01": _rotated(upfront=_SHARED, renewed=True, scale=0.01),
    "Random rotation": _rotated(upfront=egop.extras.RandomRotation(like=_SHARED)),
    "EGOP online": _rotated(online=_SHARED),
    "EGOP online, two-sided": _rotated(online=_BOTH_SIDES),
    "SOAP once": PackageOptimizer("SOAP", {"precondition_frequency": 10**9}),
    "SOAP 100": PackageOptimizer("SOAP", {"precondition_frequency": 100}),
    "SOAP 100, ours": functools.partial(build_soap, every=100),
    "SOAP each epoch": _SOAP(by="period"),
    "SOAP every 10": _SOAP(),
    "Muon": build_muon,
}

# Small problems, on which every method has Adam's constants and no weight decay; SOAP's own constants are a row of
# their own, because which are better depends on the problem. GaLore is not reduced, which leaves its change of basis.
# Its moments do not follow a new projection, so it is renewed after its authors' 200 steps; the class's eps is a
# hundred times Adam's.
SMALL: dict[str, PackageOptimizer] = {
    "SOAP": _SOAP({"betas": ADAM, "weight_decay": 0.0}),
    "SOAP (0.95)": _SOAP({"betas": SOAP_BETAS, "weight_decay": 0.0}),
    "Shampoo": PackageOptimizer("Shampoo", {}, "preconditioning_compute_steps"),
    "GaLore": PackageOptimizer(
        "GaLore",
        {"betas": ADAM, "eps": 1e-8, "rank": None, "scale": 1.0, "projection_type": "std", "update_proj_gap": 200},
    ),
}


def describe(optimizer: str) -> str | None:
    """Return the call that builds an optimizer of small problems as text; None for those that torch has."""
    return SMALL[optimizer].describe() if optimizer in SMALL else None
