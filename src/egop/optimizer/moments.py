"""Move coordinates and optimizer state to another basis.

State is recognized by its name. A tensor inside a list, a dict or a deque goes by the name of that container.

===================  =====================================================================================  ===========
kind                 how it follows a change of basis                                                       names
===================  =====================================================================================  ===========
vectors              rotated exactly: means of gradients and updates, linear in them                        LINEAR
points               moved like the coordinates, with what an incomplete basis leaves out; also if moments  POINTS
                     are kept, since the same numbers are another point in another basis
squares              rotated by the squared rotation if the structure has one (``Full``, ``Shared``,        SQUARED
                     ``Kronecker``), kept otherwise
magnitudes           squared, rotated like squares, and back                                                MAGNITUDES
step sizes           kept, since they cannot be rotated                                                     STEP_SIZES
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
from egop.numerics import copy_all, exact_products, stack_tensors

Moments = Literal["rotate", "keep", "reset"]

# First the names of torch.optim, then those of other packages that mean the same thing everywhere.
LINEAR = {"exp_avg", "momentum_buffer", "grad_avg", "prev"}
LINEAR |= {"exp_avg_slow", "exp_avg_diff", "exp_avg_grad", "neg_exp_avg", "grok_exp_avg", "avg_grad", "previous_grad"}
LINEAR |= {"last_grad", "grad_queue", "momentum", "pos_momentum", "neg_momentum", "slow_momentum"}
# Running averages of points that start at zero are not among them: they are a point times a number below one.
POINTS = {"ax", "center"}
POINTS |= {"z", "x0", "x_k", "p0", "prev_param", "slow_buffer", "slow_params"}
SQUARED = {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"}
SQUARED |= {"exp_avg_var", "max_exp_avg_var", "grad_sum_sq"}
MAGNITUDES = {"exp_inf"}
STEP_SIZES = {"step_size"}

_KINDS = (LINEAR, POINTS, SQUARED, MAGNITUDES, STEP_SIZES)  # users may add names to them
_PLAIN = (Number, str, bytes, type(None), torch.dtype, torch.device)
_WIDE = 2048  # from this width on, the product of two bases takes seconds on a CPU

# For each coordinate tensor of each block, the part of its state that follows a change of basis.
StackedStates = Sequence[Sequence[Mapping[str, Tensor]]]


def check_moments(moments: str) -> None:
    """Raise ValueError for an unknown policy."""
    if moments not in ("rotate", "keep", "reset"):
        raise ValueError(f"Invalid moments value: {moments!r}. Must be 'rotate', 'keep' or 'reset'.")


def is_known_name(name: str) -> bool:
    """Return True for a name in the table above."""
    return any(name in kind for kind in _KINDS)


def find_leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors inside a value of a state, and any opaque objects, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from find_leaves(f"{path}[{key!r}]", part)
    elif isinstance(value, Sequence | AbstractSet) and not isinstance(value, str | bytes):  # a deque is a Sequence
        for index, part in enumerate(value):
            yield from find_leaves(f"{path}[{index}]", part)
    elif not isinstance(value, _PLAIN):
        yield path, value


def select_movable(state: Mapping[str, Any], shape: torch.Size, moments: Moments = "rotate") -> dict[str, Tensor]:
    """Return the tensors of a state that follow a change of basis, by path.

    Args:
        state: the state of one coordinate tensor.
        shape: the shape of the coordinates.
        moments: ``"rotate"`` raises ValueError for unknown state; ``"keep"`` moves points only; ``"reset"`` nothing.
    """
    if moments == "reset":
        return {}
    tensors = {}
    for key, value in state.items():
        for path, leaf in ((key, value),) if isinstance(value, Tensor) else find_leaves(key, value):
            if isinstance(leaf, Tensor) and (not leaf.dim() or (leaf.shape != shape and leaf.numel() == 1)):
                continue  # a single number
            if moments == "keep" and key not in POINTS:
                continue
            if not isinstance(leaf, Tensor) or not is_known_name(key):
                raise ValueError(_describe_unknown(path))
            if leaf.shape != shape or not leaf.is_floating_point():
                kind = str(leaf.dtype).removeprefix("torch.")
                details = f" of shape {tuple(leaf.shape)} ({kind}) for one of {tuple(shape)}"
                raise ValueError(_describe_unknown(path, details))
            if key not in STEP_SIZES:
                tensors[path] = leaf
    return tensors


def rebase_stack(old: ChangeOfBasis, new: ChangeOfBasis, coordinates: Sequence[Tensor], states: StackedStates) -> None:
    """Move coordinates and states of stacked blocks to new bases, in place, and write the new bases over the old ones.

    Nothing is written before everything is computed, and no value is read by the host. A block whose basis is the same
    as before, because its renewal failed, keeps its numbers bit for bit: its rotation is only nearly the identity.
    """
    changed = _find_changed(old, new)
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    with exact_products():  # points must not lose digits with every change
        if _is_wide(new) and not any(state for block in states for state in block):
            # For points alone the rotation, a product of two bases, costs more than decoding and encoding.
            moved = new.encode(old.decode(coordinates))
        else:
            rotation = new.rotation_from(old)
            assert rotation is not None
            moved = new.rotate(tuple(coordinates), rotation)
            targets, sources = move_states(old, new, states, rotation, changed=changed)
        encoded = [_select(changed, *pair) for pair in zip(moved, coordinates, strict=True)]
    copy_all([*old.tensors.values(), *coordinates, *targets], [*new.tensors.values(), *encoded, *sources])


def move_states(
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    states: StackedStates,
    rotation: Mapping[str, Tensor] | None,
    rest: Sequence[Tensor] | None = None,
    changed: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the state tensors, and their values in the new bases. Blocks that did not change keep their values."""
    stacked = [
        {key: stack_tensors([block[place][key] for block in states]) for key in state}
        for place, state in enumerate(states[0])
    ]
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for place, fresh in enumerate(rotate_states(stacked, old, new, rotation, rest)):
        for key, value in fresh.items():
            targets += [block[place][key] for block in states]
            value = value if changed is None else _select(changed, value, stacked[place][key])
            sources += value.unbind()
    return targets, sources


