"""The statistic: running means of the gradients' Gram matrices, stacked as the blocks are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import to_full
from egop.numerics import InPlaceGraph, Recorder
from egop.optimizer import BoundBlock, Stack, Stacks

Place = tuple[Stack, slice]  # some neighbours in a stack
_GRAM = "gram/"  # before the name of each matrix, where they are saved


class GramMatrices:
    """Of every block that has had a gradient the running means of its Gram matrices.

    A gradient whose Gram matrix overflows (beyond 1e19 in float32) makes the next renewal of its block fail; the Gram
    matrix then starts anew with the gradient after that.

    Args:
        decay: of the running means.
        grams: what was remembered before, by block name.
        totals: of these the blocks whose matrices every process has as a whole, not the part of its own rows.
    """

    def __init__(
        self, decay: float, grams: Mapping[str, dict[str, Tensor]] | None = None, totals: Iterable[str] = ()
    ) -> None:
        self.decay = decay
        self.grams = dict(grams or {})
        self._totals = set(totals)
        self._stacks: dict[Stack, dict[str, Tensor]] = {}  # the same side by side: those above are views of these
        self._known: Stacks | None = None  # whose stacks these are
        self._add = InPlaceGraph(add, Recorder())

    def move_to(self, stacks: Stacks) -> None:
        """Lie side by side as the blocks do now; to be called before anything else is done with stacks."""
        if self._known is stacks:
            return
        self._stacks = {stack: self._stacks.get(stack) or self._laid_out(stack) for stack in stacks}
        self._known = stacks

    def observe(self, stacks: Stacks) -> None:
        """Take the gradients of a step into the running means."""
        active = [stack for stack in stacks if stack.active and stack.change.is_renewable()]
        steady = [stack for stack in active if stacks.still and self._is_steady(stack)]
        if steady:
            parts = [(stack.change, stack.gradients, self.of(stack)) for stack in steady]
            tensors = [tensor for _, gradients, grams in parts for tensor in (*gradients, *grams.values())]
            self._add.run(tensors, parts, self.decay)
        for stack in active:
            if stack not in steady:
                self._observe(stack)

    def of(self, stack: Stack) -> dict[str, Tensor]:
        """The Gram matrices of a stack's blocks."""
        return self._stacks[stack]

    def places(self, stack: Stack, wanted: Iterable[int] | None = None) -> Iterator[Place]:
        """Of these blocks of a stack, or all that are trained, those that have had a gradient, neighbours together."""
        indices = [i for i, block in enumerate(stack.blocks) if block.is_trained] if wanted is None else wanted
        chosen = [index for index in indices if stack.blocks[index].name in self.grams]
        for _, run in groupby(enumerate(chosen), lambda pair: pair[1] - pair[0]):
            members = [index for _, index in run]
            yield stack, slice(members[0], members[-1] + 1)

    def has_seen(self, block: BoundBlock) -> bool:
        """Whether a block has had a gradient, in the structure that it has now."""
        grams = self.grams.get(block.name, {})
        return {key: gram.shape for key, gram in grams.items()} == {
            key: torch.Size((*basis.shape[:-1], basis.shape[-2])) for key, basis in block.change.tensors.items()
        }

    def traces(self, stack: Stack) -> list[float]:
        """The trace of one Gram matrix of each block: zero without any gradient."""
        gram = next(iter(self.of(stack).values()))
        traces: list[float] = stack.summed(gram.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)).tolist()
        return traces

    def forget(self, names: Iterable[str]) -> None:
        """Start anew with the next gradient of these blocks."""
        for name in names:
            del self.grams[name]

    def saved(self, stack: Stack, *, complete: bool) -> list[dict[str, Tensor]]:
        """Return the Gram matrices of each block of a stack.

        Args:
            stack: the stack.
            complete: whether to sum the parts of all processes that hold rows of a block. The first process then keeps
                the sum and the others start from zero, as after loading: so a resumed run rounds as this one does.
                Otherwise return views of the local part.
        """
        known = [self.grams[block.name] if self.has_seen(block) else zeros_for(block.change) for block in stack.blocks]
        if complete and stack.by_rows:
            if not stack.is_first:  # what is here as a whole is there, too
                names = [block.name for block in stack.blocks]
                known = [
                    {key: torch.zeros_like(gram) for key, gram in grams.items()} if name in self._totals else grams
                    for name, grams in zip(names, known, strict=True)
                ]
            sums = {key: stack.summed(torch.stack([grams[key] for grams in known])) for key in known[0]}
            known = [{key: total[index] for key, total in sums.items()} for index in range(len(known))]
            for block, totals in zip(stack.blocks, known, strict=True):
                if block.name not in self._totals and self.has_seen(block):
                    for key, gram in self.grams[block.name].items():
                        gram.copy_(totals[key] if stack.is_first else torch.zeros_like(gram))
        return [{f"{_GRAM}{key}": gram for key, gram in grams.items()} for grams in known]

    def loaded(
        self, memories: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock], seen: Collection[str]
    ) -> GramMatrices:
        """A statistic that goes on from what was saved; an error where that does not fit the blocks.

        Args:
            memories: what :meth:`saved` gave, by block name.
            blocks: the blocks.
            seen: the names of those that had had a gradient.
        """
        grams = {}
        for block in blocks:
            if missing := [key for key in block.change.tensors if f"{_GRAM}{key}" not in memories[block.name]]:
                where = f"Gram matrix '{missing[0]}' of block '{block.name}'"
                raise ValueError(f"The state dict is incomplete or damaged: it has no {where}.")
            matrices = {key: to_full(memories[block.name][f"{_GRAM}{key}"]) for key in block.change.tensors}
            shapes = {key: gram.shape for key, gram in zeros_for(block.change).items()}
            if {key: gram.shape for key, gram in matrices.items()} != shapes:
                raise ValueError(f"The Gram matrices of block '{block.name}' in the state dict have other shapes.")
            if block.name in seen:
                grams[block.name] = {key: gram.to(block.device, copy=True) for key, gram in matrices.items()}
        return GramMatrices(self.decay, grams, totals=grams)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: stacks and recordings belong to the optimizer of this one."""
        return self.__dict__ | {"_stacks": {}, "_known": None, "_add": InPlaceGraph(add, Recorder())}

    def _laid_out(self, stack: Stack) -> dict[str, Tensor]:
        """What is remembered of the blocks of a new stack, side by side; that of another structure is dropped."""
        if not stack.change.is_renewable():
            return {}
        grams = zeros_for(stack.change)
        for index, block in enumerate(stack.blocks):
            if not self.has_seen(block):
                self.grams.pop(block.name, None)
            for key, gram in self.grams.get(block.name, {}).items():
                self.grams[block.name][key] = grams[key][index].copy_(gram)
                if block.name in self._totals and stack.by_rows and not stack.is_first:
                    grams[key][index].zero_()
            self._totals.discard(block.name)
        return grams

    def _is_steady(self, stack: Stack) -> bool:
        """Whether all blocks have a gradient, and have had one."""
        return len(stack.active) == len(stack.blocks) and all(block.name in self.grams for block in stack.blocks)

    def _observe(self, stack: Stack) -> None:
        grams = self.of(stack)
        names = [stack.blocks[index].name for index in stack.active]
        known = [name in self.grams for name in names]
        together = len(names) == len(stack.blocks) and len(set(known)) == 1
        for place in [slice(None)] if together else [slice(k, k + 1) for k in range(len(names))]:
            first = stack.active[place][0]
            members = slice(None) if together else slice(first, first + 1)
            # The mean starts at the first gradient's own Gram matrix.
            decay = self.decay if known[place][0] else 0.0
            gradients = [gradient[place] for gradient in stack.gradients]
            part = {key: gram[members] for key, gram in grams.items()}
            add([(stack.change.part(members), gradients, part)], decay)
        if not all(known):
            for name, index in zip(names, stack.active, strict=True):
                self.grams.setdefault(name, {key: gram[index] for key, gram in grams.items()})


def add(parts: Iterable[tuple[ChangeOfBasis, Sequence[Tensor], Mapping[str, Tensor]]], decay: float) -> None:
    """Take gradients into running means of Gram matrices."""
    for change, gradients, grams in parts:
        rows = change.rows(gradients)
        assert rows is not None
        for key, gram in grams.items():
            one_by_one = rows[key].flatten(0, -3)  # of every matrix of every block
            gram.flatten(0, -3).baddbmm_(one_by_one.mT, one_by_one, beta=decay, alpha=1 - decay)


def along(gram: Tensor, basis: Tensor) -> Tensor:
    """What Gram matrices hold along the columns of bases, descending, in float64: eigenvalues of a current basis."""
    held = ((gram @ basis) * basis).sum(-2, dtype=torch.float64).clamp_min(0)
    return held.sort(dim=-1, descending=True).values


def zeros_for(change: ChangeOfBasis) -> dict[str, Tensor]:
    """Gram matrices of no gradients at all, for a basis or stacked ones."""
    return {key: basis.new_zeros(*basis.shape[:-1], basis.shape[-2]) for key, basis in change.tensors.items()}


def renewal_cost(stack: Stack) -> int:
    """What the renewal of one of its blocks takes, roughly."""
    if not stack.change.is_renewable():
        return 0
    return sum(math.prod(tensor.shape[1:-2]) * tensor.shape[-2] ** 3 for tensor in stack.change.tensors.values())
