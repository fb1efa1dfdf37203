"""The optimizer that runs inside: which classes can, and how it gets its hyper-parameters."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Structure
from egop.optim import MatrixOptimizer
from egop.optimizer.binding import BoundBlock
from egop.optimizer.divided import Divided, Make
from egop.optimizer.hooks import step_inner
from egop.optimizer.loaded import level_of_user
from egop.optimizer.moments import momentum_of
from egop.optimizer.trial import tried

_ADVICE = "Use an optimizer that works coordinate by coordinate, such as Adam, AdamW, Adagrad or RMSprop"
_WARNED: set[type[Optimizer]] = set()  # of which it was said that no rotation helps
_NOT_SETTINGS = ("params", "param_names", "basis")


def check_optimizer(optimizer_class: Any) -> None:
    """Raise an error for what is not a class of optimizers."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        given = optimizer_class if isinstance(optimizer_class, type) else type(optimizer_class)
        raise TypeError(
            f"optimizer_class must be a torch.optim.Optimizer class, got {given.__name__}. Pass the class and its "
            "arguments: ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=1e-3)."
        )


def is_own_or_torch(optimizer_class: type[Optimizer]) -> bool:
    """Return True for the classes of torch and egop, of which it is known what they keep and accept."""
    return optimizer_class.__module__.startswith(("torch.optim", "egop.optim"))


def check_class(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    hyperparameters: Mapping[str, Any],
    *,
    any_class: bool,
) -> bool:
    """Raise an error for a class of optimizers that works in another way than coordinate by coordinate.

    Args:
        optimizer_class: the class.
        groups: the parameter groups, with settings of their own.
        hyperparameters: the arguments of the class.
        any_class: whether one that does not work coordinate by coordinate is to run nonetheless.

    Returns:
        Whether it is to run on coordinates that are matrices alone, see :func:`check_blocks`.
    """
    name = optimizer_class.__name__
    if next(iter(inspect.signature(optimizer_class).parameters), "params") in ("optimizer", "base_optimizer"):
        raise TypeError(
            f"{name} wraps another optimizer. Give egop that other one's class, and wrap what you get: "
            f"{name}(egop.ReparameterizedOptimizer(...))."
        )
    declared = bool(getattr(optimizer_class, "works_on_matrices", False))
    other_on_vectors = False
    for settings in [settings_of(group) for group in groups]:
        if settings.get("maximize") and "maximize" not in defaults_of(optimizer_class, settings, hyperparameters):
            raise ValueError(f"{name} has no maximize: it would minimise. Give it the negative loss.")
        trial = tried(optimizer_class, settings, hyperparameters)
        if trial.needs_closure:
            raise TypeError(
                f"{name} evaluates the loss several times within a step, or needs its value, which egop does not "
                f"support. {_ADVICE}."
            )
        if trial.whole is not None and not (any_class or declared):
            raise TypeError(
                f"{name} does not work coordinate by coordinate: {trial.whole}. The coordinates of a block need not be "
                f"a matrix, nor have rows and columns that mean the same. {_ADVICE}, or pass any_class=True to run "
                f"{name} on the coordinates nonetheless."
            )
        other_on_vectors |= trial.other_on_vectors
    return (declared or other_on_vectors) and not any_class


def gains_from_rotation(
    optimizer_class: type[Optimizer], groups: Sequence[Mapping[str, Any]], hyperparameters: Mapping[str, Any]
) -> bool:
    """Whether a rotation can make a difference to an optimizer, by the settings of any of these groups."""
    trials = [tried(optimizer_class, settings_of(group), hyperparameters) for group in groups]
    return not all(trial.same_in_every_rotation for trial in trials)


