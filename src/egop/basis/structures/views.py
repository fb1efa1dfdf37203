"""A block's tensors as one vector, or as a matrix with a row for each output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from egop.basis.partition import Block
from egop.basis.roles import rows_and_columns

Coordinates = tuple[Tensor, ...]


def rows_times(vector: Tensor, matrix: Tensor) -> Tensor:
    """``vector @ matrix``, both with leading dimensions: many rows for one matrix, or a matrix for each row."""
    if matrix.dim() == 2:
        return vector @ matrix
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def as_tuple(tensors: Tensor | Sequence[Tensor]) -> Coordinates:
    """A block of one tensor may be given as that tensor."""
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def flatten(tensors: Tensor | Sequence[Tensor], block: Block) -> Tensor:
    """The block's tensors as one vector (with the leading dimensions they have beyond the block's shapes)."""
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
    """The reverse of :func:`flatten`."""
    parts = vector.split([math.prod(shape) for shape in block.shapes], dim=-1)
    return tuple(part.reshape((*vector.shape[:-1], *shape)) for part, shape in zip(parts, block.shapes, strict=True))


def as_matrix(tensors: Tensor | Sequence[Tensor], block: Block) -> Tensor:
    """A block's one tensor as a matrix: a row for each output (unit, channel, embedded token), over all its inputs.

    Weights of linear layers, convolutions and embeddings have their outputs first. Those of transposed convolutions are
    stored (inputs, outputs / groups, kernel), the inputs group after group. A stack (of experts) has a matrix in each
    place of its first dimensions, which stay.
    """
    (tensor,) = as_tuple(tensors)
    (shape,), (stacked,) = block.shapes, block.stacked
    beyond = tensor.dim() - len(shape)
    if tensor.shape[max(beyond, 0) :] != shape:
        flatten(tensor, block)  # says what is wrong
    leading, sizes = tensor.shape[: beyond + stacked], shape[stacked:]
    if groups := block.transposed[0]:
        tensor = tensor.reshape(*leading, groups, sizes[0] // groups, *sizes[1:]).transpose(
            len(leading) + 1, len(leading) + 2
        )
    return tensor if tensor.dim() == len(leading) + 2 else tensor.reshape(*leading, *matrix_shape(block))


def from_matrix(matrix: Tensor, block: Block) -> Coordinates:
    """The reverse of :func:`as_matrix`."""
    (shape,), (stacked,) = block.shapes, block.stacked
    leading, sizes = matrix.shape[:-2], shape[stacked:]
    if groups := block.transposed[0]:
        matrix = matrix.reshape(*leading, groups, sizes[1], sizes[0] // groups, *sizes[2:]).transpose(
            len(leading) + 1, len(leading) + 2
        )
    return (matrix if matrix.shape == leading + sizes else matrix.reshape(*leading, *sizes),)


def matrix_shape(block: Block) -> tuple[int, int]:
    """The numbers of rows and columns of :func:`as_matrix`."""
    (shape,), (stacked,), (groups,) = block.shapes, block.stacked, block.transposed
    return rows_and_columns(shape[stacked:], groups)


def stack_shape(block: Block) -> tuple[int, ...]:
    """How many matrices there are, in the dimensions that count them; none for one matrix."""
    (shape,), (stacked,) = block.shapes, block.stacked
    return tuple(shape[:stacked])


def check_matrix(block: Block, structure: str) -> None:
    """Raise an error for a block that is not one tensor of two or more dimensions."""
    if len(block.shapes) != 1 or len(block.shapes[0]) - block.stacked[0] < 2:
        shapes = " and ".join(str(tuple(shape)) for shape in block.shapes)
        raise ValueError(
            f"egop.{structure} needs one tensor with rows, but block '{block.name}' has shape {shapes}. "
            "Use egop.Full() for it, or leave it in original coordinates."
        )
