"""Check that a state dict fits an optimizer before anything of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.formatting import pluralize


def check_state_dict(
    state_dict: Any,
    groups: Sequence[Mapping[str, Any]],
    options: Iterable[str],
    check_settings: Callable[[Mapping[str, Any]], object],
    expect_shapes: Callable[[str, Tensor, Mapping[str, Any]], Mapping[str, tuple[int, ...]]],
) -> None:
    """Raise ValueError if a state dict does not fit.

    Args:
        state_dict: the state dict.
        groups: the optimizer's parameter groups, with ``param_names``.
        options: the settings that each group must have.
        check_settings: raises an error for invalid settings of a group.
        expect_shapes: returns the shapes of the state of a parameter, given its name and what was saved.
    """
    parts = [state_dict.get(key) if isinstance(state_dict, Mapping) else None for key in ("state", "param_groups")]
    states, saved_groups = parts
    if not isinstance(states, Mapping) or not isinstance(saved_groups, list):
        raise ValueError(
            "The state dict is incomplete or damaged: it needs 'state' and a list of 'param_groups'. From a whole "
            "checkpoint, load the part that optimizer.state_dict() returned."
        )
    if not all(isinstance(saved, Mapping) and "update_rms" in saved for saved in saved_groups):
        raise ValueError(
            "The state dict was saved by another optimizer, or is damaged. After a change of optimizer, load only the "
            "model's weights."
        )
    if len(saved_groups) != len(groups):
        raise ValueError(f"The state dict has {pluralize(len(saved_groups), 'parameter group')}, not {len(groups)}.")
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if problem := _find_group_problem(group, saved, options, check_settings):
            raise ValueError(f"Parameter group {index} of the state dict {problem}")
        for key, name, parameter in zip(saved["params"], group["param_names"], group["params"], strict=True):
            state = states.get(key, {})
            expected = expect_shapes(name, parameter, state) if isinstance(state, Mapping) else {}
            if key in states and (problem := _find_state_problem(state, expected, parameter)):
                raise ValueError(f"In the state dict, the state of '{name}' {problem}")


def _find_group_problem(
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    options: Iterable[str],
    check_settings: Callable[[Mapping[str, Any]], object],
) -> str | None:
    # Other keys, such as those of schedulers, may differ.
    if missing := [key for key in ("params", *options) if key not in saved]:
        return f"has no {missing[0]!r}: it is damaged."
    if group["rotate"] is not saved["rotate"]:
        return (
            f"was saved with rotate={saved['rotate']!r:.80}, and this optimizer has rotate={group['rotate']}. A state "
            "fits only an optimizer that was created with the same value."
        )
    for key in ("foreach", "fused"):
        if not (saved[key] is None or isinstance(saved[key], bool)):
            return f"has {key}={saved[key]!r:.80}. Must be True, False or None."
    try:
        check_settings(saved)
    except (TypeError, ValueError) as error:
        return f"has settings that are refused: {error}"
    keys, names = saved["params"], saved.get("param_names", group["param_names"])
    if not isinstance(keys, list) or not all(isinstance(key, int | str) for key in keys):
        return f"has params={keys!r:.80}. Must be a list of the keys of 'state'."
    if len(keys) != len(group["params"]):
        return f"has {len(keys)} parameters, and this optimizer has {len(group['params'])} there."
    if names != group["param_names"]:
        pairs = zip(group["param_names"], names, strict=False) if isinstance(names, list) else ()
        different = [f": '{other}' instead of '{name}'" for name, other in pairs if name != other]
        return f"has other parameters than this optimizer{''.join(different[:1])}."
    return None


def _find_state_problem(state: Any, expected: Mapping[str, tuple[int, ...]], parameter: Tensor) -> str | None:
    if not isinstance(state, Mapping):
        return f"is {state!r:.80}. Must be a dict."
    if state.keys() != expected.keys():
        found = sorted(map(str, state))
        return f"has {found}. Must be {sorted(expected)}: was it saved with other weights in exclude=?"
    for key, shape in expected.items():
        value = state[key]
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape != shape:
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            return f"has {given} as '{key}'. Must be a dense tensor of shape {shape}."
        if value.is_complex() and not parameter.is_complex():
            return f"has complex numbers as '{key}'."
        if key == "step" and not (value.is_floating_point() and math.isfinite(float(value)) and value >= 0):
            return f"has step={value!r:.80}. Must be a number of steps."
    return None
