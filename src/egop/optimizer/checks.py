"""Check that an optimizer class can run in coordinates, and warn if a basis has no effect on it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from egop.basis import ModuleIndex
from egop.formatting import list_first
from egop.optimizer.binding import BoundBlock, BoundParameters
from egop.optimizer.trial import try_optimizer

_ADVICE = "Use an optimizer that works coordinate by coordinate, such as Adam, AdamW, Adagrad or RMSprop"
_ROTATION_INVARIANT = (torch.optim.SGD, torch.optim.ASGD)
_NOT_SETTINGS = ("params", "param_names", "basis")


def check_optimizer(optimizer_class: Any) -> None:
    """Raise TypeError for anything but an optimizer class."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        given = optimizer_class if isinstance(optimizer_class, type) else type(optimizer_class)
        raise TypeError(
            f"optimizer_class must be a torch.optim.Optimizer class, got {given.__name__}. Pass the class and its "
            "arguments: ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=1e-3)."
        )


def is_own_or_torch(optimizer_class: type[Optimizer]) -> bool:
    """Return True for the classes of torch and egop, whose state and hyper-parameters are known."""
    return optimizer_class.__module__.startswith(("torch.optim", "egop.optim"))


def check_class(
    optimizer_class: type[Optimizer], groups: Sequence[Mapping[str, Any]], hyperparameters: Mapping[str, Any]
) -> bool:
    """Raise TypeError for a class that does not work coordinate by coordinate.

    Return True if it treats matrices and vectors differently, see :func:`check_blocks`.
    """
    name = optimizer_class.__name__
    if callable(getattr(optimizer_class, "eval", None)):
        raise TypeError(
            f"{name} trains and evaluates with different weights (it has a method eval()), which egop does not support."
        )
    works_on_matrices = bool(getattr(optimizer_class, "works_on_matrices", False))
    differs_on_vectors = False
    for settings in map(get_settings, groups):
        trial = try_optimizer(optimizer_class, settings, hyperparameters)
        if trial.needs_closure:
            raise TypeError(
                f"{name} evaluates the loss several times within a step, or needs its value, which egop does not "
                f"support. {_ADVICE}."
            )
        if trial.reason is not None and not works_on_matrices:
            raise TypeError(
                f"{name} does not work coordinate by coordinate: {trial.reason}. The coordinates of a block may have "
                f"another shape than the weight. {_ADVICE}. If {name} is meant for coordinates that are matrices, set "
                "works_on_matrices = True on the class."
            )
        differs_on_vectors |= trial.differs_on_vectors
    return works_on_matrices or differs_on_vectors


def check_blocks(optimizer_class: type[Optimizer], blocks: Iterable[BoundBlock]) -> None:
    """Raise TypeError if an optimizer for matrices would get the coordinates of a matrix as a vector."""
    for block in blocks:
        matrices = [tuple(parameter.shape) for parameter in block.parameters if parameter.dim() > 1]
        if matrices and any(coordinate.dim() < 2 for coordinate in block.coordinates):
            raise TypeError(
                f"{optimizer_class.__name__} treats matrices and vectors in different ways, and the coordinates of "
                f"block '{block.name}', a weight of shape {matrices[0]}, are a vector in the structure "
                f"{block.change.kind}. Use structure=egop.Shared() or egop.Kronecker(), whose coordinates are matrices."
            )


def get_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group."""
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def complete_hyperparameters(
    optimizer_class: type[Optimizer], group: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the optimizer's hyper-parameters with its own defaults filled in; some classes need a group's settings."""
    # The optimizer is thrown away. Its parameter is a matrix because some classes take nothing else.
    number = torch.zeros(1, 1, requires_grad=True, device="cpu")
    try:
        return dict(optimizer_class([{**get_settings(group), "params": [number]}], **hyperparameters).defaults)
    except (TypeError, ValueError):  # the class explains what is wrong
        raise
    except Exception as error:
        raise TypeError(
            f"{optimizer_class.__name__} cannot be built from parameter groups and {sorted(hyperparameters)}: "
            f"{type(error).__name__}: {error}. egop needs a class that is called like torch.optim.AdamW. If this one "
            "wraps another optimizer, pass that optimizer's class and wrap the result."
        ) from error


def warn_of_no_effect(optimizer_class: type[Optimizer], blocks: Sequence[BoundBlock], *, is_intended: bool) -> None:
    """Warn if nothing is rotated and that may be a mistake, or if rotations do not change the optimizer's steps."""
    name = optimizer_class.__name__
    if not blocks and not is_intended:
        text = (
            f"Nothing is rotated: this is plain {name}. Pass basis= or refresh=egop.Online(). "
            f"If plain {name} is what you want, pass basis=egop.Basis([])."
        )
    elif (
        optimizer_class in _ROTATION_INVARIANT
        and any(block.change.kind != "Identity" for block in blocks)
        and all(block.change.is_complete for block in blocks)
    ):
        text = (
            f"{name} takes the same steps in every rotation: a change of basis costs time and gains nothing. Use an "
            "optimizer that scales each coordinate separately, such as Adam, AdamW or Adagrad; or egop.EGOP(model)."
        )
    else:
        return
    warnings.warn(text, stacklevel=find_user_level())


def warn_of_replaced(bound: BoundParameters, index: ModuleIndex | None) -> None:
    """Warn if a model has replaced parameters by new ones since it was given to the optimizer."""
    if index is not None and (names := bound.find_untrained(index)):
        warnings.warn(
            f"The model has new tensors under the names {list_first(names)}, which the optimizer does not train. "
            "Did a layer or load_state_dict(assign=True) replace them? Create the optimizer after that.",
            stacklevel=find_user_level(),
        )


def find_user_level() -> int:
    """Return the stack level, as seen by the caller, of the first frame outside egop and torch."""
    modules = (frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(context=0))
    return next((level for level, name in enumerate(modules) if name.partition(".")[0] not in ("egop", "torch")), 1)
