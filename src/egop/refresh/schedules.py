"""Schedules: when bases are renewed, and whose turn it is."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from egop.optimizer import Stacks
from egop.refresh.grams import GramMatrices, Place, renewal_cost
from egop.refresh.methods import off_diagonal


class Schedule(abc.ABC):
    """Says after each step which blocks are due.

    Args:
        every: how many steps a round has.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.turns: dict[str, int] = {}  # for each block the step of a round in which it is renewed

    @abc.abstractmethod
    def due(self, stacks: Stacks, step: int, statistic: GramMatrices) -> Iterator[Place]:
        """The blocks to be renewed after a step."""

    @abc.abstractmethod
    def is_renewal(self, step: int, due: bool) -> bool:
        """Whether a step, with or without blocks that were due, counts as a renewal of the basis."""

    @abc.abstractmethod
    def loaded(self, turns: Mapping[str, int]) -> Schedule:
        """A schedule of this kind that goes on with the turns that blocks had."""


class InTurn(Schedule):
    """Every block once in a round.

    Args:
        every: how many steps a round has.
        spread: whether the blocks take turns, so that all steps take about as long, or all come in one step.
    """

    def __init__(self, every: int, *, spread: bool) -> None:
        super().__init__(every)
        self.spread = spread
        self._known: Stacks | None = None  # whose turns these are

    def due(self, stacks: Stacks, step: int, statistic: GramMatrices) -> Iterator[Place]:
        """The blocks whose turn it is."""
        now = step % self.every
        if not self.spread and now:
            return
        if self._known is not stacks:
            costs = {block.name: renewal_cost(stack) for stack in stacks for block in stack.blocks}
            self.turns = turns_of(costs, self.every, self.turns) if self.spread else dict.fromkeys(costs, 0)
            self._known = stacks
        for stack in stacks:
            due = [i for i, block in enumerate(stack.blocks) if self.turns[block.name] == now and block.is_trained]
            yield from statistic.places(stack, due)

    def is_renewal(self, step: int, due: bool) -> bool:
        """At the end of each round."""
        return step % self.every == 0

    def loaded(self, turns: Mapping[str, int]) -> InTurn:
        """A schedule that goes on with the turns that blocks had."""
        schedule = InTurn(self.every, spread=self.spread)
        if any(turns.values()) or not self.spread:  # turns of a schedule that renews all in one step are none
            schedule.turns = dict(turns)
        return schedule

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose stacks are others."""
        return self.__dict__ | {"_known": None}


class OnceDrifted(Schedule):
    """All blocks, once one of the bases no longer diagonalises its Gram matrices.

    Args:
        every: how many steps lie between two checks.
        tolerance: how large the part off the diagonal may be.
    """

    def __init__(self, every: int, tolerance: float) -> None:
        super().__init__(every)
        self.tolerance = tolerance

    def due(self, stacks: Stacks, step: int, statistic: GramMatrices) -> Iterator[Place]:
        """All that have had a gradient, or none."""
        if step % self.every:
            return
        places = [place for stack in stacks for place in statistic.places(stack)]
        parts = [
            (off_diagonal(stack.summed(gram[members]), stack.change.tensors[key][members]) <= self.tolerance)
            .logical_not()
            .flatten()
            for stack, members in places
            for key, gram in statistic.of(stack).items()
        ]
        if parts and bool(torch.cat(parts).any()):
            yield from places

    def is_renewal(self, step: int, due: bool) -> bool:
        """Whenever there were some."""
        return due

    def loaded(self, turns: Mapping[str, int]) -> OnceDrifted:
        """Nothing is remembered: what has drifted is seen."""
        return self


def turns_of(costs: Mapping[str, float], every: int, known: Mapping[str, int]) -> dict[str, int]:
    """For each block the step of a round in which it is renewed, so that all steps of a round have like costs.

    Args:
        costs: of the renewals, by block name.
        every: how many steps a round has.
        known: the turns that blocks have already. They keep those that a round has (it may have become shorter);
            others then take the steps with least to do.
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
