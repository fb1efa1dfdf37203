"""The base optimizer: its class and options, another one for what no block has, and their parameter groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from egop.distributed import LocalShards
from egop.optimizer.binding import BoundBlock
from egop.optimizer.divided import OUTSIDE, Divided, Make
from egop.optimizer.inner import defaults_of, is_own_or_torch
from egop.optimizer.trial import tried

# A setting of optimizers that see matrices: those are the last two dimensions, which holds for coordinates.
_LAST = "matrices_last"
# What each group has of its own, and the others none of.
_OWN = ("params", "param_names", _LAST, OUTSIDE)
# What the optimizer outside takes from the user's groups. All its other settings are in these with a prefix, so that
# they are saved, and can be seen and changed; the same name may mean something else to another class.
SHARED = ("lr", "weight_decay", "maximize")
_PREFIX = "outside/"

Group = dict[str, Any]


class Base:
    """What runs inside: makes inner optimizers, and groups in the places of the user's.

    Args:
        optimizer_class: of the optimizer that runs on coordinates.
        hyperparameters: what it is given.
        outside: class of another one, or class and options, for what no block has.
        shared: the settings that mean the same to both.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        hyperparameters: Mapping[str, Any],
        outside: Any,
        shared: Sequence[str] = SHARED,
    ) -> None:
        self.optimizer_class, self.hyperparameters = optimizer_class, dict(hyperparameters)
        self._shared = tuple(shared)
        self.outside = _parsed(outside)
        # Of inner groups for each of the user's: one that sees matrices has coordinates and kernels apart.
        self._count = 1 if self.outside is None and not self.sees_matrices else 2

    @property
    def name(self) -> str:
        """What it is, in words."""
        name = self.optimizer_class.__name__
        return name if self.outside is None else f"{name} with {self.outside[0].__name__} outside"

    @property
    def keeps_gradients(self) -> bool:
        """Whether it may keep a gradient for its next step: torch's and egop's do not, of others nobody knows."""
        return not is_own_or_torch(self.optimizer_class)

    @property
    def sees_matrices(self) -> bool:
        """Whether its step of an entry depends on the whole matrix."""
        return bool(getattr(self.optimizer_class, "works_on_matrices", False))

    def class_of(self, group: Mapping[str, Any]) -> tuple[type[Optimizer], Mapping[str, Any]]:
        """Return the class that steps an inner group, and the options that it was given."""
        if self.outside is not None and OUTSIDE in group:
            return self.outside
        return self.optimizer_class, self.hyperparameters

    def owner_of(self, key: str) -> tuple[type[Optimizer], str]:
        """Return the class that a key of a user's group is a setting of, and its name there."""
        if self.outside is not None and key.startswith(_PREFIX):
            return self.outside[0], key.removeprefix(_PREFIX)
        return self.optimizer_class, key

    def make(self, groups: list[Group]) -> Optimizer:
        """An inner optimizer, or one and another for what is outside, from groups."""
        inside: Make = partial(self.optimizer_class, **self.hyperparameters)
        if self.outside is None:
            return inside(groups)
        kind, options = self.outside
        return Divided(groups, inside, partial(kind, **options))

    def groups(self, group: Mapping[str, Any], inside: Mapping[int, BoundBlock], pieces: LocalShards) -> list[Group]:
        """What an inner optimizer has in the place of one of the user's: coordinates, and what is in no block.

        Args:
            group: one of the user's.
            inside: the block of each parameter that is in one, see :func:`egop.optimizer.binding.map_to_blocks`.
            pieces: what stands for sharded parameters outside of them.
        """
        members: dict[int, Tensor] = {}  # in the order of the group, a block where its first parameter stands
        others: list[Tensor] = []
        for parameter in group["params"]:
            block = inside.get(id(parameter))
            if block is None and self._count == 2:
                others.append(pieces.get(parameter))
                continue
            tensors = block.coordinates if block is not None else [pieces.get(parameter)]
            members |= {id(tensor): tensor for tensor in tensors}
        settings = self._settings_for(group, {})
        last = {_LAST: True} if _LAST in group else {}
        first = settings | last | {"params": list(members.values())}
        if self._count == 1:
            return [first]
        if self.outside is None:
            return [first, settings | {"params": others}]
        kind, options = self.outside
        second: Group = defaults_of(kind, {}, options) | {"params": others, OUTSIDE: tuple(options)}
        return [first, second | self._settings_for(group, second)]

    def pairs(self, groups: Sequence[Group], inner: Optimizer) -> Iterator[tuple[Group, list[Group]]]:
        """Each of the user's groups, and the inner ones in its place."""
        for index, group in enumerate(groups):
            yield group, inner.param_groups[self._count * index : self._count * (index + 1)]

    def settings_in(self, groups: Sequence[Group], inner: Optimizer) -> None:
        """Give the inner groups the hyper-parameters of the user's."""
        for group, targets in self.pairs(groups, inner):
            for target in targets:
                target.update(self._settings_for(group, target))

    def settings_out(self, groups: Sequence[Group], inner: Optimizer) -> None:
        """Some optimizers keep quantities of their own (an estimated step size, a counter) in their groups."""
        for group, targets in self.pairs(groups, inner):
            group.update(self._settings_for(targets[0], {}) | self._settings_outside(targets))

    def show_outside(self, groups: Sequence[Group], inner: Optimizer) -> None:
        """Let the user's groups have all settings of the other optimizer: torch's tools load what is there already."""
        for group, targets in self.pairs(groups, inner):
            group.update(self._settings_outside(targets) | group)

    def _settings_outside(self, targets: Sequence[Group]) -> Group:
        """What the user's group has of the other optimizer's."""
        return {
            f"{_PREFIX}{key}": value
            for target in targets
            if OUTSIDE in target
            for key, value in target.items()
            if key not in _OWN and (key not in self._shared or key in target[OUTSIDE])
        }

    def drop_beyond(self, groups: Sequence[Group], inner: Optimizer) -> None:
        """Forget inner groups that belong to none of the user's: one was refused."""
        del inner.param_groups[self._count * len(groups) :]
        if isinstance(inner, Divided):
            inner.share()

    def _settings_for(self, group: Mapping[str, Any], target: Mapping[str, Any]) -> Group:
        """What an inner group takes over from the user's."""
        if OUTSIDE not in target:
            return {key: value for key, value in group.items() if key not in _OWN and not key.startswith(_PREFIX)}
        shared = {
            key: group[key] for key in self._shared if key in group and key in target and key not in target[OUTSIDE]
        }
        return shared | {key.removeprefix(_PREFIX): value for key, value in group.items() if key.startswith(_PREFIX)}


def _parsed(outside: Any) -> tuple[type[Optimizer], dict[str, Any]] | None:
    """The class and the options of the optimizer for what no block has."""
    if outside is None:
        return None
    kind, options = outside if isinstance(outside, tuple) and len(outside) == 2 else (outside, {})
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or not isinstance(options, Mapping):
        raise TypeError(
            f"outside must be an optimizer class, or a pair of one and its options, got {outside!r}. For example "
            "outside=torch.optim.AdamW, or outside=(torch.optim.AdamW, {'betas': (0.9, 0.95)})."
        )
    if "lr" in options:
        raise ValueError(
            "outside takes its learning rate from the parameter groups, so that schedulers reach it. For another one, "
            "give those parameters a group of their own."
        )
    if tried(kind, {}, options).needs_closure:
        raise TypeError(
            f"{kind.__name__} evaluates the loss within a step, which egop does not support, outside neither."
        )
    return kind, dict(options)
