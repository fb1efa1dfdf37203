"""Gram matrices of gradients, stacked as the blocks of a batch are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis
from egop.distributed import is_sharded
from egop.optimizer import Batch, BoundBlock


def add(parts: Iterable[tuple[ChangeOfBasis, Sequence[Tensor], Mapping[str, Tensor]]], decay: float) -> None:
    """Take gradients into running means of Gram matrices."""
    for change, gradients, stacks in parts:
        rows = change.rows(gradients)
        assert rows is not None
        for key, stack in stacks.items():
            one_by_one = rows[key].flatten(0, -3)  # of every matrix of every block
            stack.flatten(0, -3).baddbmm_(one_by_one.mT, one_by_one, beta=decay, alpha=1 - decay)


def zeros_for(change: ChangeOfBasis) -> dict[str, Tensor]:
    """Gram matrices of no gradients at all, for a basis or stacked ones."""
    return {key: basis.new_zeros(*basis.shape[:-1], basis.shape[-2]) for key, basis in change.tensors.items()}


def is_in_parts(gram: Tensor, shape: torch.Size) -> bool:
    """Whether this is what each process has of a Gram matrix, one below the other, as egop.checkpoint saves it."""
    return is_sharded(gram) and gram.shape != shape


def is_renewable(change: ChangeOfBasis) -> bool:
    """Whether a change of basis consists of eigenvectors of Gram matrices."""
    return type(change).rows is not ChangeOfBasis.rows


def renewal_cost(batch: Batch) -> int:
    """What the renewal of one of its blocks takes, roughly."""
    if not is_renewable(batch.change):
        return 0
    return sum(math.prod(tensor.shape[1:-2]) * tensor.shape[-2] ** 3 for tensor in batch.change.tensors.values())


def is_trained(block: BoundBlock) -> bool:
    """Whether a block is not frozen: one that is keeps its basis, too."""
    return any(owner.requires_grad or owner.grad is not None for owner in block.owners)


def of_blocks(sound: Tensor) -> list[bool]:
    """Whether all matrices of each block are sound; a block of experts has several of a kind."""
    found: list[bool] = sound.flatten(1).all(1).tolist() if sound.dim() > 1 else sound.tolist()
    return found
