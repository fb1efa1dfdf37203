"""Check that a state dict fits an optimizer before anything of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]  # of the state of one parameter, by name


def check_state_dict(
    state_dict: Any,
    groups: Sequence[Mapping[str, Any]],
    check_settings: Callable[[Mapping[str, Any]], object],
    expect_shapes: Callable[[str, Tensor, Mapping[str, Any]], Shapes],
) -> None:
    """Raise ValueError if a state dict does not fit.

    Args:
        state_dict: the state dict.
        groups: the optimizer's parameter groups, with ``param_names``.
        check_settings: raises an error for invalid settings of a group.
        expect_shapes: returns the shapes of the state of a parameter, given its name and what was saved.
    """
    parts = [state_dict.get(key) if isinstance(state_dict, Mapping) else None for key in ("state", "param_groups")]
    states, saved_groups = parts
    if not isinstance(states, Mapping) or not isinstance(saved_groups, list):
        raise ValueError(
            "The state dict is incomplete or damaged: it needs 'state' and a list of 'param_groups'. Of a whole "
            "checkpoint, load the part that optimizer.state_dict() gave."
        )
    if len(saved_groups) != len(groups):
        raise ValueError(f"The state dict has {len(saved_groups)} parameter groups; this optimizer has {len(groups)}.")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        _check_group(index, group, saved, check_settings)
        for key, name, parameter in zip(saved["params"], group["param_names"], group["params"], strict=True):
            if key in states:
                _check_entry(name, parameter, states[key], expect_shapes)


def _check_group(
    index: int, group: Mapping[str, Any], saved: Any, check_settings: Callable[[Mapping[str, Any]], object]
) -> None:
    label = f"Parameter group {index} of the state dict"
    if not isinstance(saved, Mapping):
        raise ValueError(f"{label} is {saved!r:.80}. Must be a dict.")
    if missing := [key for key in group if key not in saved and key != "param_names"]:
        raise ValueError(f"{label} has no {missing[0]!r}: it was saved by another optimizer, or is damaged.")
    if group["rotate"] is not saved["rotate"]:
        raise ValueError(
            f"{label} was saved with rotate={saved['rotate']!r:.80}, and this optimizer has rotate={group['rotate']}. "
            "A state fits only an optimizer that was created with the same value."
        )
    for key in ("foreach", "fused"):
        if not (saved[key] is None or isinstance(saved[key], bool)):
            raise ValueError(f"{label} has {key}={saved[key]!r:.80}. Must be True, False or None.")
    try:
        check_settings(saved)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label} has settings that are refused: {error}") from error
    keys, names = saved["params"], saved.get("param_names", group["param_names"])
    is_listed = isinstance(keys, list) and all(isinstance(key, int | str) for key in keys)
    if not is_listed or len(keys) != len(group["params"]):
        given = f"{len(keys)} parameters" if is_listed else f"params={keys!r:.80}"
        raise ValueError(f"{label} has {given}, and this optimizer has {len(group['params'])} there.")
    if names != group["param_names"]:
        pairs = zip(group["param_names"], names, strict=False) if isinstance(names, list) else ()
        different = [f": '{other}' instead of '{name}'" for name, other in pairs if name != other]
        raise ValueError(f"{label} has other parameters than this optimizer{''.join(different[:1])}.")


def _check_entry(
    name: str,
    parameter: Tensor,
    entry: Any,
    expect_shapes: Callable[[str, Tensor, Mapping[str, Any]], Shapes],
) -> None:
    label = f"In the state dict, the state of '{name}'"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{label} is {entry!r:.80}. Must be a dict.")
    expected = expect_shapes(name, parameter, entry)
    if entry.keys() != expected.keys():
        raise ValueError(
            f"{label} has {sorted(map(str, entry))}. Must be {sorted(expected)}: was it saved with other weights in "
            "exclude=?"
        )
    for key, shape in expected.items():
        value = entry[key]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape != shape:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise ValueError(f"{label} has {given} as '{key}'. Must be a dense tensor of shape {shape}.")
        if key != "step" and value.is_complex() and not parameter.is_complex():
            raise ValueError(f"{label} has complex numbers as '{key}'.")
        if key == "step" and not (value.is_floating_point() and math.isfinite(float(value)) and value >= 0):
            raise ValueError(f"{label} has step={value!r:.80}. Must be a number of steps.")
