"""The optimizer that runs inside: which classes can, and how it gets its hyper-parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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


def fresh_states(
    inner: Optimizer, tensors: Sequence[Tensor], hyperparameters: Mapping[str, Any], *, stepped: bool = False
) -> list[dict[str, Any]]:
    """The states that an optimizer has of its tensors before the first step, or (``stepped``) the form of later ones.

    Args:
        inner: the optimizer; it is not touched.
        tensors: some that it steps, of one group.
        hyperparameters: what it was made with.
        stepped: whether a step without a gradient is taken first, with stand-ins for the tensors.
    """
    group = next(each for each in inner.param_groups if any(tensor is tensors[0] for tensor in each["params"]))
    others = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    stand_ins = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors] if stepped else list(tensors)
    fresh = type(inner)([{**others, "params": stand_ins}], **hyperparameters)
    if stepped:
        for tensor in stand_ins:
            tensor.grad = torch.zeros_like(tensor)
        with torch.random.fork_rng(devices=[]):
            fresh.step()
    return [dict(fresh.state.get(tensor, {})) for tensor in stand_ins]
