"""RotatedPolarAdam: PolarAdam in an eigenbasis that follows the momentum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egop.distributed import is_sharded, to_full, write_shard
from egop.numerics import (
    GraphedFunction,
    Recorder,
    SideStream,
    check_positive_int,
    copy_all,
    exact_products,
    is_sound,
    orthonormality_error,
    power_iteration,
)
from egop.optim.matrix_optimizer import Part
from egop.optim.polar_adam import PolarAdam, is_tall, rotate

_MAX_STACKS = 64  # stacks of bases to keep; a network whose weights all have gradients needs one for each shape


class _Renewal(NamedTuple):
    """A new basis, computed before the step that installs it."""

    turn: Tensor  # the new basis in the coordinates of the old one
    basis: Tensor
    momentum: Tensor  # what it was computed from
    version: int


class RotatedPolarAdam(PolarAdam):
    r"""PolarAdam on rotated coordinates of each weight, :math:`Q^\top W` or :math:`W Q`, whichever side is smaller.

    The basis :math:`Q` starts as the identity and follows the eigenvectors of :math:`M M^\top`, where :math:`M` is the
    momentum. A renewal is one step of orthogonal iteration, after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and then
    every ``every`` steps. Gradients are rotated and updates rotated back, so the weights keep their own coordinates.
    ``exp_avg`` and ``exp_avg_sq`` are in the basis; a renewal rotates the first exactly, the second by the squared
    rotation.

    On a GPU a new basis is computed on another stream right after the step before, alongside the next forward and
    backward pass. Until the step that installs it, the state stays as it is.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate.
        every: number of steps between renewals of a basis.
        **options: further arguments of :class:`PolarAdam`.
    """

    recordable = True

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *, every: int = 200, **options: Any) -> None:
        check_positive_int("every", every)
        super().__init__(params, lr, **options)
        self.defaults["every"] = every
        for group in self.param_groups:
            group.setdefault("every", every)

    def step_parts(self, parts: Sequence[Part]) -> None:
        """Renew the bases that are due and step some weights of each group along these gradients."""
        self._side_stream.join()
        counters = []
        for group, weights, _ in parts:
            counters.append(self._start(group, weights))
            self._install(group, _find_due(group, weights, counters[-1]))
            for indices in self._group_by_layout(group, weights):
                self._stack_bases([weights[index] for index in indices])
        self._ahead.clear()
        super().step_parts(parts)
        for (group, weights, _), steps in zip(parts, counters, strict=True):
            torch._foreach_add_(steps, 1)
            self._renew_ahead(group, _find_due(group, weights, steps))

    def step_sharded(self, group: Mapping[str, Any], weight: Tensor, gradient: Tensor) -> None:
        """Renew the basis if it is due and step a weight that is sharded over processes."""
        steps = self._start(group, [weight])
        self._install(group, _find_due(group, [weight], steps))
        self._stack_bases([weight])
        super().step_sharded(group, weight, gradient)
        steps[0].add_(1)

    def find_bases(self, weights: list[Tensor]) -> Tensor:
        """Return the stacked bases of weights of one shape."""
        return self._base_stacks[_key(weights)][0]

    def _graph_inputs(self, group: Mapping[str, Any], weights: list[Tensor]) -> list[Tensor]:
        stacks = [
            self.find_bases([weights[index] for index in indices]) for indices in self._group_by_layout(group, weights)
        ]
        return [*super()._graph_inputs(group, weights), *stacks]

    def _start(self, group: Mapping[str, Any], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the step counters of weights; create the state of those that have none, with the identity as basis."""
        states = [self.state[weight] for weight in weights]
        for weight, state in zip(weights, states, strict=True):
            if "basis" not in state:
                state["step"] = torch.zeros((), device="cpu")
                stack, sides = _split_shape(weight, last=group["matrices_last"])
                identity = torch.eye(min(sides), dtype=weight.dtype, device=weight.device)
                state["basis"] = identity.expand(*stack, *identity.shape).clone()
        return [state["step"] for state in states]

    def _renew_ahead(self, group: Mapping[str, Any], weights: list[Tensor]) -> None:
        """Compute the next bases on a side stream, if there is one."""
        if weights:
            used = [self.state[weight][name] for weight in weights for name in ("exp_avg", "basis")]
            with self._side_stream.use(used) as is_alongside:
                self._ahead |= self._compute_renewals(group, weights) if is_alongside else {}

    def _install(self, group: Mapping[str, Any], weights: list[Tensor]) -> None:
        """Move the state of weights to their new bases."""
        if not weights:
            return
        states = [self.state[weight] for weight in weights]
        renewals = self._ahead
        if not all(_is_current(renewals.get(weight), self.state[weight]) for weight in weights):
            renewals = self._compute_renewals(group, weights)
        for indices in self._group_by_layout(group, weights):
            own = [weights[index] for index in indices]
            turns = torch.stack([renewals[weight].turn for weight in own])
            self._rotate_state(group, own, "exp_avg", turns)
            self._rotate_state(group, own, "exp_avg_sq", turns.square())
        copy_all([state["basis"] for state in states], [renewals[weight].basis for weight in weights])

    def _rotate_state(self, group: Mapping[str, Any], weights: list[Tensor], name: str, turns: Tensor) -> None:
        matrices = self._stack_state(group, weights, name)
        if _is_fast_in_bfloat16(matrices):
            matrices, turns = matrices.bfloat16(), turns.bfloat16()
        with exact_products():
            rotated = rotate(matrices, turns)
        states = [self.state[weight][name] for weight in weights]
        if is_sharded(states[0]):
            write_shard(states[0], rotated.reshape(states[0].shape))
        else:
            self._elementwise.unstack(weights, rotated, states, last=group["matrices_last"])

    def _compute_renewals(self, group: Mapping[str, Any], weights: list[Tensor]) -> dict[Tensor, _Renewal]:
        """Return new bases; those of one width are computed together."""
        by_width: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for indices in self._group_by_layout(group, weights):
            own = [weights[index] for index in indices]
            momenta = self._stack_state(group, own, "exp_avg")
            with exact_products():
                grams = momenta.mT @ momenta if is_tall(momenta) else momenta @ momenta.mT
            members, found = by_width.setdefault((grams.shape[1:], grams.dtype, grams.device), ([], []))
            members += own
            found += grams.unbind()
        renewals = {}
        for members, found in by_width.values():
            bases = torch.stack([self.state[weight]["basis"] for weight in members])
            for weight, turn, basis in zip(members, *self._renewal(torch.stack(found), bases), strict=True):
                momentum = self.state[weight]["exp_avg"]
                renewals[weight] = _Renewal(turn, basis, momentum, _version(self.state[weight]))
        return renewals

    def _stack_state(self, group: Mapping[str, Any], weights: list[Tensor], name: str) -> Tensor:
        states = self._states(weights, name)
        if is_sharded(states[0]):
            stack, sides = _split_shape(weights[0], last=group["matrices_last"])
            return to_full(states[0]).reshape(1, *stack, *sides)
        return self._elementwise.stack(weights, states, last=group["matrices_last"])

    def _stack_bases(self, weights: list[Tensor]) -> None:
        """Keep a stack of the bases, in the precision of products and always in the same memory, up to date."""
        bases = [self.state[weight]["basis"] for weight in weights]
        versions = [(basis.data_ptr(), basis._version) for basis in bases]
        stack, known = self._base_stacks.get(_key(weights), (None, None))
        if stack is None:
            if len(self._base_stacks) == _MAX_STACKS:
                self._base_stacks.clear()
            dtype = torch.bfloat16 if _is_fast_in_bfloat16(bases[0]) else bases[0].dtype
            stack = bases[0].new_empty(len(bases), *bases[0].shape, dtype=dtype)
        if known != versions:
            copy_all(list(stack.unbind()), bases)
            self._base_stacks[_key(weights)] = stack, versions

    def _reset_graphs(self) -> None:
        super()._reset_graphs()
        self._renewal = GraphedFunction(renew, Recorder())
        self._side_stream = SideStream()
        self._ahead: dict[Tensor, _Renewal] = {}
        self._base_stacks: dict[tuple[int, ...], tuple[Tensor, Any]] = {}


