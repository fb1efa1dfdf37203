"""Parameters that come late: unfrozen while training is under way, or in a group that was added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from egop.basis import plain_name
from egop.optimizer import Batches, Rebasable


class Outside:
    """The parameters outside every block that nobody has decided about, so that a step has next to nothing to look at.

    What is decided follows from the blocks, the roles and the settings, so a resumed training comes to the same; of all
    this only :attr:`made` needs to be saved.

    Args:
        made: the blocks that the refresh has made itself.
    """

    def __init__(self, made: Iterable[str] = ()) -> None:
        self.made = set(made)
        self._left: set[str] = set()  # decided: these parameters stay in original coordinates
        self._open: list[tuple[str, Tensor]] = []
        self._of: tuple[Batches, int] | None = None  # what that list was made for

    def arrived(self, optimizer: Rebasable) -> list[str]:
        """The names of those that are trained now."""
        now = optimizer.batches, len(optimizer.param_groups)
        if self._of is None or self._of[0] is not now[0] or self._of[1] != now[1]:
            self._open = self._undecided(optimizer) if self.is_open(optimizer) else []
            self._of = now
        return [name for name, parameter in self._open if parameter.requires_grad and parameter.grad is not None]

    def is_open(self, optimizer: Rebasable) -> bool:
        """Whether it is for the refresh to say which blocks there are: not if someone has given or replaced them."""
        names = {block.name for block in optimizer.blocks}
        if not self.made <= names:
            self.made = set()
        return bool(self.made) or not names

    def decided(self, names: Iterable[str], blocks: Iterable[str]) -> None:
        """Ask no more about these parameters, for which these blocks were made."""
        self.made |= set(blocks)
        self._left |= set(names)
        self._of = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the list is of the parameters of this optimizer."""
        return self.__dict__ | {"_open": [], "_of": None}

    def _undecided(self, optimizer: Rebasable) -> list[tuple[str, Tensor]]:
        inside = {id(owner) for block in optimizer.blocks for owner in block.owners}
        return [
            (plain_name(name), parameter)
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if id(parameter) not in inside and plain_name(name) not in self._left
        ]


def trained_names(optimizer: Rebasable) -> set[str]:
    """The names of the parameters that are not frozen."""
    return {
        plain_name(name)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if parameter.requires_grad
    }


def nothing_to_rotate(optimizer: Rebasable, left: Mapping[str, str], refresh: str) -> str:
    """What to say when there is no block: why, and what to do."""
    reasons = [f"'{name}' is left ({why})" for name, why in left.items()]
    reasons = [*reasons[:3], f"and {len(reasons) - 3} more"] if len(reasons) > 4 else reasons
    trained = trained_names(optimizer)
    if len(left) < len(trained):
        others = "the others" if left else f"all {len(trained)} that are trained"
        reasons.append(f"{others} are biases or of norm layers")
    frozen = sum(len(group["params"]) for group in optimizer.param_groups) - len(trained)
    if frozen:
        reasons.append(f"{frozen} are frozen, and get a basis when they are unfrozen if they are weights")
    return (
        f"egop.{refresh} has found no weight to rotate, so for now the optimizer does what the inner one does. Of the "
        f"parameters, {', '.join(reasons)}. To rotate what is left, name it: egop.{refresh}("
        "partition={'all': ['*']}, structure=egop.Full()), or structure=egop.Kronecker() for every weight."
    )
