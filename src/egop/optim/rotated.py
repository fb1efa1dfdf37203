"""RotatedPolarAdam: PolarAdam in an eigenbasis that follows the momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from egop.distributed import is_sharded
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
from egop.optim.elementwise import MatrixStack
from egop.optim.polar_adam import PolarAdam, is_tall, rotate


class _Renewal(NamedTuple):
    """A new basis, computed before the step that installs it."""

    turn: Tensor  # the new basis in the coordinates of the old one
    basis: Tensor
    version: tuple[int, ...]  # of the state that it was computed from


_Due = tuple[MatrixStack, list[dict[str, Tensor]]]  # weights of one layout, and the states of those to renew


class RotatedPolarAdam(PolarAdam):
    r"""PolarAdam on rotated coordinates of each weight, :math:`Q^\top W` or :math:`W Q`, whichever side is smaller.

    The basis :math:`Q` starts as the identity and follows the eigenvectors of :math:`M M^\top`, where :math:`M` is the
    momentum. A renewal is one step of orthogonal iteration, after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and then
    every ``every`` steps. Gradients are rotated and updates rotated back, so the weights keep their own coordinates.
    ``exp_avg`` and ``exp_avg_sq`` are in the basis; a renewal rotates the first exactly, the second by the squared
    rotation.

    On a GPU a new basis is computed on another stream right after the previous step, alongside the next forward and
    backward pass. Until the step that installs it, the state stays as it is.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate.
        every: number of steps between renewals of a basis.
        **options: further arguments of :class:`PolarAdam`.
    """

    recordable = True
    _side_stream: SideStream

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *, every: int = 200, **options: Any) -> None:
        check_positive_int("every", every)
        super().__init__(params, lr, **options)
        self.defaults["every"] = every
        for group in self.param_groups:
            group.setdefault("every", every)

    def _step_stacks(self, stacks: Sequence[MatrixStack]) -> None:
        """Renew the bases that are due, then step."""
        self._side_stream.join()
        for stack in stacks:
            self._start(stack)
        self._install(_find_due(stacks))
        self._ahead.clear()
        super()._step_stacks(stacks)
        self._renew_ahead([stack for stack in stacks if stack.weights[0].is_cuda and not is_sharded(stack.weights[0])])

    def _step_stack(self, stack: MatrixStack, lr: Any, kept: Any) -> None:
        """Step in the bases, which are copied to one stack, in the precision of products."""
        bases = [state["basis"] for state in stack.states]
        assert stack.bases_layout is not None
        stack.bases = stack.bases_layout.stack(bases, torch.bfloat16 if _is_fast_in_bfloat16(bases[0]) else None)
        super()._step_stack(stack, lr, kept)
        stack.bases = None

    def _start(self, stack: MatrixStack) -> None:
        """Create the state of weights that have none, with the identity as basis."""
        for weight, state in zip(stack.weights, stack.states, strict=True):
            if "basis" not in state:
                state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
                identity = torch.eye(min(stack.shape[-2:]), dtype=weight.dtype, device=weight.device)
                state["basis"] = identity.expand(*stack.shape[:-2], *identity.shape).clone()
        if stack.bases_layout is None:
            basis = stack.states[0]["basis"]
            stack.bases_layout = MatrixStack([basis], {"matrices_last": True}, any_column_order=self._is_recordable)

    def _renew_ahead(self, stacks: Sequence[MatrixStack]) -> None:
        """Compute the next bases on a side stream, if there is one."""
        if due := _find_due(stacks):
            used = [state[name] for _, states in due for state in states for name in ("exp_avg", "basis")]
            with self._side_stream.use(used) as is_alongside:
                self._ahead |= self._compute_renewals(due) if is_alongside else {}

    def _install(self, due: Sequence[_Due]) -> None:
        """Move states to their new bases."""
        if not due:
            return
        renewals = self._ahead
        if not all(_is_current(renewals.get(state["exp_avg"]), state) for _, states in due for state in states):
            renewals = self._compute_renewals(due)
        for stack, states in due:
            own = [renewals[state["exp_avg"]] for state in states]
            turns = torch.stack([renewal.turn for renewal in own])
            means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            new_means = _rotate(stack.stack(means), turns)
            # A mean of squares may have overflowed, and infinity times zero is not a number.
            largest = torch.finfo(torch.bfloat16 if turns.dtype is torch.float32 else turns.dtype).max
            new_squares = _rotate(stack.stack(squares).clamp_max_(largest), turns.square())
            # All at once, so that an interrupt leaves no state half renewed.
            stack.unstack(new_means, means)
            stack.unstack(new_squares, squares)
            copy_all([state["basis"] for state in states], [renewal.basis for renewal in own])

    def _compute_renewals(self, due: Sequence[_Due]) -> dict[Tensor, _Renewal]:
        """Return new bases by momentum; those of one width are computed together."""
        by_width: dict[Any, tuple[list[dict[str, Tensor]], list[Tensor]]] = {}
        for stack, states in due:
            momenta = stack.stack([state["exp_avg"] for state in states])
            grams = _gram(momenta)
            members, found = by_width.setdefault((grams.shape[1:], grams.dtype, grams.device), ([], []))
            members += states
            found += grams.unbind()
        renewals = {}
        for members, found in by_width.values():
            bases = torch.stack([state["basis"] for state in members])
            for state, turn, basis in zip(members, *self._renewal(torch.stack(found), bases), strict=True):
                renewals[state["exp_avg"]] = _Renewal(turn, basis, _version(state))
        return renewals

    def reset_graphs(self) -> None:
        """Drop all graphs, and the bases that were computed ahead."""
        if "_side_stream" in vars(self):
            self._side_stream.join()  # it may still read what is dropped
        super().reset_graphs()
        self._renewal = GraphedFunction(renew, Recorder())
        self._side_stream = SideStream()
        self._ahead: dict[Tensor, _Renewal] = {}  # by momentum


def renew(grams: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step of orthogonal iteration; return the rotations from the old to the new bases, and the new bases.

    The Gram matrices are in coordinates of the old bases. Where the iteration fails, because the momentum is not
    finite, the basis stays as it is.
    """
    ones = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device).expand_as(grams)
    turns = power_iteration(grams)
    turns = torch.where(is_sound(turns, ones)[..., None, None], turns, ones)
    with exact_products():
        fresh = bases @ turns
        # One Newton step towards the nearest orthonormal matrix, so that rounding errors do not accumulate.
        return turns, 1.5 * fresh - 0.5 * fresh @ (fresh.mT @ fresh)


