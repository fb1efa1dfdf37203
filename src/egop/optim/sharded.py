"""A weight that is sharded over processes, stepped as a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.distributed import shard_like, take_shard, to_full, to_local, write_shard
from egop.optim.elementwise import MatrixStack


class ShardedMatrix(MatrixStack):
    """A stack of one sharded weight. Its moments stay sharded; its gradient and its direction are gathered."""

    def __init__(self, weights: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        super().__init__(weights, group, any_column_order=False)
        self._local = MatrixStack([to_local(weights[0])], group, any_column_order=False)

    def stack(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Gather a tensor as a stack of one matrix."""
        return to_full(tensors[0]).reshape(1, *self.shape).to(dtype or tensors[0].dtype)

    def unstack(self, matrices: Tensor, tensors: list[Tensor]) -> None:
        """Write this process's part of a matrix."""
        write_shard(tensors[0], matrices.reshape(tensors[0].shape))

    def update_moments(
        self,
        gradients: list[Tensor] | Tensor,
        means: list[Tensor],
        squares: list[Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """Update this process's part of the moments and gather the direction."""
        (weight,) = self.weights
        gradient = gradients.reshape(weight.shape) if isinstance(gradients, Tensor) else gradients[0]
        moments = [[to_local(each) for each in moment] for moment in (means, squares) if moment is not None]
        part = self._local.update_moments([take_shard(gradient, weight)], *moments, **options)
        return self.stack([shard_like(part.reshape(to_local(weight).shape), weight)])

    def apply_updates(self, updates: Tensor, scales: Tensor, kept: float | Tensor) -> None:
        """Subtract this process's part of the update."""
        (weight,) = self.weights
        self._local.weights = [to_local(weight)]
        part = take_shard(updates.reshape(weight.shape), weight)
        self._local.apply_updates(part.reshape(1, *self._local.shape), scales, kept)
