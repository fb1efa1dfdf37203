"""Blocks of one kind and shape as one stack, so that their products and changes of basis are single calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import has_first_shard, sum_over_shards, to_local
from egop.numerics import copy_all, exact_products, stack_tensors
from egop.optimizer.binding import BoundBlock
from egop.optimizer.moments import Moments, StackedStates, move_states, rebase_stack, select_movable

States = Mapping[Tensor, dict[str, Any]]  # an optimizer's state, by tensor


def stack_blocks(blocks: Iterable[BoundBlock]) -> list[Stack]:
    """Stack the blocks of each kind and shape."""
    groups: dict[Any, list[BoundBlock]] = {}
    for block in blocks:
        groups.setdefault(block.signature, []).append(block)
    return [Stack(members) for members in groups.values()]


class Stack:
    """Blocks of one signature, whose bases and coordinates lie side by side in memory; each block holds views."""

    def __init__(self, blocks: list[BoundBlock]) -> None:
        self.blocks = blocks
        first = blocks[0].change
        bases = {name: torch.stack([block.change.tensors[name] for block in blocks]) for name in first.tensors}
        self.change = first.with_tensors(bases)
        # Columns: for each tensor of a block, the tensors of all blocks.
        self._block_coordinates = list(zip(*(block.coordinates for block in blocks), strict=True))
        self._parameters = list(zip(*(block.parameters for block in blocks), strict=True))
        self.coordinates = [
            torch.stack([coordinate.detach() for coordinate in column]) for column in self._block_coordinates
        ]
        self.active: list[int] = []  # which blocks have a gradient in this step
        self.gradients: list[Tensor] = []  # their gradients, stacked, one tensor for each parameter of a block
        self._everyone = list(range(len(blocks)))
        self._is_sharded = any(block.sharded for block in blocks)
        self._has_rest = any(block.rest is not None for block in blocks)
        # What is remembered of parameters that agree with their coordinates: their stacked values, or their version
        # counters and addresses.
        self._compares_values = compares_values(blocks[0].device)
        self._seen: list[Any] = [
            torch.stack([parameter.detach() for parameter in column]) if self._compares_values else [None] * len(blocks)
            for column in self._parameters
        ]
        self._unknown = set(self._everyone)  # blocks that may not agree, as after loading
        # Whether the decoded coordinates are these values: not if they are rounded, nor if they are the coordinates.
        dtypes = {parameter.dtype for column in self._parameters for parameter in column}
        is_exact = bool(bases) and not self._has_rest and dtypes == {first.block.dtype}
        self._can_keep_decoded = self._compares_values and is_exact
        # The blocks hold views, so that nothing is stored twice.
        for index, block in enumerate(blocks):
            block.change = block.change.with_tensors({name: tensor[index] for name, tensor in bases.items()})
        for column, stacked in zip(self._block_coordinates, self.coordinates, strict=True):
            for coordinate, view in zip(column, stacked, strict=True):
                coordinate.data = view

    @property
    def by_rows(self) -> bool:
        """True if this process has some rows of each block, and other processes have the rest."""
        return self.blocks[0].by_rows

    @property
    def is_first(self) -> bool:
        """True if this process has the first rows."""
        return not self.by_rows or has_first_shard(self.blocks[0].originals[0])

    def sum_over_rows(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes that hold the rows."""
        return sum_over_shards(tensor, self.blocks[0].originals[0]) if self.by_rows else tensor

    # --- a step ---

    def collect_gradients(self) -> None:
        """Stack the gradients of all blocks that have one, and pick up writes to their parameters by other code."""
        if self._is_sharded:
            for block in self.blocks:
                block.gather()
            self._parameters[:] = zip(*(block.parameters for block in self.blocks), strict=True)
        columns: list[Sequence[Any]] = [[parameter.grad for parameter in column] for column in self._parameters]
        layouts = {None if gradient is None else gradient.layout for column in columns for gradient in column}
        self.active = self._everyone
        if layouts != {torch.strided}:
            self.active = [index for index, block in enumerate(self.blocks) if block.has_gradient]
            columns = list(zip(*(self.blocks[index].read_gradients() for index in self.active), strict=True))
        dtype = self.change.block.dtype
        self.gradients = [stack_tensors(column).to(dtype) for column in columns]
        self.follow_parameters(self.active)

    def active_part(self) -> tuple[ChangeOfBasis, list[Tensor]]:
        """Return the bases and coordinates of the blocks that have a gradient."""
        if len(self.active) == len(self.blocks):
            return self.change, self.coordinates
        return self.change.part(self.active), [stacked[self.active] for stacked in self.coordinates]

    def encode_gradients(self) -> None:
        """Rotate the gradients of the active blocks and give them to the coordinates."""
        if not self.active:
            return
        change, _ = self.active_part()
        encoded, self.gradients = change.encode(self.gradients), []
        for column, gradients in zip(self._block_coordinates, encoded, strict=True):
            for index, gradient in zip(self.active, gradients.unbind(), strict=True):
                column[index].grad = gradient

    def decode_coordinates(self) -> None:
        """Rotate the stepped coordinates of the active blocks back and write them to the parameters."""
        if not self.active:
            return
        change, coordinates = self.active_part()
        decoded = change.decode(coordinates)
        values: list[Sequence[Tensor]] = [stacked.unbind() for stacked in decoded]
        if self._has_rest:
            pairs = zip(self.active, zip(*values, strict=True), strict=True)
            values = list(zip(*(self.blocks[index].add_rest(tensors) for index, tensors in pairs), strict=True))
        is_whole = len(self.active) == len(self.blocks)
        for column, tensors in zip(self._parameters, values, strict=True):
            copy_all(column if is_whole else [column[index] for index in self.active], tensors)
        if self._is_sharded:
            for index in self.active:
                self.blocks[index].scatter()
        if is_whole and self._can_keep_decoded:
            self._seen = list(decoded)
        else:
            self._mark_synced(self.active)

    def drop_gradients(self) -> None:
        """Remove the gradients of coordinates: a later step without gradients would mistake them for its own."""
        for column in self._block_coordinates if self.active else ():
            for coordinate in column:
                coordinate.grad = None
        if self._is_sharded:
            for block in self.blocks:
                block.release()
        self.active, self.gradients = [], []

    # --- coordinates and parameters ---

    def follow_parameters(self, indices: Sequence[int]) -> None:
        """Update the coordinates of these blocks if other code has written to their parameters."""
        written = self._find_written(indices)
        if not written:
            return
        decoded = list(zip(*self.change.decode(self.coordinates), strict=True))
        for index in written:
            if self.blocks[index].device == decoded[index][0].device:  # otherwise the next step binds it again
                self.blocks[index].follow_parameters(decoded[index], exactly=index not in self._unknown)
        self._mark_synced(written)

    def _find_written(self, indices: Sequence[int]) -> set[int]:
        """Return those of these blocks whose parameters other code may have written to."""
        written = self._unknown.intersection(indices)
        for place, seen in enumerate(self._seen):
            if not self._compares_values:
                written |= {i for i in indices if seen[i] != _read_version(self.blocks[i].originals[place])}
            elif not torch.equal(now := stack_tensors(self._parameters[place]), seen):
                written |= {i for i in indices if not torch.equal(now[i], seen[i])}
        return written

    def invalidate(self, indices: Iterable[int] | None = None) -> None:
        """Mark the coordinates as possibly stale; the next step encodes the parameters again where they differ."""
        self._unknown.update(self._everyone if indices is None else indices)

    def _mark_synced(self, indices: Iterable[int]) -> None:
        """Record that coordinates and parameters agree."""
        for place, (parameters, seen) in enumerate(zip(self._parameters, self._seen, strict=True)):
            for index in indices:
                if self._compares_values:
                    seen[index] = parameters[index].detach()
                else:
                    seen[index] = _read_version(self.blocks[index].originals[place])
        self._unknown.difference_update(indices)

    # --- changing the basis ---

    def find_moved(self, basis: Mapping[str, ChangeOfBasis]) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """Yield the blocks whose tensors differ in a basis, with the new tensors: the whole stack, or one by one."""
        fresh = [basis.get(block.name) for block in self.blocks]
        pairs = enumerate(zip(self.blocks, fresh, strict=True))
        moved = [index for index, (block, new) in pairs if new is not None and not block.change.equals(new)]
        whole = len(moved) == len(self.blocks)
        for members in [slice(None)] if whole else [slice(index, index + 1) for index in moved]:
            changes = [change for change in fresh[members] if change is not None]
            yield members, type(changes[0]).stack(changes).tensors

    def rebase(self, members: slice, tensors: Mapping[str, Tensor], states: States, moments: Moments) -> None:
        """Express some blocks in other bases.

        Args:
            members: which blocks.
            tensors: their new bases, stacked.
            states: the inner optimizer's state.
            moments: what happens to it, see :func:`egop.optimizer.moments.select_movable`.
        """
        blocks, indices = self.blocks[members], self._everyone[members]
        self.follow_parameters(indices)
        old = self.change.part(members)
        new = old.with_tensors({name: tensors[name].to(tensor) for name, tensor in old.tensors.items()})
        coordinates = [stacked[members] for stacked in self.coordinates]
        moved = [
            [select_movable(states.get(coordinate, {}), coordinate.shape, moments) for coordinate in block.coordinates]
            for block in blocks
        ]
        if any(list(map(list, block)) != list(map(list, moved[0])) for block in moved):  # not all have been stepped
            for place, index in enumerate(indices):
                own = {name: tensor[place : place + 1] for name, tensor in tensors.items()}
                self.rebase(slice(index, index + 1), own, states, moments)
            return
        try:
            if old.has_rotation:
                rebase_stack(old, new, coordinates, moved)
            else:
                self._rebase_by_decoding(blocks, old, new, coordinates, moved)
                self.invalidate(indices)
        except BaseException:  # coordinates and basis may not belong together
            self.invalidate(indices)
            raise

    def _rebase_by_decoding(
        self,
        blocks: Sequence[BoundBlock],
        old: ChangeOfBasis,
        new: ChangeOfBasis,
        coordinates: list[Tensor],
        moved: StackedStates,
    ) -> None:
        """Rebase a structure that has no rotation, or that leaves part of the parameters out."""
        with exact_products():
            decoded = zip(*old.decode(coordinates), strict=True)
            values = [block.add_rest(tensors) for block, tensors in zip(blocks, decoded, strict=True)]
            encoded = new.encode([stack_tensors(group) for group in zip(*values, strict=True)])
            rests = [block.rest for block in blocks if block.rest is not None]  # all have one, or none
            rest = [stack_tensors(group) for group in zip(*rests, strict=True)] if rests else None
            targets, sources = move_states(old, new, moved, None, rest)
        copy_all([*old.tensors.values(), *coordinates, *targets], [*new.tensors.values(), *encoded, *sources])
        for block, value in zip(blocks, values, strict=True):
            block.keep_rest(value)
            block.drop_rest()


def compares_values(device: torch.device) -> bool:
    """Return True if writes to parameters are noticed by their values, not by torch's version counter.

    The counter ``_version`` (a private name; a test notices when it changes) misses writes through ``.data``. On the
    CPU a copy of the values costs little and shows those too.
    """
    return device.type == "cpu"


def _read_version(original: Tensor) -> tuple[int, int]:
    return original._version, to_local(original).data_ptr()