def measure_rotation(momentum: Tensor, basis: Tensor | None) -> dict[str, float]:
    """Return the stable rank of a weight's momentum, and how far its basis is from diagonal and orthonormal."""
    found = {} if basis is None else {"failed_renewals": float(not _is_renewable(momentum))}
    if not momentum.isfinite().all():
        return found | {"nonfinite": 1.0}
    momentum = momentum.double()
    gram = _gram(momentum / momentum.abs().max().clamp_min(torch.finfo(momentum.dtype).tiny))  # so that none overflows
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(torch.finfo(gram.dtype).tiny)
    found |= {"stable_rank": float((diagonal.mean(-1) / largest).mean()), "nonfinite": 0.0}
    if basis is not None:
        norm = torch.linalg.matrix_norm(gram).clamp_min(torch.finfo(gram.dtype).tiny)
        found["off_diagonal"] = float((torch.linalg.matrix_norm(gram - diagonal.diag_embed()) / norm).mean())
        found["orthogonality_error"] = orthonormality_error(basis.double())
    return found


def _is_renewable(momentum: Tensor) -> bool:
    """Return True if a renewal with this momentum does not fail."""
    grams = _gram(momentum)
    ones = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device).expand_as(grams)
    return bool(is_sound(power_iteration(grams), ones).all())


def _gram(momenta: Tensor) -> Tensor:
    with exact_products():
        return momenta.mT @ momenta if is_tall(momenta) else momenta @ momenta.mT


def _find_due(stacks: Sequence[MatrixStack]) -> list[_Due]:
    """Return the states whose bases are renewed before their next step."""
    found = []
    for stack in stacks:
        steps = [int(state["step"]) for state in stack.states]
        due = {step for step in set(steps) if _is_due(step, stack.group["every"])}
        if due:
            found.append((stack, [state for state, step in zip(stack.states, steps, strict=True) if step in due]))
    return found


def _is_due(step: int, every: int) -> bool:
    """Return True after steps 1, 2, 3, 4, 6, 8, 12, 16, 24, ... below ``every``, and after every ``every`` steps."""
    is_early = step < every and step % 2 ** max(0, step.bit_length() - 2) == 0
    return step > 0 and (is_early or step % every == 0)


def _rotate(matrices: Tensor, turns: Tensor) -> Tensor:
    if _is_fast_in_bfloat16(matrices):
        matrices, turns = matrices.bfloat16(), turns.bfloat16()
    with exact_products():
        return rotate(matrices, turns)


def _is_current(renewal: _Renewal | None, state: Mapping[str, Tensor]) -> bool:
    """Return True if the state has not been touched since the renewal was computed."""
    return renewal is not None and renewal.version == _version(state)


def _version(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    return state["exp_avg"]._version, state["basis"]._version, id(state["basis"])


def _is_fast_in_bfloat16(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.device.type == "cuda"
