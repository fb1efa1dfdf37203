"""Fast Muon and NorMuon, with weights of one shape in one stack, to compare with.

torch's own Muon works weight by weight and refuses convolutions. These process a stack of weights in one call and
treat a convolution as a matrix with one row per output.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import egop


class Muon(egop.optim.MatrixOptimizer):
    """The momentum with all singular values close to one, scaled to updates of AdamW's size as in torch's Muon.

    Weights have two dimensions or more, weight decay is decoupled, ``iterations`` are Newton-Schulz steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        iterations: int = 5,
        **further: Any,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, settings | {"iterations": iterations, "update_rms": 0.2} | further)

    recordable = True

    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the polar factors."""
        return egop.optim.polar(matrices, group["iterations"])

    def compute_scales(self, updates: Tensor, directions: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the scales of exactly orthogonal updates."""
        size = group["update_rms"] * math.sqrt(max(updates.shape[-2:]))
        dtype = torch.promote_types(updates.dtype, torch.float32)
        return updates.new_full((*updates.shape[:-2], 1, 1), size, dtype=dtype)


class NorMuon(Muon):
    """Muon with the rows of each update normalized by a running mean of their squares (arXiv 2510.05491).

    The mean decays by ``beta2``; ``eps`` is added to its root.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        *,
        beta2: float = 0.95,
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, beta2=beta2, eps=eps, **options)

    recordable = True

    def compute_updates(self, stack: egop.optim.MatrixStack, matrices: Tensor) -> Tensor:
        """Return polar factors with each row divided by the root of its running mean square."""
        group, factors = stack.group, self.transform(matrices, stack.group)
        lengths = torch.linalg.vector_norm(factors, dim=-1, keepdim=True, dtype=matrices.dtype)
        squares = lengths.square().div_(factors.shape[-1])
        means = [
            state.setdefault("row_sq", torch.zeros_like(fresh))
            for state, fresh in zip(stack.states, squares, strict=True)
        ]
        torch._foreach_lerp_(means, list(squares.unbind()), 1 - group["beta2"])
        return factors / (torch.stack(means).sqrt() + group["eps"])

    def compute_scales(self, updates: Tensor, directions: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the scales that give all updates the same root mean square."""
        return egop.optim.rms_scales(updates, group["update_rms"])
