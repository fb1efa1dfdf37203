"""What keeps a basis current from the training gradients: running Gram matrices, batched as the blocks are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.batches import Batch, Batches
from egop.moments import Moments
from egop.refresh import iteration
from egop.refresh.base import Rebasable, Refresher
from egop.reparameterization import Reparameterization
from egop.replay import Aside, InPlace, Recorder, Replayed
from egop.structures import ChangeOfBasis

Place = tuple[Batch, slice]  # some neighbours in a batch
Method = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # of Gram matrices and bases: new bases, and which are sound


class Streaming(Refresher):
    """Running means of the gradients' Gram matrices, and a basis that follows them.

    On a GPU nothing here waits for the device: whether a new basis is sound is decided there, and how many were not
    comes to the host later.

    Args:
        begin: the original coordinates in the structures that are wanted, for an optimizer that has no basis yet.
        every: how many steps lie between two renewals of a block's basis.
        decay: of the running means.
        moments: what becomes of the inner optimizer's moments.
        spread: whether the blocks are renewed in turn rather than all in one step.
    """

    def __init__(
        self,
        begin: Callable[[Rebasable], Reparameterization],
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
        self._turns: tuple[Batches, dict[Batch, list[int]]] | None = None
        self._totals: set[str] = set()  # blocks whose Gram matrices were loaded, so that every process has all of them
        self._from_nothing: set[str] = set()  # blocks whose first gradient is to give their first basis
        self._stacked_of: Batches | None = None
        self._aside, recorder = Aside(), Recorder()
        self._iterate, self._add = Replayed(iteration.renewed, recorder), InPlace(_add, recorder)
        self._fresh: list[tuple[Batch, slice, dict[str, Tensor], Tensor]] = []  # new bases, and which of them are sound

    def before_step(self, optimizer: Rebasable) -> None:
        """On the first step of an optimizer without a basis, start from the original coordinates."""
        self.settle(optimizer)
        if self.steps == 0 and not optimizer.blocks:
            basis = self.begin(optimizer)
            self.left = basis.left
            optimizer.rebase(basis, moments="reset")
            self._from_nothing = {block.name for block in optimizer.blocks}

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
            places = [
                place
                for batch in optimizer.batches
                for place in self._runs(batch, [i for i, block in enumerate(batch.blocks) if block.name in begun])
            ]
            self._renew(optimizer, places, iteration.from_scratch)
            self.settle(optimizer)
            self.renewals += 1
            self._from_nothing -= begun

    def after_step(self, optimizer: Rebasable) -> None:
        """Renew the bases whose turn it is."""
        self.steps += 1
        self._renew(optimizer, list(self._due(optimizer)), self._iterate)
        self.renewals += self.steps % self.every == 0

    def renew(self, optimizer: Rebasable) -> None:
        """Renew all bases now, from scratch."""
        self.settle(optimizer)
        self._renew(optimizer, list(self._seen(optimizer)), iteration.from_scratch)
        self.settle(optimizer)
        self.renewals += 1

    def settle(self, optimizer: Rebasable) -> None:
        """Take the bases that are being computed beside the training."""
        self._aside.join()
        fresh, self._fresh = self._fresh, []
        for batch, members, tensors, sound in fresh:
            self.count_failures(sound)
            optimizer.turn(batch, members, tensors, self.moments)

    def state_dict(self) -> dict[str, Any]:
        """The counts and the Gram matrices."""
        grams = {name: dict(own) for name, own in self.grams.items()}
        for batch, stacks in self._stacks.items():
            for key, stack in stacks.items() if batch.by_rows else ():
                total = batch.summed(stack)
                # From here on the first process has it all, as after loading: both go on alike to the last bit.
                stack.copy_(total if batch.is_first else torch.zeros_like(total))
                for block, own in zip(batch.blocks, total, strict=True):
                    if block.name in grams:
                        grams[block.name][key] = own
        return super().state_dict() | {"grams": grams, "from_nothing": sorted(self._from_nothing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state dict."""
        if "grams" not in state:
            raise ValueError("The state dict is incomplete or damaged, or of another refresh: it has no Gram matrices.")
        grams = {name: {key: gram.clone() for key, gram in own.items()} for name, own in state["grams"].items()}
        super().load_state_dict(state)
        self.grams, self._stacks, self._totals = grams, {}, set(grams)
        self._from_nothing = set(state["from_nothing"])

    def reset(self) -> None:
        """Begin anew, without Gram matrices."""
        super().reset()
        self.grams, self._stacks, self._totals, self._from_nothing = {}, {}, set(), set()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: stacks, turns and recordings belong to the batches of this optimizer."""
        recorder = Recorder()
        return self.__dict__ | {
            "_stacks": {},
            "_turns": None,
            "_stacked_of": None,
            "_aside": Aside(),
            "_iterate": Replayed(iteration.renewed, recorder),
            "_add": InPlace(_add, recorder),
        }

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
            _add(
                [(batch.change.part(members), gradients, {key: stack[members] for key, stack in stacks.items()})], decay
            )
        if not all(known):
            for name, index in zip(names, batch.active, strict=True):
                self.grams.setdefault(name, {key: stack[index] for key, stack in stacks.items()})

    def _stacked(self, batch: Batch) -> dict[str, Tensor]:
        """The Gram matrices of a batch's blocks, made when the batch is new."""
        if batch not in self._stacks:
            tensors = batch.change.tensors.items()
            stacks = {key: basis.new_zeros(*basis.shape[:-1], basis.shape[-2]) for key, basis in tensors}
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
        if not self.spread:
            if self.steps % self.every == 0:
                yield from self._seen(optimizer)
            return
        if self._turns is None or self._turns[0] is not optimizer.batches:
            self._turns = optimizer.batches, _turns(optimizer.batches, self.every)
        for batch, turns in self._turns[1].items():
            now = [index for index, turn in enumerate(turns) if turn == self.steps % self.every]
            yield from self._runs(batch, now)

    def _runs(self, batch: Batch, wanted: Iterable[int]) -> Iterator[Place]:
        """Of these blocks those that have had a gradient, neighbours together."""
        chosen = [index for index in wanted if batch.blocks[index].name in self.grams]
        for _, run in groupby(enumerate(chosen), lambda pair: pair[1] - pair[0]):
            members = [index for _, index in run]
            yield batch, slice(members[0], members[-1] + 1)

    def _renew(self, optimizer: Rebasable, places: list[Place], method: Method) -> None:
        """Compute new bases; on a GPU beside what comes until the next step, when they are taken."""
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
                self._fresh.append((batch, members, tensors, torch.stack(sound).all(0)))
        if not beside:
            self.settle(optimizer)


