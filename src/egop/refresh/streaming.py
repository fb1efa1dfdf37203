"""A basis that follows the training gradients: a statistic of them × a schedule × a method."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Plan
from egop.distributed import whole
from egop.numerics import Aside, Recorder, Replayed, exact_products
from egop.optimizer import BoundBlock, Moments, Rebasable, Refresher, Stack
from egop.refresh.beginnings import Beginnings, Choose
from egop.refresh.grams import GramMatrices, Place, along
from egop.refresh.methods import Method, Renewal, announced, clear_null_space, together
from egop.refresh.schedules import Schedule

_PHASE = "phase"  # where a block stands: has it had a gradient, does it wait for a basis, was it made here, its turn


class Streaming(Refresher):
    """Keeps the bases of one optimizer current from its training gradients.

    On a GPU nothing here waits for the device: whether a new basis is sound is decided there, and how many were not
    comes to the host later. Only a first basis is waited for. A renewal that fails leaves basis, coordinates and
    moments of its block as they are; one that was to give the first basis leaves that to the next gradient.

    Args:
        choose: the original coordinates in the structures that are wanted, for parameters that have no basis yet.
        statistic: what is remembered of the gradients.
        schedule: when bases are renewed, and whose turn it is.
        method: how a basis follows the statistic.
        moments: what becomes of the inner optimizer's moments.
    """

    def __init__(
        self, choose: Choose, statistic: GramMatrices, schedule: Schedule, method: Method, moments: Moments
    ) -> None:
        super().__init__()
        self.beginnings = Beginnings(choose)
        self.statistic, self.schedule, self.method, self.moments = statistic, schedule, method, moments
        self._aside, self._renewed = Aside(), self._recorded()
        self._fresh: list[tuple[Stack, slice, dict[str, Tensor], Tensor]] = []  # new bases, and which of them are sound

    @property
    def unrotated(self) -> dict[str, str]:
        """Why weights have no basis, by name, where the refresh has chosen."""
        return self.beginnings.unrotated

    def plan(self, optimizer: Rebasable) -> Plan | None:
        """The blocks that it makes itself, if it does."""
        return self.beginnings.plan(optimizer)

    def spectra(self, optimizer: Rebasable) -> dict[str, dict[str, Tensor]]:
        """What the running Gram matrices hold along each vector of the bases.

        None of blocks of which this process has some rows only: to add up the others takes all processes.
        """
        self.settle(optimizer)
        known = [block for block in optimizer.blocks if block.name in self.statistic.grams and not block.by_rows]
        return {
            block.name: {
                key: along(gram, block.change.tensors[key]) for key, gram in self.statistic.grams[block.name].items()
            }
            for block in known
            if self.statistic.has_seen(block)
        }

    def before_step(self, optimizer: Rebasable) -> None:
        """Parameters that have no basis yet start from the original coordinates."""
        self.settle(optimizer)
        self.prepare(optimizer)
        self.beginnings.make_late(optimizer)

    def observe(self, optimizer: Rebasable) -> None:
        """Take the gradients into the statistic; first ones give first bases."""
        self.statistic.move_to(optimizer.stacks)
        self.statistic.observe(optimizer.stacks)
        if begun := self.beginnings.waiting & self.statistic.grams.keys():
            self._find_first_bases(optimizer, begun)

    def after_step(self, optimizer: Rebasable) -> None:
        """Renew the bases that are due."""
        self.steps += 1
        self.statistic.move_to(optimizer.stacks)
        due = list(self.schedule.due(optimizer.stacks, self.steps, self.statistic))
        beside = self._renew(due, self._renewed)
        if not (beside and self.method.beside):
            self.settle(optimizer)
        self.renewals += self.schedule.is_renewal(self.steps, bool(due))

    def renew(self, optimizer: Rebasable) -> None:
        """Renew all bases now, from scratch."""
        self.settle(optimizer)
        self.statistic.move_to(optimizer.stacks)
        places = [place for stack in optimizer.stacks for place in self.statistic.places(stack)]
        self._renew(places, self.method.anew)
        self.settle(optimizer)
        self.renewals += bool(places)

    def settle(self, optimizer: Rebasable) -> None:
        """Take the bases that are being computed beside the training."""
        self._aside.join()
        fresh, self._fresh = self._fresh, []
        for stack, members, tensors, sound in fresh:
            self.count_failures(sound)
            if self.moments != "reset":  # those that failed are left as they are, since they have the old basis
                optimizer.rebase_stack(stack, members, tensors, self.moments)
                continue
            # Their moments are not to start anew, so here the host has to know which they are.
            for right, run in groupby(enumerate(_of_blocks(sound)), lambda pair: pair[1]):
                places = [index for index, _ in run]
                part = slice(places[0], places[-1] + 1)
                if right:
                    here = slice(members.start + part.start, members.start + part.stop)
                    bases = {key: tensor[part] for key, tensor in tensors.items()}
                    optimizer.rebase_stack(stack, here, bases, "reset")

    def can_renew(self, change: ChangeOfBasis) -> bool:
        """Whether it consists of eigenvectors of Gram matrices."""
        return change.is_renewable()

    def prepare(self, optimizer: Rebasable) -> None:
        """Without a basis, start from the original coordinates."""
        if self.steps == 0:
            self.beginnings.make_first(optimizer, type(self.refresh).__name__)

    def rebased(self, names: Collection[str], *, replaced: bool) -> None:
        """Blocks to which someone has given a basis need no first one."""
        self.beginnings.rebased(names, replaced=replaced or self.steps == 0)

    def memories(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        """The statistic of each block, and of what follows from the past only: whether it counts and so on."""
        memories: dict[str, dict[str, Tensor]] = {}
        made = self.beginnings.made_of(optimizer)
        for stack in optimizer.stacks:
            if not stack.change.is_renewable():
                continue
            for block, memory in zip(stack.blocks, self.statistic.saved(stack, complete=complete), strict=True):
                name = block.name
                seen, waits = self.statistic.has_seen(block), name in self.beginnings.waiting
                phase = [seen, waits, name in made, self.schedule.turns.get(name, -1)]
                memories[name] = memory | {_PHASE: torch.tensor(phase, device=block.device)}
        return memories

    def load(
        self, counts: Sequence[int], memories: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        """Go on from what was saved."""
        wanted = [block for block in blocks if block.change.is_renewable()]
        if missing := [block.name for block in wanted if _PHASE not in memories[block.name]]:
            raise ValueError(
                "The state dict is incomplete or damaged, or of another refresh: it has no Gram matrices of "
                f"{', '.join(missing[:3])}."
            )
        phases = {block.name: whole(memories[block.name][_PHASE]).tolist() for block in wanted}
        if wrong := [name for name, phase in phases.items() if not (isinstance(phase, list) and len(phase) == 4)]:
            raise ValueError(f"The state dict is incomplete or damaged: the phase of '{wrong[0]}' is not four numbers.")
        seen, waiting, made = ({name for name, phase in phases.items() if phase[place]} for place in range(3))
        statistic = self.statistic.loaded(memories, wanted, seen)
        super().load(counts, memories, blocks)
        self._start_with(statistic, made, waiting, {name: phase[3] for name, phase in phases.items() if phase[3] >= 0})

    def reset(self) -> None:
        """Begin anew, without Gram matrices."""
        super().reset()
        self._start_with(self.statistic.loaded({}, [], ()), (), (), {})

    def _start_with(
        self, statistic: GramMatrices, made: Collection[str], waiting: Collection[str], turns: Mapping[str, int]
    ) -> None:
        # New objects, since a copy of this refresher may still have the old ones.
        unrotated = self.beginnings.unrotated
        self.beginnings = Beginnings(self.beginnings.choose, made, waiting)
        self.beginnings.unrotated = unrotated
        self.statistic, self.schedule = statistic, self.schedule.loaded(turns)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: recordings belong to the stacks of this optimizer."""
        return self.__dict__ | {"_aside": Aside(), "_renewed": self._recorded()}

    def _recorded(self) -> Renewal:
        return Replayed(self.method.renewed, Recorder()) if self.method.beside else self.method.renewed

    def _find_first_bases(self, optimizer: Rebasable, begun: set[str]) -> None:
        """Of blocks that have a first gradient; where that is zero or not sound, the next one will do."""
        chosen: list[Place] = []
        for stack in optimizer.stacks:
            if wanted := [index for index, block in enumerate(stack.blocks) if block.name in begun]:
                traces = self.statistic.traces(stack)
                chosen += self.statistic.places(stack, [index for index in wanted if traces[index] != 0])
        sound = self._decompose_first(chosen) if chosen else set()
        self.settle(optimizer)
        self.renewals += bool(chosen)
        self.beginnings.waiting -= sound
        self.statistic.forget(begun - sound)

    def _decompose_first(self, places: list[Place]) -> set[str]:
        """Compute first bases; the names of the blocks for which they are sound."""
        grams = [gram[members] for stack, members in places for gram in self.statistic.of(stack).values()]
        matrices = [matrix for gram in grams for matrix in gram]
        with announced([matrix.shape[-1] for matrix in matrices], self.method.seconds(matrices)) as done:
            self._renew(places, functools.partial(self.method.first, done=done))
            self._fresh = [_refine_first_bases(*each) for each in self._fresh]
            return {
                block.name
                for stack, members, _, sound in self._fresh
                for block, right in zip(stack.blocks[members], _of_blocks(sound), strict=True)
                if right
            }

    def _renew(self, places: list[Place], renewal: Renewal) -> bool:
        """Compute new bases; whether that goes on beside what comes, on a GPU, until the next step takes them."""
        self.look_for_failures()
        inputs = [
            (stack, members, key, stack.summed(gram[members]), gram[members])
            for stack, members in places
            for key, gram in self.statistic.of(stack).items()
        ]
        used = [tensor for stack, _, key, total, gram in inputs for tensor in (total, gram, stack.change.tensors[key])]
        with self._aside.of(used) as beside:
            pairs = [(total, stack.change.tensors[key][members]) for stack, members, key, total, _ in inputs]
            renewed = iter(together(renewal, pairs))
            for (stack, members), matrices in groupby(inputs, lambda given: given[:2]):
                tensors, sound = {}, []
                for _, _, key, _, gram in matrices:
                    tensors[key], right = next(renewed)
                    # What is not finite would never leave a running mean again.
                    torch.where(right[..., None, None], gram, gram.new_zeros(()), out=gram)
                    sound.append(right)
                right = torch.stack(sound).all(0)
                for key, fresh in tensors.items() if len(tensors) > 1 else ():  # a block is renewed as a whole
                    old = stack.change.tensors[key][members]
                    tensors[key] = torch.where(right[..., None, None], fresh, old)
                self._fresh.append((stack, members, tensors, right))
        return beside


def _refine_first_bases(
    stack: Stack, members: slice, tensors: dict[str, Tensor], sound: Tensor
) -> tuple[Stack, slice, dict[str, Tensor], Tensor]:
    """Remove what rounding of the Gram matrices has left of the gradients in directions without gradient."""
    change = stack.change.part(members).with_tensors(tensors)
    places = [stack.active.index(index) for index in range(len(stack.blocks))[members]]
    rows = change.rows([gradient[places] for gradient in stack.gradients])
    assert rows is not None
    refined = {}
    for key, basis in tensors.items():
        with exact_products():
            inside = rows[key] @ basis
            gram = stack.summed(inside.mT @ inside)
        refined[key] = torch.where(sound[..., None, None], clear_null_space(basis, gram), basis)
    return stack, members, refined, sound


def _of_blocks(sound: Tensor) -> list[bool]:
    """Whether all matrices of each block are sound; a block of experts has several of a kind."""
    flags: list[bool] = sound.flatten(1).all(1).tolist() if sound.dim() > 1 else sound.tolist()
    return flags
