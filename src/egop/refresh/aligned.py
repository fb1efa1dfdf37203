"""Aligned: the rotation that serves the base optimizer best."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

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
        alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[_Wanted]] = {}
        for stack in optimizer.stacks:
            if stack.active and self.can_renew(stack.change):
                wanted = _Wanted.of(optimizer, stack)
                alike.setdefault((wanted.basis.shape[1:], wanted.basis.dtype, wanted.basis.device), []).append(wanted)
        for group in alike.values():  # of one width, whatever the other side is: one call for all of them
            self._align(optimizer, group)
        self.renewals += bool(alike)
        others = {block.change.kind for block in optimizer.blocks if not _can_align(block.change)}
        if others and not alike and not self._said and any(stack.active for stack in optimizer.stacks):
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

    def _align(self, optimizer: Rebasable, group: Sequence[_Wanted]) -> None:
        images, bases = ([getattr(wanted, name) for wanted in group] for name in ("image", "basis"))
        fresh, sound = aligned(*(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (images, bases)))
        self.count_failures(sound)
        for wanted, part in zip(group, fresh.split([len(basis) for basis in bases]), strict=True):
            for _, run in groupby(enumerate(wanted.stack.active), lambda pair: pair[1] - pair[0]):
                places, members = zip(*run, strict=True)
                tensors = {"basis": part[places[0] : places[-1] + 1]}
                optimizer.rebase_stack(wanted.stack, slice(members[0], members[-1] + 1), tensors, "rotate")


class _Wanted(NamedTuple):
    """What the rotations of a stack's active blocks are made from."""

    stack: Stack
    image: Tensor
    basis: Tensor

    @classmethod
    def of(cls, optimizer: Rebasable, stack: Stack) -> _Wanted:
        (momentum,), (mapped,) = optimizer.lookahead(stack)
        change, _ = stack.active_part()
        # In coordinates, where M is R times the momentum: the factor of R A is that of M f(RᵀM)ᵀ.
        image = momentum.mT @ mapped if change.rowwise else momentum @ mapped.mT
        return cls(stack, image, change.tensors["basis"])
