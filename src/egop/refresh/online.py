"""Online and WhenDrifted: the basis learnt from the training gradients as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egop import linalg
from egop.moments import Moments, check_moments
from egop.objective import plain_name
from egop.partition import Partition, partition_parameters
from egop.plan import StructureChoice, make_plan
from egop.refresh.base import Rebasable, Refresh, Refresher, check_decay, check_positive
from egop.reparameterization import Reparameterization
from egop.structures import ChangeOfBasis, Kronecker, Shared
from egop.units import parse_bytes


@dataclass(frozen=True)
class Online(Refresh):
    """Keep the basis current from the training gradients themselves; nothing is sampled.

    Running means of the gradients' Gram matrices are updated every step. The basis is renewed by one step of orthogonal
    iteration (multiply by the Gram matrix, orthonormalise by QR). Without a basis to start with, the first gradient
    gives one, by a full eigendecomposition; ``optimizer.renew_basis()`` does that on demand.

    Args:
        every: how many steps lie between two renewals.
        decay: of the running means.
        structure: when the optimizer has no basis to start with: a structure (``Kronecker``, ``Shared`` or ``Full``), a
            mapping of name patterns to structures, or ``"auto"``, for each weight the richer of ``Kronecker`` and
            ``Shared`` that fits; embeddings, output heads and very wide layers are left.
        partition: which parameters form a block, likewise.
        memory: what all bases together may take, likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
    """

    every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"

    def __post_init__(self) -> None:
        check_positive("every", self.every)
        check_decay(self.decay)
        check_moments(self.moments)

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        return _Streaming(self, optimizer)


@dataclass(frozen=True)
class WhenDrifted(Refresh):
    """As :class:`Online`, but the basis is renewed only when it no longer diagonalises the gradients' Gram matrices.

    Args:
        tolerance: how large the part of a Gram matrix off the diagonal may be, relative to all of it (Frobenius norms).
        check_every: how many steps lie between two checks.
        decay: of the running means.
        structure: when the optimizer has no basis to start with, as in :class:`Online`.
        partition: likewise.
        memory: likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
    """

    tolerance: float = 0.1
    check_every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"

    def __post_init__(self) -> None:
        check_positive("check_every", self.check_every)
        check_decay(self.decay)
        check_moments(self.moments)
        if not 0 < self.tolerance < 1:
            raise ValueError(f"Invalid tolerance value: {self.tolerance}. Must be between 0 and 1.")

    @property
    def every(self) -> int:
        """How many steps lie between two checks."""
        return self.check_every

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        return _Drifting(self, optimizer)


class _Streaming(Refresher):
    """Running Gram matrices, and a basis that follows them."""

    def __init__(self, config: Online | WhenDrifted, optimizer: Rebasable) -> None:
        super().__init__()
        self.config = config
        self.grams: dict[str, dict[str, Tensor]] = {}
        kinds = sorted({block.change.kind for block in optimizer.blocks})
        if kinds and not any(_is_renewable(block.change) for block in optimizer.blocks):
            raise ValueError(_not_renewable(config, ", ".join(kinds)))

    def before_step(self, optimizer: Rebasable) -> None:
        fresh = self.steps == 0 and not optimizer.blocks
        if fresh:
            optimizer.rebase(_identities(optimizer, self.config), moments="reset")
        for block in optimizer.blocks:
            if block.has_gradient and _is_renewable(block.change):
                self._observe(block.change, block.gradients())
        if fresh:
            self.renew(optimizer)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1
        if self.steps % self.config.every == 0:
            self._renew(optimizer, power_iteration)

    def renew(self, optimizer: Rebasable) -> None:
        self._renew(optimizer, _decomposed)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"grams": self.grams}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        grams = {name: {key: gram.clone() for key, gram in own.items()} for name, own in state["grams"].items()}
        super().load_state_dict(state)
        self.grams = grams

    def _observe(self, change: ChangeOfBasis, gradients: Sequence[Tensor]) -> None:
        found = change.grams(gradients) or {}
        known = self.grams.setdefault(change.block.name, found)
        if known is not found:
            for key, gram in found.items():
                known[key].lerp_(gram, 1 - self.config.decay)

    def _renew(self, optimizer: Rebasable, method: Callable[[Tensor, Tensor], Tensor]) -> None:
        renewed = []
        for block in optimizer.blocks:
            grams = self.grams.get(block.change.block.name)
            if grams is None:
                continue
            try:
                tensors = {key: method(gram, block.change.tensors[key]) for key, gram in grams.items()}
            except torch.linalg.LinAlgError as error:
                del self.grams[block.change.block.name]  # what is not finite would never leave a running mean again
                self.failed(error)
            else:
                renewed.append(block.change.replaced(tensors))
        self.renewals += 1
        optimizer.rebase(Reparameterization(renewed), moments=self.config.moments)


class _Drifting(_Streaming):
    config: WhenDrifted

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1
        if self.steps % self.config.check_every == 0 and self._drifted(optimizer):
            self.renew(optimizer)

    def _drifted(self, optimizer: Rebasable) -> bool:
        return any(
            not off_diagonal(gram, block.change.tensors[key]) <= self.config.tolerance
            for block in optimizer.blocks
            for key, gram in self.grams.get(block.change.block.name, {}).items()
        )


def power_iteration(gram: Tensor, basis: Tensor) -> Tensor:
    """One step of orthogonal iteration towards the eigenvectors of a Gram matrix, strongest first.

    The shift keeps directions without gradient where they are; the signs keep every vector near the old one.
    """
    if not torch.isfinite(gram).all():
        raise torch.linalg.LinAlgError("the gradients' Gram matrix is not finite")
    image = gram @ basis
    order = (basis * image).sum(0).argsort(descending=True, stable=True)
    shift = 1e-6 * gram.diagonal().mean()
    shift = torch.where(shift > 0, shift, 1)  # no gradients at all: every direction stays where it is
    fresh, triangle = torch.linalg.qr(image[:, order] + shift * basis[:, order])
    signs = triangle.diagonal().sign()
    return fresh * torch.where(signs == 0, 1, signs)


def off_diagonal(gram: Tensor, basis: Tensor) -> float:
    """How much of a Gram matrix is off the diagonal in this basis, relative to all of it."""
    inside = basis.mT @ gram @ basis
    total = torch.linalg.matrix_norm(inside)
    rest = torch.linalg.matrix_norm(inside - inside.diagonal().diag_embed())
    return float(rest / total) if total != 0 else 0.0


def _decomposed(gram: Tensor, basis: Tensor) -> Tensor:
    return linalg.eigenbasis(gram)[1].to(basis)


def _is_renewable(change: ChangeOfBasis) -> bool:
    return type(change).grams is not ChangeOfBasis.grams


def _identities(optimizer: Rebasable, config: Online | WhenDrifted) -> Reparameterization:
    """The original coordinates, in the structures that the basis is to have."""
    named = {
        plain_name(name): parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if parameter.requires_grad
    }
    layers = {name: optimizer.layers[name] for name in named}
    blocks = partition_parameters(named, layers, config.partition)
    plan = make_plan(blocks, layers, config.structure, parse_bytes(config.memory), (Kronecker(), Shared()))
    changes = []
    for block, structure in plan.chosen.items():
        shapes = structure.basis_shapes(block).items()
        changes.append(structure.change(block, {key: torch.eye(*shape, dtype=block.dtype) for key, shape in shapes}))
        if not _is_renewable(changes[-1]):
            raise ValueError(_not_renewable(config, changes[-1].kind))
    return Reparameterization(changes, left=plan.left)


def _not_renewable(config: Online | WhenDrifted, kinds: str) -> str:
    return (
        f"egop.{type(config).__name__} renews bases of structure Full, Shared and Kronecker, not {kinds}. "
        "Use egop.Every(...), which can renew every structure."
    )
