"""The two kinds of loss behind an objective: of a module, and of a function of named tensors."""

from __future__ import annotations

import abc
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from egop.basis import strip_compile_prefix
from egop.distributed import is_sharded
from egop.estimation.keeping import one_at_a_time, remember

LossFunction = Callable[[nn.Module, Any], Tensor]
Graph = tuple[Tensor, Mapping[str, Tensor]]


class Loss(abc.ABC):
    """A loss of named parameters and a batch."""

    module: nn.Module | None = None  # what has the parameters, if anything has

    @abc.abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """What is sampled, by name."""

    @abc.abstractmethod
    def tensors(self) -> list[Tensor]:
        """All parameters, frozen ones too: where they are and in which precision, batches are wanted."""

    @abc.abstractmethod
    def value(self, values: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss at these values, as a pure function of them."""

    @abc.abstractmethod
    def graph(self, values: Mapping[str, Tensor], batch: Any, parameters: Mapping[str, Tensor]) -> Graph:
        """The loss at these values, and the tensors it was computed from, for plain reverse mode."""

    @abc.abstractmethod
    def trainable_copy(self, values: Mapping[str, Tensor]) -> tuple[nn.Module, LossFunction]:
        """A module of its own at these values, and the loss to train it with."""

    def remember(self) -> Callable[[], None]:
        """What puts back all that sampling changes."""
        return lambda: None


class ModuleLoss(Loss):
    """``loss_fn(model, batch)``."""

    module: nn.Module

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "For a plain function of tensors use egop.Objective.from_function(f, {'name': tensor})."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function loss_fn(model, batch), got {type(loss_fn).__name__}.")
        _check_loss(loss_fn)
        self.module = _unwrapped(model)
        self._loss_fn, self._bound = loss_fn, _Bound(self.module)
        _check_parameters(self.parameters())

    def parameters(self) -> dict[str, Tensor]:
        """Those of the module's parameters that require a gradient now."""
        with one_at_a_time:  # while another thread samples, values may stand in the parameters' places
            named = self.module.named_parameters()
            return {strip_compile_prefix(name): parameter for name, parameter in named if parameter.requires_grad}

    def tensors(self) -> list[Tensor]:
        """All parameters of the module."""
        return list(self.module.parameters())

    def value(self, values: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss with these values in the place of the module's own parameters."""
        return _scalar(self.at(values, self._loss_fn, batch))

    def at(self, values: Mapping[str, Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(module, *arguments)`` with these values in the place of the module's own parameters."""
        names = {name: strip_compile_prefix(name) for name, _ in self.module.named_parameters()}
        named = {f"model.{name}": values[plain] for name, plain in names.items() if plain in values}
        return torch.func.functional_call(self._bound, named, (function, *arguments))

    def graph(self, values: Mapping[str, Tensor], batch: Any, parameters: Mapping[str, Tensor]) -> Graph:
        """The values are written into the module's own parameters, which works whatever a model does with them."""
        write(values, parameters)
        with torch.enable_grad():
            return _scalar(self._loss_fn(self.module, batch)), parameters

    def trainable_copy(self, values: Mapping[str, Tensor]) -> tuple[nn.Module, LossFunction]:
        """A copy of the module, as it is."""
        return copy.deepcopy(self.module), lambda module, batch: _scalar(self._loss_fn(module, batch))

    def remember(self) -> Callable[[], None]:
        """What puts parameters, buffers, gradients and modes back."""
        return remember(self.module)

    def check_whole(self) -> None:
        """Raise an error when the module's parameters are sharded over processes."""
        with one_at_a_time:
            named = list(self.module.named_parameters())
        for name, parameter in named:
            if is_sharded(parameter):
                raise TypeError(
                    f"Parameter '{strip_compile_prefix(name)}' is sharded over processes by fully_shard, and points "
                    "cannot be sampled there. Estimate the basis before fully_shard is called, or with an unsharded "
                    "copy of the model; or use egop.Online(), which learns the basis from the training gradients."
                )


class FunctionLoss(Loss):
    """``function(**tensors)``, or ``function(batch, **tensors)``."""

    def __init__(self, function: Callable[..., Tensor], tensors: Mapping[str, Tensor], *, batched: bool) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}.")
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("tensors must be a mapping of names to tensors, such as {'theta': torch.zeros(10)}.")
        _check_parameters(tensors)
        _check_signature(function, list(tensors), batched)
        self._function, self._tensors, self._batched = function, dict(tensors), batched

    def parameters(self) -> dict[str, Tensor]:
        """All of the tensors."""
        return self._tensors

    def tensors(self) -> list[Tensor]:
        """All of the tensors."""
        return list(self._tensors.values())

    def value(self, values: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The function of these values."""
        return _scalar(self._function(*([batch] if self._batched else []), **values))

    def graph(self, values: Mapping[str, Tensor], batch: Any, parameters: Mapping[str, Tensor]) -> Graph:
        """The function of copies of these values; the tensors themselves are never written."""
        live = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        with torch.enable_grad():
            return self.value(live, batch), live

    def trainable_copy(self, values: Mapping[str, Tensor]) -> tuple[nn.Module, LossFunction]:
        """A module that has the tensors as its parameters."""
        module = nn.Module()
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value.clone()))
        return module, lambda module, batch: self.value(dict(module.named_parameters()), batch)


def gradients_of(graph: Graph, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    """A loss and its gradients by the named tensors that it was computed from."""
    value, live = graph
    if not value.requires_grad:
        raise ValueError(
            "The loss does not depend on the parameters: it has no gradient. "
            "Check that the loss function uses the model it is given and does not detach or use no_grad."
        )
    gradients = torch.autograd.grad(value, [live[name] for name in names], allow_unused=True)
    return value.detach(), [
        torch.zeros_like(live[name]) if gradient is None else _dense(name, gradient)
        for name, gradient in zip(names, gradients, strict=True)
    ]


def write(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Copy values into parameters."""
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


class _Bound(nn.Module):
    """Calls a function with the model, so that ``functional_call`` reaches every use of the parameters in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def _unwrapped(model: nn.Module) -> nn.Module:
    """What ``DistributedDataParallel`` wraps, also where it was compiled as a whole."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):
        model = inner
    wrapped: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return wrapped


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise ValueError("The objective has no parameters to sample: none of them requires a gradient.")
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"Parameter '{name}' is not initialised yet (a lazy module). Run one forward pass first.")
        if not parameter.is_floating_point():
            raise TypeError(f"Parameter '{name}' is {parameter.dtype}; egop works with real floating-point parameters.")


def _check_loss(loss_fn: Callable[..., Any]) -> None:
    """Raise an error for a loss of ``torch.nn`` itself, as a module or a function."""
    called = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else loss_fn
    if getattr(called, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"loss_fn is called as loss_fn(model, batch), but {name} takes outputs and targets. "
            "Wrap it: lambda model, batch: criterion(model(batch[0]), batch[1])."
        )


def _check_signature(function: Callable[..., Tensor], names: list[str], batched: bool) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*([None] if batched else []), **dict.fromkeys(names))
    except TypeError as error:
        call = ", ".join((["batch"] if batched else []) + [f"{name}=..." for name in names])
        raise TypeError(f"The function must accept the call f({call}), but its signature is f{signature}.") from error


def _dense(name: str, gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"Parameter '{name}' has a sparse gradient, which cannot be rotated. "
            "Use sparse=False in the embedding, or leave the parameter out of the partition."
        )
    return gradient


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"The loss function must return a scalar tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"The loss function must return a scalar, got a tensor of shape {tuple(loss.shape)}. Take its mean or sum."
        )
    return loss.reshape(())
