"""Online: a basis that follows the training gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egop.basis import Partition, StructureChoice, check_structure
from egop.distributed import to_full
from egop.numerics import GraphedFunction, Recorder, SideStream, check_fraction, check_positive_int, exact_products
from egop.optimizer import BoundBlock, Moments, Rebasable, Refresh, Refresher, Stack, check_moments
from egop.refresh.eigenbases import (
    Renewal,
    clear_null_space,
    decompose,
    decompose_leading,
    find_runs,
    iterate,
    off_diagonal_share,
    renew_in_batches,
)
from egop.refresh.grams import BlockRange, GramMatrices
from egop.refresh.new_blocks import BlockCreatingRefresher

_PHASE = (
    "phase"  # saved for each block: has it seen a gradient, does it wait for a basis, was it created here, its turn
)


@dataclass(frozen=True)
class Online(Refresh):
    """A refresh that follows the training gradients; nothing is sampled.

    Every step updates running means of the gradients' Gram matrices. A renewal is one step of orthogonal iteration:
    multiply the basis by the Gram matrix and orthonormalize. If the optimizer has no basis to start with, the first
    gradient gives one, by a full eigendecomposition; ``optimizer.renew_basis()`` does the same on demand. For Gram
    matrices wider than 2048, the first basis has the 256 strongest directions and the iteration finds the others.

    Layers that are unfrozen later, or whose parameter group is added later, get their basis from their first gradient.
    A frozen layer keeps its basis. If there is no weight to rotate, the first step warns.

    Args:
        every: number of steps between renewals of a block; with a tolerance, between checks.
        decay: decay of the running means.
        structure: used if the optimizer has no basis to start with. A structure (``Kronecker``, ``Shared`` or
            ``Full``), a mapping from name patterns to structures, or ``"auto"``: for each weight ``Kronecker`` or
            ``Shared``, the richer one that fits. ``"auto"`` skips embeddings, output heads and very wide
            layers; ``optimizer.refresher.unrotated`` lists them with the reason. A single structure applies to all
            weights, but skips these too if ``outside=`` is given; ``{"*": structure}`` always applies to all.
        partition: which parameters form a block, if the optimizer has no basis to start with.
        memory: memory limit for all bases together, if the optimizer has no basis to start with.
        moments: what happens to the base optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
        spread: renew the blocks in turn, each once in ``every`` steps, so that all steps take about the same time.
            If False, renew all of them in the same step, as SOAP does.
        tolerance: if given, check every ``every`` steps how much of each Gram matrix is off the diagonal in its basis,
            as a share of its Frobenius norm. If one of them exceeds the tolerance, compute all bases from scratch;
            otherwise renew none.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(every=5), lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.basis), optimizer.refresher.unrotated
        (['0.weight'], {'2.weight': 'the output head'})
    """

    every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"
    spread: bool = True
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        check_fraction("decay", self.decay)
        check_moments(self.moments)
        check_structure(self.structure)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ValueError(f"Invalid tolerance value: {self.tolerance}. Must be between 0 and 1, or None.")

    def start(self, optimizer: Rebasable) -> Refresher:
        """Create the refresher for one optimizer."""
        return _OnlineRefresher(optimizer, self)


class _NewBases(NamedTuple):
    stack: Stack
    members: slice
    tensors: dict[str, Tensor]
    sound: Tensor  # which new bases are sound; the others are the old bases


class _OnlineRefresher(BlockCreatingRefresher):
    """The refresher of :class:`Online`.

    On a GPU, the host waits for first bases only. The device itself decides whether a new basis is sound, and the
    number of failures reaches the host later. A failed renewal leaves the basis, coordinates and moments of its block
    unchanged; if this would have been its first basis, the next gradient provides one.
    """

    def __init__(self, optimizer: Rebasable, config: Online) -> None:
        super().__init__(optimizer, config, config.structure, config.partition, config.memory)
        self.config = config
        self.grams = GramMatrices(config.decay)
        self.turns: dict[str, int] = {}  # for each block the step, modulo `every`, in which it is renewed
        self._turns_for: list[Stack] | None = None  # the stacks whose blocks have got their turns
        self._pending: list[_NewBases] = []  # bases that have been computed but not installed yet
        self._side_stream = SideStream()
        self._renewal = self._record_renewal()

    def observe(self, optimizer: Rebasable) -> None:
        """Update the Gram matrices, and compute the first bases of blocks that have their first gradient."""
        self.grams.follow(optimizer.stacks)
        self.grams.update()
        if self.waiting and (ready := self.waiting & self.grams.by_block.keys()):
            self._compute_first_bases(optimizer, ready)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1
        self.report_failures()
        is_last = self.steps % self.config.every == 0  # of a round
        if self.config.tolerance is None:
            due = self._find_due(optimizer.stacks)
            self.renewals += is_last
        else:
            due = self._find_drifted(optimizer.stacks) if is_last else []
            self.renewals += bool(due)
        if due:
            is_alongside = self._renew(due, self._renewal)
            if not is_alongside or self.config.tolerance is not None:
                self.wait_for_refresh(optimizer)

    def renew(self, optimizer: Rebasable) -> None:
        self.wait_for_refresh(optimizer)
        self.grams.follow(optimizer.stacks)
        if ranges := [each for stack in optimizer.stacks for each in self.grams.find_ranges(stack)]:
            self._renew(ranges, decompose)
            self.wait_for_refresh(optimizer)
            self.renewals += 1

    def wait_for_refresh(self, optimizer: Rebasable) -> None:
        self._side_stream.join()
        pending, self._pending = self._pending, []
        for new in pending:
            self.count_failures(new.sound)
            if self.config.moments != "reset":  # a failed renewal gives the old basis again, which changes nothing
                optimizer.rebase_stack(new.stack, new.members, new.tensors, self.config.moments)
                continue
            # After a failed renewal the moments must not be reset, so the host has to know which ones failed.
            sound = [place for place, is_sound in enumerate(_list_sound_blocks(new.sound)) if is_sound]
            for _, part in find_runs(sound):
                members = slice(new.members.start + part.start, new.members.start + part.stop)
                tensors = {key: tensor[part] for key, tensor in new.tensors.items()}
                optimizer.rebase_stack(new.stack, members, tensors, "reset")

    def block_states(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        states: dict[str, dict[str, Tensor]] = {}
        created = self.find_created(optimizer)
        for stack in optimizer.stacks:
            if not stack.change.is_renewable():
                continue
            for block, grams in zip(stack.blocks, self.grams.export(stack, complete=complete), strict=True):
                is_waiting, turn = block.name in self.waiting, self.turns.get(block.name, -1)
                phase = [self.grams.has_seen(block), is_waiting, block.name in created, turn]
                states[block.name] = grams | {_PHASE: torch.tensor(phase, device=block.device)}
        return states

    def load(
        self, counts: Sequence[int], states: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        blocks = [block for block in blocks if block.change.is_renewable()]
        if missing := [block.name for block in blocks if _PHASE not in states[block.name]]:
            raise ValueError(f"It was saved with another refresh: it has no Gram matrices of {', '.join(missing[:3])}.")
        phases = {block.name: to_full(states[block.name][_PHASE]).tolist() for block in blocks}
        if wrong := [name for name, phase in phases.items() if not (isinstance(phase, list) and len(phase) == 4)]:
            raise ValueError(f"The phase of '{wrong[0]}' is not four numbers.")
        seen, waiting, created = ({name for name, phase in phases.items() if phase[place]} for place in range(3))
        grams = GramMatrices.load(self.config.decay, states, blocks, seen)
        super().load(counts, states, blocks)
        self.restart(created, waiting)
        turns = {name: phase[3] for name, phase in phases.items() if phase[3] >= 0}
        self.grams, self._turns_for = grams, None
        self.turns = turns if any(turns.values()) else {}  # if all are 0, they were not spread

    def reset(self) -> None:
        super().reset()
        self.restart()
        self.grams, self.turns, self._turns_for = GramMatrices(self.config.decay), {}, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the stacks and recordings out of copies: they belong to this optimizer."""
        recordings = {"_side_stream": SideStream(), "_renewal": self._record_renewal()}
        return super().__getstate__() | recordings | {"_turns_for": None}

    def _record_renewal(self) -> Renewal:
        return GraphedFunction(iterate, Recorder()) if self.config.tolerance is None else decompose

    def _find_due(self, stacks: list[Stack]) -> list[BlockRange]:
        """Find the blocks whose turn it is."""
        if self.config.spread and self._turns_for is not stacks:
            costs = {block.name: _renewal_cost(stack) for stack in stacks for block in stack.blocks}
            self.turns, self._turns_for = assign_turns(costs, self.config.every, self.turns), stacks
        turn = self.steps % self.config.every
        if turn not in (self.turns.values() if self.config.spread else (0,)):
            return []
        self.grams.follow(stacks)
        due = [
            (stack, [i for i, block in enumerate(stack.blocks) if self.turns.get(block.name, 0) == turn])
            for stack in stacks
        ]
        return [each for stack, indices in due for each in self.grams.find_ranges(stack, indices)]

    def _find_drifted(self, stacks: list[Stack]) -> list[BlockRange]:
        """Return all blocks that have received a gradient if one of their bases has drifted, else none."""
        assert self.config.tolerance is not None
        self.grams.follow(stacks)
        ranges = [each for stack in stacks for each in self.grams.find_ranges(stack)]
        shares = [
            off_diagonal_share(stack.sum_over_rows(gram[members]), stack.change.tensors[key][members]).flatten()
            for stack, members in ranges
            for key, gram in self.grams.stacked(stack).items()
        ]
        is_current = not shares or bool((torch.cat(shares) <= self.config.tolerance).all())  # False for NaN
        return [] if is_current else ranges

    def _compute_first_bases(self, optimizer: Rebasable, ready: set[str]) -> None:
        """Compute first bases from the first gradients. If a gradient is zero or not finite, wait for the next one."""
        ranges: list[BlockRange] = []
        for stack in optimizer.stacks:
            if wanted := [index for index, block in enumerate(stack.blocks) if block.name in ready]:
                traces = self.grams.traces(stack)
                ranges += self.grams.find_ranges(stack, [index for index in wanted if traces[index] != 0])
        sound: set[str] = set()
        if ranges:
            # Leading eigenvectors alone would count as drifted.
            self._renew(ranges, decompose_leading if self.config.tolerance is None else decompose)
            self._side_stream.join()
            self._pending = [_refine_first_bases(new) for new in self._pending]
            for new in self._pending:
                flags = zip(new.stack.blocks[new.members], _list_sound_blocks(new.sound), strict=True)
                sound |= {block.name for block, is_sound in flags if is_sound}
            self.renewals += 1
        self.wait_for_refresh(optimizer)
        self.waiting = self.waiting - sound
        self.grams.forget(ready - sound)

    def _renew(self, ranges: list[BlockRange], renewal: Renewal) -> bool:
        """Compute new bases. Return True if a GPU computes them during training and the next step installs them."""
        inputs = [
            (stack, members, key, stack.sum_over_rows(gram[members]), gram[members])
            for stack, members in ranges
            for key, gram in self.grams.stacked(stack).items()
        ]
        used = [tensor for stack, _, key, total, gram in inputs for tensor in (total, gram, stack.change.tensors[key])]
        with self._side_stream.use(used) as is_alongside:
            pairs = [(total, stack.change.tensors[key][members]) for stack, members, key, total, _ in inputs]
            results = iter(renew_in_batches(renewal, pairs))
            for (stack, members), matrices in groupby(inputs, lambda given: given[:2]):
                tensors, flags = {}, []
                for _, _, key, _, gram in matrices:
                    tensors[key], sound = next(results)
                    # Replace non-finite values with zeros: they would never leave the running mean.
                    torch.where(sound[..., None, None], gram, gram.new_zeros(()), out=gram)
                    flags.append(sound)
                sound = torch.stack(flags).all(0)
                for key, fresh in tensors.items() if len(tensors) > 1 else ():  # renew all bases of a block, or none
                    old = stack.change.tensors[key][members]
                    tensors[key] = torch.where(sound[..., None, None], fresh, old)
                self._pending.append(_NewBases(stack, members, tensors, sound))
        return is_alongside


