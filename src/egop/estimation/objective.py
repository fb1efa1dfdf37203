"""Objective: a loss of named parameters, and the batches it sees."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from egop.basis import plain_name
from egop.distributed import is_sharded, processes
from egop.estimation.keeping import one_at_a_time, remember
from egop.estimation.nested import moved
from egop.numerics import random_state, seed_everything, set_random_state

LossFunction = Callable[[nn.Module, Any], Tensor]


class Objective:
    """A loss of named parameters, and the batches it sees.

    Args:
        model: the module that is going to be trained; of ``DistributedDataParallel`` the module inside is taken, so
            that sampling causes no traffic.
        loss_fn: ``loss_fn(model, batch)``, the scalar loss of one batch.
        batches: any iterable of batches (a ``DataLoader``, a list). It is gone through again and again; what
            reshuffles on every pass, as a ``DataLoader`` does, keeps doing so. Batches are brought to the model's
            device, and floating ones to its precision where all of it is in half precision.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> batches = [(torch.ones(8, 3), torch.zeros(8, 1))]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> objective = egop.Objective(model, loss, batches)
        >>> sorted(objective.parameters)
        ['bias', 'weight']
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batches: Iterable[Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "For a plain function of tensors use egop.Objective.from_function(f, {'name': tensor})."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function loss_fn(model, batch), got {type(loss_fn).__name__}.")
        _check_loss(loss_fn)
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}.")
        model = _unwrapped(model)
        self.module: nn.Module | None = model
        self._loss = loss_fn
        self._bound = _Bound(model)
        self._batches = batches
        self._kept: dict[str, Tensor] | None = None
        self._sampled: dict[str, Tensor] | None = None
        _check_parameters(self.parameters)
        self.check_whole()

    @classmethod
    def from_function(
        cls, function: Callable[..., Tensor], tensors: Mapping[str, Tensor], batches: Iterable[Any] | None = None
    ) -> Objective:
        """The objective of any differentiable function of named tensors.

        Args:
            function: called with the tensors as keyword arguments, ``function(theta=...)``; with ``batches``, the batch
                comes first, ``function(batch, theta=...)``. Returns the scalar loss.
            tensors: the parameters by name. They are read where a distribution is centred on them, never written.
            batches: any iterable of batches; none for a function of the parameters alone.

        Example:
            >>> theta = torch.zeros(2)
            >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}.")
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("tensors must be a mapping of names to tensors, such as {'theta': torch.zeros(10)}.")
        _check_parameters(tensors)
        _check_signature(function, list(tensors), batches is not None)
        objective = cls.__new__(cls)
        objective.module = None
        objective._tensors = dict(tensors)
        objective._function = function if batches is not None else lambda _, **values: function(**values)
        objective._batches = [None] if batches is None else batches
        objective._kept = objective._sampled = None
        return objective

    _function: Callable[..., Tensor]
    _tensors: dict[str, Tensor]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What is sampled: those of the module's parameters that require a gradient now, by name."""
        if self._sampled is not None:
            return self._sampled
        if self.module is None:
            return self._tensors
        with one_at_a_time:  # while another thread samples, values may stand in the parameters' places
            named = self.module.named_parameters()
            return {plain_name(name): parameter for name, parameter in named if parameter.requires_grad}

    def batches(self) -> Iterator[Any]:
        """Batches without end: the iterable is started again whenever it is through."""
        passes = 0
        while True:
            batch_seen = False
            for batch in self._batches:
                batch_seen = True
                yield batch
            if not batch_seen and passes == 0:
                raise ValueError("The batches are empty: the objective needs at least one batch.")
            if not batch_seen:
                raise ValueError(
                    f"The batches could be gone through only {passes} time(s): an iterator or generator is used up "
                    "after one pass. Give a list or a DataLoader, which can be iterated again."
                )
            passes += 1

    def placed(self, batches: Iterable[Any]) -> list[Any]:
        """The batches on the device of the parameters; floating tensors in their precision, where all are in half.

        Batches may be tensors in lists, tuples, mappings and dataclasses, and whatever else has a method ``to``. What
        is in its place already is not copied, and what comes twice is moved once. Where parameters are on several
        devices, batches stay where they are.
        """
        own = list(self._tensors.values() if self.module is None else self.module.parameters())
        devices, kinds = {each.device for each in own}, {each.dtype for each in own}
        device = devices.pop() if len(devices) == 1 else None
        half = self.module is not None and len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}
        return moved(batches, device, kinds.pop() if half else None)

    @property
    def current(self) -> dict[str, Tensor]:
        """The parameters' values where training stands, also while sampling has written other ones into the model."""
        if self._kept is not None:
            return self._kept
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def loss(self, values: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss at ``values``, as a pure function of them: what ``torch.func`` can differentiate and batch."""
        if self.module is None:
            return _scalar(self._function(batch, **values))
        return _scalar(self.at(values, self._loss, batch))

    def at(self, values: Mapping[str, Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(module, *arguments)`` with these values in the place of the module's own parameters."""
        assert self.module is not None
        names = {name: plain_name(name) for name, _ in self.module.named_parameters()}
        named = {f"model.{name}": values[plain] for name, plain in names.items() if plain in values}
        return torch.func.functional_call(self._bound, named, (function, *arguments))

    def gradients(self, values: Mapping[str, Tensor], batch: Any, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """The loss at ``values`` and its gradients by the named parameters, by plain reverse mode.

        For a module the values are written into its own parameters, which works for every model, whatever it does
        with them; so this is only to be called inside :meth:`preserved`.
        """
        if self.module is None:
            live = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
            with torch.enable_grad():
                loss = _scalar(self._function(batch, **live))
        else:
            live = self.parameters
            self.write(values)
            with torch.enable_grad():
                loss = _scalar(self._loss(self.module, batch))
        wanted = [live[name] for name in names]
        if not loss.requires_grad:
            raise ValueError(
                "The loss does not depend on the parameters: it has no gradient. "
                "Check that the loss function uses the model it is given and does not detach or use no_grad."
            )
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss.detach(), [
            torch.zeros_like(live[name]) if gradient is None else _dense(name, gradient)
            for name, gradient in zip(names, gradients, strict=True)
        ]

    def trainable_copy(self) -> tuple[nn.Module, LossFunction]:
        """A module of its own at the current parameters, and the loss to train it with; the model stays untouched."""
        if self.module is not None:
            return copy.deepcopy(self.module), self._loss
        module = nn.Module()
        for name, value in self.current.items():
            module.register_parameter(name, nn.Parameter(value.clone()))
        return module, lambda module, batch: self.loss(dict(module.named_parameters()), batch)

    def check_whole(self) -> None:
        """Raise an error when the module's parameters are sharded over processes."""
        with one_at_a_time:
            named = [] if self.module is None else list(self.module.named_parameters())
        for name, parameter in named:
            if is_sharded(parameter):
                raise TypeError(
                    f"Parameter '{plain_name(name)}' is sharded over processes by fully_shard, and points cannot be "
                    "sampled there. Estimate the basis before fully_shard is called, or with an unsharded copy of the "
                    "model; or use egop.Online(), which learns the basis from the training gradients."
                )

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values into the module's parameters; only inside :meth:`preserved`."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    @contextlib.contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Whatever happens inside, afterwards the model and the random state are exactly as before.

        Parameters, buffers, gradients, train/eval modes and the global random states of torch, numpy and ``random`` are
        put back, also when the loss raises or the user interrupts. Inside, the random states start from ``seed``. Only
        one thread is inside at a time; others wait.
        """
        with one_at_a_time:
            outer, states = (self._kept, self._sampled), random_state()
            restore = remember(self.module) if self.module is not None else lambda: None
            self._sampled = self.parameters
            if self._kept is None:
                self._kept = {name: parameter.detach().clone() for name, parameter in self._sampled.items()}
            try:
                if seed is not None:
                    seed_everything(seed)
                yield
            finally:
                set_random_state(states)
                restore()
                self._kept, self._sampled = outer

    @contextlib.contextmanager
    def as_in_first(self) -> Iterator[None]:
        """Inside, all processes stand where the first one does: in its parameters, frozen ones too, and buffers.

        Those of ``DistributedDataParallel`` differ in their buffers at least. To be called by all of them.
        """
        if processes.world_size() == 1:
            yield
            return
        others = [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]
        drawn = {id(parameter) for parameter in self.parameters.values()}
        others = [each for each in others if id(each) not in drawn]
        outer = self._kept
        kept, own = processes.agreed(
            lambda: (
                {name: value.clone() for name, value in self.current.items()},
                [each.detach().clone() for each in others],
            )
        )
        for tensor in [*kept.values(), *others]:
            processes.broadcast(tensor, 0)
        self._kept = kept
        try:
            yield
        finally:
            self._kept = outer
            with torch.no_grad():
                for tensor, value in zip(others, own, strict=True):
                    tensor.copy_(value)


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
