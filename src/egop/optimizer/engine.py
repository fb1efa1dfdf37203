"""The working parts of an optimizer: blocks, the inner optimizer, the refresh, and how a step goes through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Known, Layer, Reparameterization, check_disjoint
from egop.distributed import Pieces
from egop.optimizer.binding import BoundBlock, bind
from egop.optimizer.divided import OUTSIDE, Divided, Make
from egop.optimizer.inner import (
    LAST,
    check_blocks,
    check_class,
    defaults_of,
    fresh_states,
    lookahead,
    parse_outside,
    proposed,
    settings_for,
)
from egop.optimizer.membership import Bound
from egop.optimizer.moments import Moments, check_moments, momentum_of, movable
from egop.optimizer.refreshing import Refresher
from egop.optimizer.stacks import Stack, Stacks


class Engine:
    """All that an optimizer works with, in one object.

    Frameworks wrap an optimizer by copying its attributes into another object; wrapper and original then share this.

    Args:
        optimizer_class: of the optimizer that runs inside.
        hyperparameters: what it is given.
        outside: class of another one, or class and options, for what no block has.
        compiled: whether the products of a step go through ``torch.compile``.
        any_class: whether it may work in another way than coordinate by coordinate.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        hyperparameters: Mapping[str, Any],
        *,
        outside: Any,
        compiled: bool,
        any_class: bool,
    ) -> None:
        self.optimizer_class, self.hyperparameters = optimizer_class, dict(hyperparameters)
        self.outside = parse_outside(outside)
        self.compiled, self.any_class, self.matrices_only = compiled, any_class, False
        self.param_groups: list[dict[str, Any]] = []
        self.layers: dict[str, Layer] = {}
        self.known: Known | None = None  # what the model says of its parameters
        self.refresher: Refresher | None = None
        self.blocks: list[BoundBlock] = []
        self.pieces = Pieces()
        self._inner: Optimizer | None = None
        self._stacks: Stacks | None = None
        self.bound = Bound()

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
    def stacks(self) -> Stacks:
        """The blocks, stacked by kind and shape: when they are wanted, not for each of many groups that are added."""
        if self._stacks is None:
            # torch's own optimizers keep no gradient for the next step; of others nobody knows.
            reused = self.optimizer_class.__module__.startswith(("torch.optim", "egop.optim"))
            self._stacks = Stacks(self.blocks, compiled=self.compiled, reused=reused)
        return self._stacks

    # --- what is bound to what ---

    def check_class(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise an error if the inner optimizer does not work with coordinates, by the settings of these groups."""
        self.matrices_only |= check_class(self.optimizer_class, groups, self.hyperparameters, any_class=self.any_class)

    def bind(
        self, basis: Reparameterization | None, groups: Sequence[Mapping[str, Any]], first_group: int = 0
    ) -> list[BoundBlock]:
        """The blocks of a basis, bound to the parameters of these groups; nothing is changed."""
        whole = bool(getattr(self.optimizer_class, "works_on_matrices", False))
        blocks = bind(basis, groups, first_group, whole_matrices=whole)
        if self.matrices_only:
            check_blocks(self.optimizer_class, blocks)
        return blocks

    def build(self, blocks: list[BoundBlock], pieces: Pieces, inner: Optimizer | None = None) -> None:
        """Work with these blocks from here on.

        Args:
            blocks: the blocks.
            pieces: what stands for sharded parameters outside of them.
            inner: the optimizer over their coordinates and these; a new one if none is given.
        """
        inner = inner or self.inner_over(blocks, pieces)
        self.blocks, self.pieces, self._inner, self._stacks = blocks, pieces, inner, None
        self.note_bound()

    def inner_over(self, blocks: list[BoundBlock], pieces: Pieces) -> Optimizer:
        """A new inner optimizer over the coordinates of blocks and the parameters outside."""
        return self.make_inner(
            [inner for group in self.param_groups for inner in self._inner_groups(group, blocks, pieces)]
        )

    def make_inner(self, groups: list[dict[str, Any]]) -> Optimizer:
        """An inner optimizer, or one and another for what is outside, from groups."""
        inside: Make = partial(self.optimizer_class, **self.hyperparameters)
        if self.outside is None:
            return inside(groups)
        kind, options = self.outside
        return Divided(groups, inside, partial(kind, **options))

    @property
    def inner_name(self) -> str:
        """What runs inside, in words."""
        name = self.optimizer_class.__name__
        return name if self.outside is None else f"{name} with {self.outside[0].__name__} outside"

    def _inner_groups(
        self, group: Mapping[str, Any], blocks: Sequence[BoundBlock], pieces: Pieces
    ) -> list[dict[str, Any]]:
        """What the inner optimizer has in the place of a parameter group: coordinates, and what is in no block."""
        inside = {id(original): block for block in blocks for original in block.originals}
        members: dict[int, Tensor] = {}  # in the order of the group, a block where its first parameter stands
        outside: list[Tensor] = []
        for parameter in group["params"]:
            block = inside.get(id(parameter))
            if block is None and self.outside is not None:
                outside.append(pieces.of(parameter))
                continue
            tensors = block.coordinates if block is not None else [pieces.of(parameter)]
            members |= {id(tensor): tensor for tensor in tensors}
        last = {LAST: True} if LAST in group else {}  # coordinates are matrices in their last two dimensions
        first = settings_for(group, {}) | last | {"params": list(members.values())}
        if self.outside is None:
            return [first]
        kind, options = self.outside
        defaults = defaults_of(kind, {}, options)
        follows = [key for key in defaults if key in group and key not in options]
        return [first, defaults | {key: group[key] for key in follows} | {"params": outside, OUTSIDE: follows}]

    def _settings_in(self) -> None:
        """Give the inner groups the hyper-parameters of the user's."""
        for group, targets in self._pairs():
            for target in targets:
                target.update(settings_for(group, target))

    def _settings_out(self) -> None:
        """Some optimizers keep quantities of their own (an estimated step size, a counter) in their groups."""
        for group, targets in self._pairs():
            group.update(settings_for(targets[0], {}))

    def _pairs(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Each of the user's groups, and the inner ones in its place."""
        count = 1 if self.outside is None else 2
        for index, group in enumerate(self.param_groups):
            yield group, self.inner.param_groups[count * index : count * (index + 1)]

    def add_group(self, blocks: list[BoundBlock]) -> None:
        """Take in the last parameter group, which these blocks are of."""
        groups = self._inner_groups(self.param_groups[-1], blocks, self.pieces)
        for group in groups:
            self.inner.add_param_group(group)
        self.blocks = self.blocks + blocks
        for tensor in [
            tensor for group in groups for tensor in group["params"]
        ]:  # some make their states when they are made themselves, and at no other time
            if not self.inner.state.get(tensor) and any(fresh := fresh_states(self.inner, [tensor], self.make_inner)):
                self.inner.state[tensor] = fresh[0]
        self._stacks = None
        self.note_bound()

    def drop_last_group(self) -> None:
        """Forget inner groups that belong to none of the user's: one was refused."""
        count = 1 if self.outside is None else 2
        del self.inner.param_groups[count * len(self.param_groups) :]
        if isinstance(self.inner, Divided):
            self.inner.share()

    def note_bound(self) -> None:
        """The parameters are bound as they are now."""
        self.bound = Bound.of(self.param_groups)

    def block_of(self, parameter: Tensor) -> BoundBlock | None:
        """The block that a parameter is in."""
        return next(
            (block for block in self.blocks if any(original is parameter for original in block.originals)), None
        )

    # --- a step ---

    def step(self) -> None:
        """One step of the inner optimizer in coordinates."""
        if self.refresher is not None:
            self.refresher.before_step(self)
        self._settings_in()
        stacks = self.stacks
        try:
            stacks.collect()
            self.pieces.pull()
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
            self.pieces.drop_gradients()
        self._settings_out()
        if self.refresher is not None:
            self.refresher.after_step(self)

    def _step_coordinates(self) -> None:
        try:
            self.inner.step()
            self.stacks.decode_coordinates()
        except BaseException:  # some coordinates may have been stepped already
            for block in self.blocks:
                block.distrust()
            raise

    def switch(self, mode: str) -> None:
        """Call the inner optimizer's ``train`` or ``eval``, which writes other weights."""
        self.settle()
        self._settings_in()
        self.pieces.pull()
        try:
            self.stacks.rewrite(getattr(self.inner, mode))
        except BaseException:  # some coordinates may have been written already
            for block in self.blocks:
                block.distrust()
            raise
        finally:
            self.pieces.drop_gradients()
        self._settings_out()

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
        self._settings_in()
        change, _ = stack.active_part()
        gradients = [gradient for part in change.encode(stack.gradients) for gradient in part.unbind()]
        count = len(stack.coordinates)
        tensors = [stack.blocks[index].coordinates[place] for place in range(count) for index in stack.active]
        steps = proposed(self.inner, tensors, gradients, self.make_inner)
        size = len(stack.active)
        return [torch.stack(steps[place * size : (place + 1) * size]) for place in range(count)]

    def lookahead(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """The momentum that this step will have, and what the inner optimizer maps it to; nothing is changed.

        Of the blocks that have a gradient, in coordinates, stacked as in :meth:`momentum`.
        """
        self._settings_in()
        gradients = stack.active_part()[0].encode(stack.gradients)
        momenta, mapped = [], []
        for place, gradient in enumerate(gradients):
            tensors = [stack.blocks[index].coordinates[place] for index in stack.active]
            pair = lookahead(self.inner, tensors, gradient)
            momenta.append(pair[0])
            mapped.append(pair[1])
        return momenta, mapped

    # --- other bases ---

    @torch.no_grad()
    def settle(self) -> None:
        """Bring to an end what a refresh has under way."""
        if self.refresher is not None:
            self.refresher.settle(self)

    @torch.no_grad()
    def rebase(self, basis: Reparameterization, *, moments: Moments = "rotate") -> None:
        """Go on in another basis, from the same point; see ``ReparameterizedOptimizer.rebase``."""
        check_moments(moments)
        self.settle()
        blocks = {block.name: block for block in self.blocks}
        if not all(name in blocks and blocks[name].whole_change().alike(change) for name, change in basis.items()):
            self._replace_blocks(self.bind(basis, self.param_groups), moments)
            return
        for block in blocks.values():  # what is refused, before anything changes
            for coordinate in block.coordinates:
                movable(self.inner.state.get(coordinate, {}), coordinate.shape, moments)
        for stack, members, tensors in self.stacks.moved(basis):
            self.rebase_stack(stack, members, tensors, moments)

    @torch.no_grad()
    def add_blocks(self, basis: Reparameterization) -> None:
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
                self.inner.state.pop(self.pieces.of(original), None)
        self.blocks = self.blocks + new
        # In the same optimizer: it may keep more than its state.
        for group, targets in self._pairs():
            for target, wanted in zip(targets, self._inner_groups(group, self.blocks, self.pieces), strict=True):
                target["params"] = wanted["params"]
        for block in new:
            self.reset_moments(block)
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
        if moments == "reset":
            for block in stack.blocks[members]:
                self.reset_moments(block)

    def reset_moments(self, block: BoundBlock) -> None:
        """Let the inner optimizer begin anew with the coordinates of a block."""
        fresh = fresh_states(self.inner, block.coordinates, self.make_inner)
        self.inner.state.update(zip(block.coordinates, fresh, strict=True))

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
        return self.__dict__ | {"_stacks": None, "bound": Bound(), "known": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.note_bound()
