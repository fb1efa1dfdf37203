"""What every refresh has in common."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Basis, ChangeOfBasis, Plan, Role, call_hint
from egop.optimizer.binding import BoundBlock
from egop.optimizer.moments import Moments
from egop.optimizer.stacks import Stack, Stacks

_NOT_SOUND = "the gradients' Gram matrix is not finite, or its decomposition failed"


class Rebasable(Protocol):
    """What a refresh needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    layers: dict[str, Role]

    @property
    def outside(self) -> type[Optimizer] | None:
        """The class of the optimizer for what no block has, if that is another one."""

    @property
    def blocks(self) -> Sequence[BoundBlock]:
        """The blocks with their live parameters."""

    @property
    def stacks(self) -> Stacks:
        """The blocks, stacked by kind and shape."""

    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Go on in another basis."""

    def add_blocks(self, basis: Basis) -> None:
        """Give parameters outside every block a basis."""

    def momentum(self, stack: Stack) -> list[Tensor] | None:
        """The inner optimizer's running mean of gradients, in coordinates; in :meth:`Refresher.observe`."""

    def proposed(self, stack: Stack) -> list[Tensor]:
        """What the inner optimizer would add to the coordinates now; in :meth:`Refresher.observe`."""

    def check_lookahead(self) -> None:
        """Raise an error if the inner optimizer offers no :meth:`lookahead`."""

    def lookahead(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """The momentum of this step and what the inner optimizer maps it to; in :meth:`Refresher.observe`."""

    def read_by_lookahead(self, stacks: Sequence[Stack]) -> tuple[list[Tensor], str] | None:
        """All tensors that :meth:`lookahead` reads for these stacks, and settings; None if it cannot be recorded."""

    def rebase_stack(self, stack: Stack, members: slice, tensors: Mapping[str, Tensor], moments: Moments) -> None:
        """Go on in other bases of some blocks of one stack."""


class Refresh(abc.ABC):
    """When and how an optimizer's basis is renewed: configuration only.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> refresh: egop.Refresh | None = egop.Online(every=5, structure=egop.Shared())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
        >>> optimizer.refresher.counts()  # steps, renewals, failures
        [0, 0, 0]
    """

    @abc.abstractmethod
    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""


class Refresher(abc.ABC):
    """What renews the basis of one optimizer, by its ``rebase``.

    A decomposition that fails (not finite, not converging) keeps the old basis: it is counted, the first one is warned
    about, and training goes on.
    """

    refresh: Refresh  # what it was begun by

    def __init__(self) -> None:
        self.steps = 0
        self.renewals = 0
        self._failures = 0  # as far as the host knows
        self._counted: Tensor | None = None  # all of them, on a device that is not waited for
        self._arriving: Tensor | None = None  # a copy of that count, on its way to the host

    @abc.abstractmethod
    def before_step(self, optimizer: Rebasable) -> None:
        """Called with fresh gradients, before the inner optimizer steps."""

    def observe(self, optimizer: Rebasable) -> None:  # noqa: B027 - only some look at the gradients of the training
        """Called when the gradients have been collected in ``optimizer.stacks``, before they are encoded.

        Here a refresh may look at ``stack.gradients``, ``optimizer.momentum(stack)`` and ``optimizer.proposed(stack)``,
        and give other bases: they count for this very step.
        """

    @abc.abstractmethod
    def after_step(self, optimizer: Rebasable) -> None:
        """Called after the inner optimizer has stepped."""

    def settle(self, optimizer: Rebasable) -> None:  # noqa: B027 - most have nothing under way
        """Bring to an end what is under way; called before anyone looks at the bases or changes them."""

    @abc.abstractmethod
    def renew(self, optimizer: Rebasable) -> None:
        """Renew the basis now, from scratch."""

    @property
    def unrotated(self) -> Mapping[str, str]:
        """Why weights have no basis, by name, where the refresh has chosen which get one."""
        return {}

    def plan(self, optimizer: Rebasable) -> Plan | None:
        """Which blocks it makes, in which structures, and why; None where it does not choose. Nothing is changed."""
        return None

    def spectra(self, optimizer: Rebasable) -> dict[str, dict[str, Tensor]]:
        """The eigenvalues of what it follows, by block and tensor of its basis, (…, n), in float64; as far as known."""
        return {}

    def can_renew(self, change: ChangeOfBasis) -> bool:
        """Whether it can renew a basis of this kind."""
        return True

    @property
    def failures(self) -> int:
        """How many decompositions have failed so far."""
        if self._counted is not None:
            self._learn(int(self._counted))
        return self._failures

    def counts(self) -> list[int]:
        """How many steps, renewals and failures there were."""
        return [self.steps, self.renewals, self.failures]

    def prepare(self, optimizer: Rebasable) -> None:  # noqa: B027 - most have nothing to prepare
        """Make the blocks that the first step would make, so that it is known what a state consists of."""

    def rebased(self, names: Collection[str], *, replaced: bool) -> None:  # noqa: B027 - most do not mind
        """Someone has called ``optimizer.rebase`` with a basis for these blocks; or, ``replaced``, other blocks."""

    def memories(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        """What it remembers of each block, by its name, as tensors; with :meth:`counts` all that is needed to go on.

        Args:
            optimizer: whose blocks they are.
            complete: as all processes together have them, who call this together; otherwise what is here.
        """
        return {}

    def load(
        self, counts: Sequence[int], memories: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        """Go on from what was saved; when it does not fit, an error, and nothing is changed."""
        self.steps, self.renewals, self._failures = counts
        self._counted = self._arriving = None

    def check(self, optimizer: Rebasable) -> None:  # noqa: B027 - most can go on with any
        """Raise an error if it cannot go on with the parameters that the optimizer has got."""

    def reset(self) -> None:
        """Begin anew, as after loading a state that knows nothing of a refresh."""
        Refresher.load(self, [0, 0, 0], {}, [])

    def count_failures(self, sound: Tensor) -> None:
        """Count the decompositions that are not sound; on a GPU without waiting for it."""
        bad = sound.logical_not().sum()
        if bad.device.type != "cuda" and self._counted is None:
            self._learn(self._failures + int(bad))
            return
        if self._counted is None or self._arriving is None:
            self._counted = torch.full_like(bad, self._failures)
            self._arriving = torch.full((), self._failures, dtype=bad.dtype, device="cpu", pin_memory=True)
        self._counted += bad.to(self._counted.device)
        self._arriving.copy_(self._counted, non_blocking=True)

    def look_for_failures(self) -> None:
        """Say so when the count that was on its way shows the first failure."""
        if self._arriving is not None:
            self._learn(max(self._failures, int(self._arriving)))

    def failed(self, error: Exception) -> None:
        """Count a decomposition that raised an error."""
        self._learn(self._failures + 1, str(error))

    def _learn(self, failures: int, why: str = _NOT_SOUND) -> None:
        first = self._failures == 0 and failures > 0
        self._failures = failures
        if first:
            warnings.warn(
                f"The basis could not be renewed and stays as it is ({why}). Training goes on; further failures are "
                "only counted, in optimizer.refresher.failures. Look at the loss: a gradient that is not finite makes "
                "its weight so too, in any basis.",
                stacklevel=2,
            )


def check_refresh(refresh: object, basis: object) -> None:
    """Raise an error for what is not a refresh, and for one that was given as the basis."""
    kind = basis if isinstance(basis, type) else type(basis)
    if issubclass(kind, Refresh):
        raise TypeError(
            f"basis must be an egop.Basis, got {kind.__name__}, which says when one is renewed. "
            f"Give it as refresh=egop.{kind.__name__}(...)."
        )
    if refresh is not None and not isinstance(refresh, Refresh):
        raise TypeError(
            "refresh must be egop.Every(...), egop.Online(...), egop.WhenDrifted(...), egop.Aligned(...) or an "
            f"egop.Refresh of your own, got {refresh!r}.{call_hint(refresh, Refresh)}"
        )
