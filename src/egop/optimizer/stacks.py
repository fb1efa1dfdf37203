"""Blocks of one kind and shape as one stack, so that their products and changes of basis are single calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import has_first_shard, sum_over_shards, to_local
from egop.numerics import (
    SMALL_NETWORK_BYTES,
    InPlaceGraph,
    Recorder,
    copy_all,
    exact_products,
    run_in_branches,
    stack_tensors,
)
from egop.optimizer.binding import BoundBlock
from egop.optimizer.moments import Moments, StackedStates, move_states, rebase_stack, select_movable

States = Mapping[Tensor, dict[str, Any]]  # an optimizer's state, by tensor
Part = tuple[ChangeOfBasis, list[Tensor], list[Tensor]]  # the change of basis, its inputs, and the memory to use
Products = list[Sequence[Tensor]]  # for each tensor of a block, the tensors of all blocks
# What is remembered of a parameter that agrees with its coordinates: its values, or its version counter and address.
# None if it is not known whether they agree, as after loading.
Snapshot = Tensor | tuple[int, int] | None


class Stack:
    """Blocks whose bases and coordinates lie side by side in memory; each block holds views.

    Args:
        blocks: blocks of one signature.
        recorder: records GPU work that is repeated in the same memory.
    """

    def __init__(self, blocks: list[BoundBlock], recorder: Recorder) -> None:
        self.blocks, self._recorder = blocks, recorder
        first = blocks[0].change
        bases = {name: torch.stack([block.change.tensors[name] for block in blocks]) for name in first.tensors}
        self.change = first.with_tensors(bases)
        # Columns: for each tensor of a block, the tensors of all blocks.
        self._blocks_coordinates = list(zip(*(block.coordinates for block in blocks), strict=True))
        self._parameters = self._find_parameters()
        self.coordinates = [
            torch.stack([coordinate.detach() for coordinate in column]) for column in self._blocks_coordinates
        ]
        self.active: list[int] = []  # which blocks have a gradient in this step
        self.gradients: list[Tensor] = []  # their gradients, stacked, one tensor for each parameter of a block
        self.slots: list[Tensor] = []  # where gradients are stacked, if the memory is reused
        self._everyone = list(range(len(blocks)))
        self._is_sharded = any(block.sharded for block in blocks)
        self._has_rest = any(block.rest is not None for block in blocks)
        self._compares_values = compares_values(blocks[0].device)
        self._seen: list[list[Any]] = [[None] * len(blocks) for _ in self._parameters]  # a Snapshot of each
        self._is_known = False  # whether none of these is None
        self._incoming: dict[str, Tensor] = {}  # where new bases arrive, if the memory is reused
        self._rebases: dict[tuple[int | None, int | None], InPlaceGraph[..., None]] = {}
        # The blocks hold views, so that everything is there once.
        for index, block in enumerate(blocks):
            block.change = block.change.with_tensors({name: tensor[index] for name, tensor in bases.items()})
        for column, stacked in zip(self._blocks_coordinates, self.coordinates, strict=True):
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

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes that hold the rows."""
        return sum_over_shards(tensor, self.blocks[0].originals[0]) if self.by_rows else tensor

    # --- a step ---

    def collect(self, *, in_place: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Stack the gradients of all blocks that have one.

        Args:
            in_place: stack them in the same memory in every step.

        Returns:
            The targets and sources of copies that the caller has to make.
        """
        if self._is_sharded:
            self._gather()
        dtype = self.change.block.dtype
        columns: list[list[Any]] = []
        for parameters in self._parameters:
            column = [parameter.grad for parameter in parameters]
            for grad in column:
                if grad is None or grad.layout is not torch.strided or not (in_place or grad.dtype is dtype):
                    self._collect_some()
                    return []
            columns.append(column)
        self.active = self._everyone
        if not in_place:
            self.gradients = [stack_tensors(column) for column in columns]
            return []
        self.gradients = self.slots = self.slots or [_allocate_stack(column, dtype) for column in columns]
        pairs = zip(self.slots, columns, strict=True)
        return [copy for slot, column in pairs for copy in zip(slot.unbind(), column, strict=True)]

    def _collect_some(self) -> None:
        self.active = [index for index, block in enumerate(self.blocks) if block.has_gradient]
        gradients = [self.blocks[index].read_gradients() for index in self.active]
        self.gradients = [stack_tensors(column) for column in zip(*gradients, strict=True)]

    def _gather(self) -> None:
        for block in self.blocks:
            block.gather()
        self._parameters = self._find_parameters()

    def _find_parameters(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(block.parameters for block in self.blocks), strict=True))

    def active_part(self) -> tuple[ChangeOfBasis, list[Tensor]]:
        """Return the bases and coordinates of the blocks that have a gradient."""
        if len(self.active) == len(self.blocks):
            return self.change, self.coordinates
        return self.change.part(self.active), [stacked[self.active] for stacked in self.coordinates]

    def set_gradients(self, encoded: Products) -> None:
        """Give the coordinates of the active blocks their gradients."""
        self.gradients = []
        for coordinates, gradients in zip(self._blocks_coordinates, encoded, strict=True):
            for index, gradient in zip(self.active, gradients, strict=True):
                coordinates[index].grad = gradient

    def drop_gradients(self) -> None:
        """Remove the gradients of coordinates: a later step without gradients would mistake them for its own."""
        for coordinates in self._blocks_coordinates if self.active else ():
            for coordinate in coordinates:
                coordinate.grad = None
        if self._is_sharded:
            for block in self.blocks:
                block.release()
        self.active, self.gradients = [], []

    def find_targets(self, decoded: Products) -> tuple[list[Tensor], Products]:
        """Return the parameters of the active blocks, and the values to write to them in the same order."""
        targets = [parameters[index] for parameters in self._parameters for index in self.active]
        if not self._has_rest:
            return targets, decoded
        rests = zip(*(self.blocks[index].rest or () for index in self.active), strict=True)
        pairs = zip(decoded, rests, strict=True)
        return targets, [[part + rest for part, rest in zip(*pair, strict=True)] for pair in pairs]

    def finish_write(self, values: Products | None) -> None:
        """Record that the parameters of the active blocks have been written.

        Args:
            values: what was written, if these are new tensors that nobody else uses or writes to.
        """
        if self._is_sharded:
            for index in self.active:
                self.blocks[index].scatter()
        self._mark_synced(self.active, values)

    # --- coordinates and parameters ---

    def follow_parameters(self, indices: Sequence[int]) -> None:
        """Update the coordinates of these blocks if other code has written to their parameters."""
        written = self.find_written(indices)
        if not written:
            return
        decoded = list(zip(*self.change.decode(self.coordinates), strict=True))
        for index in written:
            if self.blocks[index].device == decoded[index][0].device:  # otherwise the next step binds it again
                exactly = all(seen[index] is not None for seen in self._seen)
                self.blocks[index].follow_parameters(decoded[index], exactly=exactly)
        self._mark_synced(written)

    def find_written(self, indices: Sequence[int]) -> list[int]:
        """Return the blocks among these whose parameters someone else may have written to."""
        is_usual = self._compares_values and self._is_known and indices is self._everyone  # so it has to be fast
        columns = zip(self._parameters, self._seen, strict=True)
        if is_usual and all(all(map(torch.equal, *column)) for column in columns):
            return []
        places = range(len(self._parameters))
        return [index for index in indices if any(self._is_written(place, index) for place in places)]

    def _is_written(self, place: int, index: int) -> bool:
        seen, parameter = self._seen[place][index], self._parameters[place][index]
        if isinstance(seen, Tensor):
            return not (seen.dtype is parameter.dtype and torch.equal(parameter, seen))
        return seen is None or bool(seen != _read_version(self.blocks[index].originals[place]))

    def invalidate(self, indices: Iterable[int] | None = None) -> None:
        """Compare coordinates and parameters at the next step; if they do not agree, the parameters count."""
        self._is_known = False
        for seen in self._seen:
            for index in self._everyone if indices is None else indices:
                seen[index] = None

    def _mark_synced(self, indices: Sequence[int], values: Products | None = None) -> None:
        """Record that coordinates and parameters agree; arguments as in :meth:`finish_write`."""
        self._is_known |= len(indices) == len(self.blocks)
        for place, (parameters, seen) in enumerate(zip(self._parameters, self._seen, strict=True)):
            for position, index in enumerate(indices):
                parameter = parameters[index]
                if not self._compares_values:
                    seen[index] = _read_version(self.blocks[index].originals[place])
                elif values is not None and values[place][position].dtype is parameter.dtype:
                    seen[index] = values[place][position]
                else:
                    seen[index] = parameter.detach().clone()

    # --- changing the basis ---

    def rebase(
        self, members: slice, tensors: Mapping[str, Tensor], states: States, moments: Moments, *, in_place: bool = False
    ) -> None:
        """Express some blocks in other bases.

        Args:
            members: which blocks.
            tensors: their new bases, stacked.
            states: the inner optimizer's state.
            moments: what happens to it, see :func:`egop.optimizer.moments.select_movable`.
            in_place: work in the same memory every time.
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
                self.rebase(slice(index, index + 1), own, states, moments, in_place=in_place)
            return
        try:
            if not old.has_rotation:
                self._rebase_by_decoding(blocks, old, new, coordinates, moved)
                self.invalidate(indices)
            elif in_place:
                new = self._copy_incoming(new, members)
                used = [*old.tensors.values(), *new.tensors.values(), *coordinates]
                used += [tensor for block in moved for state in block for tensor in state.values()]
                recorded = self._rebases.setdefault(
                    (members.start, members.stop), InPlaceGraph(rebase_stack, self._recorder)
                )
                recorded.run(used, old, new, coordinates, moved)
            else:
                rebase_stack(old, new, coordinates, moved)
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

    def _copy_incoming(self, new: ChangeOfBasis, members: slice) -> ChangeOfBasis:
        if not self._incoming:
            self._incoming = {name: torch.empty_like(tensor) for name, tensor in self.change.tensors.items()}
        places = {name: tensor[members] for name, tensor in self._incoming.items()}
        copy_all(list(places.values()), [new.tensors[name] for name in places])
        return new.with_tensors(places)


class Stacks:
    """All blocks of an optimizer, stacked by kind and shape.

    Args:
        blocks: the blocks, in any order.
        reused: whether the gradients of coordinates may be overwritten in the next step.
    """

    def __init__(self, blocks: Iterable[BoundBlock], *, reused: bool = False) -> None:
        groups: dict[Any, list[BoundBlock]] = {}
        for block in blocks:
            groups.setdefault(block.signature, []).append(block)
        recorder = Recorder(branched=True)
        self._each = [Stack(members, recorder) for members in groups.values()]
        # True if every step works in the same memory, so that its products can be recorded.
        self.still = reused and _is_small([block for members in groups.values() for block in members])
        self._recorded = {method: InPlaceGraph(_apply_in_branches, recorder) for method in ("encode", "decode")}

    def __iter__(self) -> Iterator[Stack]:
        return iter(self._each)

    def find_moved(self, basis: Mapping[str, ChangeOfBasis]) -> Iterator[tuple[Stack, slice, Mapping[str, Tensor]]]:
        """Yield the blocks whose tensors differ in a basis, with the new tensors: a whole stack, or block by block."""
        for stack in self._each:
            fresh = [basis.get(block.name) for block in stack.blocks]
            pairs = enumerate(zip(stack.blocks, fresh, strict=True))
            moved = [index for index, (block, new) in pairs if new is not None and not block.change.equals(new)]
            whole = len(moved) == len(stack.blocks)
            for members in [slice(None)] if whole else [slice(index, index + 1) for index in moved]:
                changes = [change for change in fresh[members] if change is not None]
                yield stack, members, type(changes[0]).stack(changes).tensors

    def collect(self) -> None:
        """Stack the gradients of all blocks that have one, and pick up writes to their parameters by other code."""
        copies: list[tuple[Tensor, Tensor]] = []
        for stack in self._each:
            copies += stack.collect(in_place=self.still)
        copy_all([target for target, _ in copies], [source for _, source in copies])
        for stack in self._each:
            stack.follow_parameters(stack.active)

    def encode_gradients(self) -> None:
        """Rotate the gradients of all active blocks and give them to the coordinates."""
        active = [stack for stack in self._each if stack.active]
        parts: list[Part] = [(stack.active_part()[0], stack.gradients, []) for stack in active]
        products = self._multiply_all("encode", parts)
        for index, stack in enumerate(active):
            stack.set_gradients(products[index] if products else _multiply("encode", parts[index]))

    def decode_coordinates(self) -> None:
        """Rotate the stepped coordinates of all active blocks back and write them to the parameters."""
        active = [stack for stack in self._each if stack.active]
        parts: list[Part] = [
            (*stack.active_part(), stack.slots if len(stack.active) == len(stack.blocks) else []) for stack in active
        ]
        products = self._multiply_all("decode", parts)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for place, stack in enumerate(active):
            parameters, values = stack.find_targets(products[place] if products else _multiply("decode", parts[place]))
            if self.still:
                targets += parameters
                sources += itertools.chain(*values)
            else:  # not all decoded tensors need to exist at once
                copy_all(parameters, list(itertools.chain(*values)))
                stack.finish_write(values if stack.change.tensors else None)  # without a basis they are the coordinates
        if self.still:
            copy_all(targets, sources)
            for stack in active:
                stack.finish_write(None)

    def invalidate(self) -> None:
        """Compare all coordinates with their parameters at the next step."""
        for stack in self._each:
            stack.invalidate()

    def drop_gradients(self) -> None:
        """Forget the gradients of this step."""
        for stack in self._each:
            stack.drop_gradients()

    def _multiply_all(self, method: str, parts: Sequence[Part]) -> list[Products]:
        """Encode or decode all stacks at once if that is recorded; otherwise return an empty list."""
        if not self.still:
            return []
        tensors = [tensor for change, inputs, slots in parts for tensor in (*change.tensors.values(), *inputs, *slots)]
        return self._recorded[method].run(tensors, method, parts)


def compares_values(device: torch.device) -> bool:
    """Return True if writes to parameters are noticed by their values, not by torch's version counter.

    The counter ``_version`` (a private name; a test notices when it changes) misses writes through ``.data``. On the
    CPU a copy of the values costs little and shows those too.
    """
    return device.type == "cpu"


def _read_version(original: Tensor) -> tuple[int, int]:
    return original._version, to_local(original).data_ptr()


def _multiply(method: str, part: Part) -> Products:
    change, tensors, slots = part
    results = getattr(change, method)(tensors)
    if slots:
        results = [_match_layout(*pair) for pair in zip(results, slots, strict=True)]
    return [result.unbind() for result in results]


def _apply_in_branches(method: str, parts: Sequence[Part]) -> list[Products]:
    return run_in_branches([functools.partial(_multiply, method, part) for part in parts])


def _match_layout(tensor: Tensor, slot: Tensor) -> Tensor:
    """Return a tensor in the memory layout of a slot; copy it there if its layout differs (usually channels last)."""
    return tensor if tensor.stride()[1:] == slot.stride()[1:] else slot.copy_(tensor)


def _is_small(blocks: Sequence[BoundBlock]) -> bool:
    """Return True if a GPU computes the products of a step faster than the host launches them."""
    coordinates = [coordinate for block in blocks for coordinate in block.coordinates]
    kinds = {coordinate.device.type for coordinate in coordinates}
    is_rotated = any(block.change.tensors for block in blocks)
    return is_rotated and kinds == {"cuda"} and sum(tensor.nbytes for tensor in coordinates) <= SMALL_NETWORK_BYTES


def _allocate_stack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Allocate memory for these tensors, stacked, each in the layout of the first."""
    first = torch.empty_like(tensors[0], dtype=dtype)
    return first.new_empty_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
