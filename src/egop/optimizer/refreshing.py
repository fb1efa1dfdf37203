"""Base classes of all refreshes, and the interface through which a refresh works on an optimizer."""

from __future__ import annotations

import abc
import dataclasses
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Basis, ChangeOfBasis, Plan, Role, call_hint
from egop.formatting import pluralize
from egop.optimizer.binding import BoundBlock
from egop.optimizer.moments import Moments
from egop.optimizer.stacks import Stack

_UNSOUND = "the gradients' Gram matrix is not finite, or its decomposition failed"


class Rebasable(Protocol):
    """The part of an optimizer that a refresh works with."""

    param_groups: list[dict[str, Any]]
    layers: dict[str, Role]

    @property
    def outside(self) -> type[Optimizer] | None:
        """The class of the separate optimizer for parameters outside every block, if there is one."""

    @property
    def blocks(self) -> Sequence[BoundBlock]:
        """The blocks with their live parameters."""

    @property
    def stacks(self) -> list[Stack]:
        """The blocks, stacked by kind and shape."""

    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Continue in another basis."""

    def add_blocks(self, basis: Basis) -> None:
        """Give a basis to parameters outside every block."""

    def check_lookahead(self) -> None:
        """Raise an error if the base optimizer does not support :meth:`lookahead`."""

    def lookahead(self, stack: Stack) -> tuple[list[Tensor], list[Tensor]]:
        """Return the momentum of this step and what the base optimizer maps it to; for :meth:`Refresher.observe`."""

    def rebase_stack(self, stack: Stack, members: slice, tensors: Mapping[str, Tensor], moments: Moments) -> None:
        """Continue in other bases for some blocks of one stack."""


class Refresh(abc.ABC):
    """Configuration of when and how an optimizer's basis is renewed.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> refresh: egop.Refresh | None = egop.Online(every=5, structure=egop.Shared())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
        >>> optimizer.refresher
        Online(every=5, structure=Shared(side='input')): 0 steps, 0 renewals, 0 failures
    """

    @abc.abstractmethod
    def start(self, optimizer: Rebasable) -> Refresher:
        """Create the refresher for one optimizer."""


class Refresher(abc.ABC):
    """The running part of a refresh, which renews the basis of one optimizer and counts steps, renewals and failures.

    A subclass defines ``before_step``, ``after_step`` and ``renew``, and counts in ``self.steps`` and
    ``self.renewals``, which are saved. If a decomposition fails (because its input is not finite, or it does not
    converge), the old basis is kept and training continues. The first failure causes a warning; later ones are only
    counted.
    """

    refresh: Refresh  # the configuration that created it

    def __init__(self) -> None:
        self.steps = 0
        self.renewals = 0
        self._failures = 0  # as far as the host knows
        self._device_failures: Tensor | None = None  # the count on a GPU, which the host does not wait for
        self._copied_failures: Tensor | None = None  # a copy of it in pinned memory, written asynchronously

    @abc.abstractmethod
    def before_step(self, optimizer: Rebasable) -> None:
        """Prepare a step. Called with fresh gradients, before they are collected."""

    def observe(self, optimizer: Rebasable) -> None:  # noqa: B027 - optional
        """Look at the gradients, which are collected in ``optimizer.stacks`` but not yet encoded.

        A refresh may read ``stack.gradients`` and ``optimizer.lookahead(stack)`` here. If it changes the basis, this
        step already uses the new one.
        """

    @abc.abstractmethod
    def after_step(self, optimizer: Rebasable) -> None:
        """Finish a step. Called after the base optimizer has stepped."""

    def wait_for_refresh(self, optimizer: Rebasable) -> None:  # noqa: B027 - optional
        """Install bases that are still being computed. Called before anyone reads or changes the bases."""

    @abc.abstractmethod
    def renew(self, optimizer: Rebasable) -> None:
        """Renew the basis now, from scratch."""

    @property
    def unrotated(self) -> Mapping[str, str]:
        """The weights that the refresh has left without a basis, each with the reason."""
        return {}

    def plan(self, optimizer: Rebasable) -> Plan | None:
        """Return the blocks that the refresh creates, their structures and the reasons; None if it creates none."""
        return None

    @property
    def failures(self) -> int:
        """The number of renewals that have failed so far."""
        if self._device_failures is not None:
            self._set_failures(int(self._device_failures))
        return self._failures

    def counts(self) -> list[int]:
        """Return the number of steps, renewals and failures."""
        return [self.steps, self.renewals, self.failures]

    def prepare(self, optimizer: Rebasable) -> None:  # noqa: B027 - optional
        """Create the blocks that the first step would create, so that the layout of the state is known."""

    def on_rebase(self, names: Collection[str], *, replaced: bool) -> None:  # noqa: B027 - optional
        """React when the user calls ``optimizer.rebase``.

        Args:
            names: the blocks that got a basis.
            replaced: whether these blocks replace all earlier ones.
        """

    def block_states(self, optimizer: Rebasable, *, complete: bool) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to save for each block, by block name. With :meth:`counts` they must suffice to resume.

        Args:
            optimizer: the optimizer whose blocks are saved.
            complete: whether to combine what all processes hold; then all of them call this together.
        """
        return {}

    def load(
        self, counts: Sequence[int], states: Mapping[str, Mapping[str, Tensor]], blocks: Sequence[BoundBlock]
    ) -> None:
        """Resume from saved counts and block states; if they do not fit, raise an error and change nothing."""
        self.steps, self.renewals, self._failures = counts
        self._device_failures = self._copied_failures = None

    def check(self, optimizer: Rebasable, changes: Sequence[ChangeOfBasis]) -> None:  # noqa: B027 - optional
        """Raise an error if the refresh cannot continue with the optimizer's current parameters and these bases."""

    def reset(self) -> None:
        """Start over, as after loading a state that was saved without a refresh."""
        Refresher.load(self, [0, 0, 0], {}, [])

    def count_failures(self, sound: Tensor) -> None:
        """Count the False entries of ``sound`` as failures, without waiting for a GPU."""
        failed = sound.logical_not().sum()
        if failed.device.type != "cuda" and self._device_failures is None:
            self._set_failures(self._failures + int(failed))
            return
        if self._device_failures is None or self._copied_failures is None:
            self._device_failures = torch.full_like(failed, self._failures)
            self._copied_failures = torch.full((), self._failures, dtype=failed.dtype, device="cpu", pin_memory=True)
        self._device_failures += failed.to(self._device_failures.device)
        self._copied_failures.copy_(self._device_failures, non_blocking=True)

    def count_error(self, error: Exception) -> None:
        """Count a renewal that raised an error as a failure."""
        self._set_failures(self._failures + 1, str(error))

    def report_failures(self) -> None:
        """Warn if the host has learned of a first failure on a GPU."""
        if self._copied_failures is not None:
            self._set_failures(max(self._failures, int(self._copied_failures)))

    def _set_failures(self, failures: int, reason: str = _UNSOUND) -> None:
        is_first = self._failures == 0 and failures > 0
        self._failures = failures
        if is_first:
            warnings.warn(
                f"The basis could not be renewed and stays as it is ({reason}). Training continues; further failures "
                "are only counted, in optimizer.refresher.failures. Check the loss: a non-finite gradient corrupts "
                "the weight with any optimizer.",
                stacklevel=2,
            )

    def __repr__(self) -> str:
        name = describe_refresh(self.refresh) if hasattr(self, "refresh") else type(self).__name__
        nouns = ("step", "renewal", "failure")
        return f"{name}: {', '.join(map(pluralize, self.counts(), nouns))}"


def describe_refresh(refresh: Refresh) -> str:
    """Return a refresh's name and the settings that differ from their defaults, without its objective."""
    name = type(refresh).__name__
    if not dataclasses.is_dataclass(refresh):
        return name
    settings = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(refresh)
        if isinstance(value := getattr(refresh, field.name), bool | int | float | str | tuple | dict)
        or dataclasses.is_dataclass(value)
        if value != field.default
    ]
    return f"{name}({', '.join(settings)})"


def check_refresh(refresh: object, basis: object) -> None:
    """Raise an error if ``refresh`` is not a refresh, or if one was given as the basis."""
    kind = basis if isinstance(basis, type) else type(basis)
    if issubclass(kind, Refresh):
        raise TypeError(
            f"basis must be an egop.Basis, got the refresh {kind.__name__}. Pass it as "
            f"refresh=egop.{kind.__name__}(...)."
        )
    if refresh is not None and not isinstance(refresh, Refresh):
        raise TypeError(
            "refresh must be egop.Every(...), egop.Online(...), egop.Aligned(...) or your own egop.Refresh, "
            f"got {refresh!r}.{call_hint(refresh, Refresh)}"
        )