def assign_turns(costs: Mapping[str, float], every: int, known: Mapping[str, int]) -> dict[str, int]:
    """Assign each block the step of a round in which it is renewed, so that all steps have similar costs.

    Turns that were assigned before are kept, unless the round of ``every`` steps has become too short for them. New
    blocks take the steps with the least work.
    """
    turns = {name: known[name] for name in costs if known.get(name, every) < every}
    if not turns:
        total, before = sum(costs.values()), 0.0
        for name, cost in costs.items():
            turns[name] = int(every * (before + 0.5 * cost) / total) if total else 0
            before += cost
        return turns
    loads = [sum(costs[name] for name, turn in turns.items() if turn == step) for step in range(every)]
    for name in [name for name in costs if name not in turns]:
        turns[name] = loads.index(min(loads))
        loads[turns[name]] += costs[name]
    return turns


def _renewal_cost(stack: Stack) -> int:
    """Estimate the relative cost of renewing one of the stack's blocks."""
    if not stack.change.is_renewable():
        return 0
    return sum(math.prod(tensor.shape[1:-2]) * tensor.shape[-2] ** 3 for tensor in stack.change.tensors.values())


def _refine_first_bases(new: _NewBases) -> _NewBases:
    """Make directions without gradient orthogonal to the gradients, beyond the rounding error of Gram matrices."""
    change = new.stack.change.part(new.members).with_tensors(new.tensors)
    places = [new.stack.active.index(index) for index in range(len(new.stack.blocks))[new.members]]
    rows = change.rows([gradient[places] for gradient in new.stack.gradients])
    assert rows is not None
    refined = {}
    for key, basis in new.tensors.items():
        with exact_products():
            inside = rows[key] @ basis
            gram = new.stack.sum_over_rows(inside.mT @ inside)
        refined[key] = torch.where(new.sound[..., None, None], clear_null_space(basis, gram), basis)
    return new._replace(tensors=refined)


def _list_sound_blocks(sound: Tensor) -> list[bool]:
    """Return, for each block, whether all its matrices are sound. A block of experts has several per side."""
    flags: list[bool] = sound.flatten(1).all(1).tolist() if sound.dim() > 1 else sound.tolist()
    return flags
