"""Two optimizers as one: for the coordinates of blocks, and for what no block has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from egop.optimizer.hooks import step_inner

# The key of a group that is the other optimizer's.
OUTSIDE = "egop/outside"

Make = Callable[[list[dict[str, Any]]], Optimizer]


class Divided(Optimizer):
    """Has the groups of both, the same dictionaries, and the states of both in one.

    Args:
        groups: as for an optimizer; those with the key ``OUTSIDE`` are the other's.
        inside: makes the first optimizer from its groups.
        outside: makes the other.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], inside: Make, outside: Make) -> None:
        super().__init__([{"params": []}], {})
        # An optimizer may have a group without parameters, but not no groups.
        self._parts = [
            make([group for group in groups if (OUTSIDE in group) is outer] or [{"params": []}])
            for make, outer in ((inside, False), (outside, True))
        ]
        places = [iter(part.param_groups) for part in self._parts]
        self.param_groups = [next(places[OUTSIDE in group]) for group in groups]
        self.state.update(self._parts[0].state | self._parts[1].state)
        self.share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give a group to the one whose it is."""
        if "_parts" not in vars(self):  # while this is made
            super().add_param_group(param_group)
            return
        part = self._parts[OUTSIDE in param_group]
        part.add_param_group(param_group)
        self.param_groups.append(part.param_groups[-1])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of both, of the other one first: it sees what its user gave it, and may refuse that."""
        assert closure is None
        for part in reversed(self._parts):
            step_inner(part)

    def __getattr__(self, name: str) -> Any:
        """``train`` and ``eval``, if one of the two has them."""
        if name in ("train", "eval") and "_parts" in vars(self):
            functions = [getattr(part, name) for part in self._parts if callable(getattr(part, name, None))]
            if functions:
                return lambda: [function() for function in functions]
        raise AttributeError(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies; torch also comes here with a state that was loaded."""
        super().__setstate__(state)
        self.share()

    @property
    def inside(self) -> Optimizer:
        """The optimizer of the coordinates."""
        return self._parts[0]

    def share(self) -> None:
        """Let both have their groups of these, and all of the state."""
        for outer, part in enumerate(self._parts):
            groups = [group for group in self.param_groups if (OUTSIDE in group) == bool(outer)]
            part.param_groups = groups or part.param_groups
            part.state = self.state
