"""Snapshots of a module: everything that sampling may change, restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Sampling writes to the model and seeds the global random state, so only one thread may sample at a time, even with
# different models. The lock is reentrant because points are drawn while gradients are being sampled.
sampling_lock = threading.RLock()


def take_snapshot(module: nn.Module) -> Callable[[], None]:
    """Copy a module's parameters, gradients, buffers and modes; return a function that restores them."""
    parameters = [(tensor, tensor.detach().clone(), tensor.grad, _copy(tensor.grad)) for tensor in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, {name: (buffer, _copy(buffer)) for name, buffer in part._buffers.items()}) for part in module.modules()
    ]
    # Plain tensor attributes, such as the weight that torch.nn.utils.weight_norm computes in a hook: torch.func would
    # leave one of its own tensors there.
    plain = [(part, {name: item for name, item in vars(part).items() if isinstance(item, Tensor)}) for part, _ in modes]

    def restore() -> None:
        for part, tensors in plain:
            vars(part).update(tensors)
        with torch.no_grad():
            for parameter, value, gradient, gradient_value in parameters:
                parameter.copy_(value)
                parameter.grad = gradient
                if gradient is not None and gradient_value is not None:
                    gradient.copy_(gradient_value)
            for part, entries in buffers:
                for name in set(part._buffers) - set(entries):
                    delattr(part, name)
                for name, (buffer, buffer_value) in entries.items():
                    setattr(part, name, buffer)  # the forward pass may have assigned another tensor
                    if buffer is not None and buffer_value is not None:
                        buffer.copy_(buffer_value)
        for part, training in modes:
            part.training = training

    return restore


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
