"""What renews a basis only when it no longer fits."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from egop.optimizer import Rebasable
from egop.refresh import iteration
from egop.refresh.first import seconds
from egop.refresh.streaming import Streaming


class Drifting(Streaming):
    """The same, but renewed from scratch, and only when the basis no longer diagonalises the Gram matrices.

    Args:
        tolerance: how large the part off the diagonal may be.
        **settings: as for the other.
    """

    def __init__(self, tolerance: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.tolerance = tolerance

    # All eigenvectors from the start: a basis with some of them would be taken for one that has drifted.
    _first = staticmethod(iteration.from_scratch)
    _seconds = staticmethod(functools.partial(seconds, wide=sys.maxsize, rank=0))

    def after_step(self, optimizer: Rebasable) -> None:
        """Renew all bases if one has drifted."""
        self.steps += 1
        if self.steps % self.every == 0 and self._drifted(optimizer):
            self.renew(optimizer)

    def _drifted(self, optimizer: Rebasable) -> bool:
        parts = [
            (iteration.off_diagonal(batch.summed(gram[members]), batch.change.tensors[key][members]) <= self.tolerance)
            .logical_not()
            .flatten()
            for batch, members in self._seen(optimizer)
            for key, gram in self._stacked(batch).items()
        ]
        return bool(torch.cat(parts).any()) if parts else False
