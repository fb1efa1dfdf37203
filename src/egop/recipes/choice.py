"""The choice of weights that EGOP steps as matrices."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from egop.basis import Block, Identity, ModuleIndex, Plan, Role, Shared, find_roles, rows_and_columns
from egop.formatting import list_first
from egop.optimizer import find_user_level

# Parameters that a model holds outside any layer, such as ``pos_embed``: what they hold is added, not multiplied.
_POSITIONS = re.compile(r"pos(ition|itional)?s?(_|$)|.*(embed|token)|(.*_)?emb(_|$)|(wpe|wte|pe)$")
_WIDEST = 8192  # a weight whose sides are both wider is left to AdamW: its polar factor would take too long


class Matrix(NamedTuple):
    """What EGOP knows of a weight matrix besides its shape.

    Attributes:
        stacked: the number of leading dimensions that count matrices: 1 for experts, otherwise 0.
        gain: the root of outputs over inputs, but at least 1: a factor of its updates.
        overlaps: whether it is a convolution whose windows overlap.
    """

    stacked: int
    gain: float
    overlaps: bool

    def sides(self, weight: Tensor) -> tuple[int, int]:
        """Return the shape of a weight, or of each matrix of a stack, as a matrix with one row per first index."""
        shape = weight.shape[self.stacked :]
        return shape[0], math.prod(shape[1:])

    def basis_shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of the basis of the smaller side."""
        side = min(self.sides(weight))
        return (*weight.shape[: self.stacked], side, side)

    def block(self, name: str, weight: Tensor) -> Block:
        """Return the weight as a block."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return Block(name, (name,), (weight.shape,), dtype, stacked=(self.stacked,))


def _find_gain(weight: Tensor, role: Role) -> float:
    outputs, inputs = rows_and_columns(weight.shape[role.stacked :], role.transposed)
    return max(1.0, math.sqrt(outputs / inputs)) if inputs else 1.0


class WeightChoice:
    """Which parameters are stepped as matrices, and why other weights are not.

    Args:
        exclude: name patterns of weights to leave out.
    """

    def __init__(self, exclude: str | Sequence[str] | None) -> None:
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude or ())
        if wrong := [pattern for pattern in self.exclude if not isinstance(pattern, str)]:
            raise TypeError(f"exclude must be name patterns such as '*.gate', got {type(wrong[0]).__name__}.")
        self.roles: dict[str, Role] = {}
        self.matrices: dict[str, Matrix] = {}
        self.left: dict[str, str] = {}  # why a weight is left to AdamW

    def add(self, named: Mapping[str, Tensor], index: ModuleIndex | None) -> None:
        """Choose how to step these parameters by their roles in the module; without a module, guess the roles."""
        for name, found in find_roles(named, index).items():
            # A copy has no module to ask for the roles of known parameters.
            role = self.roles[name] = found if index is not None else self.roles.get(name, found)
            self.matrices.pop(name, None)
            self.left.pop(name, None)
            if role.kind in ("bias", "norm"):
                if named[name].dim() > 1:
                    self.left[name] = "a bias" if role.kind == "bias" else "part of a normalization layer"
                continue
            matrix = Matrix(role.stacked, _find_gain(named[name], role), role.overlaps)
            if reason := self._find_reason(name, named[name], role, matrix):
                self.left[name] = reason
            else:
                self.matrices[name] = matrix

    def check(self, names: Collection[str], index: ModuleIndex | None, added: Collection[str] | None = None) -> None:
        """Raise ValueError for a pattern that matches nothing; warn of roles that were guessed and of no matrices.

        Args:
            names: names of all parameters.
            index: the module's parameters, if it is known.
            added: names of parameters that were added later: only these are checked.
        """
        weights = [name for name in (*self.matrices, *self.left) if added is None or name in added]
        for pattern in self.exclude if added is None else ():
            if not any(_matches(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, weights)
                names = f"Closest: {', '.join(near)}." if near else f"The weights are {list_first(weights)}."
                raise ValueError(f"Pattern {pattern!r} in exclude matches no parameter. {names}")
        chosen = [name for name in weights if name in self.matrices]
        left = list_first([f"{name} ({self.left[name]})" for name in weights if name in self.left])
        if index is None and weights:
            warnings.warn(
                "egop.EGOP chooses weights by their roles. Without the model, the roles were guessed from names and "
                f"shapes, and the model is assumed to have normalization layers. Weights to rotate: "
                f"{list_first(chosen)}. Weights left to AdamW: {left}. Pass the model itself, or add model=model.",
                stacklevel=find_user_level(),
            )
        elif self.left and not self.matrices:
            warnings.warn(
                f"egop.EGOP found no weight matrix, so AdamW updates all parameters. Weights left out: {left}.",
                stacklevel=find_user_level(),
            )

    def plan(self, named: Iterable[tuple[str, Tensor]], *, rotate: bool) -> Plan:
        """Return the choice as a plan, which can be printed. Frozen parameters are left out."""
        structure = Shared(side="smaller") if rotate else Identity()
        trained = {name: weight for name, weight in named if weight.requires_grad}
        blocks = [self.matrices[name].block(name, weight) for name, weight in trained.items() if name in self.matrices]
        left = {name: reason for name, reason in self.left.items() if name in trained}
        return Plan(dict.fromkeys(blocks, structure), left)

    def _find_reason(self, name: str, parameter: Tensor, role: Role, matrix: Matrix) -> str:
        if parameter.is_complex():
            return "complex numbers"
        if role.skip_reason:
            return role.skip_reason
        if any(_matches(name, pattern) for pattern in self.exclude):
            return "excluded"
        if _POSITIONS.match(name.rpartition(".")[2]):
            return "a table of positions or tokens"
        return f"both sides are wider than {_WIDEST}" if min(matrix.sides(parameter)) > _WIDEST else ""


def _matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a weight's name, or that of a module that holds it."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