def warn_of_no_gain(optimizer_class: type[Optimizer], blocks: Sequence[BoundBlock], refresh: object) -> None:
    """Say once for each class that a change of basis makes no difference to it; not where a basis leaves parts out."""
    if optimizer_class in _WARNED or any(not block.change.complete for block in blocks):
        return
    structure = getattr(refresh, "structure", None)
    wanted = structure.values() if isinstance(structure, Mapping) else [structure]
    if any(isinstance(each, Structure) and not each.change_type.complete for each in wanted):
        return
    if refresh is None and all(block.change.kind == "Identity" for block in blocks):
        return  # nothing is rotated
    _WARNED.add(optimizer_class)
    name = optimizer_class.__name__
    warnings.warn(
        f"{name} takes the same steps in every rotation, with these settings: a change of basis costs time and gains "
        "nothing. Use one that scales each coordinate by itself, such as Adam, AdamW or Adagrad; or egop.EGOP(model); "
        f"or {name} without a basis.",
        stacklevel=level_of_user(),  # the line that makes the optimizer
    )


def warn_of_no_basis(optimizer_class: type[Optimizer]) -> None:
    """Say that an optimizer for which neither a basis nor a refresh was given does nothing of its own."""
    name = optimizer_class.__name__
    warnings.warn(
        f"Nothing is rotated: this is plain {name}. Give the optimizer basis= or refresh=egop.Online(); "
        f"if plain {name} is meant, basis=egop.Basis([]).",
        stacklevel=level_of_user(),
    )


def check_blocks(optimizer_class: type[Optimizer], blocks: Iterable[BoundBlock]) -> None:
    """Raise an error where an optimizer that tells matrices from vectors would take one for the other."""
    for block in blocks:
        matrices = [tuple(parameter.shape) for parameter in block.parameters if parameter.dim() > 1]
        if matrices and any(coordinate.dim() < 2 for coordinate in block.coordinates):
            raise TypeError(
                f"{optimizer_class.__name__} treats matrices and vectors in different ways, and the coordinates of "
                f"block '{block.name}', a weight of shape {matrices[0]}, are a vector in the structure "
                f"{block.change.kind}. Use structure=egop.Shared() or egop.Kronecker(), whose coordinates are "
                "matrices, or pass any_class=True."
            )


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a group has of its own."""
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def defaults_of(
    optimizer_class: type[Optimizer], group: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """All hyper-parameters of an optimizer, checked and completed by itself.

    Args:
        optimizer_class: the class.
        group: one of its groups: some classes need settings there.
        hyperparameters: its arguments.
    """
    # Thrown away. It is a matrix because some classes take nothing else.
    number = torch.zeros(1, 1, requires_grad=True, device="cpu")
    try:
        return dict(optimizer_class([{**settings_of(group), "params": [number]}], **hyperparameters).defaults)
    except (TypeError, ValueError):  # in its own words
        raise
    except Exception as error:
        raise TypeError(
            f"{optimizer_class.__name__} cannot be made from parameter groups and {sorted(hyperparameters)}: "
            f"{type(error).__name__}: {error}. egop needs a class that is called as torch.optim.AdamW is."
        ) from error


def proposed(inner: Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor], make: Make) -> list[Tensor]:
    """What a step of an optimizer would add to some of its tensors: tried on copies of them and of their states.

    Args:
        inner: the optimizer; it is not touched.
        tensors: some that it steps.
        gradients: of these.
        make: makes another one from groups.
    """
    copies: dict[int, Tensor] = {id(tensor): tensor.detach().clone().requires_grad_() for tensor in tensors}
    groups = [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        | {"params": [copies[id(tensor)] for tensor in group["params"] if id(tensor) in copies]}
        for group in inner.param_groups
    ]
    trial = make([group for group in groups if group["params"]])
    for tensor, gradient in zip(tensors, gradients, strict=True):
        copies[id(tensor)].grad = gradient.clone()
        if tensor in inner.state:
            trial.state[copies[id(tensor)]] = copy.deepcopy(inner.state[tensor])
    with torch.random.fork_rng({tensor.device for tensor in tensors if tensor.device.type == "cuda"}):
        step_inner(trial)
    return [copies[id(tensor)].detach() - tensor.detach() for tensor in tensors]


def check_lookahead(inner: Optimizer) -> None:
    """Raise an error for an optimizer of which :func:`lookahead` knows nothing."""
    inside = inner.inside if isinstance(inner, Divided) else inner
    if not callable(getattr(inside, "lookahead", None)) and not isinstance(inside, torch.optim.Adam):  # AdamW is one
        raise TypeError(
            f"{type(inside).__name__} does not say what it maps a momentum to, which egop.Aligned() follows. Use "
            "egop.optim.Sinkhorn, egop.optim.Sign, torch.optim.Adam or AdamW; or egop.Online(), which serves every "
            "optimizer."
        )


def lookahead(inner: Optimizer, tensors: Sequence[Tensor], gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The momenta that a step with these gradients has, and what an optimizer maps them to, both stacked.

    An optimizer offers this by a method ``lookahead(tensors, gradients)``, as those of ``egop.optim`` whose map is of
    the momentum alone; of Adam the map is a division by the root of its second moment.
    """
    check_lookahead(inner)
    inside = inner.inside if isinstance(inner, Divided) else inner
    if callable(offered := getattr(inside, "lookahead", None)):
        pair: tuple[Tensor, Tensor] = offered(tensors, gradients)
        return pair
    groups = {id(tensor): group for group in inside.param_groups for tensor in group["params"]}
    momenta, mapped = [], []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        group, state = groups[id(tensor)], inside.state.get(tensor, {})
        (first, second), eps = group["betas"], group["eps"]
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"] and not group.get("decoupled_weight_decay"):
            gradient = gradient + group["weight_decay"] * tensor.detach()
        steps = float(state.get("step", 0)) + 1
        momentum = (1 - first) * gradient + (first * state["exp_avg"] if state else 0)
        squares = (1 - second) * gradient.square() + (second * state["exp_avg_sq"] if state else 0)
        if "max_exp_avg_sq" in state:
            squares = torch.maximum(squares, state["max_exp_avg_sq"])
        momenta.append(momentum)
        mapped.append(momentum / ((squares / (1 - second**steps)).sqrt() + eps))
    return torch.stack(momenta), torch.stack(mapped)


