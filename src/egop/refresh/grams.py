"""Running means of the gradients' Gram matrices, stacked like the blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import to_full
from egop.optimizer import BoundBlock, Stack
from egop.refresh.eigenbases import find_runs

BlockRange = tuple[Stack, slice]  # consecutive blocks of a stack
_PREFIX = "gram/"  # prefix of the names under which the matrices are saved


class GramMatrices:
    """Running means of the Gram matrices of every block that has received a gradient.

    If a gradient's Gram matrix overflows (in float32, with gradients of 1e19 or more), the next renewal of its block
    fails, and the mean starts again with the gradient after that.

    Args:
        by_block: the means so far, by block name and tensor of its basis.
        totals: the blocks among them whose means include the rows of all processes.
    """

    def __init__(
        self, decay: float, by_block: Mapping[str, dict[str, Tensor]] | None = None, totals: Iterable[str] = ()
    ) -> None:
        self.decay = decay
        self.by_block = dict(by_block or {})  # views of the stacked matrices, once these exist
        self._totals = set(totals)
        self._stacks: list[Stack] | None = None
        self._stacked: dict[Stack, dict[str, Tensor]] = {}  # of the stacks that can be renewed

    def follow(self, stacks: list[Stack]) -> None:
        """Arrange the matrices like these stacks. Call this before any method that takes a stack."""
        if self._stacks is stacks:
            return
        self._stacked = {stack: self._arrange(stack) for stack in stacks if stack.change.is_renewable()}
        self._stacks = stacks

    def update(self) -> None:
        """Add the gradients of a step to the running means. A mean starts with its block's first Gram matrix."""
        for stack, grams in self._stacked.items():
            names = [stack.blocks[index].name for index in stack.active]
            known = [name in self.by_block for name in names]
            for places, members in find_runs(stack.active, known):
                gradients = [gradient[places] for gradient in stack.gradients]
                means = {key: gram[members] for key, gram in grams.items()}
                add_gradients(stack.change.part(members), gradients, means, self.decay if known[places.start] else 0.0)
            for name, index in zip(names, stack.active, strict=True) if not all(known) else ():
                self.by_block.setdefault(name, {key: gram[index] for key, gram in grams.items()})

    def stacked(self, stack: Stack) -> dict[str, Tensor]:
        """Return the Gram matrices of a stack's blocks."""
        return self._stacked[stack]

    def find_ranges(self, stack: Stack, indices: Iterable[int] | None = None) -> list[BlockRange]:
        """Return the blocks among these, or all, that are trained and have received a gradient."""
        pairs = [(i, stack.blocks[i]) for i in (range(len(stack.blocks)) if indices is None else indices)]
        chosen = [index for index, block in pairs if block.is_trained and block.name in self.by_block]
        return [(stack, members) for _, members in find_runs(chosen)]

    def has_seen(self, block: BoundBlock) -> bool:
        """Return True if the block has received a gradient in its present structure."""
        shapes = {key: gram.shape for key, gram in self.by_block.get(block.name, {}).items()}
        return shapes == _gram_shapes(block.change)

    def traces(self, stack: Stack) -> list[float]:
        """Return the trace of one Gram matrix of each block, which is zero if all its gradients were zero."""
        gram = next(iter(self._stacked[stack].values()))
        traces: list[float] = stack.sum_over_rows(gram.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1)).tolist()
        return traces

    def forget(self, names: Iterable[str]) -> None:
        """Discard the means of these blocks; their next gradients start new ones."""
        for name in names:
            del self.by_block[name]

    def export(self, stack: Stack, *, complete: bool) -> list[dict[str, Tensor]]:
        """Return the tensors to save for each block of a stack.

        Args:
            stack: the stack.
            complete: whether to sum the parts of all processes that hold rows of a block. The first process then keeps
                the sum and the others continue from zero, as after loading, so that a resumed run rounds like this one.
                Otherwise return views of the local part.
        """
        exported = [
            self.by_block[block.name] if self.has_seen(block) else _zero_grams(block.change) for block in stack.blocks
        ]
        if complete and stack.by_rows:
            if not stack.is_first:  # the first process holds the totals too
                exported = [
                    _zero_grams(block.change) if block.name in self._totals else grams
                    for block, grams in zip(stack.blocks, exported, strict=True)
                ]
            sums = {key: stack.sum_over_rows(torch.stack([grams[key] for grams in exported])) for key in exported[0]}
            exported = [{key: total[index] for key, total in sums.items()} for index in range(len(exported))]
            for block, totals in zip(stack.blocks, exported, strict=True):
                if block.name not in self._totals and self.has_seen(block):
                    for key, gram in self.by_block[block.name].items():
                        gram.copy_(totals[key] if stack.is_first else torch.zeros_like(gram))
        return [{f"{_PREFIX}{key}": gram for key, gram in grams.items()} for grams in exported]

    @classmethod
    def load(
        cls,
        decay: float,
        states: Mapping[str, Mapping[str, Tensor]],
        blocks: Sequence[BoundBlock],
        seen: Collection[str],
    ) -> GramMatrices:
        """Continue from what :meth:`export` returned; raise ValueError if it does not fit the blocks.

        Only the blocks in ``seen`` had received a gradient.
        """
        by_block = {}
        for block in blocks:
            if missing := [key for key in block.change.tensors if f"{_PREFIX}{key}" not in states[block.name]]:
                raise ValueError(f"It has no Gram matrix '{missing[0]}' for block '{block.name}'.")
            grams = {key: to_full(states[block.name][f"{_PREFIX}{key}"]) for key in block.change.tensors}
            shapes, expected = {key: gram.shape for key, gram in grams.items()}, _gram_shapes(block.change)
            if shapes != expected:
                raise ValueError(
                    f"The Gram matrices of block '{block.name}' have the wrong shapes: expected "
                    f"{_list_shapes(expected)}, got {_list_shapes(shapes)}."
                )
            if block.name in seen:
                by_block[block.name] = {key: gram.to(block.device, copy=True) for key, gram in grams.items()}
        return cls(decay, by_block, totals=by_block)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stacks out of copies: they belong to this optimizer."""
        return self.__dict__ | {"_stacks": None, "_stacked": {}}

    def _arrange(self, stack: Stack) -> dict[str, Tensor]:
        """Stack the matrices of a new stack's blocks; drop those of another structure."""
        stacked = _zero_grams(stack.change)
        for index, block in enumerate(stack.blocks):
            if not self.has_seen(block):
                self.by_block.pop(block.name, None)
            for key, gram in self.by_block.get(block.name, {}).items():
                self.by_block[block.name][key] = stacked[key][index].copy_(gram)
                if block.name in self._totals and stack.by_rows and not stack.is_first:
                    stacked[key][index].zero_()
            self._totals.discard(block.name)
        return stacked


def add_gradients(
    change: ChangeOfBasis, gradients: Sequence[Tensor], grams: Mapping[str, Tensor], decay: float
) -> None:
    """Add stacked gradients to running means of Gram matrices."""
    rows = change.rows(gradients)
    assert rows is not None
    for key, gram in grams.items():
        matrices = rows[key].flatten(0, -3)
        gram.flatten(0, -3).baddbmm_(matrices.mT, matrices, beta=decay, alpha=1 - decay)


def _gram_shapes(change: ChangeOfBasis) -> dict[str, torch.Size]:
    return {key: torch.Size((*basis.shape[:-1], basis.shape[-2])) for key, basis in change.tensors.items()}


def _zero_grams(change: ChangeOfBasis) -> dict[str, Tensor]:
    return {key: change.tensors[key].new_zeros(shape) for key, shape in _gram_shapes(change).items()}


def _list_shapes(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{key} {tuple(shape)}" for key, shape in shapes.items())
