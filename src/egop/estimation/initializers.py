"""Initializers: how a model initializes itself, by its layers' ``reset_parameters`` and by what its author wrote."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from egop.estimation import processes
from egop.estimation.objective import Objective
from egop.formatting import list_first
from egop.numerics import seed_everything

logger = logging.getLogger("egop")

Initializer = Callable[[nn.Module], object]
_Step = Callable[[], object]

# Root mean squares that differ by this factor count as different scales. Smaller tensors may differ by chance.
_SCALE_RATIO, _MIN_SIZE = 3, 32
_MAX_LISTED = 5  # maximum number of parameters named in a message

# Names that authors give to a function that initializes a whole model (timm, MAE, torchvision) or one module
# (transformers, nanoGPT). For the whole model the first match counts, since it calls the others.
_NAMES = ("init_weights", "initialize_weights", "_init_weights", "_initialize_weights")
# Names of the argument of a function that initializes one module.
_MODULE_ARGUMENTS = ("m", "mod", "module", "submodule", "layer", "child")
# transformers sets this on weights that it has loaded or initialized, and then does not initialize them again.
_INITIALIZED_MARK = "_is_hf_initialized"


@torch.no_grad()
def draw_initializations(
    objective: Objective, initializer: Initializer, generator: torch.Generator, count: int
) -> dict[str, Tensor]:
    """Initialize an objective's module several times; return the values, stacked along a new first dimension.

    Initializers use the global random state, so each draw seeds it from the generator.
    """
    seeds = torch.randint(2**62, (count,), generator=generator, device=generator.device).tolist()
    with objective.preserve():
        return stack_points([_initialize(objective, initializer, seed) for seed in seeds])


@torch.no_grad()
def warn_of_scale(objective: Objective, initializer: Initializer) -> None:
    """Log which weights the initializer draws at another scale, once per objective: it may be sampled many times."""
    if objective.has_warned_of_scale:
        return
    with objective.preserve():
        changes = _find_scale_changes(_initialize(objective, initializer, 0), objective.current)
    objective.has_warned_of_scale = bool(changes)
    if changes and processes.rank() == 0:
        logger.warning(
            "egop.Initialization() draws weights at a different scale from the model's: %s (root mean squares). If "
            "they are pretrained or trained, sample around them: rho=egop.Recentered(scale). If the model was "
            "initialized in another way, pass it: rho=egop.Initialization(init_fn=...).",
            list_first(changes, _MAX_LISTED),
        )


def _initialize(objective: Objective, initializer: Initializer, seed: int) -> dict[str, Tensor]:
    assert objective.module is not None, "check() was not called"
    objective.write(objective.current)  # parameters without an initializer keep their current values
    seed_everything(seed)
    initializer(objective.module)
    return {name: parameter.detach().clone() for name, parameter in objective.parameters.items()}


def find_initializer(module: nn.Module) -> Initializer | None:
    """Return a function that re-initializes the module in place, or None if the module has no initializer.

    First it calls every layer's ``reset_parameters()``, inner layers first. Then it calls what the author of the model,
    or of a part of it, wrote: either a function for the whole, called once, or one for each module, such as
    ``_init_weights(module)`` in transformers, called for every module inside that has no initializer of its own. Frozen
    parts are left alone.
    """
    steps = [*_find_resets(module), *_find_author_initializers(module, None)]
    if not steps:
        return None
    marked = [
        tensor for tensor in module.parameters() if tensor.requires_grad and getattr(tensor, _INITIALIZED_MARK, False)
    ]

    def initialize(_: nn.Module) -> None:
        for parameter in marked:
            setattr(parameter, _INITIALIZED_MARK, False)
        try:
            for step in steps:
                step()
        finally:
            for parameter in marked:
                setattr(parameter, _INITIALIZED_MARK, True)

    return initialize


def stack_points(points: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack each parameter's values along a new first dimension."""
    return {name: torch.stack([point[name] for point in points]) for name in points[0]}


def _find_resets(module: nn.Module) -> Iterator[_Step]:
    if not _is_trainable(module):
        return
    for child in module.children():
        yield from _find_resets(child)
    # MultiheadAttention and Transformer have a leading underscore; a test fails if torch renames it.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        yield reset


def _find_author_initializers(module: nn.Module, outer: Initializer | None) -> Iterator[_Step]:
    """Yield the author's initializers in the order in which a model is built.

    ``outer`` is the per-module initializer of a model that contains this module.
    """
    if not _is_trainable(module):
        return
    whole, per_module = _get_author_functions(module)
    per_module = per_module or outer
    for child in module.children():
        yield from _find_author_initializers(child, per_module)
    if per_module is not None:
        yield partial(per_module, module)
    if whole is not None:
        yield whole


def _get_author_functions(module: nn.Module) -> tuple[_Step | None, Initializer | None]:
    """Return the functions of a module's class that initialize the whole module, and each module inside it."""
    whole, per_module = None, None
    # Look at the class: wrappers such as peft's and torch.compile's forward attributes of the model inside.
    for name in _NAMES:
        function = getattr(module, name) if callable(getattr(type(module), name, None)) else None
        required = None if function is None else _get_required_arguments(function)
        if required == []:
            whole = whole or function
        elif required is not None and len(required) == 1:
            takes_module = required[0].name in _MODULE_ARGUMENTS or "Module" in str(required[0].annotation)
            per_module = per_module or (function if takes_module else None)
    # init_weights() of transformers only ties weights once a model has been built.
    is_transformers = any(kind.__module__ == "transformers.modeling_utils" for kind in type(module).__mro__)
    return None if is_transformers else whole, per_module


def _get_required_arguments(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [argument for argument in parameters if argument.default is argument.empty and argument.kind not in variadic]


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _find_scale_changes(drawn: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> list[str]:
    """Describe the weights whose root mean square differs a lot between the two."""
    changes = []
    for name, value in current.items():
        if value.dim() < 2 or value.numel() < _MIN_SIZE:
            continue
        before, after = (tensor.double().square().mean().sqrt().item() for tensor in (value, drawn[name]))
        if max(before, after) > _SCALE_RATIO * min(before, after):
            changes.append(f"'{name}' {after:.2g} instead of {before:.2g}")
    return changes
