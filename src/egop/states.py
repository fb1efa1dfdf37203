"""What is saved of an optimizer, and whether a saved state fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from egop.binding import BoundBlock
from egop.objective import plain_name
from egop.sharding import Pieces, local

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


def inner_state(inner: Optimizer, blocks: Sequence[BoundBlock], pieces: Pieces) -> dict[int, dict[str, Any]]:
    """The inner optimizer's state by position, tensors as all processes together have them."""
    spread = _spreading(inner, blocks, pieces)
    return {
        index: {key: spread[index](value) if isinstance(value, Tensor) else value for key, value in own.items()}
        for index, own in inner.state_dict()["state"].items()
    }


def inner_shapes(inner: Optimizer, blocks: Sequence[BoundBlock], pieces: Pieces) -> list[list[int]]:
    """The shapes of all that the inner optimizer steps, by position."""
    spread = _spreading(inner, blocks, pieces)
    return [list(spread[index](tensor).shape) for index, tensor in enumerate(_stepped(inner))]


def load_inner_state(inner: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Give the inner optimizer its state by position, as it was saved."""
    here = {
        index: {key: local(value) if isinstance(value, Tensor) else value for key, value in own.items()}
        for index, own in state.items()
    }
    inner.load_state_dict({"state": here, "param_groups": inner.state_dict()["param_groups"]})
    # Torch casts all it loads to the parameter's precision, also running products, which are in another one.
    tensors = _stepped(inner)
    for index, saved in here.items():
        own = inner.state[tensors[index]]
        numbers = {key: value for key, value in saved.items() if isinstance(value, Tensor) and value.dim() == 0}
        own.update({key: value.to(own[key].device) for key, value in numbers.items()})


def stepped_owners(groups: list[dict[str, Any]], blocks: Sequence[BoundBlock]) -> list[tuple[str | None, bool]]:
    """For all that the inner optimizer steps, by position, the parameter with whose rows its own go, if there is one.

    With it comes whether that holds only where the parameter is cut by rows: not for one that is stepped itself.
    """
    inside = {id(owner): block for block in blocks for owner in block.owners}
    found: list[tuple[str | None, bool]] = []
    done: set[int] = set()
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            block = inside.get(id(parameter))
            if block is None:
                found.append((plain_name(name), False))
            elif id(block) not in done:  # a block stands where its first parameter does
                done.add(id(block))
                found += [(owner, True) for owner in row_owners(block, groups)]
    return found


def row_owners(block: BoundBlock, groups: list[dict[str, Any]]) -> list[str | None]:
    """For each of a block's coordinates the parameter with whose rows its own go, if there is one."""
    if not block.rowwise:
        return [None] * len(block.coordinates)
    pairs = [pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True)]
    names = {id(parameter): plain_name(name) for parameter, name in pairs}
    return [names[id(owner)] for owner in block.owners]


def _stepped(inner: Optimizer) -> list[Tensor]:
    return [tensor for group in inner.param_groups for tensor in group["params"]]


def _spreading(inner: Optimizer, blocks: Sequence[BoundBlock], pieces: Pieces) -> list[Callable[[Tensor], Tensor]]:
    """For each position what makes a tensor of the processes' pieces of it."""
    own = {
        id(coordinate): partial(block.spread, place)
        for block in blocks
        for place, coordinate in enumerate(block.coordinates)
    }
    return [own.get(id(tensor)) or pieces.spreading(tensor) for tensor in _stepped(inner)]


def fresh_states(inner: Optimizer, block: BoundBlock, hyperparameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inner optimizer's states of a block's coordinates as they are before the first step."""
    first = block.coordinates[0]
    group = next(each for each in inner.param_groups if any(tensor is first for tensor in each["params"]))
    fresh = type(inner)([{**group, "params": block.coordinates}], **hyperparameters)
    return [dict(fresh.state.get(coordinate, {})) for coordinate in block.coordinates]
