"""Parameter groups with names, built from whatever an optimizer is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from egop.basis import DDP_PREFIX, ModuleIndex, strip_compile_prefix


def named_parameters(groups: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the parameters of these groups by their plain names."""
    return {
        strip_compile_prefix(name): parameter
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def name_groups(
    params: Any, taken: Iterable[str] = (), model: nn.Module | ModuleIndex | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups with ``params`` and ``param_names``.

    Args:
        params: a module, named parameters, or groups of them; with a model also parameters without names.
        taken: names that are already used.
        model: the module that owns the parameters, wrapped or not. Parameters without a name get their name in the
            model, and given names must agree with it.
    """
    if model is not None and not isinstance(model, nn.Module | ModuleIndex):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(params, nn.Module):
        params = params.named_parameters() if model is None else params.parameters()
    if isinstance(params, type) and issubclass(params, nn.Module):
        raise TypeError(
            f"The parameters come first, got the class {params.__name__}. Pass a model: {params.__name__}(...)."
        )
    if isinstance(params, type):
        raise TypeError(
            f"The parameters come first, got the class {params.__name__}: "
            f"ReparameterizedOptimizer(model, {params.__name__}, ...)."
        )
    if isinstance(params, (Tensor, Mapping)):
        raise TypeError(_describe_unnamed(params))
    if not isinstance(params, Iterable):
        given = "None" if params is None else type(params).__name__
        raise TypeError(f"The model or its parameters come first, got {given}.")
    groups = list(params)
    if not groups:
        raise ValueError("The optimizer got an empty parameter list.")
    if not isinstance(groups[0], Mapping):
        groups = [{"params": groups}]
    known = ModuleIndex(model) if isinstance(model, nn.Module) else model
    names = {strip_compile_prefix(name) for name in taken}
    checked = []
    for group in groups:
        members = _read_members(group, known)
        for name, _ in members:
            if strip_compile_prefix(name) in names:
                raise ValueError(f"The parameter name '{name}' is given twice. Names must be unique.")
            names.add(strip_compile_prefix(name))
        params, param_names = [parameter for _, parameter in members], [name for name, _ in members]
        checked.append({**group, "params": params, "param_names": param_names})
    return checked if known is not None else _strip_wrapper(checked)


def _add_name(member: Any, known: ModuleIndex) -> Any:
    """Return a parameter with its name in the model, and anything else unchanged."""
    if isinstance(member, Tensor):
        if not known.names(member):
            kind = type(known.module).__name__
            raise ValueError(
                f"A parameter of shape {tuple(member.shape)} does not belong to the model ({kind}), so it has no name. "
                "Pass the model that has it, or the parameter with its name: (name, parameter)."
            )
        return known.names(member)[0], member
    return (_check_name(member[0], member[1], known), member[1]) if _is_named(member) else member


def _check_name(given: str, parameter: Any, known: ModuleIndex) -> str:
    """Return the model's spelling of a given name. A parameter outside the model keeps its name."""
    names, name = known.names(parameter), strip_compile_prefix(given)
    if name not in known.parameters:
        name = name.removeprefix(DDP_PREFIX)
    if name in names or (not names and name not in known.parameters):
        return name
    problem = f"is called '{names[0]}' in the model" if names else "is not the model's parameter of this name"
    raise ValueError(
        f"The parameter given as '{given}' {problem} ({type(known.module).__name__}). Pass the module that owns "
        "these parameters as model=, or pass them without names."
    )


def _strip_wrapper(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the ``module.`` that ``DistributedDataParallel`` puts before every name."""
    names = [[strip_compile_prefix(name) for name in group["param_names"]] for group in groups]
    if not all(name.startswith(DDP_PREFIX) for members in names for name in members):
        return groups
    pairs = zip(groups, names, strict=True)
    return [group | {"param_names": [name.removeprefix(DDP_PREFIX) for name in members]} for group, members in pairs]


def _is_named(member: Any) -> bool:
    return isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)


def _read_members(group: Any, known: ModuleIndex | None) -> list[tuple[str, Any]]:
    if not isinstance(group, Mapping) or "params" not in group:
        content = list(group) if isinstance(group, Mapping) else type(group).__name__
        raise TypeError(f"A parameter group must be a dict with 'params', got {content}.")
    given = group["params"]
    if isinstance(given, nn.Module):
        given = given.named_parameters() if known is None else given.parameters()
    elif isinstance(given, Tensor) and known is not None:
        given = [given]
    members = list(given)
    if "param_names" in group:
        if len(members) != len(group["param_names"]):
            raise ValueError(f"A group has {len(members)} parameters, but {len(group['param_names'])} param_names.")
        members = list(zip(group["param_names"], members, strict=True))
    if known is not None:
        members = [_add_name(member, known) for member in members]
    for member in members:
        if not _is_named(member):
            raise TypeError(_describe_unnamed(member))
    return members


def _describe_unnamed(given: Any) -> str:
    return (
        f"Parameters must come with their names, got {type(given).__name__}. Pass the model itself instead of "
        "model.parameters(). For some of its parameters, or groups of them, add model=model, or use named_parameters()."
    )
