"""Parameter groups with names, from all that an optimizer may be given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from egop.objective import plain_name

# What DistributedDataParallel puts before every name.
WRAPPER = "module."


def named_groups(params: Any, taken: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Parameter groups with ``params`` and ``param_names``, from all that an optimizer may be given.

    Args:
        params: a module, named parameters, or groups of them.
        taken: names that are already used.
    """
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    if isinstance(params, (Tensor, Mapping)):
        raise TypeError(_names_wanted(params))
    groups = list(params)
    if not groups:
        raise ValueError("The optimizer got an empty parameter list.")
    if not isinstance(groups[0], Mapping):
        groups = [{"params": groups}]
    names = {plain_name(name) for name in taken}
    checked = []
    for group in groups:
        members = _members(group)
        for name, _ in members:
            if plain_name(name) in names:
                raise ValueError(f"The parameter name '{name}' is given twice. Names must be unique.")
            names.add(plain_name(name))
        params, param_names = [parameter for _, parameter in members], [name for name, _ in members]
        checked.append({**group, "params": params, "param_names": param_names})
    check_real(checked)
    return _without_wrapper(checked)


def check_real(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise an error for parameters that are complex."""
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if isinstance(parameter, Tensor) and parameter.is_complex():
                raise TypeError(f"Parameter '{name}' is complex; egop works with real floating-point parameters.")


def _without_wrapper(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names as the model has them: ``DistributedDataParallel`` puts ``module.`` before every one."""
    names = [[plain_name(name) for name in group["param_names"]] for group in groups]
    if not all(name.startswith(WRAPPER) for own in names for name in own):
        return groups
    pairs = zip(groups, names, strict=True)
    return [group | {"param_names": [name.removeprefix(WRAPPER) for name in own]} for group, own in pairs]


def _members(group: Any) -> list[tuple[str, Any]]:
    if not isinstance(group, Mapping) or "params" not in group:
        given = list(group) if isinstance(group, Mapping) else type(group).__name__
        raise TypeError(f"A parameter group must be a dict with 'params', got {given}.")
    given = group["params"]
    members = list(given.named_parameters() if isinstance(given, nn.Module) else given)
    if "param_names" in group:
        if len(members) != len(group["param_names"]):
            raise ValueError(f"A group has {len(members)} parameters, but {len(group['param_names'])} param_names.")
        members = list(zip(group["param_names"], members, strict=True))
    for member in members:
        if not (isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)):
            raise TypeError(_names_wanted(member))
    return members


def _names_wanted(given: Any) -> str:
    return (
        f"Parameters must come with their names, got {type(given).__name__}. Pass the model itself, "
        "model.named_parameters() instead of model.parameters(), or groups of named parameters such as "
        "[{'params': list(model.named_parameters()), 'lr': 1e-3}]."
    )
