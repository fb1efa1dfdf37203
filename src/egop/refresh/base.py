"""What every refresh has in common."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from egop.binding import BoundBlock
from egop.moments import Moments
from egop.partition import Layer
from egop.reparameterization import Reparameterization


class Rebasable(Protocol):
    """What a refresh needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    layers: dict[str, Layer]

    @property
    def blocks(self) -> Sequence[BoundBlock]:
        """The blocks with their live parameters."""

    def rebase(self, basis: Reparameterization, *, moments: Moments = "rotate") -> None:
        """Go on in another basis."""


class Refresh(abc.ABC):
    """When and how an optimizer's basis is renewed: configuration only."""

    @abc.abstractmethod
    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""


class Refresher(abc.ABC):
    """What renews the basis of one optimizer, by its ``rebase``.

    A decomposition that fails (not finite, not converging) keeps the old basis: it is counted, the first one is warned
    about, and training goes on.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.renewals = 0
        self.failures = 0

    @abc.abstractmethod
    def before_step(self, optimizer: Rebasable) -> None:
        """Called with fresh gradients, before the inner optimizer steps."""

    @abc.abstractmethod
    def after_step(self, optimizer: Rebasable) -> None:
        """Called after the inner optimizer has stepped."""

    @abc.abstractmethod
    def renew(self, optimizer: Rebasable) -> None:
        """Renew the basis now, from scratch."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly, as plain values and tensors."""
        return {"steps": self.steps, "renewals": self.renewals, "failures": self.failures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state dict."""
        self.steps, self.renewals, self.failures = state["steps"], state["renewals"], state["failures"]

    def failed(self, error: Exception) -> None:
        """Count a decomposition that did not succeed."""
        self.failures += 1
        if self.failures == 1:
            warnings.warn(
                f"The basis could not be renewed and stays as it is ({error}). Training goes on; further failures are "
                "only counted, in optimizer.refresher.failures.",
                stacklevel=2,
            )


def check_positive(name: str, value: int) -> None:
    """Raise an error for what is not a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"Invalid {name} value: {value!r}. Must be a whole number of at least 1.")


def check_decay(decay: float) -> None:
    """Raise an error for what is not the decay of a running mean."""
    if not 0 <= decay < 1:
        raise ValueError(f"Invalid decay value: {decay}. Must be at least 0 and below 1.")
