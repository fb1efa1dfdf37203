"""The working parts of an optimizer: blocks, the inner optimizer, the refresh, and how a step goes through them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Basis, Known, Layer, check_disjoint
from egop.distributed import LocalShards
from egop.optimizer.base import Base
from egop.optimizer.binding import BoundBlock, map_to_blocks
from egop.optimizer.hooks import step_inner
from egop.optimizer.inner import (
    check_blocks,
    check_class,
    check_lookahead,
    fresh_states,
    gains_from_rotation,
    lookahead,
    proposed,
    read_by_lookahead,
    warn_of_no_basis,
)
from egop.optimizer.membership import Bound, bind, check_padding
from egop.optimizer.moments import Moments, check_moments, momentum_of, movable
from egop.optimizer.refreshing import Refresher
from egop.optimizer.stacks import Stack, Stacks


class Engine:
    """All that an optimizer works with, in one object.

    Frameworks wrap an optimizer by copying its attributes into another object; wrapper and original then share this.

    Args:
        base: what runs inside.
        compiled: whether the products of a step go through ``torch.compile``.
        any_class: whether it may work in another way than coordinate by coordinate.
    """

    def __init__(self, base: Base, *, compiled: bool, any_class: bool) -> None:
        self.base = base
        self.compiled, self.any_class, self.matrices_only = compiled, any_class, False
        self.gains = False
        self.bare = False  # made without a basis and a refresh, of which the first step has still to warn
        self.param_groups: list[dict[str, Any]] = []
        self.layers: dict[str, Layer] = {}
        self.known: Known | None = None  # what the model says of its parameters
        self.refresher: Refresher | None = None
        self.blocks: list[BoundBlock] = []
        self.left: dict[str, str] = {}  # why weights have no basis, as the one that was given says
        self.pieces = LocalShards()
        self._inner: Optimizer | None = None
        self._stacks: Stacks | None = None
        self.bound = Bound()
        self._inside: tuple[list[BoundBlock], dict[int, BoundBlock]] | None = None  # what block_of looks up

    @property
    def is_built(self) -> bool:
        """Whether there is an inner optimizer yet."""
        return self._inner is not None

    @property
    def inner(self) -> Optimizer:
        """The optimizer that runs on the coordinates (and on the parameters outside every block)."""
        assert self._inner is not None
        return self._inner

    @property
    def outside(self) -> type[Optimizer] | None:
        """The class of the optimizer for what no block has, if that is another one."""
        return None if self.base.outside is None else self.base.outside[0]

    @property
    def unrotated(self) -> dict[str, str]:
        """Why weights have no basis, by name, as far as a basis that was given or the refresh says."""
        inside = {name for block in self.blocks for name in block.change.block.parameters}
        left = dict(self.left)
        if self.refresher is not None and self.blocks:
            left |= self.refresher.unrotated
            if not left:  # a state was loaded, and nothing was chosen here
                left = self._planned_unrotated()
        return {name: why for name, why in left.items() if name not in inside}

    def _planned_unrotated(self) -> dict[str, str]:
        """What the refresh would leave; nothing where it could not choose now, as with less memory than was used."""
        assert self.refresher is not None
        try:
            plan = self.refresher.plan(self)
        except (MemoryError, ValueError):
            return {}
        return {} if plan is None else plan.unrotated

    @property
    def stacks(self) -> Stacks:
        """The blocks, stacked by kind and shape: when they are wanted, not for each of many groups that are added."""
        if self._stacks is None:
            self._stacks = Stacks(self.blocks, compiled=self.compiled, reused=not self.base.keeps_gradients)
        return self._stacks

    # --- what is bound to what ---

    def check_class(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error if the inner optimizer does not work with coordinates, by the settings of these groups."""
        base = self.base
        # A rotation may be of use where one group has settings with which it makes a difference.
        self.gains |= gains_from_rotation(base.optimizer_class, groups, base.hyperparameters)
        self.matrices_only |= check_class(base.optimizer_class, groups, base.hyperparameters, any_class=self.any_class)

    def bind(
        self,
        basis: Basis | None,
        groups: Sequence[Mapping[str, Any]],
        first_group: int = 0,
        layers: Mapping[str, Layer] | None = None,
    ) -> list[BoundBlock]:
        """Bind the blocks of a basis to the parameters of these groups; nothing is changed.

        Args:
            basis: the basis.
            groups: some of the parameter groups, or one to be added.
            first_group: the place of the first.
            layers: what their parameters are; by default what is known already.
        """
        blocks = bind(basis, groups, first_group, whole_matrices=self.base.sees_matrices)
        check_padding(blocks, groups, self.layers if layers is None else layers)
        if self.matrices_only:
            check_blocks(self.base.optimizer_class, blocks)
        return blocks

    def build(self, blocks: list[BoundBlock], pieces: LocalShards, inner: Optimizer | None = None) -> None:
        """Work with these blocks from here on.

        Args:
            blocks: the blocks.
            pieces: what stands for sharded parameters outside of them.
            inner: the optimizer over their coordinates and these; a new one if none is given.
        """
        inner = inner or self.inner_over(blocks, pieces)
        self.blocks, self.pieces, self._inner, self._stacks = blocks, pieces, inner, None
        self.base.show_outside(self.param_groups, inner)
        self.note_bound()

    def inner_over(
        self, blocks: list[BoundBlock], pieces: LocalShards, groups: Sequence[dict[str, Any]] | None = None
    ) -> Optimizer:
        """Make an inner optimizer over the coordinates of blocks and the parameters outside.

        Args:
            blocks: the blocks.
            pieces: what stands for sharded parameters outside of them.
            groups: parameter groups with other hyper-parameters than the optimizer's own.
        """
        base, groups = self.base, self.param_groups if groups is None else groups
        inside = map_to_blocks(blocks)
        return base.make([inner for group in groups for inner in base.groups(group, inside, pieces)])

    def add_group(self, blocks: list[BoundBlock]) -> None:
        """Take in the last parameter group, which these blocks are of."""
        groups = self.base.groups(self.param_groups[-1], map_to_blocks(blocks), self.pieces)
        for group in groups:
            self.inner.add_param_group(group)
        self.base.show_outside(self.param_groups, self.inner)
        self.blocks = self.blocks + blocks
        # Some make their states when they are made themselves, and at no other time.
        for tensor in [tensor for group in groups for tensor in group["params"]]:
            if not self.inner.state.get(tensor) and any(fresh := fresh_states(self.inner, [tensor], self.base.make)):
                self.inner.state[tensor] = fresh[0]
        self._stacks = None
        self.note_bound()

    def note_bound(self) -> None:
        """The parameters are bound as they are now."""
        self.bound = Bound.of(self.param_groups)

    def block_of(self, parameter: Tensor) -> BoundBlock | None:
        """The block that a parameter is in."""
        if self._inside is None or self._inside[0] is not self.blocks:
            self._inside = self.blocks, map_to_blocks(self.blocks)
        return self._inside[1].get(id(parameter))

    # --- a step ---

    def step(self) -> None:
        """One step of the inner optimizer in coordinates."""
        if self.bare:
            self.bare = False
            if not self.blocks:  # none have come by a state either, or with a group
                warn_of_no_basis(self.base.optimizer_class)
        if self.refresher is not None:
            self.refresher.before_step(self)
        self.base.settings_in(self.param_groups, self.inner)
        stacks = self.stacks
        try:
            stacks.collect()
            self.pieces.sync()
            if self.refresher is not None:
                self.refresher.observe(self)
            if self.stacks is not stacks:  # it has given other blocks, which are to take this step
                stacks.drop_gradients()
                stacks = self.stacks
                stacks.collect()
            stacks.encode_gradients()
            self._step_coordinates()
        finally:
            stacks.drop_gradients()
            self.pieces.clear_gradients()
        self.base.settings_out(self.param_groups, self.inner)
        if self.refresher is not None:
            self.refresher.after_step(self)

    def _step_coordinates(self) -> None:
        try:
            step_inner(self.inner)
            self.stacks.decode_coordinates()
        except BaseException:  # some coordinates may have been stepped already
            for block in self.blocks:
                block.distrust()
            raise

    def switch(self, mode: str) -> None:
        """Call the inner optimizer's ``train`` or ``eval``, which writes other weights."""
        self.settle()
        self.base.settings_in(self.param_groups, self.inner)
        self.pieces.sync()
        try:
            self.stacks.rewrite(getattr(self.inner, mode))
        except BaseException:  # some coordinates may have been written already
            for block in self.blocks:
                block.distrust()
            raise
        finally:
            self.pieces.clear_gradients()
        self.base.settings_out(self.param_groups, self.inner)

    # --- what a refresh may look at, while a step is under way ---

    def momentum(self, stack: Stack) -> list[Tensor] | None:
        """The inner optimizer's running mean of gradients, for the blocks of a stack that have a gradient.

        It is in coordinates, stacked, one tensor for each coordinate tensor of a block; None where there is none yet.
        """
        columns = zip(*(stack.blocks[index].coordinates for index in stack.active), strict=True)
        means = [[momentum_of(self.inner.state.get(tensor, {})) for tensor in column] for column in columns]
        known = [[mean for mean in column if mean is not None] for column in means]
        return list(map(torch.stack, known)) if list(map(len, known)) == list(map(len, means)) else None

    def proposed(self, stack: Stack) -> list[Tensor]:
        """What the inner optimizer would add to the coordinates now, in the basis as it is; nothing is changed.

        Of the blocks that have a gradient, stacked as in :meth:`momentum`. Takes as long as a step of these blocks.
        """
        if not stack.active:
            return []
        self.base.settings_in(self.param_groups, self.inner)
        change, _ = stack.active_part()
        gradients = [gradient for part in change.encode(stack.gradients) for gradient in part.unbind()]
        count = len(stack.coordinates)
        tensors = [stack.blocks[index].coordinates[place] for place in range(count) for index in stack.active]
        steps = proposed(self.inner, tensors, gradients, self.base.make)
        size = len(stack.active)
        return [torch.stack(steps[place * size : (place + 1) * size]) for place in range(count)]

    def check_lookahead(self) -> None:
        """Raise an error if the inner optimizer offers no :meth:`lookahead`."""
        check_lookahead(self.inner)

    def lookahead(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """The momentum that this step will have, and what the inner optimizer maps it to; nothing is changed.

        Of the blocks that have a gradient, in coordinates, stacked as in :meth:`momentum`.
        """
        self.base.settings_in(self.param_groups, self.inner)
        gradients = stack.active_part()[0].encode(stack.gradients)
        momenta, mapped = [], []
        for place, gradient in enumerate(gradients):
            tensors = [stack.blocks[index].coordinates[place] for index in stack.active]
            pair = lookahead(self.inner, tensors, gradient)
            momenta.append(pair[0])
            mapped.append(pair[1])
        return momenta, mapped

    def read_by_lookahead(self, stacks: Sequence[Stack]) -> tuple[list[Tensor], str] | None:
        """All tensors that :meth:`lookahead` reads for these stacks, and the settings; None if it cannot be recorded.

        It can if nothing in it happens on the host, and the tensors are where they were in the last step.
        """
        if not self.stacks.still or any(len(stack.active) < len(stack.blocks) for stack in stacks):
            return None
        coordinates = [tensor for stack in stacks for block in stack.blocks for tensor in block.coordinates]
        of_inner = read_by_lookahead(self.inner, coordinates)
        if of_inner is None:
            return None
        own = [tensor for stack in stacks for tensor in (*stack.gradients, *stack.change.tensors.values())]
        return own + of_inner[0], of_inner[1]

    # --- other bases ---

    @torch.no_grad()
    def settle(self) -> None:
        """Bring to an end what a refresh has under way."""
        if self.refresher is not None:
            self.refresher.wait_for_refresh(self)

    @torch.no_grad()
    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Go on in another basis, from the same point; see ``ReparameterizedOptimizer.rebase``."""
        check_moments(moments)
        self.settle()
        blocks = {block.name: block for block in self.blocks}
        if not all(name in blocks and blocks[name].whole_change().alike(change) for name, change in basis.items()):
            self._replace_blocks(self.bind(basis, self.param_groups), moments)
            self.left = dict(basis.unrotated)
            return
        for block in blocks.values():  # what is refused, before anything changes
            for coordinate in block.coordinates:
                movable(self.inner.state.get(coordinate, {}), coordinate.shape, moments)
        for stack, members, tensors in self.stacks.moved(basis):
            self.rebase_stack(stack, members, tensors, moments)
        for name in basis:
            blocks[name].spectrum = basis.spectrum.get(name)

    @torch.no_grad()
    def add_blocks(self, basis: Basis) -> None:
        """Give parameters outside every block a basis; all other blocks go on as they are.

        Args:
            basis: of parameters that are in no block yet. What the inner optimizer remembers of them starts anew.
        """
        self.settle()
        new = self.bind(basis, self.param_groups)
        check_disjoint([block.change.block for block in self.blocks + new])
        for block in new:
            block.drop_rest()
            for original in block.originals:
                self.inner.state.pop(self.pieces.get(original), None)
        self.blocks = self.blocks + new
        inside = map_to_blocks(self.blocks)
        # In the same optimizer: it may keep more than its state.
        for group, targets in self.base.pairs(self.param_groups, self.inner):
            for target, wanted in zip(targets, self.base.groups(group, inside, self.pieces), strict=True):
                target["params"] = wanted["params"]
        self.reset_moments(new)
        self._stacks = None

    def rebase_stack(self, stack: Stack, members: slice, tensors: Mapping[str, Tensor], moments: Moments) -> None:
        """Go on in other bases of some blocks of one stack: what :meth:`rebase` does, without its checks.

        Args:
            stack: one of :attr:`stacks`.
            members: which of its blocks.
            tensors: their new bases, stacked.
            moments: as in :meth:`rebase`.
        """
        stack.rebase(members, tensors, self.inner.state, moments, still=self.stacks.still)
        for block in stack.blocks[members]:
            block.spectrum = None  # of the basis that it had
        if moments == "reset":
            self.reset_moments(stack.blocks[members])

    def reset_moments(self, blocks: Iterable[BoundBlock]) -> None:
        """Let the inner optimizer begin anew with the coordinates of some blocks."""
        wanted = {id(coordinate) for block in blocks for coordinate in block.coordinates}
        for group in self.inner.param_groups:
            if tensors := [tensor for tensor in group["params"] if id(tensor) in wanted]:
                fresh = fresh_states(self.inner, tensors, self.base.make, group=group)
                self.inner.state.update(zip(tensors, fresh, strict=True))

    def _replace_blocks(self, blocks: list[BoundBlock], moments: Moments) -> None:
        if moments != "reset" and any(self.inner.state.values()):
            raise ValueError(
                "The new basis has other blocks, or blocks of another kind, than the one in use, so moments cannot be "
                "carried over. Use rebase(basis, moments='reset')."
            )
        kept = dict(self.inner.state)
        for block in blocks:
            block.drop_rest()
        self.build(blocks, self.pieces)
        inside = {tensor for group in self.inner.param_groups for tensor in group["params"]}
        self.inner.state.update({tensor: state for tensor, state in kept.items() if tensor in inside})

    def __getstate__(self) -> dict[str, Any]:
        """For copies: stacks are views of memory that the blocks of a copy do not share, and its model is another."""
        self.settle()
        return self.__dict__ | {"_stacks": None, "bound": Bound(), "known": None, "_inside": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.note_bound()