def read_by_lookahead(inner: Optimizer, tensors: Sequence[Tensor]) -> tuple[list[Tensor], str] | None:
    """What :func:`lookahead` reads of an optimizer, and its settings, if it is work on tensors alone; else None."""
    inside = inner.inside if isinstance(inner, Divided) else inner
    means = [momentum_of(inside.state.get(tensor, {})) for tensor in tensors]
    known = [mean for mean in means if mean is not None]
    if not isinstance(inside, MatrixOptimizer) or not inside.is_recordable or len(known) < len(means):
        return None
    return known, inside.recorded_settings


def fresh_states(
    inner: Optimizer,
    tensors: Sequence[Tensor],
    make: Make,
    *,
    stepped: bool = False,
    group: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The states that an optimizer has of its tensors before the first step, or (``stepped``) the form of later ones.

    Args:
        inner: the optimizer; it is not touched.
        tensors: some that it steps, of one group.
        make: makes another one from groups.
        stepped: whether a step without a gradient is taken first, with stand-ins for the tensors.
        group: the parameter group that has them; searched for if not given.
    """
    if group is None:
        group = next(each for each in inner.param_groups if any(tensor is tensors[0] for tensor in each["params"]))
    others = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    stand_ins = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors] if stepped else list(tensors)
    fresh = make([{**others, "params": stand_ins}])
    if stepped:
        for tensor in stand_ins:
            tensor.grad = torch.zeros_like(tensor)
        with torch.random.fork_rng(devices=[]):
            step_inner(fresh)
    states = [dict(fresh.state.get(tensor, {})) for tensor in stand_ins]
    for state in states if stepped else ():
        if isinstance(state.get("step"), Tensor | int | float):
            state["step"] = state["step"] * 0  # none has been taken
    return states
