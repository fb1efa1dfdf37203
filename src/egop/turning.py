"""Some blocks of one kind and shape, stacked, expressed in other bases: their points and their moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from egop.moments import rotated
from egop.precision import exact_products
from egop.replay import copy_all
from egop.structures import ChangeOfBasis

# What of an optimizer's state follows a change of basis, by where it is, for each coordinate tensor of each block.
StackedStates = Sequence[Sequence[Mapping[str, Tensor]]]


def turn(old: ChangeOfBasis, new: ChangeOfBasis, coordinates: Sequence[Tensor], states: StackedStates) -> None:
    """Write the new bases over the old ones, and what coordinates and states are in them over these.

    Nothing is written before all is computed, and the host does not look at any value.
    """
    with exact_products():  # the point itself must not lose digits with every change
        rotation = new.rotation_from(old)
        assert rotation is not None
        encoded = new.rotated(tuple(coordinates), rotation)
        targets, sources = moved_states(old, new, states, rotation)
    copy_all([*old.tensors.values(), *coordinates, *targets], [*new.tensors.values(), *encoded, *sources])


def moved_states(
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    states: StackedStates,
    rotation: Mapping[str, Tensor] | None,
    rest: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The state tensors, and what they are to be in the new basis.

    Args:
        old: the bases that they are in.
        new: the bases that they are wanted in.
        states: the state tensors.
        rotation: from one to the other, if there is one.
        rest: what the old bases leave out of the blocks' tensors and the optimizer keeps.
    """
    kinds: dict[tuple[tuple[str, ...], ...], list[int]] = {}  # nearly always one: all have been stepped, or none
    for index, each in enumerate(states):
        kinds.setdefault(tuple(tuple(state) for state in each), []).append(index)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for kind, places in kinds.items():
        stacked = [{key: stack([states[i][k][key] for i in places]) for key in keys} for k, keys in enumerate(kind)]
        together = len(kinds) == 1
        sides = (
            (old, new, rotation, rest)
            if together
            else (old.part(places), new.part(places), None, rest and [part[places] for part in rest])
        )
        for k, fresh in enumerate(rotated(stacked, *sides)):
            for key, value in fresh.items():
                targets += [states[index][k][key] for index in places]
                sources += value.unbind()
    return targets, sources


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one; a single one is not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))
