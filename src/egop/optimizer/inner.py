"""The inner optimizers: one for the coordinates, and optionally another for everything outside the blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.distributed import LocalShards
from egop.optimizer.binding import BoundBlock, map_to_blocks
from egop.optimizer.checks import complete_hyperparameters, is_own_or_torch
from egop.optimizer.hooks import step_inner

# A setting of matrix optimizers: the last two dimensions are the matrices, as in coordinates.
_LAST = "matrices_last"
_OWN = ("params", "param_names", _LAST)  # not passed between groups
# Settings that the outside optimizer takes from the user's groups. Its other settings are there with a prefix, so that
# they are saved and can be changed; the same name may mean something else to another class.
_SHARED = ("lr", "weight_decay", "maximize")
_PREFIX = "outside/"

Group = dict[str, Any]


class BaseOptimizer:
    """The classes and options of the inner optimizers."""

    def __init__(self, optimizer_class: type[Optimizer], hyperparameters: Mapping[str, Any], outside: Any) -> None:
        self.optimizer_class, self.hyperparameters = optimizer_class, dict(hyperparameters)
        self.outside_class, self.outside_options = _parse_outside(outside)
        # Classes of other packages may keep estimates or counters in their groups.
        self.is_foreign = not all(is_own_or_torch(kind) for kind in (optimizer_class, self.outside_class) if kind)
        self.needs_matrices = bool(getattr(optimizer_class, "works_on_matrices", False))

    @property
    def name(self) -> str:
        """A description that state dicts carry."""
        name = self.optimizer_class.__name__
        return name if self.outside_class is None else f"{name} with {self.outside_class.__name__} outside"

    def make(self, groups: list[Group], *, outside: bool = False) -> Optimizer:
        """Build one of the two optimizers."""
        if outside and self.outside_class is not None:
            return self.outside_class(groups, **self.outside_options)
        return self.optimizer_class(groups, **self.hyperparameters)

    def split_group(
        self, group: Mapping[str, Any], block_of: Mapping[int, BoundBlock], pieces: LocalShards
    ) -> tuple[list[Group], Group | None]:
        """Return the inner groups for one of the user's: those of the first optimizer, and that of ``outside``."""
        members: dict[int, Tensor] = {}  # in the order of the group; a block comes where its first parameter is
        others: list[Tensor] = []
        for parameter in group["params"]:
            block = block_of.get(id(parameter))
            if block is not None:
                members |= {id(tensor): tensor for tensor in block.coordinates}
            elif self.outside_class is not None or self.needs_matrices:
                others.append(pieces.get(parameter))
            else:
                members[id(parameter)] = pieces.get(parameter)
        settings = self.inside_settings(group)
        last = {_LAST: True} if _LAST in group else {}
        inside = [settings | last | {"params": list(members.values())}]
        if self.outside_class is None:
            # An optimizer for matrices that steps everything has one group of coordinates and one of kernels.
            return inside + ([settings | {"params": others}] if self.needs_matrices else []), None
        outside = complete_hyperparameters(self.outside_class, {}, self.outside_options) | {"params": others}
        return inside, outside | self.outside_settings(group, outside)

    def inside_settings(self, group: Mapping[str, Any]) -> Group:
        """Return the settings that the first optimizer shares with a user's group, given either group."""
        return {key: value for key, value in group.items() if key not in _OWN and not key.startswith(_PREFIX)}

    def outside_settings(self, group: Mapping[str, Any], target: Mapping[str, Any]) -> Group:
        """Return the settings of a user's group that the outside optimizer's group takes."""
        own = {key.removeprefix(_PREFIX): value for key, value in group.items() if key.startswith(_PREFIX)}
        return {key: group[key] for key in _SHARED if key in group and self._takes_shared(key, target)} | own

    def exposed_settings(self, target: Mapping[str, Any]) -> Group:
        """Return the outside optimizer's own settings under the names that they have in the user's groups."""
        return {
            f"{_PREFIX}{key}": value
            for key, value in target.items()
            if key not in _OWN and not (key in _SHARED and self._takes_shared(key, target))
        }

    def _takes_shared(self, key: str, target: Mapping[str, Any]) -> bool:
        return key in target and key not in self.outside_options


