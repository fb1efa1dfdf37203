"""What becomes of an optimizer's moments when the basis changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from egop.structures import ChangeOfBasis

Moments = Literal["rotate", "keep", "reset"]

# The state of the optimizers in torch.optim, by how it follows a change of coordinates. Other optimizers mostly use the
# same names for the same things; a name that is not here is an error, never a guess.
LINEAR = {"exp_avg", "momentum_buffer", "grad_avg", "ax", "prev", "center"}
SQUARED = {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"}
MAGNITUDES = {"exp_inf"}  # as squared ones, after squaring
STEP_SIZES = {"step_size"}  # of Rprop: there is no way to rotate them; they are kept


def check_moments(moments: str) -> None:
    """Raise an error for an unknown policy."""
    if moments not in ("rotate", "keep", "reset"):
        raise ValueError(f"Invalid moments value: {moments!r}. Must be 'rotate', 'keep' or 'reset'.")


def check_movable(states: Iterable[Mapping[str, Any]]) -> None:
    """Raise an error for state that :func:`rotated` does not know."""
    keys = {key for state in states for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    for key in sorted(keys - LINEAR - SQUARED - MAGNITUDES - STEP_SIZES):
        raise ValueError(
            f"The optimizer's state has '{key}', and it is not known how that follows a change of basis. "
            "Use moments='reset' or moments='keep'."
        )


def rotated(
    states: Sequence[Mapping[str, Any]],
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    rotation: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:
    """The state of a block's coordinates after a change of basis.

    Moments that are linear in the gradient are rotated exactly. Squared moments are carried by the squared rotation
    where the structure can afford it (``Full``, ``Shared``, ``Kronecker``) and kept elsewhere. Single numbers (step
    counters) stay.

    Args:
        states: the inner optimizer's state of each coordinate tensor of the block.
        old: the basis that the states are in.
        new: the basis that they are wanted in.
        rotation: from one to the other, if it is known already.
    """
    check_movable(states)
    rotation = new.rotation_from(old) if rotation is None else rotation
    fresh = [dict(state) for state in states]
    keys = {key for state in states for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
    for key in sorted(keys - STEP_SIZES):
        values = tuple(state[key] for state in states)
        if key in LINEAR:
            moved = new.encode(old.decode(values)) if rotation is None else new.rotated(values, rotation)
        elif key in SQUARED:
            moved = squares_rotated(values, new, rotation)
        else:
            # In float64: the square of a magnitude that is finite must not overflow.
            squares = squares_rotated(tuple(value.double().square() for value in values), new, rotation)
            moved = tuple(value.sqrt().to(values[0].dtype) for value in squares)
        for state, value in zip(fresh, moved, strict=True):
            state[key] = value
    return fresh


def squares_rotated(
    squares: tuple[Tensor, ...], new: ChangeOfBasis, rotation: Mapping[str, Tensor] | None
) -> tuple[Tensor, ...]:
    """Squared moments, carried by the squared rotation; as they are where there is none.

    One that has overflowed makes infinite all that it is mixed with, though infinity times zero is not a number: like
    the coordinate it stood for, these get no more steps. Less would not be safe, as the huge first moment beside it is
    mixed with theirs, too.
    """
    if rotation is None:
        return squares
    moved = new.rotated(squares, {name: matrix.to(squares[0].dtype).square() for name, matrix in rotation.items()})
    return tuple(each.nan_to_num(nan=torch.inf, posinf=torch.inf) for each in moved)
