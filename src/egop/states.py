"""Whether a saved state fits an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from egop.objective import plain_name

STATE_VERSION = 1


def check_state(state_dict: Any, groups: list[dict[str, Any]], optimizer_class: type[Optimizer]) -> None:
    """Raise an error that says so when a state dict is not of this kind of optimizer over these parameters."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"A state dict must be a dict as optimizer.state_dict() gives it, got {state_dict!r:.80}.")
    saved = state_dict.get("egop")
    if saved is None:
        raise ValueError(
            "This is not a state dict of egop.ReparameterizedOptimizer, but of a plain optimizer. Moments of another "
            "coordinate system cannot be loaded: load the model's weights alone, and start with a new optimizer."
        )
    if saved["version"] != STATE_VERSION:
        raise ValueError(f"The state dict has version {saved['version']}; this egop reads {STATE_VERSION}.")
    if saved["optimizer"] != optimizer_class.__name__:
        raise ValueError(f"The state dict is of {saved['optimizer']}, this optimizer runs {optimizer_class.__name__}.")
    own, others = shapes_of(groups), saved["shapes"]
    if len(own) != len(others):
        raise ValueError(f"The state dict has {len(others)} parameter group(s), the optimizer {len(own)}.")
    for here, there in zip(own, others, strict=True):
        if here.keys() != there.keys():
            raise ValueError(
                f"The state dict is of another model: only it has {sorted(there.keys() - here.keys())}, "
                f"only the optimizer has {sorted(here.keys() - there.keys())}."
            )
        for name, shape in here.items():
            if shape != there[name]:
                raise ValueError(
                    f"Block '{name}' has shape {tuple(there[name])} in the state dict, but {tuple(shape)} here."
                )
        if list(here) != list(there):  # state goes by position
            raise ValueError(
                f"The state dict has the parameters in another order: {list(there)}, but here {list(here)}. "
                "Give them to the optimizer in the order in which they were saved."
            )


def shapes_of(groups: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """The shapes of all parameters by name, group by group."""
    return [
        {plain_name(name): list(p.shape) for name, p in zip(group["param_names"], group["params"], strict=True)}
        for group in groups
    ]
