"""Objective: a loss of named parameters, and the batches it sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from egop.distributed import processes
from egop.estimation.keeping import one_at_a_time
from egop.estimation.losses import FunctionLoss, Loss, LossFunction, ModuleLoss, gradients_of, write
from egop.estimation.nested import moved
from egop.numerics import get_random_state, seed_everything, set_random_state


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
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches must be an iterable of batches, got {type(batches).__name__}.")
        self._begin(ModuleLoss(model, loss_fn), batches)
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
        objective = cls.__new__(cls)
        loss = FunctionLoss(function, tensors, batched=batches is not None)
        objective._begin(loss, [None] if batches is None else batches)
        return objective

    def _begin(self, loss: Loss, batches: Iterable[Any]) -> None:
        self._loss, self._batches = loss, batches
        self._kept: dict[str, Tensor] | None = None
        self._sampled: dict[str, Tensor] | None = None

    @property
    def module(self) -> nn.Module | None:
        """The module that has the parameters; None for a function of tensors."""
        return self._loss.module

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What is sampled: those of the module's parameters that require a gradient now, by name."""
        return self._loss.parameters() if self._sampled is None else self._sampled

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
        tensors = self._loss.tensors()
        devices, kinds = {tensor.device for tensor in tensors}, {tensor.dtype for tensor in tensors}
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
        return self._loss.value(values, batch)

    def at(self, values: Mapping[str, Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(module, *arguments)`` with these values in the place of the module's own parameters."""
        assert isinstance(self._loss, ModuleLoss)
        return self._loss.at(values, function, *arguments)

    def gradients(self, values: Mapping[str, Tensor], batch: Any, names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """The loss at ``values`` and its gradients by the named parameters, by plain reverse mode.

        For a module the values are written into its own parameters; so this is only to be called inside
        :meth:`preserved`.
        """
        return gradients_of(self._loss.graph(values, batch, self.parameters), names)

    def trainable_copy(self) -> tuple[nn.Module, LossFunction]:
        """A module of its own at the current parameters, and the loss to train it with; the model stays untouched."""
        return self._loss.trainable_copy(self.current)

    def check_whole(self) -> None:
        """Raise an error when the module's parameters are sharded over processes."""
        if isinstance(self._loss, ModuleLoss):
            self._loss.check_whole()

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy the values into the module's parameters; only inside :meth:`preserved`."""
        write(values, self.parameters)

    @contextlib.contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Whatever happens inside, afterwards the model and the random state are exactly as before.

        Parameters, buffers, gradients, train/eval modes and the global random states of torch, numpy and ``random`` are
        put back, also when the loss raises or the user interrupts. Inside, the random states start from ``seed``. Only
        one thread is inside at a time; others wait.
        """
        with one_at_a_time:
            outer, states = (self._kept, self._sampled), get_random_state()
            restore = self._loss.remember()
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
        others = [] if self.module is None else [*self._loss.tensors(), *self.module.buffers()]
        drawn = {id(parameter) for parameter in self.parameters.values()}
        others = [tensor for tensor in others if id(tensor) not in drawn]
        outer = self._kept
        kept, values = processes.run_collectively(
            lambda: (
                {name: value.clone() for name, value in self.current.items()},
                [tensor.detach().clone() for tensor in others],
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
                for tensor, value in zip(others, values, strict=True):
                    tensor.copy_(value)