class Drifting(Streaming):
    """The same, but renewed from scratch, and only when the basis no longer diagonalises the Gram matrices.

    Args:
        tolerance: how large the part off the diagonal may be.
        **settings: as for the other.
    """

    def __init__(self, tolerance: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.tolerance = tolerance

    def after_step(self, optimizer: Rebasable) -> None:
        """Renew all bases if one has drifted."""
        self.steps += 1
        if self.steps % self.every == 0 and self._drifted(optimizer):
            self.renew(optimizer)

    def _drifted(self, optimizer: Rebasable) -> bool:
        parts = [
            (iteration.off_diagonal(batch.summed(gram[members]), batch.change.tensors[key][members]) <= self.tolerance)
            .logical_not()
            .flatten()
            for batch, members in self._seen(optimizer)
            for key, gram in self._stacked(batch).items()
        ]
        return bool(torch.cat(parts).any()) if parts else False


def _add(parts: Iterable[tuple[ChangeOfBasis, Sequence[Tensor], Mapping[str, Tensor]]], decay: float) -> None:
    """Take gradients into running means of Gram matrices."""
    for change, gradients, stacks in parts:
        rows = change.rows(gradients)
        assert rows is not None
        for key, stack in stacks.items():
            one_by_one = rows[key].reshape(-1, *rows[key].shape[-2:])
            stack.view(-1, *stack.shape[-2:]).baddbmm_(one_by_one.mT, one_by_one, beta=decay, alpha=1 - decay)


def is_renewable(change: ChangeOfBasis) -> bool:
    """Whether a change of basis consists of eigenvectors of Gram matrices."""
    return type(change).rows is not ChangeOfBasis.rows


def _turns(batches: Batches, every: int) -> dict[Batch, list[int]]:
    """For each block the step of a round in which it is renewed, so that all steps of a round have like costs."""
    costs = {
        batch: sum(math.prod(tensor.shape[1:-2]) * tensor.shape[-2] ** 3 for tensor in batch.change.tensors.values())
        if is_renewable(batch.change)
        else 0
        for batch in batches
    }  # of one block
    total, before = sum(costs[batch] * len(batch.blocks) for batch in batches), 0.0
    turns: dict[Batch, list[int]] = {}
    for batch, cost in costs.items():
        places = [before + (index + 0.5) * cost for index in range(len(batch.blocks))]
        turns[batch] = [int(every * place / total) for place in places] if total else [0] * len(places)
        before += cost * len(batch.blocks)
    return turns
