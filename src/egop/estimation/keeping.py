"""A model as it was before something was done to it, and one who does so at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Sampling writes into the model and seeds the random numbers of the whole program, so it is one thread's at a time,
# also where the models are two. In one thread it may be nested: points are drawn while gradients are sampled.
one_at_a_time = threading.RLock()


def remember(module: nn.Module) -> Callable[[], None]:
    """Take note of all that sampling may change in a module; the function returned puts it back."""
    parameters = [(tensor, tensor.detach().clone(), tensor.grad, _copy(tensor.grad)) for tensor in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, {name: (buffer, _copy(buffer)) for name, buffer in part._buffers.items()}) for part in module.modules()
    ]

    # The weight that a hook computes (torch.nn.utils.weight_norm): it would be a tensor that torch.func is done with.
    plain = [(part, {name: item for name, item in vars(part).items() if isinstance(item, Tensor)}) for part, _ in modes]

    def restore() -> None:
        for part, kept in plain:
            vars(part).update(kept)
        with torch.no_grad():
            for parameter, value, gradient, its_value in parameters:
                parameter.copy_(value)
                parameter.grad = gradient
                if gradient is not None and its_value is not None:
                    gradient.copy_(its_value)
            for part, entries in buffers:
                for name in set(part._buffers) - set(entries):
                    delattr(part, name)
                for name, (buffer, its_value) in entries.items():
                    setattr(part, name, buffer)  # a forward pass may have put another tensor in its place
                    if buffer is not None and its_value is not None:
                        buffer.copy_(its_value)
        for part, training in modes:
            part.training = training

    return restore


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
