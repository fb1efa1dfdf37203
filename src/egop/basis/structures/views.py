"""Views of a block's tensors: as one vector, or as a matrix with one row per output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.roles import rows_and_columns

Coordinates = tuple[Tensor, ...]


def rows_times(vector: Tensor, matrix: Tensor) -> Tensor:
    """Return ``vector @ matrix`` with leading dimensions: many vectors for one matrix, or one matrix per vector."""
    if matrix.dim() == 2:
        return vector @ matrix
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right``; for two stacks without the checks of matmul, which take longer than a small product."""
    if left.dim() == right.dim() == 3 and len(left) == len(right):
        return torch.bmm(left, right)
    return left @ right


def as_tuple(tensors: Tensor | Sequence[Tensor]) -> Coordinates:
    """Return the tensors as a tuple; a single tensor becomes a tuple of one."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def flatten(tensors: Tensor | Sequence[Tensor], block: Block) -> Tensor:
    """Concatenate the block's tensors into one vector, keeping extra leading dimensions."""
    tensors = as_tuple(tensors)
    if len(tensors) != len(block.shapes):
        raise ValueError(f"Block '{block.name}' has {len(block.shapes)} tensor(s), got {len(tensors)}.")
    parts = []
    for name, shape, tensor in zip(block.parameters, block.shapes, tensors, strict=True):
        leading = tensor.dim() - len(shape)
        if leading < 0 or tensor.shape[leading:] != shape:
            raise ValueError(
                f"Block '{block.name}': '{name}' has shape {tuple(shape)}, got a tensor of {tuple(tensor.shape)}."
            )
        parts.append(tensor.reshape(*tensor.shape[:leading], math.prod(shape)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unflatten(vector: Tensor, block: Block) -> Coordinates:
    """Invert :func:`flatten`."""
    parts = vector.split([math.prod(shape) for shape in block.shapes], dim=-1)
    return tuple(part.reshape((*vector.shape[:-1], *shape)) for part, shape in zip(parts, block.shapes, strict=True))


def as_matrix(tensors: Tensor | Sequence[Tensor], block: Block) -> Tensor:
    """Return a block's single tensor as a matrix with one row per output (unit, channel, embedded token).

    Weights of linear layers, convolutions and embeddings have their outputs first. Those of transposed convolutions are
    stored as (inputs, outputs / groups, kernel), with the inputs of one group after another. The leading dimensions of
    a stack (of experts) are kept.
    """
    (tensor,) = as_tuple(tensors)
    (shape,), (stacked,) = block.shapes, block.stacked
    beyond = tensor.dim() - len(shape)
    if tensor.shape[max(beyond, 0) :] != shape:
        flatten(tensor, block)  # raises the error about the shape
    leading, sizes = tensor.shape[: beyond + stacked], shape[stacked:]
    if groups := block.transposed[0]:
        tensor = tensor.reshape(*leading, groups, sizes[0] // groups, *sizes[1:]).transpose(
            len(leading) + 1, len(leading) + 2
        )
    return tensor if tensor.dim() == len(leading) + 2 else tensor.reshape(*leading, *matrix_shape(block))


def from_matrix(matrix: Tensor, block: Block) -> Coordinates:
    """Invert :func:`as_matrix`."""
    (shape,), (stacked,) = block.shapes, block.stacked
    leading, sizes = matrix.shape[:-2], shape[stacked:]
    if groups := block.transposed[0]:
        matrix = matrix.reshape(*leading, groups, sizes[1], sizes[0] // groups, *sizes[2:]).transpose(
            len(leading) + 1, len(leading) + 2
        )
    return (matrix if matrix.shape == leading + sizes else matrix.reshape(*leading, *sizes),)


def matrix_shape(block: Block) -> tuple[int, int]:
    """Return the numbers of rows and columns of :func:`as_matrix`."""
    (shape,), (stacked,), (groups,) = block.shapes, block.stacked, block.transposed
    return rows_and_columns(shape[stacked:], groups)


def stack_shape(block: Block) -> tuple[int, ...]:
    """Return the leading dimensions that count matrices; empty for a single matrix."""
    (shape,), (stacked,) = block.shapes, block.stacked
    return tuple(shape[:stacked])


def check_matrix(block: Block, structure: str) -> None:
    """Raise ValueError unless the block is one tensor of two or more dimensions."""
    if len(block.shapes) != 1 or len(block.shapes[0]) - block.stacked[0] < 2:
        shapes = " and ".join(str(tuple(shape)) for shape in block.shapes)
        raise ValueError(
            f"egop.{structure} needs one tensor with rows, but block '{block.name}' has shape {shapes}. "
            "Use egop.Full() for it, or leave it in original coordinates."
        )
