"""Some blocks of one kind and shape, stacked, expressed in other bases: their points and their moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.numerics import copy_all, exact_products, stack_tensors
from egop.optimizer.moments import rotated

_WIDE = 2048  # from here on the product of two bases takes seconds on a CPU

# What of an optimizer's state follows a change of basis, by where it is, for each coordinate tensor of each block.
StackedStates = Sequence[Sequence[Mapping[str, Tensor]]]


def rebase(old: ChangeOfBasis, new: ChangeOfBasis, coordinates: Sequence[Tensor], states: StackedStates) -> None:
    """Write the new bases over the old ones, and what coordinates and states are in them over these.

    Nothing is written before all is computed, and the host does not look at any value. What has the same basis as
    before, since its renewal failed, stays as it is, bit for bit: its rotation is only nearly the identity.
    """
    changed = _changed(old, new)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    with exact_products():  # the point itself must not lose digits with every change
        if _is_wide(new) and not any(state for block in states for state in block):
            # For a point alone the rotation, a product of two bases, costs more than the way through the parameters.
            moved = new.encode(old.decode(coordinates))
        else:
            rotation = new.rotation_from(old)
            assert rotation is not None
            moved = new.rotated(tuple(coordinates), rotation)
            targets, sources = moved_states(old, new, states, rotation, changed=changed)
        encoded = [_where(changed, *pair) for pair in zip(moved, coordinates, strict=True)]
    copy_all([*old.tensors.values(), *coordinates, *targets], [*new.tensors.values(), *encoded, *sources])


def moved_states(
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    states: StackedStates,
    rotation: Mapping[str, Tensor] | None,
    rest: Sequence[Tensor] | None = None,
    changed: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The state tensors, and what they are to be in the new basis.

    Args:
        old: the bases that they are in.
        new: the bases that they are wanted in.
        states: the state tensors.
        rotation: from one to the other, if there is one.
        rest: what the old bases leave out of the blocks' tensors and the optimizer keeps.
        changed: which blocks have another basis; the states of the others stay as they are.
    """
    kinds: dict[tuple[tuple[str, ...], ...], list[int]] = {}  # nearly always one: all have been stepped, or none
    for index, entry in enumerate(states):
        kinds.setdefault(tuple(tuple(state) for state in entry), []).append(index)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for kind, places in kinds.items():
        stacked = [
            {key: stack_tensors([states[i][place][key] for i in places]) for key in keys}
            for place, keys in enumerate(kind)
        ]
        together = len(kinds) == 1
        sides = (
            (old, new, rotation, rest)
            if together
            else (old.part(places), new.part(places), None, rest and [part[places] for part in rest])
        )
        for k, fresh in enumerate(rotated(stacked, *sides)):
            for key, value in fresh.items():
                targets += [states[index][k][key] for index in places]
                if changed is not None:
                    mask = changed if together else changed[places]
                    value = _where(mask, value, stacked[k][key])
                sources += value.unbind()
    return targets, sources


def _is_wide(change: ChangeOfBasis) -> bool:
    return any(tensor.shape[-1] > _WIDE for tensor in change.tensors.values())


def _changed(old: ChangeOfBasis, new: ChangeOfBasis) -> Tensor:
    """Which of several stacked changes of basis are not the same as before, to the last bit; experts one by one."""
    leading = 1 + (old.block.stacked[0] if len(old.block.stacked) == 1 else 0)
    pairs = [(tensor, new.tensors[name]) for name, tensor in old.tensors.items()]
    return torch.stack([(before != after).flatten(leading).any(-1) for before, after in pairs]).any(0)


def _where(changed: Tensor, fresh: Tensor, kept: Tensor) -> Tensor:
    """What is new for those that have changed, for the others what they had."""
    return torch.where(changed.reshape(changed.shape + (1,) * (kept.dim() - changed.dim())), fresh, kept)
