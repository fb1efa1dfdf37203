"""Aligned: rotations that follow the momentum, chosen for the base optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Shared, Side
from egop.distributed import to_full
from egop.numerics import GraphedFunction, Recorder, check_positive_int
from egop.optimizer import BoundBlock, Rebasable, Refresh, Refresher, Stack
from egop.refresh.eigenbases import align, find_runs, renew_in_batches
from egop.refresh.new_blocks import BlockCreatingRefresher

_CREATED = "created"  # saved for each block: whether this refresh created it


@dataclass(frozen=True)
class Aligned(Refresh):
    """A refresh that rotates one side of each weight to align the base optimizer's update with its momentum.

    Every ``every`` steps, before the update, R becomes the orthonormal factor of M f(RᵀM)ᵀ, where M is the momentum
    and f the base optimizer's map from momentum to update: one step of power iteration. With
    ``egop.optim.Sinkhorn`` this is ARO (arXiv 2602.09006). It stores the rotations only, no Gram matrices. It works
    with optimizers whose map is known: ``egop.optim.Sinkhorn``, ``Sign``, and Adam, whose map divides by its second
    moment.

    Args:
        every: number of steps between updates of the rotation.
        side: which side of a weight is rotated, as in :class:`egop.Shared`.
        memory: memory limit for all rotations together.

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
        check_positive_int("every", self.every)
        Shared(side=self.side)  # checks the side

    def start(self, optimizer: Rebasable) -> Refresher:
        """Create the refresher for one optimizer."""
        optimizer.check_lookahead()
        return _AlignedRefresher(optimizer, self)


class _AlignedRefresher(BlockCreatingRefresher):
    def __init__(self, optimizer: Rebasable, config: Aligned) -> None:
        super().__init__(optimizer, config, "auto", "parameter", config.memory, (Shared(side=config.side),))
        self._every = config.every
        self._renewal = GraphedFunction(align, Recorder())

    def observe(self, optimizer: Rebasable) -> None:
        self.report_failures()
        if self.steps % self._every == 0:
            self.renew(optimizer)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1

    def renew(self, optimizer: Rebasable) -> None:
        """Rotate now, using the gradients of the current step. Outside a step there are none, so nothing happens."""
        stacks = [stack for stack in optimizer.stacks if stack.active and self.can_renew(stack.change)]
        if not stacks:
            return
        self.renewals += 1
        rotations = renew_in_batches(self._renewal, [_compute_image(optimizer, stack) for stack in stacks])
        self.count_failures(torch.cat([sound.flatten() for _, sound in rotations]))
        for stack, (fresh, _) in zip(stacks, rotations, strict=True):
            for places, members in find_runs(stack.active):
                optimizer.rebase_stack(stack, members, {"basis": fresh[places]}, "rotate")

    def can_renew(self, change: ChangeOfBasis) -> bool:
        return isinstance(change.structure(), Shared)

    def block_states(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        created = self.find_created(optimizer)
        names = [block.name for block in optimizer.blocks]
        return {name: {_CREATED: torch.tensor([name in created], device="cpu")} for name in names}

    def load(
        self, counts: Sequence[int], states: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        if missing := [block.name for block in blocks if _CREATED not in states[block.name]]:
            raise ValueError(f"It was saved with another refresh, which has no entry for {', '.join(missing[:3])}.")
        created = [block.name for block in blocks if bool(to_full(states[block.name][_CREATED]).any())]
        super().load(counts, states, blocks)
        self.restart(created)

    def reset(self) -> None:
        super().reset()
        self.restart()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the recordings out of copies."""
        return super().__getstate__() | {"_renewal": GraphedFunction(align, Recorder())}


def _compute_image(optimizer: Rebasable, stack: Stack) -> tuple[Tensor, Tensor]:
    """Return A = M f(M)ᵀ for the active blocks of a stack, in coordinates, and their rotations R.

    The momentum itself is R M, so R A has the same orthonormal factor as the formula in :class:`Aligned`.
    """
    (momentum,), (mapped,) = optimizer.lookahead(stack)
    change, _ = stack.active_part()
    image = momentum.mT @ mapped if change.is_rowwise else momentum @ mapped.mT
    return stack.sum_over_rows(image), change.tensors["basis"]  # summed, so that every process finds the same rotation
