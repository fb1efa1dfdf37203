"""What becomes of an optimizer's state when the basis changes.

State is known by its name, wherever it is: a tensor inside a list, a dict or a deque goes by the name of that.

===================  =====================================================================================  ===========
what it is           how it follows                                                                         names
===================  =====================================================================================  ===========
vectors              rotated exactly: means of gradients and updates, linear in them                        LINEAR
points               as the coordinates do, with what an incomplete basis leaves out; also where moments    POINTS
                     are kept, since the numbers of a point mean another one in another basis
squares              by the squared rotation where the structure can afford it (``Full``, ``Shared``,       SQUARED
                     ``Kronecker``), kept elsewhere
magnitudes           as squares, after squaring                                                             MAGNITUDES
step sizes           kept: there is no way to rotate them                                                   STEP_SIZES
single numbers       kept: counters, norms                                                                  any
everything else      an error that names it, never a guess                                                  any
===================  =====================================================================================  ===========
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Number
from typing import Any, Literal

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis

Moments = Literal["rotate", "keep", "reset"]

# First those of torch.optim, then those of other packages that mean the same thing everywhere.
LINEAR = {"exp_avg", "momentum_buffer", "grad_avg", "prev"}
LINEAR |= {"exp_avg_slow", "exp_avg_diff", "exp_avg_grad", "neg_exp_avg", "grok_exp_avg", "avg_grad", "previous_grad"}
LINEAR |= {"last_grad", "grad_queue", "momentum", "pos_momentum", "neg_momentum", "slow_momentum"}
# Running averages of points are not among them if they start at zero: such a one is a point times a number below one.
POINTS = {"ax", "center"}
POINTS |= {"z", "x0", "x_k", "p0", "prev_param", "slow_buffer", "slow_params"}
SQUARED = {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"}
SQUARED |= {"exp_avg_var", "max_exp_avg_var", "grad_sum_sq"}
MAGNITUDES = {"exp_inf"}
STEP_SIZES = {"step_size"}

_KINDS = (LINEAR, POINTS, SQUARED, MAGNITUDES, STEP_SIZES)  # which may get further names
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)


def momentum_of(state: Mapping[str, Any]) -> Tensor | None:
    """The running mean of gradients in the state of a tensor, under any of the names that it goes by."""
    names = ("exp_avg", "momentum_buffer", "momentum", "avg_grad", "grad_avg")
    return next((state[name] for name in names if isinstance(state.get(name), Tensor)), None)


def keeps_only_vectors(state: Mapping[str, Any]) -> bool:
    """Whether all that is kept of a tensor is linear in its gradients, a point, or a single number."""
    return all(
        key in LINEAR
        or key in POINTS
        or (isinstance(value, Tensor) and value.numel() <= 1)
        or isinstance(value, _PLAIN)
        for key, value in state.items()
    )


def is_known(name: str) -> bool:
    """Return True for a name of the table above."""
    return any(name in kind for kind in _KINDS)


def check_moments(moments: str) -> None:
    """Raise an error for an unknown policy."""
    if moments not in ("rotate", "keep", "reset"):
        raise ValueError(f"Invalid moments value: {moments!r}. Must be 'rotate', 'keep' or 'reset'.")


def movable(state: Mapping[str, Any], shape: torch.Size, moments: Moments = "rotate") -> dict[str, Tensor]:
    """What of the state of one coordinate tensor follows a change of basis, by where it is.

    Args:
        state: of an optimizer.
        shape: of the coordinates.
        moments: ``"rotate"``, and what is not known is an error; ``"keep"`` for points alone; ``"reset"`` for nothing.
    """
    if moments == "reset":
        return {}
    tensors = {}
    for key, value in state.items():
        for where, leaf in ((key, value),) if isinstance(value, Tensor) else leaves(key, value):
            if isinstance(leaf, Tensor) and (not leaf.dim() or (leaf.shape != shape and leaf.numel() == 1)):
                continue  # a single number
            if moments == "keep" and key not in POINTS:
                continue
            if not isinstance(leaf, Tensor) or not is_known(key):
                raise ValueError(_unknown(where))
            if leaf.shape != shape or not leaf.is_floating_point():
                kind = str(leaf.dtype).removeprefix("torch.")
                raise ValueError(_unknown(where, f" of shape {tuple(leaf.shape)} ({kind}) for one of {tuple(shape)}"))
            if key not in STEP_SIZES:
                tensors[where] = leaf
    return tensors


def leaves(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors inside a value of a state, and objects that nobody can look into, each with where it is."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(f"{where}[{key!r}]", part)
    elif isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):  # a deque is a Sequence
        for index, part in enumerate(value):
            yield from leaves(f"{where}[{index}]", part)
    elif not isinstance(value, _PLAIN):
        yield where, value


def rotated(
    states: Sequence[Mapping[str, Tensor]],
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    rotation: Mapping[str, Tensor] | None = None,
    rest: Sequence[Tensor] | None = None,
) -> list[dict[str, Tensor]]:
    """The state of a block's coordinates after a change of basis.

    Args:
        states: what of the state of each coordinate tensor of the block is :func:`movable`.
        old: the basis that the states are in.
        new: the basis that they are wanted in.
        rotation: from one to the other, if it is known already.
        rest: what the old basis leaves out of the block's tensors and the optimizer keeps: part of every point.
    """
    rotation = new.rotation_from(old) if rotation is None else rotation
    fresh: list[dict[str, Tensor]] = [{} for _ in states]
    for where in dict.fromkeys(where for state in states for where in state):
        if not all(where in state for state in states):
            raise ValueError(_unknown(where, " for some of a block's coordinates only"))
        values = tuple(state[where].to(new.block.dtype) for state in states)
        kind = where.partition("[")[0]
        if kind in SQUARED:
            moved = squares_rotated(values, new, rotation)
        elif kind in MAGNITUDES:
            # In float64: the square of a magnitude that is finite must not overflow.
            squares = squares_rotated(tuple(value.double().square() for value in values), new, rotation)
            moved = tuple(value.sqrt().to(values[0].dtype) for value in squares)
        elif rotation is not None:
            moved = new.rotate(values, rotation)
        else:
            decoded = old.decode(values)
            if kind in POINTS and rest is not None:
                decoded = tuple(part + kept for part, kept in zip(decoded, rest, strict=True))
            moved = new.encode(decoded)
        for state, value in zip(fresh, moved, strict=True):
            state[where] = value
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
    moved = new.rotate(squares, {name: matrix.to(squares[0].dtype).square() for name, matrix in rotation.items()})
    return tuple(square.nan_to_num(nan=torch.inf, posinf=torch.inf) for square in moved)


def _unknown(where: str, details: str = "") -> str:
    return (
        f"The optimizer's state has '{where}'{details}, and it is not known how that follows a change of basis. "
        "If it is linear in the gradients, as a momentum is, say so once: egop.optimizer.moments.LINEAR.add(name). Or "
        "use moments='reset', as in egop.Online(moments='reset'), which starts the state anew; moments='keep' is right "
        "only for what does not depend on the basis."
    )
