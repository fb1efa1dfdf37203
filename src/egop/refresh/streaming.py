"""What keeps a basis current from the training gradients: running Gram matrices, batched as the blocks are."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Reparameterization
from egop.distributed import local, whole
from egop.optimizer import Aside, Batch, Batches, BoundBlock, InPlace, Moments, Rebasable, Recorder, Refresher, Replayed
from egop.refresh import iteration
from egop.refresh.first import announced, seconds
from egop.refresh.grams import add, is_in_parts, is_renewable, is_trained, of_blocks, renewal_cost, zeros_for
from egop.refresh.late import Outside, nothing_to_rotate, trained_names
from egop.refresh.turns import turns_of

Place = tuple[Batch, slice]  # some neighbours in a batch
_GRAM, _PHASE = "gram/", "phase"  # what is saved of a block: its matrices, and where it stands
Method = Callable[..., tuple[Tensor, ...]]  # of Gram matrices and bases: new bases, and which are sound
# The original coordinates in the structures that are wanted, for all parameters that are trained or for those of names.
Begin = Callable[[Rebasable, Collection[str] | None], Reparameterization]


class Streaming(Refresher):
    """Running means of the gradients' Gram matrices, and a basis that follows them.

    On a GPU nothing here waits for the device: whether a new basis is sound is decided there, and how many were not
    comes to the host later. Only a first basis is waited for.

    A gradient whose Gram matrix overflows (beyond 1e19 in float32) makes the next renewal of its block fail: basis,
    coordinates and moments stay as they are, and the Gram matrix starts anew with the gradient after that. One that
    was to give the first basis leaves that to the next.

    Args:
        begin: the original coordinates in the structures that are wanted, for parameters that have no basis yet.
        every: how many steps lie between two renewals of a block's basis.
        decay: of the running means.
        moments: what becomes of the inner optimizer's moments.
        spread: whether the blocks are renewed in turn rather than all in one step.
    """

    def __init__(
        self,
        begin: Begin,
        every: int,
        decay: float,
        moments: Moments,
        *,
        spread: bool = False,
    ) -> None:
        super().__init__()
        self.begin, self.every, self.decay, self.moments, self.spread = begin, every, decay, moments, spread
        self.left: dict[str, str] = {}  # why weights have no basis, by name, where the refresh has chosen
        self.grams: dict[str, dict[str, Tensor]] = {}  # of every block that has had a gradient
        self._stacks: dict[Batch, dict[str, Tensor]] = {}  # the same side by side: those above are views of these
        self.turns: dict[str, int] = {}  # for each block the step of a round in which it is renewed
        self._turns_of: Batches | None = None
        self._outside, self._began = Outside(), False
        self._totals: set[str] = set()  # blocks whose Gram matrices were loaded, so that every process has all of them
        self._from_nothing: set[str] = set()  # blocks whose first gradient is to give their first basis
        self._stacked_of: Batches | None = None
        self._aside, recorder = Aside(), Recorder()
        self._iterate, self._add = Replayed(iteration.renewed, recorder), InPlace(add, recorder)
        self._fresh: list[tuple[Batch, slice, dict[str, Tensor], Tensor]] = []  # new bases, and which of them are sound

    def before_step(self, optimizer: Rebasable) -> None:
        """Parameters that have no basis yet start from the original coordinates."""
        self.settle(optimizer)
        self.prepare(optimizer)
        if late := self._outside.arrived(optimizer):
            self._make_late_blocks(optimizer, late)

    def observe(self, optimizer: Rebasable) -> None:
        """Take the gradients into the running means."""
        if self._stacked_of is not optimizer.batches:  # what belongs to batches that are no more is dropped
            self._stacks = {batch: self._stacks[batch] for batch in optimizer.batches if batch in self._stacks}
            self._stacked_of = optimizer.batches
        batches = [batch for batch in optimizer.batches if batch.active and is_renewable(batch.change)]
        steady = [batch for batch in batches if self._is_steady(batch)]
        if steady and optimizer.batches.still:
            parts = [(batch.change, batch.gradients, self._stacked(batch)) for batch in steady]
            tensors = [tensor for _, gradients, stacks in parts for tensor in (*gradients, *stacks.values())]
            self._add.of(tensors, parts, self.decay)
            batches = [batch for batch in batches if batch not in steady]
        for batch in batches:
            self._observe(batch)
        if begun := self._from_nothing & self.grams.keys():
            self._find_first_bases(optimizer, begun)

    def after_step(self, optimizer: Rebasable) -> None:
        """Renew the bases whose turn it is."""
        self.steps += 1
        if not self._renew(list(self._due(optimizer)), self._iterate):
            self.settle(optimizer)
        self.renewals += self.steps % self.every == 0

    def renew(self, optimizer: Rebasable) -> None:
        """Renew all bases now, from scratch."""
        self.settle(optimizer)
        self._renew(list(self._seen(optimizer)), iteration.from_scratch)
        self.settle(optimizer)
        self.renewals += 1

    def settle(self, optimizer: Rebasable) -> None:
        """Take the bases that are being computed beside the training."""
        self._aside.join()
        fresh, self._fresh = self._fresh, []
        for batch, members, tensors, sound in fresh:
            self.count_failures(sound)
            if self.moments != "reset":  # those that failed are left as they are, since they have the old basis
                optimizer.turn(batch, members, tensors, self.moments)
                continue
            # Their moments are not to start anew, so here the host has to know which they are.
            for right, run in groupby(enumerate(of_blocks(sound)), lambda pair: pair[1]):
                places = [index for index, _ in run]
                own = slice(places[0], places[-1] + 1)
                if right:
                    part = {key: tensor[own] for key, tensor in tensors.items()}
                    optimizer.turn(batch, slice(members.start + own.start, members.start + own.stop), part, "reset")

    def can_renew(self, change: ChangeOfBasis) -> bool:
        """Whether it consists of eigenvectors of Gram matrices."""
        return is_renewable(change)

    def prepare(self, optimizer: Rebasable) -> None:
        """Without a basis, start from the original coordinates."""
        if self.steps == 0 and not optimizer.blocks and not self._began:
            self._make_blocks(optimizer)

    def rebased(self, names: Collection[str]) -> None:
        """Blocks to which someone has given a basis need no first one; before the first step all blocks are theirs."""
        self._from_nothing -= set(names)
        if self.steps == 0:
            self._outside = Outside()

    def memories(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        """The Gram matrices of each block, and of what follows from the past only: whether they count and so on."""
        found: dict[str, dict[str, Tensor]] = {}
        made = self._outside.made if self._outside.made <= {block.name for block in optimizer.blocks} else set()
        for batch in optimizer.batches:
            if not is_renewable(batch.change):
                continue
            # As views of what is here, unless processes have parts that are to be summed.
            sums = {key: batch.summed(stack) for key, stack in self._stacked(batch).items()} if complete else {}
            for index, block in enumerate(batch.blocks):
                name = block.name
                phase = [name in self.grams, name in self._from_nothing, name in made, self.turns.get(name, -1)]
                grams = self.grams.get(name) or zeros_for(block.change)
                found[name] = {f"{_GRAM}{key}": sums[key][index] if sums else gram for key, gram in grams.items()}
                found[name][_PHASE] = torch.tensor(phase, device=block.device)
        return found

    def load(
        self, counts: Sequence[int], memories: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        """Go on from what was saved."""
        wanted = [block for block in blocks if is_renewable(block.change)]
        if missing := [block.name for block in wanted if _PHASE not in memories[block.name]]:
            raise ValueError(
                "The state dict is incomplete or damaged, or of another refresh: it has no Gram matrices of "
                f"{', '.join(missing[:3])}."
            )
        phases = {block.name: whole(memories[block.name][_PHASE]).tolist() for block in wanted}
        grams, parts = {}, set()
        for block in wanted:
            own = {key: memories[block.name][f"{_GRAM}{key}"] for key in block.change.tensors}
            shapes = {key: gram.shape for key, gram in zeros_for(block.change).items()}
            if any(is_in_parts(gram, shapes[key]) for key, gram in own.items()):
                parts.add(block.name)
            elif {key: gram.shape for key, gram in own.items()} != shapes:
                raise ValueError(f"The Gram matrices of block '{block.name}' in the state dict have other shapes.")
            if phases[block.name][0]:
                grams[block.name] = {key: local(gram).to(block.device, copy=True) for key, gram in own.items()}
        super().load(counts, memories, blocks)
        self.grams, self._stacks, self._totals = grams, {}, set(grams) - parts
        self._from_nothing = {name for name, (_, begins, _, _) in phases.items() if begins}
        self._outside = Outside(name for name, (_, _, made, _) in phases.items() if made)
        self.turns, self._turns_of = {name: turn for name, (_, _, _, turn) in phases.items() if turn >= 0}, None
        self._began = False

    def reset(self) -> None:
        """Begin anew, without Gram matrices."""
        super().reset()
        self.grams, self._stacks, self._totals, self._from_nothing = {}, {}, set(), set()
        self._outside = Outside()
        self.turns, self._turns_of, self._began = {}, None, False

    def __getstate__(self) -> dict[str, Any]:
        """For copies: stacks, turns and recordings belong to the batches of this optimizer."""
        recorder = Recorder()
        return self.__dict__ | {
            "_stacks": {},
            "_turns_of": None,
            "_stacked_of": None,
            "_aside": Aside(),
            "_iterate": Replayed(iteration.renewed, recorder),
            "_add": InPlace(add, recorder),
        }

    def _make_blocks(self, optimizer: Rebasable) -> None:
        """On the first step of an optimizer without a basis."""
        basis = self.begin(optimizer, None)
        self.left = basis.left
        optimizer.rebase(basis, moments="reset")
        self._from_nothing = {block.name for block in optimizer.blocks}
        self._outside.decided(trained_names(optimizer), self._from_nothing)
        self._began = True
        if not basis:
            warnings.warn(nothing_to_rotate(optimizer, basis.left, type(self.refresh).__name__), stacklevel=2)

    def _make_late_blocks(self, optimizer: Rebasable, late: Sequence[str]) -> None:
        """For parameters that were not trained when the other blocks were made, or not there."""
        before = {block.name for block in optimizer.blocks}
        try:
            basis = self.begin(optimizer, late)
            self.left |= basis.left
            if basis:
                optimizer.add_blocks(basis)
        except (MemoryError, ValueError) as error:  # no reason to end a training that is under way
            warnings.warn(
                f"Parameters that are trained from now on ({', '.join(late)}) get no basis: {error}", stacklevel=2
            )
        new = {block.name for block in optimizer.blocks} - before
        self._from_nothing |= new
        self._outside.decided(late, new)

    def _find_first_bases(self, optimizer: Rebasable, begun: set[str]) -> None:
        """Of blocks that have a first gradient; where that is zero or not sound, the next one will do."""
        chosen: list[Place] = []
        for batch in optimizer.batches:
            if wanted := [index for index, block in enumerate(batch.blocks) if block.name in begun]:
                stack = next(iter(self._stacked(batch).values()))
                traces = batch.summed(stack.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)).tolist()
                chosen += self._runs(batch, [index for index in wanted if traces[index] != 0])
        sound = self._decompose_first(chosen) if chosen else set()
        self.settle(optimizer)
        self.renewals += bool(chosen)
        self._from_nothing -= sound
        for name in begun - sound:
            del self.grams[name]

    def _decompose_first(self, places: list[Place]) -> set[str]:
        """Compute first bases; the names of the blocks for which they are sound."""
        matrices = [
            matrix for batch, members in places for stack in self._stacked(batch).values() for matrix in stack[members]
        ]
        widths = [matrix.shape[-1] for matrix in matrices]
        total = sum(self._seconds(matrix.shape[-1], matrix.device) for matrix in matrices)
        with announced(widths, total) as done:
            self._renew(places, functools.partial(self._first, done=done))
            return {
                block.name
                for batch, members, _, sound in self._fresh
                for block, right in zip(batch.blocks[members], of_blocks(sound), strict=True)
                if right
            }

    # The first basis of a wide block, and roughly how long that takes; see `iteration.first`.
    _first = staticmethod(iteration.first)
    _seconds = staticmethod(functools.partial(seconds, wide=iteration.WIDE, rank=iteration.LEADING))

    def _is_steady(self, batch: Batch) -> bool:
        """Whether all blocks have a gradient, and have had one."""
        self._stacked(batch)  # drops Gram matrices of another structure
        return len(batch.active) == len(batch.blocks) and all(block.name in self.grams for block in batch.blocks)

    def _observe(self, batch: Batch) -> None:
        stacks = self._stacked(batch)
        names = [batch.blocks[index].name for index in batch.active]
        known = [name in self.grams for name in names]
        together = len(names) == len(batch.blocks) and len(set(known)) == 1
        for place in [slice(None)] if together else [slice(k, k + 1) for k in range(len(names))]:
            first = batch.active[place][0]
            members = slice(None) if together else slice(first, first + 1)
            # The mean starts at the first gradient's own Gram matrix.
            decay = self.decay if known[place][0] else 0.0
            gradients = [stacked[place] for stacked in batch.gradients]
            add(
                [(batch.change.part(members), gradients, {key: stack[members] for key, stack in stacks.items()})], decay
            )
        if not all(known):
            for name, index in zip(names, batch.active, strict=True):
                self.grams.setdefault(name, {key: stack[index] for key, stack in stacks.items()})

    def _stacked(self, batch: Batch) -> dict[str, Tensor]:
        """The Gram matrices of a batch's blocks, made when the batch is new."""
        if batch not in self._stacks:
            stacks = zeros_for(batch.change)
            shapes = {key: stack.shape[1:] for key, stack in stacks.items()}
            for index, block in enumerate(batch.blocks):
                known = self.grams.get(block.name)
                if known is not None and {key: gram.shape for key, gram in known.items()} != shapes:
                    del self.grams[block.name]  # of another structure
                for key, gram in self.grams.get(block.name, {}).items():
                    self.grams[block.name][key] = stacks[key][index].copy_(gram)
                    if block.name in self._totals and batch.by_rows and not batch.is_first:
                        stacks[key][index].zero_()
                self._totals.discard(block.name)
            self._stacks[batch] = stacks
        return self._stacks[batch]

    def _seen(self, optimizer: Rebasable) -> Iterator[Place]:
        """All blocks that have had a gradient."""
        for batch in optimizer.batches:
            yield from self._runs(batch, range(len(batch.blocks)))

    def _due(self, optimizer: Rebasable) -> Iterator[Place]:
        """Those whose turn it is."""
        now = self.steps % self.every
        if not self.spread and now:
            return
        if self._turns_of is not optimizer.batches:
            costs = {block.name: renewal_cost(batch) for batch in optimizer.batches for block in batch.blocks}
            self.turns = turns_of(costs, self.every, self.turns) if self.spread else dict.fromkeys(costs, 0)
            self._turns_of = optimizer.batches
        for batch in optimizer.batches:
            blocks = enumerate(batch.blocks)
            due = [index for index, block in blocks if self.turns[block.name] == now and is_trained(block)]
            yield from self._runs(batch, due)

    def _runs(self, batch: Batch, wanted: Iterable[int]) -> Iterator[Place]:
        """Of these blocks those that have had a gradient, neighbours together."""
        chosen = [index for index in wanted if batch.blocks[index].name in self.grams]
        for _, run in groupby(enumerate(chosen), lambda pair: pair[1] - pair[0]):
            members = [index for _, index in run]
            yield batch, slice(members[0], members[-1] + 1)

    def _renew(self, places: list[Place], method: Method) -> bool:
        """Compute new bases; whether that goes on beside what comes, on a GPU, until the next step takes them."""
        self.look_for_failures()
        inputs = [
            (batch, members, key, batch.summed(stack[members]), stack[members])
            for batch, members in places
            for key, stack in self._stacked(batch).items()
        ]
        used = [tensor for batch, _, key, total, gram in inputs for tensor in (total, gram, batch.change.tensors[key])]
        with self._aside.of(used) as beside:
            for (batch, members), own in groupby(inputs, lambda each: each[:2]):
                tensors, sound = {}, []
                for _, _, key, total, gram in own:
                    old = batch.change.tensors[key][members]
                    try:
                        tensors[key], right = method(total, old)
                    except torch.linalg.LinAlgError:
                        tensors[key], right = old.clone(), gram.new_zeros(gram.shape[:-2], dtype=torch.bool)
                    # What is not finite would never leave a running mean again.
                    torch.where(right[..., None, None], gram, gram.new_zeros(()), out=gram)
                    sound.append(right)
                right = torch.stack(sound).all(0)
                for key, fresh in tensors.items() if len(tensors) > 1 else ():  # a block is renewed as a whole
                    old = batch.change.tensors[key][members]
                    tensors[key] = torch.where(right[..., None, None], fresh, old)
                self._fresh.append((batch, members, tensors, right))
        return beside
