"""Aligned: the rotation that serves the base optimizer best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Shared, Side
from egop.distributed import whole
from egop.numerics import check_positive
from egop.optimizer import BoundBlock, Rebasable, Refresh, Refresher, Stack
from egop.refresh.beginnings import Beginnings, Choose
from egop.refresh.choosing import Choice
from egop.refresh.methods import aligned

_MADE = "made"  # what is saved of a block: whether it was made here


@dataclass(frozen=True)
class Aligned(Refresh):
    """Rotate one side of each weight so that the base optimizer's update has most to do with its momentum.

    In every step, before the update, R becomes the orthonormal factor of M f(RᵀM)ᵀ, where M is the momentum and f the
    base's own map: one step of the power iteration for what f makes of M. With ``egop.optim.Sinkhorn`` this is ARO
    (arXiv 2602.09006). Nothing but the rotation is kept, no second moment and no Gram matrix. For bases that offer
    their map: ``egop.optim.Sinkhorn`` and ``Sign``, and Adam, whose map divides by its second moment.

    Args:
        every: how many steps lie between two changes of the rotation.
        side: which side of a weight is rotated, as in :class:`egop.Shared`.
        memory: what all rotations together may take.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.ReparameterizedOptimizer(
        ...     model, egop.optim.Sinkhorn, refresh=egop.Aligned(), outside=torch.optim.AdamW, lr=1e-3
        ... )
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    every: int = 1
    side: Side = "smaller"
    memory: int | str = "2GiB"

    def __post_init__(self) -> None:
        check_positive("every", self.every)
        Shared(side=self.side)

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        choice = Choice(type(self).__name__, "auto", "parameter", self.memory, (Shared(side=self.side),))
        choice.check(optimizer)
        return _Aligning(choice, self.every)


class _Aligning(Refresher):
    def __init__(self, choose: Choose, every: int) -> None:
        super().__init__()
        self.every, self.beginnings = every, Beginnings(choose)

    @property
    def unrotated(self) -> dict[str, str]:
        """Why weights have no rotation, by name, where the refresh has chosen."""
        return self.beginnings.unrotated

    def before_step(self, optimizer: Rebasable) -> None:
        self.prepare(optimizer)
        self.beginnings.make_late(optimizer)

    def prepare(self, optimizer: Rebasable) -> None:
        if self.steps == 0:
            self.beginnings.make_first(optimizer, "Aligned")

    def observe(self, optimizer: Rebasable) -> None:
        self.look_for_failures()
        if self.steps % self.every == 0:
            self.renew(optimizer)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1

    def renew(self, optimizer: Rebasable) -> None:
        """Rotate now, by the gradients of the step that is under way; without one there is nothing to follow."""
        for stack in optimizer.stacks:
            if stack.active and self.can_renew(stack.change):
                self._align(optimizer, stack)
        self.renewals += 1

    def can_renew(self, change: ChangeOfBasis) -> bool:
        return isinstance(change.structure(), Shared)

    def rebased(self, names: Collection[str]) -> None:
        self.beginnings.rebased(names, before_any_step=self.steps == 0)

    def memories(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        made = self.beginnings.made_of(optimizer)
        return {block.name: {_MADE: torch.tensor([block.name in made])} for block in optimizer.blocks}

    def load(
        self, counts: Sequence[int], memories: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        marks = {block.name: memories[block.name].get(_MADE) for block in blocks}
        if missing := [name for name, tensor in marks.items() if tensor is None]:
            raise ValueError(f"The state dict is damaged, or of another refresh: it says nothing of {missing[:3]}.")
        made = [name for name, tensor in marks.items() if bool(whole(tensor).any())]
        super().load(counts, memories, blocks)
        self._start_with(made)

    def reset(self) -> None:
        super().reset()
        self._start_with(())

    def _start_with(self, made: Collection[str]) -> None:
        unrotated = self.beginnings.unrotated
        self.beginnings = Beginnings(self.beginnings.choose, made)
        self.beginnings.unrotated = unrotated

    def _align(self, optimizer: Rebasable, stack: Stack) -> None:
        (momentum,), (mapped,) = optimizer.lookahead(stack)
        change, _ = stack.active_part()
        # In coordinates, where M is R times the momentum: the factor of R A is that of M f(RᵀM)ᵀ.
        image = momentum.mT @ mapped if change.rowwise else momentum @ mapped.mT
        fresh, sound = aligned(image, change.tensors["basis"])
        self.count_failures(sound)
        for _, run in groupby(enumerate(stack.active), lambda pair: pair[1] - pair[0]):
            pairs = list(run)
            members = slice(pairs[0][1], pairs[-1][1] + 1)
            optimizer.rebase_stack(stack, members, {"basis": fresh[pairs[0][0] : pairs[-1][0] + 1]}, "rotate")