class InnerOptimizers:
    """The optimizer of the coordinates, and the one for everything outside the blocks if it is separate.

    Both share one state. Without an outside optimizer the first one steps everything.
    """

    def __init__(
        self, base: BaseOptimizer, groups: Sequence[Group], blocks: Sequence[BoundBlock], pieces: LocalShards
    ) -> None:
        self.base = base
        block_of = map_to_blocks(blocks)
        splits = [base.split_group(group, block_of, pieces) for group in groups]
        self.coordinates = base.make([each for inside, _ in splits for each in inside])
        outside = [each for _, each in splits if each is not None]
        self.outside = base.make(outside, outside=True) if outside else None
        if self.outside is not None:
            own = {key: state for key, state in self.outside.state.items() if isinstance(key, Tensor)}
            self.coordinates.state.update(own)
            self.outside.state = self.coordinates.state
        inside_groups = iter(self.coordinates.param_groups)
        outside_groups = iter(self.outside.param_groups if self.outside is not None else [None] * len(splits))
        # The inner groups of each of the user's groups.
        self._groups = [([next(inside_groups) for _ in inside], next(outside_groups)) for inside, _ in splits]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Both optimizers, in the order of their steps: the outside one sees raw gradients and may refuse them."""
        return [each for each in (self.outside, self.coordinates) if each is not None]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of both optimizers."""
        return self.coordinates.state

    def step(self) -> None:
        """Step both optimizers."""
        if self.outside is not None:
            step_inner(self.outside)
        step_inner(self.coordinates)

    # --- groups and settings ---

    def map_to_groups(self) -> dict[int, tuple[Optimizer, Group]]:
        """Map each stepped tensor, by its ``id``, to its optimizer and group."""
        return {
            id(tensor): (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for tensor in group["params"]
        }

    def load_settings(self, groups: Sequence[Group]) -> None:
        """Copy the hyper-parameters of the user's groups to the inner groups."""
        for group, (inside, outside) in zip(groups, self._groups, strict=True):
            settings = self.base.inside_settings(group)
            for target in inside:
                target.update(settings)
            if outside is not None:
                outside.update(self.base.outside_settings(group, outside))

    def store_settings(self, groups: Sequence[Group]) -> None:
        """Copy the inner groups' values to the user's groups: some optimizers keep estimates or counters there."""
        for group, (inside, outside) in zip(groups, self._groups, strict=True):
            group.update(self.base.inside_settings(inside[0]))
            if outside is not None:
                group.update(self.base.exposed_settings(outside))

    def expose_outside_settings(self, groups: Sequence[Group]) -> None:
        """Add all settings of the outside optimizer to the user's groups: torch's tools load only existing keys."""
        for group, (_, outside) in zip(groups, self._groups, strict=True):
            if outside is not None:
                group.update(self.base.exposed_settings(outside) | group)

    # --- state ---

    def reset(self, tensors: Sequence[Tensor]) -> None:
        """Reset the state of some tensors to what it was before the first step."""
        wanted = {id(tensor) for tensor in tensors}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if members := [tensor for tensor in group["params"] if id(tensor) in wanted]:
                    for tensor, state in zip(members, self.make_fresh_states(members, optimizer, group), strict=True):
                        self.state.pop(tensor, None)
                        self.state.update({tensor: state} if state else {})

    def make_fresh_states(
        self, tensors: Sequence[Tensor], optimizer: Optimizer, group: Group, *, steps: int = 0
    ) -> list[dict[str, Any]]:
        """Return the states that a group's tensors have before their first step, or in their form after some steps.

        These steps are taken with zero gradients, on copies.
        """
        settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        used = [torch.zeros_like(tensor).requires_grad_() for tensor in tensors] if steps else list(tensors)
        fresh = self.base.make([{**settings, "params": used}], outside=optimizer is self.outside)
        for tensor in used if steps else ():
            tensor.grad = torch.zeros_like(tensor)
        with torch.random.fork_rng(devices=[], enabled=steps > 0):
            for _ in range(steps):
                step_inner(fresh)
        states = [dict(fresh.state.get(tensor, {})) for tensor in used]
        for state in states if steps else ():
            if isinstance(state.get("step"), Tensor | int | float):
                state["step"] = state["step"] * 0  # no step has been taken
        return states

    def take_over(self, previous: InnerOptimizers) -> None:
        """Take the state of all tensors that earlier optimizers have stepped too, and what belongs to no tensor."""
        kept = self.map_to_groups()
        for key, state in previous.state.items():
            if not isinstance(key, Tensor) or id(key) in kept:
                self.state[key] = state

    @property
    def shared_state(self) -> dict[Any, Any]:
        """The state that belongs to no tensor."""
        return {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}

    @shared_state.setter
    def shared_state(self, state: Mapping[Any, Any]) -> None:
        for key in self.shared_state:
            del self.state[key]
        self.state.update(state)


def _parse_outside(outside: Any) -> tuple[type[Optimizer] | None, dict[str, Any]]:
    """Return the class and the options of the outside optimizer."""
    if outside is None:
        return None, {}
    kind, options = outside if isinstance(outside, tuple) and len(outside) == 2 else (outside, {})
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or not isinstance(options, Mapping):
        raise TypeError(
            f"outside must be an optimizer class, or a pair of a class and its options, got {outside!r}. For example "
            "outside=torch.optim.AdamW, or outside=(torch.optim.AdamW, {'betas': (0.9, 0.95)})."
        )
    if "lr" in options:
        raise ValueError(
            "outside= takes its learning rate from the parameter groups, so that schedulers apply to it. For another "
            "one, put those parameters in a group of their own."
        )
    return kind, dict(options)


# --- the momentum that a step will have, for refreshes that follow it ---


def check_lookahead(optimizer: Optimizer) -> None:
    """Raise TypeError for an optimizer that :func:`look_ahead` does not support."""
    if not callable(getattr(optimizer, "lookahead", None)) and not isinstance(optimizer, torch.optim.Adam):
        raise TypeError(
            f"{type(optimizer).__name__} has no lookahead method, which egop.Aligned() needs. Use "
            "egop.optim.Sinkhorn, egop.optim.Sign, torch.optim.Adam or AdamW; or egop.Online(), which works with every "
            "optimizer."
        )


def look_ahead(optimizer: Optimizer, tensors: Sequence[Tensor], gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the momenta after a step with these gradients, and what the optimizer maps them to, both stacked.

    An optimizer supports this through a method ``lookahead(tensors, gradients)``. Those of ``egop.optim`` whose map
    depends on the momentum alone have one. Adam's map is the division by the root of its second moment.
    """
    check_lookahead(optimizer)
    if callable(method := getattr(optimizer, "lookahead", None)):
        pair: tuple[Tensor, Tensor] = method(tensors, gradients)
        return pair
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    momenta, mapped = [], []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        group, state = groups[id(tensor)], optimizer.state.get(tensor, {})
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
