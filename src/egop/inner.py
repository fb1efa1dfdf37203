"""The optimizer that runs inside: which classes can, and how it gets its hyper-parameters."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

_ADVICE = "Use an optimizer that works coordinate by coordinate, such as Adam, AdamW, Adagrad or RMSprop."


def check_class(optimizer_class: Any) -> None:
    """Raise an error for what is not a class of optimizers, or one that works in another way."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        given = optimizer_class if isinstance(optimizer_class, type) else type(optimizer_class)
        raise TypeError(
            f"optimizer_class must be a torch.optim.Optimizer class, got {given.__name__}. Pass the class and its "
            "arguments: ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=1e-3)."
        )
    if any(base.__name__ == "Muon" for base in optimizer_class.__mro__):  # torch's, and those of other packages
        raise TypeError(
            f"{optimizer_class.__name__} works on whole matrices, and the coordinates of a block need not be one. "
            f"{_ADVICE}"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_class.__name__} evaluates the loss several times within a step, which egop does not support. "
            f"{_ADVICE}"
        )


def copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Give groups the hyper-parameters of other ones."""
    for one, other in zip(source, target, strict=True):
        other.update({key: value for key, value in one.items() if key not in ("params", "param_names")})
