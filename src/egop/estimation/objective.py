"""Objective: a loss of named parameters and the batches it is evaluated on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from egop.basis import strip_compile_prefix
from egop.distributed import is_sharded
from egop.estimation import processes
from egop.estimation.batches import move_batches
from egop.formatting import pluralize
from egop.numerics import get_random_state, seed_everything, set_random_state

LossFunction = Callable[[nn.Module, Any], Tensor]

# Sampling writes to the model and seeds the global random state, so only one thread may sample at a time, even with
# different models. The lock is reentrant because points are drawn while gradients are being sampled.
sampling_lock = threading.RLock()


class Objective:
    """A loss as a function of named parameters, and the batches it is evaluated on.

    Args:
        model: the module to train. If it is wrapped in ``DistributedDataParallel``, the inner module is used, so that
            sampling causes no communication.
        loss_fn: ``loss_fn(model, batch)``, which returns the scalar loss of one batch.
        batches: any iterable of batches (a ``DataLoader``, a list). It is iterated again whenever it is exhausted, so
            a ``DataLoader`` reshuffles on every pass. Batches are moved to the model's device, and floating-point
            tensors are cast if the whole model is in half precision.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> batches = [(torch.ones(8, 3), torch.zeros(8, 1))]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        >>> objective = egop.Objective(model, loss, batches)
        >>> objective
        Objective(Linear, 4 parameters in 2 tensors)
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batches: Iterable[Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {type(model).__name__}. "
                "For a plain function of tensors use egop.Objective.from_function(f, {'name': tensor})."
            )
        _check_loss_function(loss_fn)
        if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            kind = type(batches).__name__
            raise TypeError(f"batches must be a DataLoader, a list or another iterable of batches, got a {kind}.")
        self._model = _unwrap(model)
        self._loss_fn, self._batches = loss_fn, batches
        self._caller = _Caller(self._model)
        self.has_warned_of_scale = False  # by egop.Initialization
        self._tensors: dict[str, Tensor] | None = None  # the tensors of a function, which are never written
        # While sampling: the module's own parameters, and their values before sampling.
        self._sampled: dict[str, Tensor] | None = None
        self._current: dict[str, Tensor] | None = None
        _check_parameters(self.parameters)
        self.check_unsharded()

    @classmethod
    def from_function(
        cls, function: Callable[..., Tensor], tensors: Mapping[str, Tensor], batches: Iterable[Any] | None = None
    ) -> Objective:
        """Build an objective from a differentiable function of named tensors.

        Args:
            function: called with the tensors as keyword arguments, ``function(theta=...)``; with ``batches``, the batch
                comes first, ``function(batch, theta=...)``. Returns the scalar loss.
            tensors: the parameters by name. They are read if a distribution is centered on them, but never written.
            batches: any iterable of batches; None for a function of the parameters alone.

        Example:
            >>> theta = torch.zeros(2)
            >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": theta})
        """
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise TypeError("tensors must be a mapping of names to tensors, such as {'theta': torch.zeros(10)}.")
        _check_parameters(tensors)

        def loss_fn(module: nn.Module, batch: Any) -> Tensor:
            values = dict(module.named_parameters(remove_duplicate=False))
            return function(**values) if batches is None else function(batch, **values)

        objective = cls(_hold_tensors(tensors), loss_fn, [None] if batches is None else batches)
        objective._tensors = dict(tensors)
        return objective

    def __repr__(self) -> str:
        parameters = self.parameters.values()
        size, tensors = sum(tensor.numel() for tensor in parameters), pluralize(len(parameters), "tensor")
        kind = "function" if self.module is None else type(self._model).__name__
        return f"Objective({kind}, {size:,} parameters in {tensors})"

    @property
    def module(self) -> nn.Module | None:
        """The module that owns the parameters; None for a function of tensors."""
        return self._model if self._tensors is None else None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters to sample, by name: those of the module that currently require a gradient."""
        return self._sampled or self._tensors or self._trainable_parameters()

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def current(self) -> dict[str, Tensor]:
        """The parameters' values in training, even while sampling has temporarily overwritten them in the model."""
        if self._current is not None:
            return self._current
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches without end, restarting the iterable whenever it is exhausted."""
        passes = 0
        while True:
            is_empty = True
            for batch in self._batches:
                is_empty = False
                yield batch
            if is_empty and passes == 0:
                raise ValueError("The batches are empty: the objective needs at least one batch.")
            if is_empty:
                raise ValueError(
                    "The batches ran out: an iterator or generator can be read only once. Pass a list or a DataLoader, "
                    "which can be iterated again."
                )
            passes += 1

    def move_batches(self, batches: Iterable[Any]) -> list[Any]:
        """Move batches to the parameters' device; cast their floats if the whole model is in half precision.

        Batches may be tensors in lists, tuples, mappings and dataclasses, and other objects that have a ``to`` method.
        If the parameters are on several devices, batches stay where they are.
        """
        tensors = list(self._model.parameters())
        devices, dtypes = {tensor.device for tensor in tensors}, {tensor.dtype for tensor in tensors}
        device = devices.pop() if len(devices) == 1 else None
        casts = self.module is not None and len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16}
        return move_batches(batches, device, dtypes.pop() if casts else None)

    def loss(self, values: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Compute the loss at ``values`` as a pure function of them, for use with ``torch.func``."""
        names = {name: strip_compile_prefix(name) for name, _ in self._model.named_parameters()}
        named = {f"model.{name}": values[plain] for name, plain in names.items() if plain in values}
        # functional_call leaves its own tensors in a layer that the model has twice.
        own = [(part, dict(part._parameters)) for part in self._model.modules()]
        try:
            return _as_scalar(torch.func.functional_call(self._caller, named, (self._loss_fn, batch)))
        finally:
            for part, parameters in own:
                part._parameters.update(parameters)

    def gradients(self, values: Mapping[str, Tensor], batch: Any, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss at ``values`` and its gradients with respect to the named parameters.

        The values are written to the module's own parameters, which works whatever the model does with them. Call this
        only inside :meth:`preserve`.
        """
        self.write(values)
        wanted = [self.parameters[name] for name in names]
        with torch.enable_grad():
            loss = _as_scalar(self._loss_fn(self._model, batch))
        if not loss.requires_grad:
            raise ValueError(
                "The loss does not depend on the parameters: it has no gradient. "
                "Check that the loss function uses the model it is given and does not detach or use no_grad."
            )
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return loss.detach(), [
            torch.zeros_like(parameter) if gradient is None else _check_dense(name, gradient)
            for name, parameter, gradient in zip(names, wanted, gradients, strict=True)
        ]

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the module's parameters. Call this only inside :meth:`preserve`."""
        with torch.no_grad():
            for name, value in values.items():
                self.parameters[name].copy_(value)

    def trainable_copy(self) -> tuple[nn.Module, LossFunction]:
        """Return a copy of the module at the current parameters, and the loss function to train it with."""
        if self._sampled is None:
            self._load_tensors()
        # Weights that a hook has computed, as torch.nn.utils.prune does: torch cannot copy these as they are.
        computed = [item for part in self._model.modules() for item in vars(part).values() if _is_computed(item)]
        model = copy.deepcopy(self._model, {id(tensor): tensor.detach().clone() for tensor in computed})
        return model, lambda module, batch: _as_scalar(self._loss_fn(module, batch))

    def check_unsharded(self) -> None:
        """Raise TypeError if a parameter is sharded over processes."""
        with sampling_lock:
            named = list(self._model.named_parameters())
        for name, parameter in named:
            if is_sharded(parameter):
                raise TypeError(
                    f"Parameter '{strip_compile_prefix(name)}' is sharded over processes by fully_shard, and points "
                    "cannot be sampled there. Estimate the basis before fully_shard is called, or with an unsharded "
                    "copy of the model; or use egop.Online(), which learns the basis from the training gradients."
                )

    @contextlib.contextmanager
    def preserve(self, seed: int | None = None) -> Iterator[None]:
        """Restore the model and the random state on exit, whatever happens inside.

        Parameters, buffers, gradients, train/eval modes and the global random states of torch, numpy and ``random`` are
        restored, even after an error or an interrupt. If a seed is given, the random states start from it. Only one
        thread may be inside at a time; others wait.
        """
        with sampling_lock:
            outer, states = (self._current, self._sampled), get_random_state()
            if self._sampled is None:
                self._load_tensors()
            restore = _take_snapshot(self._model)
            try:
                self._sampled = self._trainable_parameters()
                if self._current is None:
                    self._current = {name: parameter.detach().clone() for name, parameter in self._sampled.items()}
                if seed is not None:
                    seed_everything(seed)
                yield
            finally:
                set_random_state(states)
                restore()
                self._current, self._sampled = outer

    @contextlib.contextmanager
    def synchronize(self) -> Iterator[None]:
        """Give all processes the first one's parameters and buffers, and restore their own on exit.

        The processes of ``DistributedDataParallel`` differ at least in their buffers. All processes must call this.
        """
        with contextlib.ExitStack() as stack:
            if processes.world_size() > 1:
                processes.run_collectively(lambda: stack.enter_context(self.preserve()))
                own = [tensor.detach() for tensor in (*self._model.parameters(), *self._model.buffers())]
                for tensor, first in zip(own, processes.broadcast_object(own, 0, self.device), strict=True):
                    tensor.copy_(first)
                self._current = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
            yield

    def _trainable_parameters(self) -> dict[str, Tensor]:
        with sampling_lock:  # while another thread samples, torch.func may have swapped the parameters
            named = self._model.named_parameters()
            return {strip_compile_prefix(name): parameter for name, parameter in named if parameter.requires_grad}

    def _load_tensors(self) -> None:
        """Copy a function's tensors into its module."""
        for name, tensor in (self._tensors or {}).items():
            self._model.get_parameter(name).data = tensor.detach().clone()


def _take_snapshot(module: nn.Module) -> Callable[[], None]:
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


def _is_computed(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.is_leaf


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _hold_tensors(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a module whose parameters are copies of the tensors; dots in names become submodules."""
    module = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(tensor.detach().clone()))
    return module


class _Caller(nn.Module):
    """A module that calls a function with the model, so that ``functional_call`` swaps every use of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``, even if the wrapper was compiled."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):
        model = inner
    unwrapped: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return unwrapped


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise ValueError("The objective has no parameters to sample: none of them requires a gradient.")
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"Parameter '{name}' is not initialized yet (a lazy module). Run one forward pass first.")
        if not parameter.is_floating_point():
            raise TypeError(f"Parameter '{name}' is {parameter.dtype}; egop works with real floating-point parameters.")


def _check_loss_function(loss_fn: Any) -> None:
    """Raise TypeError for a function that cannot be called with a model and a batch."""
    places = getattr(loss_fn, "__module__", ""), type(loss_fn).__module__
    fits = callable(loss_fn) and not {"torch.nn.functional", "torch.nn.modules.loss"} & set(places)
    if fits:
        with contextlib.suppress(ValueError):  # of a callable that does not tell its arguments
            try:
                inspect.signature(loss_fn).bind(None, None)
            except TypeError:
                fits = False
    if not fits:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"loss_fn is called as loss_fn(model, batch), which does not fit {name}. Write, for example, "
            "lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])."
        )


def _check_dense(name: str, gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"Parameter '{name}' has a sparse gradient, which cannot be rotated. "
            "Use sparse=False in the embedding, or leave the parameter out of the partition."
        )
    return gradient


def _as_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"The loss function must return a scalar tensor, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"The loss function must return a scalar, got a tensor of shape {tuple(loss.shape)}. Take its mean or sum."
        )
    return loss.reshape(())
