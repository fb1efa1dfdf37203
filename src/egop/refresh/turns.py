"""Whose turn it is: in which step of a round each block is renewed."""

from __future__ import annotations

from collections.abc import Mapping


def turns_of(costs: Mapping[str, float], every: int, known: Mapping[str, int]) -> dict[str, int]:
    """For each block the step of a round in which it is renewed, so that all steps of a round have like costs.

    Args:
        costs: of the renewals, by block name.
        every: how many steps a round has.
        known: the turns that blocks have already. They keep them; others then take the steps with least to do.
    """
    turns = {name: known[name] for name in costs if name in known}
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
