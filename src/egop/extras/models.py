"""Models changed in place, so that a plain optimizer trains them in other coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize as torch_parametrize

from egop.basis import Basis, ChangeOfBasis, strip_compile_prefix


def parametrize(model: nn.Module, basis: Basis) -> nn.Module:
    """Make the coordinates of each block the model's own parameters, in place.

    The model computes the same function, but ``model.parameters()`` are coordinates: any optimizer on them is that
    optimizer on f∘V. Every use of a weight decodes it. :class:`egop.ReparameterizedOptimizer` takes the same steps
    without changing the model.

    Args:
        model: the module.
        basis: a basis with blocks of this model, each of one tensor.

    Returns:
        The same model.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> basis = egop.estimate(objective, structure=egop.Full(), progress=False)
        >>> model = egop.extras.parametrize(model, basis)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> {name: tuple(value.shape) for name, value in model.named_parameters()}
        {'bias': (2,), 'parametrizations.weight.original0': (8,)}
    """
    places = {
        strip_compile_prefix(f"{prefix}.{name}" if prefix else name): (part, name)
        for prefix, part in model.named_modules()
        for name, _ in part.named_parameters(recurse=False)
    }
    decoded = []
    for name, change in basis.items():
        key, *others = change.block.parameters
        if others:
            raise ValueError(
                f"Block '{name}' has {len(others) + 1} tensors; a parametrization takes one. Estimate the "
                "basis with partition='parameter', or use egop.ReparameterizedOptimizer."
            )
        if key not in places:
            raise ValueError(
                f"Block '{name}' of the basis needs a parameter '{key}', which the model does not have. "
                f"It has: {', '.join(places)}."
            )
        parameter = getattr(*places[key])
        if tied := [other for other, place in places.items() if other != key and getattr(*place) is parameter]:
            raise ValueError(
                f"Parameter '{key}' is tied to {', '.join(map(repr, tied))}, and a parametrization would untie "
                "them. Use egop.ReparameterizedOptimizer, which does not change the model."
            )
        decoded.append((*places[key], _DecodedTensor(change, parameter.detach())))
    for part, name, tensor in decoded:  # only now, so that a basis that does not fit changes nothing
        torch_parametrize.register_parametrization(part, name, tensor, unsafe=True)
    return model


def merge(model: nn.Module) -> nn.Module:
    """Turn the weights back into parameters, with their current values.

    Args:
        model: a module changed by :func:`parametrize`.

    Returns:
        The same model.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
        >>> model = egop.extras.parametrize(model, egop.estimate(objective, structure=egop.Full(), progress=False))
        >>> sorted(name for name, _ in egop.extras.merge(model).named_parameters())
        ['bias', 'weight']
    """
    for part in list(model.modules()):
        for name, entries in list(getattr(part, "parametrizations", {}).items()):
            if isinstance(entries[0], _DecodedTensor):
                value = getattr(part, name).detach().clone()
                is_trained = any(coordinates.requires_grad for coordinates in entries.parameters())
                torch_parametrize.remove_parametrizations(part, name, leave_parametrized=True)
                setattr(part, name, nn.Parameter(value, requires_grad=is_trained))
    return model


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
    if integers := [data.dtype for data in inputs if not data.is_floating_point()]:
        raise TypeError(f"Rotated data are real numbers: convert data of {integers[0]} first, as in data.float().")
    rotation = change.tensors["basis"].mT if inverse else change.tensors["basis"]
    rotated = tuple(data @ rotation.to(data) for data in inputs)  # first, because it fails if the data do not fit
    layer.weight.copy_(layer.weight @ rotation.to(layer.weight))
    return rotated


class _DecodedTensor(nn.Module):
    """A weight that is decoded from its coordinates."""

    rest: Tensor | None

    def __init__(self, change: ChangeOfBasis, tensor: Tensor) -> None:
        super().__init__()
        self.change, self.dtype = change.to(tensor.device, change.block.dtype), tensor.dtype
        exact = tensor.to(change.block.dtype)
        (decoded,) = self.change.decode(self.change.encode(exact))
        # Buffers move with the model. They are not saved, because the basis has a file of its own.
        has_rest = not change.is_complete and change.settings["keep_rest"]
        self.register_buffer("rest", exact - decoded if has_rest else None, persistent=False)
        for name, basis in self.change.tensors.items():
            self.register_buffer(f"basis_{name}", basis, persistent=False)

    def forward(self, *coordinates: Tensor) -> Tensor:
        change = self.change.with_tensors({name: getattr(self, f"basis_{name}") for name in self.change.tensors})
        (decoded,) = change.decode(coordinates)
        return (decoded if self.rest is None else decoded + self.rest).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype  # follow casts of the model
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def right_inverse(self, tensor: Tensor) -> Sequence[Tensor]:
        return tuple(coordinates.clone() for coordinates in self.change.encode(tensor.to(self.change.block.dtype)))
