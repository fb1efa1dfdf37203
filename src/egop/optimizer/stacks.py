"""Blocks of one kind and shape as one stack: their products, and a change of their basis, are single calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import has_first_shard, sum_over_shards
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
from egop.optimizer.moments import Moments, movable
from egop.optimizer.rebasing import StackedStates, moved_states, rebase

States = Mapping[Tensor, dict[str, Any]]  # an optimizer's state, by tensor


class Stack:
    """Blocks whose bases and coordinates lie side by side in memory, each block's own being views.

    Args:
        blocks: of one signature.
        recorder: makes recordings of what is done in one place again and again.
    """

    def __init__(self, blocks: list[BoundBlock], recorder: Recorder) -> None:
        self.blocks, self._recorder = blocks, recorder
        self.change = type(blocks[0].change).stack([block.change for block in blocks])
        self.coordinates = [
            torch.stack([coordinate.detach() for coordinate in group])
            for group in zip(*(block.coordinates for block in blocks), strict=True)
        ]
        self.active: list[int] = []  # which blocks have a gradient in this step
        self.gradients: list[Tensor] = []  # theirs, stacked, one tensor for each parameter of a block
        self.slots: list[Tensor] = []  # where they are stacked, if always in the same place
        self._owns_basis = len(blocks) > 1
        self._incoming: dict[str, Tensor] = {}  # where new bases come to, if always to the same place
        self._rebases: dict[tuple[int | None, int | None], InPlaceGraph[..., None]] = {}
        self._share_basis()
        for index, block in enumerate(blocks):
            for coordinate, stacked in zip(block.coordinates, self.coordinates, strict=True):
                coordinate.data = stacked[index]

    @property
    def by_rows(self) -> bool:
        """Whether this process has some rows of each block, and others the rest."""
        return self.blocks[0].by_rows

    @property
    def is_first(self) -> bool:
        """Whether it is this process that has the first rows."""
        return not self.by_rows or has_first_shard(self.blocks[0].originals[0])

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of what each process has for its rows."""
        return sum_over_shards(tensor, self.blocks[0].originals[0]) if self.by_rows else tensor

    def collect(self, *, still: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Stack the gradients of all blocks that have one.

        Args:
            still: whether to stack them in the same place in every step.

        Yields:
            For the caller to copy: where to, and what.
        """
        for block in self.blocks:
            if block.sharded:
                block.pull()
        dtype = self.change.block.dtype
        grads = list(zip(*([parameter.grad for parameter in block.parameters] for block in self.blocks), strict=True))
        if all(
            grad is not None and grad.layout is torch.strided and (still or grad.dtype is dtype)
            for group in grads
            for grad in group
        ):
            self.active = list(range(len(self.blocks)))  # the common case, with nothing done block by block
            if not still:
                self.gradients = [stack_tensors(group) for group in grads]
                return
            self.gradients = self.slots = self.slots or [_room_for(group, dtype) for group in grads]
            for slot, group in zip(self.slots, grads, strict=True):
                yield from zip(slot.unbind(), group, strict=True)
            return
        self.active = [index for index, block in enumerate(self.blocks) if block.has_gradient]
        apart = [self.blocks[index].gradients() for index in self.active]
        self.gradients = [stack_tensors(group) for group in zip(*apart, strict=True)]

    def drop_gradients(self) -> None:
        """Leave no gradient that a later step without one could take for its own."""
        for index in self.active:
            for tensor in self.blocks[index].stepped():
                tensor.grad = None
        self.active, self.gradients = [], []

    def active_part(self) -> tuple[ChangeOfBasis, list[Tensor]]:
        """The bases and the coordinates of the blocks that have a gradient."""
        if len(self.active) == len(self.blocks):
            return self.change, self.coordinates
        return self.change.part(self.active), [stacked[self.active] for stacked in self.coordinates]

    def active_slots(self) -> list[Tensor]:
        """Memory in the layout of the parameters, if there is some and all blocks have a gradient."""
        return self.slots if len(self.active) == len(self.blocks) else []

    def follow(self, blocks: Sequence[BoundBlock]) -> None:
        """Take what someone else has written to the blocks' parameters into the coordinates."""
        written = [block for block in blocks if block.was_written]
        if written:
            decoded = zip(*self.change.decode(self.coordinates), strict=True)
            for block, tensors in zip(self.blocks, decoded, strict=True):
                if block in written:
                    block.follow(tensors)

    def pull(self) -> None:
        """Take in what is new in the parameters of all blocks, outside a step."""
        for block in self.blocks:
            if block.sharded:
                block.pull()
                for tensor in block.stepped():
                    tensor.grad = None
        self.follow(self.blocks)

    def push(self, before: Sequence[Tensor]) -> None:
        """Write to the parameters of the blocks whose coordinates, stacked, are not what they were before."""
        pairs = list(zip(self.coordinates, before, strict=True))
        changed = [i for i in range(len(self.blocks)) if any(not torch.equal(now[i], was[i]) for now, was in pairs)]
        if changed:
            decoded = list(zip(*self.change.decode(self.coordinates), strict=True))
            for index in changed:
                self.blocks[index].accept(decoded[index])

    def rebase(
        self, members: slice, tensors: Mapping[str, Tensor], states: States, moments: Moments, *, still: bool = False
    ) -> None:
        """Express some blocks' points in other bases.

        Args:
            members: which blocks.
            tensors: their new bases, stacked.
            states: the inner optimizer's state.
            moments: what becomes of that, see :func:`egop.optimizer.moments.movable`.
            still: whether to do so in the same memory every time.
        """
        blocks = self.blocks[members]
        self.follow(blocks)
        self._own_basis()
        old = self.change.part(members)
        new = old.replaced({name: tensors[name].to(tensor) for name, tensor in old.tensors.items()})
        coordinates = [stacked[members] for stacked in self.coordinates]
        moved = [
            [movable(states.get(coordinate, {}), coordinate.shape, moments) for coordinate in block.coordinates]
            for block in blocks
        ]
        try:
            if not old.has_rotation:
                self._rebase_by_decoding(blocks, old, new, coordinates, moved)
            elif still:
                new = self._brought_in(new, members)
                used = [*old.tensors.values(), *new.tensors.values(), *coordinates]
                used += [tensor for block in moved for state in block for tensor in state.values()]
                again = self._rebases.setdefault((members.start, members.stop), InPlaceGraph(rebase, self._recorder))
                again.run(used, old, new, coordinates, moved)
            else:
                rebase(old, new, coordinates, moved)
        except BaseException:  # coordinates and basis may not belong together
            for block in blocks:
                block.distrust()
            raise

    def _rebase_by_decoding(
        self,
        blocks: Sequence[BoundBlock],
        old: ChangeOfBasis,
        new: ChangeOfBasis,
        coordinates: list[Tensor],
        moved: StackedStates,
    ) -> None:
        """For structures that may leave something of the parameters out."""
        with exact_products():
            decoded = zip(*old.decode(coordinates), strict=True)
            values = [block.whole(tensors) for block, tensors in zip(blocks, decoded, strict=True)]
            encoded = new.encode([stack_tensors(group) for group in zip(*values, strict=True)])
            rests = [block.rest for block in blocks if block.rest is not None]  # all have one, or none
            rest = [stack_tensors(group) for group in zip(*rests, strict=True)] if rests else None
            targets, sources = moved_states(old, new, moved, None, rest)
        copy_all([*old.tensors.values(), *coordinates, *targets], [*new.tensors.values(), *encoded, *sources])
        for block, value in zip(blocks, values, strict=True):
            block.keep_rest_of(value)
            block.drop_rest()

    def _brought_in(self, new: ChangeOfBasis, members: slice) -> ChangeOfBasis:
        """New bases where they always come to."""
        if not self._incoming:
            self._incoming = {name: torch.empty_like(tensor) for name, tensor in self.change.tensors.items()}
        places = {name: tensor[members] for name, tensor in self._incoming.items()}
        copy_all(list(places.values()), [new.tensors[name] for name in places])
        return new.replaced(places)

    def _own_basis(self) -> None:
        """Before it is written to: a single block's basis may be someone else's too."""
        if not self._owns_basis:
            layout = torch.contiguous_format  # always the same, so that a resumed training rounds alike
            copies = {name: tensor.clone(memory_format=layout) for name, tensor in self.change.tensors.items()}
            self.change = self.change.replaced(copies)
            self._share_basis()
            self._owns_basis = True

    def _share_basis(self) -> None:
        for index, block in enumerate(self.blocks):  # views, so that every basis is held once
            block.change = block.change.replaced({name: tensor[index] for name, tensor in self.change.tensors.items()})


class Stacks:
    """All blocks of an optimizer, stacked by kind and shape.

    Args:
        blocks: in any order.
        compiled: whether the products of a step go through ``torch.compile``, all of them as one graph.
        reused: whether the gradients that coordinates get may be written over in the next step.
    """

    def __init__(self, blocks: Iterable[BoundBlock], *, compiled: bool = False, reused: bool = False) -> None:
        alike: dict[Any, list[BoundBlock]] = {}
        for block in blocks:
            alike.setdefault(block.signature, []).append(block)
        recorder = Recorder(branched=True)
        self._each = [Stack(members, recorder) for members in alike.values()]
        self.still = reused and not compiled and _is_small([block for members in alike.values() for block in members])
        self._apply: _Apply = torch.compile(_all_applied) if compiled else _applied
        self._again = {method: InPlaceGraph(_applied_in_branches, recorder) for method in ("encode", "decode")}

    def __iter__(self) -> Iterator[Stack]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    def moved(self, basis: Mapping[str, ChangeOfBasis]) -> Iterator[tuple[Stack, slice, Mapping[str, Tensor]]]:
        """The blocks for which a basis has other tensors, and these, stacked: all of a stack, or each alone."""
        for stack in self._each:
            fresh = [basis.get(block.name) for block in stack.blocks]
            pairs = enumerate(zip(stack.blocks, fresh, strict=True))
            moved = [index for index, (block, new) in pairs if new is not None and not block.change.equal(new)]
            together = len(moved) == len(stack.blocks)
            for members in [slice(None)] if together else [slice(index, index + 1) for index in moved]:
                changes = [change for change in fresh[members] if change is not None]
                yield stack, members, type(changes[0]).stack(changes).tensors

    def collect(self) -> None:
        """Stack the gradients of all blocks that have one, and take in what someone else has written to them."""
        copies = [copy for stack in self._each for copy in stack.collect(still=self.still)]
        copy_all([target for target, _ in copies], [source for _, source in copies])
        for stack in self._each:
            stack.follow([stack.blocks[index] for index in stack.active])

    def encode_gradients(self) -> None:
        """Give the coordinates of every block that has a gradient theirs."""
        active = [stack for stack in self._each if stack.active]
        encoded = self._applied("encode", [(stack.active_part()[0], stack.gradients, []) for stack in active])
        for stack, parts in zip(active, encoded, strict=True):
            stack.gradients = []
            for place, gradients in enumerate(parts):
                for index, gradient in zip(stack.active, gradients, strict=True):
                    stack.blocks[index].coordinates[place].grad = gradient

    def decode_coordinates(self) -> None:
        """Write the stepped coordinates back to the parameters."""
        active = [stack for stack in self._each if stack.active]
        decoded = self._applied("decode", [(*stack.active_part(), stack.active_slots()) for stack in active])
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for stack, parts in zip(active, decoded, strict=True):
            for index, tensors in zip(stack.active, zip(*parts, strict=True), strict=True):
                targets += stack.blocks[index].parameters
                sources += stack.blocks[index].whole(tensors)
            if not self.still:  # what was decoded need not all be held at once
                copy_all(targets, sources)
                targets, sources = [], []
        copy_all(targets, sources)
        for stack in active:
            for index in stack.active:
                stack.blocks[index].wrote()

    def rewrite(self, write: Callable[[], object]) -> None:
        """Let someone write other weights into the coordinates, as the parameters are now, and then into these."""
        for stack in self._each:
            stack.pull()
        before = [[stacked.clone() for stacked in stack.coordinates] for stack in self._each]
        write()
        for stack, coordinates in zip(self._each, before, strict=True):
            stack.push(coordinates)

    def _applied(self, method: str, parts: Parts) -> Iterable[list[Sequence[Tensor]]]:
        if not self.still:
            return self._apply(method, parts)
        tensors = [tensor for change, inputs, slots in parts for tensor in (*change.tensors.values(), *inputs, *slots)]
        return self._again[method].run(tensors, method, parts)

    def drop_gradients(self) -> None:
        """Forget the gradients of this step."""
        for stack in self._each:
            stack.drop_gradients()


Part = tuple[ChangeOfBasis, list[Tensor], list[Tensor]]  # what to apply to what, and memory to use
Parts = Sequence[Part]
_Apply = Callable[[str, Parts], Iterable[list[Sequence[Tensor]]]]


def _applied_to(method: str, part: Part) -> list[Sequence[Tensor]]:
    """Encode or decode one stack."""
    change, tensors, slots = part
    results = getattr(change, method)(tensors)
    return [_in_layout(*pair).unbind() for pair in zip(results, slots or results, strict=True)]


def _applied(method: str, parts: Parts) -> Iterator[list[Sequence[Tensor]]]:
    """One stack after the other, so that what comes out need not all be held at once."""
    return (_applied_to(method, part) for part in parts)


def _all_applied(method: str, parts: Parts) -> Iterable[list[Sequence[Tensor]]]:
    """The same as one graph, for ``torch.compile``."""
    return [_applied_to(method, part) for part in parts]


def _applied_in_branches(method: str, parts: Parts) -> Iterable[list[Sequence[Tensor]]]:
    """The same for recordings."""
    return run_in_branches([functools.partial(_applied_to, method, part) for part in parts])


def _in_layout(tensor: Tensor, slot: Tensor) -> Tensor:
    """A tensor in the layout of a slot, which it is copied to if it has another: channels last, mostly."""
    return tensor if tensor.stride()[1:] == slot.stride()[1:] else slot.copy_(tensor)


def _is_small(blocks: Sequence[BoundBlock]) -> bool:
    """Whether launching the products of a step takes longer than computing them."""
    coordinates = [coordinate for block in blocks for coordinate in block.coordinates]
    kinds = {coordinate.device.type for coordinate in coordinates}
    rotated = any(block.change.tensors for block in blocks)
    return rotated and kinds == {"cuda"} and sum(tensor.nbytes for tensor in coordinates) <= SMALL_NETWORK_BYTES


def _room_for(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Memory for these tensors, stacked, each in the layout of the first."""
    first = torch.empty_like(tensors[0], dtype=dtype)
    return first.new_empty_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
