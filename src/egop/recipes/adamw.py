"""AdamW for the parameters that EGOP does not step as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from egop.distributed import to_local_parts

MOMENTS = ("exp_avg", "exp_avg_sq")


def step_adamw(
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    all_states: dict[Tensor, dict[str, Any]],
) -> None:
    """Take a step with some parameters of a group; create the state of those that have none, as torch does."""
    if not parameters:
        return
    fused = group["fused"]
    states = [all_states[parameter] or _start(all_states[parameter], parameter, fused) for parameter in parameters]
    lr, eps, weight_decay = read_numbers(group)
    means, squares = ([state[name] for state in states] for name in MOMENTS)
    adamw(
        to_local_parts(parameters),
        to_local_parts(gradients),
        to_local_parts(means),
        to_local_parts(squares),
        [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        fused=fused,
        has_complex=any(map(torch.is_complex, parameters)),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr * group["outside_lr"],
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def read_numbers(group: Mapping[str, Any]) -> list[Any]:
    """Return lr, eps and weight decay, which may be any kind of number; torch's functions want their own kinds."""
    values = (group["lr"], group["eps"], group["weight_decay"])
    return [value if isinstance(value, Tensor) else float(value) for value in values]


def _start(state: dict[str, Any], parameter: Tensor, fused: bool | None) -> dict[str, Any]:
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
    for name in MOMENTS:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state
