"""The blocks that a refresh makes itself: at the first step, and for parameters that come late."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from egop.basis import Basis, Plan, strip_compile_prefix
from egop.optimizer import Rebasable, Stacks
from egop.refresh.choosing import Choice

# The original coordinates in the structures that are wanted, for all parameters that are trained or for those of names.
Choose = Callable[[Rebasable, Collection[str] | None], Basis]


class Beginnings:
    """Gives parameters without a block one, in original coordinates; their first gradient is to give its first basis.

    Late are layers that are unfrozen while training is under way, and those of groups that were added. What is decided
    follows from the blocks, the roles and the settings, so a resumed training comes to the same; of all this only
    :attr:`made` and :attr:`waiting` need to be saved.

    Args:
        choose: the original coordinates in the structures that are wanted.
        made: the blocks that were made here.
        waiting: the blocks that have no basis yet but the original coordinates.
    """

    def __init__(self, choose: Choose, made: Iterable[str] = (), waiting: Iterable[str] = ()) -> None:
        self.choose = choose
        self.made, self.waiting = set(made), set(waiting)
        self.unrotated: dict[str, str] = {}  # why weights have no block, by name
        self._asked = False  # for the first blocks
        self._settled: set[str] = set()  # parameters that nobody needs to ask about again
        self._open: list[tuple[str, Tensor]] = []  # the others outside every block: a step has little to look at
        self._known: tuple[Stacks, int] | None = None  # what that list was made for

    def make_first(self, optimizer: Rebasable, name: str) -> None:
        """The blocks of an optimizer that has none, before its first step; ``name`` is what the refresh is called."""
        if optimizer.blocks or self._asked:
            return
        basis = self.choose(optimizer, None)
        self.unrotated = basis.unrotated
        optimizer.rebase(basis, moments="reset")
        self.waiting = {block.name for block in optimizer.blocks}
        self._decide(_trained_names(optimizer), self.waiting)
        self._asked = True
        if not basis:
            warnings.warn(_nothing_to_rotate(optimizer, basis.unrotated, name), stacklevel=2)

    def make_late(self, optimizer: Rebasable) -> None:
        """Blocks for parameters that were not trained when the others were made, or not there."""
        if not (late := self._arrived(optimizer)):
            return
        before = {block.name for block in optimizer.blocks}
        try:
            basis = self.choose(optimizer, late)
            self.unrotated |= basis.unrotated
            if basis:
                optimizer.add_blocks(basis)
        except (MemoryError, ValueError) as error:  # no reason to end a training that is under way
            warnings.warn(
                f"Parameters that are trained from now on ({', '.join(late)}) get no basis: {error}", stacklevel=2
            )
        new = {block.name for block in optimizer.blocks} - before
        self.waiting |= new
        self._decide(late, new)

    def plan(self, optimizer: Rebasable) -> Plan | None:
        """What the first step chooses, or has chosen; None if someone has given or replaced the blocks."""
        if not isinstance(self.choose, Choice) or (optimizer.blocks and not self.made_of(optimizer)):
            return None
        return self.choose.plan(optimizer, None)

    def made_of(self, optimizer: Rebasable) -> set[str]:
        """The blocks that were made here; none if someone has given or replaced them."""
        return self.made if self.made <= {block.name for block in optimizer.blocks} else set()

    def rebased(self, names: Collection[str], *, replaced: bool) -> None:
        """Blocks to which someone has given a basis need no first one; if all were replaced, they are all there are."""
        self.waiting -= set(names)
        if replaced:
            self.made, self._settled, self._known = set(), set(), None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: the list is of the parameters of this optimizer."""
        return self.__dict__ | {"_open": [], "_known": None}

    def _arrived(self, optimizer: Rebasable) -> list[str]:
        """The names of the undecided parameters that are trained now."""
        now = optimizer.stacks, len(optimizer.param_groups)
        if self._known is None or self._known[0] is not now[0] or self._known[1] != now[1]:
            self.made = self.made_of(optimizer)
            # It is not for the refresh to say which blocks there are, if someone has given or replaced them.
            self._open = self._undecided(optimizer) if self.made or not optimizer.blocks else []
            self._known = now
        return [name for name, parameter in self._open if parameter.requires_grad and parameter.grad is not None]

    def _decide(self, names: Iterable[str], blocks: Iterable[str]) -> None:
        """Ask no more about these parameters, for which these blocks were made."""
        self.made |= set(blocks)
        self._settled |= set(names)
        self._known = None

    def _undecided(self, optimizer: Rebasable) -> list[tuple[str, Tensor]]:
        inside = {id(original) for block in optimizer.blocks for original in block.originals}
        return [
            (strip_compile_prefix(name), parameter)
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if id(parameter) not in inside and strip_compile_prefix(name) not in self._settled
        ]


def _trained_names(optimizer: Rebasable) -> set[str]:
    """The names of the parameters that are not frozen."""
    return {
        strip_compile_prefix(name)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if parameter.requires_grad
    }


def _nothing_to_rotate(optimizer: Rebasable, unrotated: Mapping[str, str], refresh: str) -> str:
    """What to say when there is no block: why, and what to do."""
    reasons = [f"'{name}' is left ({why})" for name, why in unrotated.items()]
    reasons = [*reasons[:3], f"and {len(reasons) - 3} more"] if len(reasons) > 4 else reasons
    trained = _trained_names(optimizer)
    if len(unrotated) < len(trained):
        others = "the others" if unrotated else f"all {len(trained)} that are trained"
        reasons.append(f"{others} are biases or of norm layers")
    frozen = sum(len(group["params"]) for group in optimizer.param_groups) - len(trained)
    if frozen:
        reasons.append(f"{frozen} are frozen, and get a basis when they are unfrozen if they are weights")
    outside = optimizer.outside
    steps = "the optimizer does what the inner one does" if outside is None else f"{outside.__name__} steps them all"
    return (
        f"egop.{refresh} has found no weight to rotate, so for now {steps}. Of the parameters, {', '.join(reasons)}. "
        "To rotate what is left, name it: egop.Online(structure={'*': egop.Kronecker()}) for every weight, with "
        "partition={'all': ['*']} and egop.Full() for everything."
    )
