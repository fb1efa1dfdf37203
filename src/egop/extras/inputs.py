"""Rotate the first layer's inputs once, in the data, instead of rotating its weight in every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from egop.basis import Basis


@torch.no_grad()
def rotate_inputs(model: nn.Module, basis: Basis, *inputs: Tensor, inverse: bool = False) -> tuple[Tensor, ...]:
    """Move the rotation of the first linear layer into its weight and the data.

    A layer computes W x = (W V)(Vᵀ x). With W V as its weight and Vᵀ x as its input, a plain optimizer on the model
    does what the reparameterized one would do, at no extra cost per step.

    Args:
        model: a model whose first layer receives the data unchanged. The layer's weight is changed in place.
        basis: a basis with a single block, of structure ``Shared``, for that layer's weight.
        *inputs: data (say, for training, validation and test) with the layer's inputs in the last dimension.
        inverse: rotate weight and data back instead.

    Returns:
        The rotated data, one new tensor for each input.

    Example:
        >>> model, data = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.eye(4)
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [data])
        >>> first = {"first": ["0.weight"]}
        >>> basis = egop.estimate(objective, partition=first, structure=egop.Shared(), progress=False)
        >>> before = model(data)
        >>> (rotated,) = egop.extras.rotate_inputs(model, basis, data)
        >>> torch.allclose(model(rotated), before, atol=1e-6)
        True
    """
    if len(basis) != 1:
        raise ValueError(f"The basis must have one block, the first layer's weight; it has {list(basis)}.")
    (change,) = basis.values()
    (name, *_) = change.block.parameters
    path, _, attribute = name.rpartition(".")
    layer = dict(model.named_modules()).get(path)
    if not isinstance(layer, nn.Linear) or attribute != "weight":
        kind = "not in this model" if layer is None else f"the {attribute} of a {type(layer).__name__}"
        raise ValueError(f"Inputs can be rotated only for the weight of a linear layer; '{name}' is {kind}.")
    if change.kind != "Shared" or not change.is_rowwise:
        side = "" if change.kind != "Shared" else " on the output side"
        raise ValueError(
            f"Block '{name}' has structure {change.kind}{side}. Only a rotation that all rows share can be moved "
            "into the data: estimate the basis with structure=egop.Shared()."
        )
    rotation = change.tensors["basis"].mT if inverse else change.tensors["basis"]
    for data in inputs:
        if data.shape[-1] != layer.in_features:
            raise ValueError(
                f"Data of shape {tuple(data.shape)} do not fit '{path}', which has {layer.in_features} inputs."
            )
    layer.weight.copy_(layer.weight @ rotation.to(layer.weight))
    return tuple(data @ rotation.to(data) for data in inputs)
