"""The working parts of an optimizer (blocks, inner optimizers, refresh) and one step through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Basis, ModuleIndex, Role, check_disjoint
from egop.distributed import LocalShards
from egop.optimizer.binding import BoundBlock, BoundParameters, bind_blocks, check_padding
from egop.optimizer.checks import check_blocks, check_class, warn_of_no_effect, warn_of_replaced
from egop.optimizer.inner import BaseOptimizer, InnerOptimizers, check_lookahead, look_ahead
from egop.optimizer.moments import Moments, check_moments, select_movable
from egop.optimizer.refreshing import Refresher
from egop.optimizer.stacks import Stack, stack_blocks


class Engine:
    """Everything that an optimizer works with, in one object.

    Frameworks wrap an optimizer by copying its attributes to another object. Wrapper and original then share this one.
    """

    def __init__(self, base: BaseOptimizer) -> None:
        self.base = base
        self.is_for_matrices = False  # whether the class treats matrices and vectors differently
        self.has_stepped = False
        self.may_be_plain = False  # whether having no blocks may be intended
        self.param_groups: list[dict[str, Any]] = []
        self.layers: dict[str, Role] = {}
        self.known: ModuleIndex | None = None  # the model's names and modules
        self.refresher: Refresher | None = None
        self.blocks: list[BoundBlock] = []
        self.excluded: dict[str, str] = {}  # weights without a basis, with the reasons given by the basis
        self.pieces = LocalShards()
        self._inner: InnerOptimizers | None = None
        self._stacks: list[Stack] | None = None
        self.bound = BoundParameters()
        self.exported: Any = None  # the state that was read since the last step, see `state.ExportedState`

    @property
    def is_built(self) -> bool:
        """True if the inner optimizers have been built."""
        return self._inner is not None

    @property
    def inner(self) -> InnerOptimizers:
        """The optimizers that run on the coordinates and on the parameters outside every block."""
        assert self._inner is not None
        return self._inner

    @property
    def outside(self) -> type[Optimizer] | None:
        """The class of the outside optimizer, if there is one."""
        return self.base.outside_class

    @property
    def stacks(self) -> list[Stack]:
        """The blocks, stacked by kind and shape; built when needed, not after each of many added groups."""
        if self._stacks is None:
            self._stacks = stack_blocks(self.blocks)
        return self._stacks

    @property
    def unrotated(self) -> dict[str, str]:
        """Weights without a basis, with the reasons that the given basis or the refresh states."""
        inside = {name for block in self.blocks for name in block.change.block.parameters}
        reasons = dict(self.excluded)
        if self.refresher is not None and self.blocks:
            reasons |= self.refresher.unrotated
            if not reasons:  # a state was loaded, so nothing was chosen here
                try:
                    plan = self.refresher.plan(self)
                except (MemoryError, ValueError):  # for example, memory= is smaller than before
                    plan = None
                reasons = {} if plan is None else plan.unrotated
        return {name: reason for name, reason in reasons.items() if name not in inside}

    # --- binding ---

    def check_class(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise TypeError if the optimizer class does not work in coordinates with the settings of these groups."""
        self.is_for_matrices |= check_class(self.base.optimizer_class, groups, self.base.hyperparameters)

    def bind(
        self,
        basis: Basis | None,
        groups: Sequence[Mapping[str, Any]],
        first_group: int = 0,
        layers: Mapping[str, Role] | None = None,
    ) -> list[BoundBlock]:
        """Bind the blocks of a basis to the parameters of these groups, without changing anything."""
        blocks = bind_blocks(basis, groups, first_group, needs_matrices=self.base.needs_matrices)
        check_padding(blocks, groups, self.layers if layers is None else layers)
        if self.is_for_matrices:
            check_blocks(self.base.optimizer_class, blocks)
        return blocks

    def build(
        self, blocks: list[BoundBlock], pieces: LocalShards | None = None, inner: InnerOptimizers | None = None
    ) -> None:
        """Use these blocks from now on.

        New inner optimizers keep the state of all tensors that continue to be stepped.
        """
        pieces = pieces or self.pieces
        if inner is None:
            inner = InnerOptimizers(self.base, self.param_groups, blocks, pieces)
            if self._inner is not None:
                inner.take_over(self._inner)
        self.blocks, self.pieces, self._inner, self._stacks = blocks, pieces, inner, None
        inner.expose_outside_settings(self.param_groups)
        self.bound = BoundParameters(self.param_groups)

    # --- a step ---

    def step(self) -> None:
        """Collect gradients, rotate them, step the inner optimizers, rotate back and write the parameters."""
        refresher = self.refresher
        if refresher is not None:
            refresher.before_step(self)
        if not self.has_stepped:
            self.has_stepped = True
            warn_of_no_effect(self.base.optimizer_class, self.blocks, is_intended=self.may_be_plain)
        self.inner.load_settings(self.param_groups)
        stacks = self.stacks
        try:
            self._collect_gradients(stacks)
            if refresher is not None:
                refresher.observe(self)
                if self.stacks is not stacks:  # it has created other blocks, which take this step
                    self._drop_gradients(stacks)
                    stacks = self.stacks
                    self._collect_gradients(stacks)
            for stack in stacks:
                stack.encode_gradients()
            try:
                self.inner.step()
                for stack in stacks:
                    stack.decode_coordinates()
            except BaseException:  # some coordinates may have been stepped already
                for stack in stacks:
                    stack.invalidate()
                raise
        finally:
            self._drop_gradients(stacks)
        if self.base.is_foreign:
            self.inner.store_settings(self.param_groups)
        if refresher is not None:
            refresher.after_step(self)
        warn_of_replaced(self.bound, self.known)

    def _collect_gradients(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:
            stack.collect_gradients()
        self.pieces.sync()

    def _drop_gradients(self, stacks: Sequence[Stack]) -> None:
        for stack in stacks:
            stack.drop_gradients()
        self.pieces.clear_gradients()

    # --- for a refresh, during a step ---

    def check_lookahead(self) -> None:
        """Raise TypeError if the inner optimizer does not support :meth:`lookahead`."""
        check_lookahead(self.inner.coordinates)

    def lookahead(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """Return the momentum after this step, and the update that the inner optimizer maps it to.

        Both are in coordinates and stacked, for the blocks that have a gradient. Nothing is changed.
        """
        self.inner.load_settings(self.param_groups)
        momenta, mapped = [], []
        for place, gradient in enumerate(stack.active_part()[0].encode(stack.gradients)):
            tensors = [stack.blocks[index].coordinates[place] for index in stack.active]
            momentum, update = look_ahead(self.inner.coordinates, tensors, gradient)
            momenta.append(momentum)
            mapped.append(update)
        return momenta, mapped

    # --- changing the basis ---

    @torch.no_grad()
    def wait_for_refresh(self) -> None:
        """Finish the renewal that is in progress, if any."""
        if self.refresher is not None:
            self.refresher.wait_for_refresh(self)

    @torch.no_grad()
    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Continue in another basis from the same point; see ``ReparameterizedOptimizer.rebase``."""
        check_moments(moments)
        self.wait_for_refresh()
        blocks = {block.name: block for block in self.blocks}
        if not all(name in blocks and blocks[name].whole_change().matches(change) for name, change in basis.items()):
            self._replace_blocks(self.bind(basis, self.param_groups), moments)
            self.excluded = dict(basis.unrotated)
            return
        for block in blocks.values():  # refuse unknown state before anything changes
            for coordinate in block.coordinates:
                select_movable(self.inner.state.get(coordinate, {}), coordinate.shape, moments)
        for stack in self.stacks:
            for members, tensors in stack.find_moved(basis):
                self.rebase_stack(stack, members, tensors, moments)
        for name in basis:
            blocks[name].spectrum = basis.spectrum.get(name)

    @torch.no_grad()
    def add_blocks(self, basis: Basis) -> None:
        """Give parameters outside every block a basis and reset their moments; other blocks stay as they are."""
        self.wait_for_refresh()
        new = self.bind(basis, self.param_groups)
        check_disjoint([block.change.block for block in self.blocks + new])
        for block in new:
            block.drop_rest()
        self.build(self.blocks + new)

    def rebase_stack(self, stack: Stack, members: slice, tensors: Mapping[str, Tensor], moments: Moments) -> None:
        """Continue in other bases for some blocks of one stack, without the checks of :meth:`rebase`."""
        stack.rebase(members, tensors, self.inner.state, moments)
        for block in stack.blocks[members]:
            block.spectrum = None  # it belongs to the old basis
        if moments == "reset":
            self.inner.reset([coordinate for block in stack.blocks[members] for coordinate in block.coordinates])

    def _replace_blocks(self, blocks: list[BoundBlock], moments: Moments) -> None:
        if self.refresher is not None:
            self.refresher.check(self, [block.change for block in blocks])
        if moments != "reset" and any(self.inner.state.values()):
            raise ValueError(
                "The new basis has other blocks, or blocks of another kind, than the one in use, so moments cannot be "
                "carried over. Use rebase(basis, moments='reset')."
            )
        for block in blocks:
            block.drop_rest()
        self.build(blocks)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: not the model, nor the stacks, whose memory its blocks do not share."""
        self.wait_for_refresh()
        return self.__dict__ | {"_stacks": None, "exported": None, "bound": BoundParameters(), "known": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.bound = BoundParameters(self.param_groups)
