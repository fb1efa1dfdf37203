"""Aligned: the rotation that serves the base optimizer best."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Plan, Shared, Side
from egop.distributed import whole
from egop.numerics import InPlace, Recorder, check_positive
from egop.optimizer import BoundBlock, Rebasable, Refresh, Refresher, Stack
from egop.refresh.beginnings import Beginnings, Choose
from egop.refresh.choosing import Choice
from egop.refresh.methods import aligned, together

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
        optimizer.check_lookahead()
        kinds = sorted({block.change.kind for block in optimizer.blocks})
        if kinds and not any(_can_align(block.change) for block in optimizer.blocks):
            raise ValueError(
                f"egop.Aligned rotates one side of a weight, a basis of structure Shared, not {', '.join(kinds)}. "
                "Leave basis= out, or use egop.Online() or egop.Every(...) to renew these."
            )
        choice.check(optimizer)
        return _Aligning(choice, self.every)


def _can_align(change: ChangeOfBasis) -> bool:
    return isinstance(change.structure(), Shared)


class _Aligning(Refresher):
    def __init__(self, choose: Choose, every: int) -> None:
        super().__init__()
        self.every, self.beginnings, self._said = every, Beginnings(choose), False
        self._again = InPlace(_rotations, Recorder())

    @property
    def unrotated(self) -> dict[str, str]:
        """Why weights have no rotation, by name, where the refresh has chosen."""
        return self.beginnings.unrotated

    def plan(self, optimizer: Rebasable) -> Plan | None:
        return self.beginnings.plan(optimizer)

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
        stacks = [stack for stack in optimizer.stacks if stack.active and self.can_renew(stack.change)]
        if stacks:
            self._align(optimizer, stacks)
        self.renewals += bool(stacks)
        others = {block.change.kind for block in optimizer.blocks if not _can_align(block.change)}
        if others and not stacks and not self._said and any(stack.active for stack in optimizer.stacks):
            self._said = True
            warnings.warn(
                f"egop.Aligned finds no basis that it can rotate, only of structure {', '.join(sorted(others))}: they "
                "stay as they are.",
                stacklevel=2,
            )

    def can_renew(self, change: ChangeOfBasis) -> bool:
        return _can_align(change)

    def rebased(self, names: Collection[str], *, replaced: bool) -> None:
        self.beginnings.rebased(names, replaced=replaced or self.steps == 0)

    def memories(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        made = self.beginnings.made_of(optimizer)
        return {block.name: {_MADE: torch.tensor([block.name in made], device="cpu")} for block in optimizer.blocks}

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

    def _align(self, optimizer: Rebasable, stacks: Sequence[Stack]) -> None:
        read = optimizer.read_by_lookahead(stacks)
        if read is None:
            rotations = _rotations(optimizer, stacks, "")
        else:
            rotations = self._again.of(read[0], optimizer, stacks, read[1])
        self.count_failures(torch.cat([sound.flatten() for _, sound in rotations]))
        for stack, (fresh, _) in zip(stacks, rotations, strict=True):
            for _, run in groupby(enumerate(stack.active), lambda pair: pair[1] - pair[0]):
                places, members = zip(*run, strict=True)
                tensors = {"basis": fresh[places[0] : places[-1] + 1]}
                optimizer.rebase_stack(stack, slice(members[0], members[-1] + 1), tensors, "rotate")

    def __getstate__(self) -> dict[str, Any]:
        """For copies: recordings belong to the stacks of this optimizer."""
        return self.__dict__ | {"_again": InPlace(_rotations, Recorder())}


def _rotations(optimizer: Rebasable, stacks: Sequence[Stack], settings: str) -> list[tuple[Tensor, Tensor]]:
    """New rotations of each stack's active blocks, and which are sound; those of one width by one call."""
    return together(aligned, [_image(optimizer, stack) for stack in stacks])


def _image(optimizer: Rebasable, stack: Stack) -> tuple[Tensor, Tensor]:
    """What the rotations of a stack's active blocks are made from, and the old ones."""
    (momentum,), (mapped,) = optimizer.lookahead(stack)
    change, _ = stack.active_part()
    # In coordinates, where M is R times the momentum: the factor of R A is that of M f(RᵀM)ᵀ.
    image = momentum.mT @ mapped if change.is_rowwise else momentum @ mapped.mT
    return stack.summed(image), change.tensors["basis"]  # over all rows, so that every process finds the same rotation
