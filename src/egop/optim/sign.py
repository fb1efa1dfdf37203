"""Sign: move every entry by the same amount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.numerics import noise_floor
from egop.optim.matrix_optimizer import MatrixOptimizer


class Sign(MatrixOptimizer):
    """The sign of the momentum, entry by entry.

    In the eigenbasis of the gradients' Gram matrices this is SPlus (arXiv 2506.07254):
    ``egop.ReparameterizedOptimizer(model, egop.optim.Sign, lr=1e-3, refresh=egop.Online(structure=egop.Kronecker()),
    outside=torch.optim.AdamW)``.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        lr: learning rate, similar to AdamW's.
        momentum: decay of the running mean of the gradients.
        nesterov: use Nesterov momentum.
        weight_decay: decoupled weight decay, as in AdamW.
        update_rms: root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.Sign(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

    recordable = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        update_rms: float = 0.2,
    ) -> None:
        rates = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, rates | {"weight_decay": weight_decay, "update_rms": update_rms})

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the signs of the entries: 0 for rounding errors, NaN for NaN."""
        limit = noise_floor(matrices.dtype) * matrices.abs().amax((-2, -1), keepdim=True)
        signs = torch.where(matrices.abs() > limit, matrices.sign(), 0)
        return torch.where(matrices.isnan(), matrices, signs)