def rotate_states(
    states: Sequence[Mapping[str, Tensor]],
    old: ChangeOfBasis,
    new: ChangeOfBasis,
    rotation: Mapping[str, Tensor] | None,
    rest: Sequence[Tensor] | None = None,
) -> list[dict[str, Tensor]]:
    """Return the state of a block's coordinates after a change of basis.

    Args:
        states: the movable state of each coordinate tensor, see :func:`select_movable`.
        old: the current basis.
        new: the basis to move to.
        rotation: the rotation between them, if there is one.
        rest: the part of the block's tensors outside the old basis, which belongs to every point.
    """
    fresh: list[dict[str, Tensor]] = [{} for _ in states]
    for path in dict.fromkeys(path for state in states for path in state):
        if not all(path in state for state in states):
            raise ValueError(_describe_unknown(path, " for some of a block's coordinates only"))
        values = tuple(state[path].to(new.block.dtype) for state in states)
        kind = path.partition("[")[0]
        if kind in SQUARED:
            moved = rotate_squares(values, new, rotation)
        elif kind in MAGNITUDES:
            # In float64: the square of a finite magnitude must not overflow.
            squares = rotate_squares(tuple(value.double().square() for value in values), new, rotation)
            moved = tuple(value.sqrt().to(values[0].dtype) for value in squares)
        elif rotation is not None:
            moved = new.rotate(values, rotation)
        else:
            decoded = old.decode(values)
            if kind in POINTS and rest is not None:
                decoded = tuple(part + kept for part, kept in zip(decoded, rest, strict=True))
            moved = new.encode(decoded)
        for state, value in zip(fresh, moved, strict=True):
            state[path] = value
    return fresh


def rotate_squares(
    squares: tuple[Tensor, ...], new: ChangeOfBasis, rotation: Mapping[str, Tensor] | None
) -> tuple[Tensor, ...]:
    """Return squared moments rotated by the squared rotation, or unchanged if there is no rotation.

    A square that has overflowed makes every coordinate it is mixed with infinite (not NaN, although infinity times zero
    is NaN). These coordinates then stop moving, like the one that overflowed. Nothing less is safe, because the huge
    first moment is mixed into theirs too.
    """
    if rotation is None:
        return squares
    moved = new.rotate(squares, {name: matrix.to(squares[0].dtype).square() for name, matrix in rotation.items()})
    return tuple(square.nan_to_num(nan=torch.inf, posinf=torch.inf) for square in moved)


def _is_wide(change: ChangeOfBasis) -> bool:
    return any(tensor.shape[-1] > _WIDE for tensor in change.tensors.values())


def _find_changed(old: ChangeOfBasis, new: ChangeOfBasis) -> Tensor:
    """Return which stacked bases differ from the old ones in any bit, expert by expert."""
    leading = 1 + (old.block.stacked[0] if len(old.block.stacked) == 1 else 0)
    pairs = [(tensor, new.tensors[name]) for name, tensor in old.tensors.items()]
    return torch.stack([(before != after).flatten(leading).any(-1) for before, after in pairs]).any(0)


def _select(changed: Tensor, fresh: Tensor, kept: Tensor) -> Tensor:
    return torch.where(changed.reshape(changed.shape + (1,) * (kept.dim() - changed.dim())), fresh, kept)


def _describe_unknown(path: str, details: str = "") -> str:
    return (
        f"The optimizer's state has '{path}'{details}, and egop does not know how to rotate it. If it is linear in the "
        "gradients, like a momentum, register it: egop.optimizer.moments.LINEAR.add(name); if it is a mean of their "
        "squares: egop.optimizer.moments.SQUARED.add(name). Or use moments='reset', as in "
        "egop.Online(moments='reset'), which resets the state; moments='keep' is right only for state that does not "
        "depend on the basis."
    )
