"""Sign: every entry moves by the same amount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from egop.numerics import check_fraction, noise_floor
from egop.optim.matrices import MatrixOptimizer


class Sign(MatrixOptimizer):
    """The sign of the momentum, entry by entry.

    In the original coordinates this is a poor optimizer of a network; in those of the gradients' Gram matrices it is
    SPlus (arXiv 2506.07254): ``egop.ReparameterizedOptimizer(model, egop.optim.Sign, lr=1e-3,
    refresh=egop.Online(structure=egop.Kronecker()), outside=torch.optim.AdamW)``.

    Args:
        params: weights of two dimensions or more, or groups of them.
        lr: learning rate, of AdamW's size.
        momentum: decay of the running mean of the gradients.
        nesterov: look a step ahead.
        weight_decay: decoupled, as AdamW's.
        update_rms: the root mean square of an update before the learning rate.

    Example:
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> optimizer = egop.optim.Sign(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
    """

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
        check_fraction("momentum", momentum)
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, settings | {"weight_decay": weight_decay, "update_rms": update_rms})

    recordable = True

    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the signs of the entries, zero for those that are mere rounding; NaN stays visible."""
        limit = noise_floor(matrices.dtype) * matrices.abs().amax((-2, -1), keepdim=True)
        signs = torch.where(matrices.abs() > limit, matrices.sign(), 0)
        return torch.where(matrices.isnan(), matrices, signs)