def renew(grams: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of orthogonal iteration; return the new bases in coordinates of the old ones, and themselves.

    Where the iteration fails, because the momentum is not finite, the basis stays as it is.

    Args:
        grams: Gram matrices in the old coordinates.
        bases: the old bases.
    """
    ones = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device).expand_as(grams)
    turns = power_iteration(grams)
    turns = torch.where(is_sound(turns, ones)[..., None, None], turns, ones)
    with exact_products():
        fresh = bases @ turns
        # One Newton step towards the nearest orthonormal matrix, so that errors of products do not add up.
        return turns, 1.5 * fresh - 0.5 * fresh @ (fresh.mT @ fresh)


def measure_rotation(momentum: Tensor, basis: Tensor | None) -> dict[str, float]:
    """Return how far the momentum of a weight is from equal strength in all directions, and its basis from perfect.

    Args:
        momentum: the momentum in the basis, with any leading dimensions.
        basis: the basis; None if there is none.
    """
    if not momentum.isfinite().all():
        return {"nonfinite": 1.0}
    gram = momentum.mT @ momentum if is_tall(momentum) else momentum @ momentum.mT
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(torch.finfo(gram.dtype).tiny)
    found = {"stable_rank": float((diagonal.mean(-1) / largest).mean()), "nonfinite": 0.0}
    if basis is not None:
        norm = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(gram.dtype).tiny)
        found["off_diagonal"] = float((torch.linalg.matrix_norm(gram - diagonal.diag_embed()) / norm).mean())
        found["orthogonality_error"] = orthonormality_error(basis.double())
    return found


def _find_due(group: Mapping[str, Any], weights: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights whose basis is renewed before their next step."""
    due = {step for step in set(map(int, steps)) if _is_due(step, group["every"])}
    return [weight for weight, step in zip(weights, steps, strict=True) if int(step) in due] if due else []


def _is_due(step: int, every: int) -> bool:
    """Return True after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... below ``every``, and after every ``every`` steps."""
    is_early = step < every and step % 2 ** max(0, step.bit_length() - 2) == 0
    return step > 0 and (is_early or step % every == 0)


def _split_shape(weight: Tensor, *, last: bool) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the shape of the stack that a weight is, and the sides of its matrices."""
    if last:
        return tuple(weight.shape[:-2]), (weight.shape[-2], weight.shape[-1])
    return (), (weight.shape[0], math.prod(weight.shape[1:]))


def _is_current(renewal: _Renewal | None, state: Mapping[str, Tensor]) -> bool:
    """Return True if the state has not been touched since the renewal was computed."""
    return renewal is not None and renewal.momentum is state["exp_avg"] and renewal.version == _version(state)


def _version(state: Mapping[str, Tensor]) -> int:
    return state["exp_avg"]._version + state["basis"]._version


def _is_fast_in_bfloat16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cuda"


def _key(weights: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(map(id, weights))
