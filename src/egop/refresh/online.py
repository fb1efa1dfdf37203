"""Online and WhenDrifted: the basis learnt from the training gradients as they come."""

from __future__ import annotations

from dataclasses import dataclass

from egop.basis import (
    Partition,
    StructureChoice,
    check_structure,
)
from egop.numerics import check_fraction, check_positive_int
from egop.optimizer import Moments, Rebasable, Refresh, Refresher, check_moments
from egop.refresh.choosing import Choice
from egop.refresh.grams import GramMatrices
from egop.refresh.methods import FROM_SCRATCH, ITERATION
from egop.refresh.schedules import InTurn, OnceDrifted
from egop.refresh.streaming import Streaming


@dataclass(frozen=True)
class Online(Refresh):
    """Keep the basis current from the training gradients themselves; nothing is sampled.

    Running means of the gradients' Gram matrices are updated every step. The basis is renewed by one step of orthogonal
    iteration (multiply by the Gram matrix, orthonormalise). Without a basis to start with, the first gradient
    gives one, by a full eigendecomposition; ``optimizer.renew_basis()`` does that on demand. Of Gram matrices wider
    than 2048 it gives the 256 strongest directions, and the iteration finds the others. A first step that takes long
    for that shows a progress bar.

    Layers that are unfrozen later, and those of groups that are added, get their basis from their first gradient. One
    that is frozen keeps its basis. If there is no weight to rotate, the first step warns of that.

    Args:
        every: how many steps lie between two renewals.
        decay: of the running means.
        structure: when the optimizer has no basis to start with: a structure (``Kronecker``, ``Shared`` or ``Full``), a
            mapping of name patterns to structures, or ``"auto"``, for each weight the richer of ``Kronecker`` and
            ``Shared`` that fits; embeddings, output heads and very wide layers are left, and
            ``optimizer.refresher.unrotated`` says why. With ``outside=`` one structure leaves these too; without it,
            it is for all weights, as ``{"*": structure}`` always is.
        partition: which parameters form a block, likewise.
        memory: what all bases together may take, likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
        spread: renew the blocks in turn, every block once in ``every`` steps, so that all steps take about as long;
            False renews all of them in one step, as SOAP does.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=egop.Online(every=5), lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.basis), optimizer.refresher.unrotated
        (['0.weight'], {'2.weight': 'the output head'})
    """

    every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"
    spread: bool = True

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        check_fraction("decay", self.decay)
        check_moments(self.moments)
        check_structure(self.structure)

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        choice = Choice(type(self).__name__, self.structure, self.partition, self.memory)
        choice.check(optimizer)
        schedule = InTurn(self.every, spread=self.spread)
        return Streaming(choice, GramMatrices(self.decay), schedule, ITERATION, self.moments)


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

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> refresh = egop.WhenDrifted(0.2, check_every=20, structure=egop.Kronecker())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    """

    tolerance: float = 0.1
    check_every: int = 10
    decay: float = 0.95
    structure: StructureChoice = "auto"
    partition: Partition = "parameter"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"

    def __post_init__(self) -> None:
        check_positive_int("check_every", self.check_every)
        check_fraction("decay", self.decay)
        check_moments(self.moments)
        check_structure(self.structure)
        if not 0 < self.tolerance < 1:
            raise ValueError(f"Invalid tolerance value: {self.tolerance}. Must be between 0 and 1.")

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        choice = Choice(type(self).__name__, self.structure, self.partition, self.memory)
        choice.check(optimizer)
        schedule = OnceDrifted(self.check_every, self.tolerance)
        return Streaming(choice, GramMatrices(self.decay), schedule, FROM_SCRATCH, self.moments)
