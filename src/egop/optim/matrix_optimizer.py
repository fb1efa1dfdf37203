"""Base class of the matrix optimizers: momentum, stacks of weights of one shape, updates of one size."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import (
    SMALL_NETWORK_BYTES,
    InPlaceGraph,
    Recorder,
    check_fraction,
    check_nonnegative,
    check_positive_int,
    copy_all,
    run_in_branches,
    without_autocast,
)
from egop.optim.elementwise import ElementwiseOps

# A parameter group, its weights that have a gradient, and their gradients.
Part = tuple[Mapping[str, Any], list[Tensor], list[Tensor]]


class MatrixOptimizer(Optimizer, abc.ABC):
    """Base class of optimizers that transform the momentum of a weight as a whole matrix.

    Every update is scaled to the same root mean square, so that learning rates are similar to AdamW's. Weights of one
    shape are stepped together. A weight of more than two dimensions (a convolution) is a matrix with one row per
    output. All state is plain tensors of the weight's shape: ``exp_avg`` is linear in the gradients and is rotated
    exactly, ``exp_avg_sq`` is rotated by the squared rotation (see :mod:`egop.optimizer.moments`).

    On a GPU the steps of small networks are recorded as a CUDA graph if the class itself, not a base class, sets
    ``recordable = True``. Its step may then only use tensors (no counters, no random numbers), and permuting the
    columns of a matrix must permute its update in the same way.
    """

    # Tells egop.ReparameterizedOptimizer that coordinates must be matrices, not vectors.
    works_on_matrices = True
    recordable = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        _check_hyperparameters(defaults)
        # matrices_last: whether a tensor of more than two dimensions is a stack of matrices, as egop's coordinates are.
        super().__init__(params, defaults | {"matrices_last": False})
        self._reset_graphs()

    @property
    def is_recordable(self) -> bool:
        """True if the class itself declares that its step can be recorded."""
        return bool(vars(type(self)).get("recordable"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of weights, each of two or more dimensions."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise TypeError(
                    f"egop.optim.{type(self).__name__} steps real numbers, but got a parameter of {parameter.dtype}. "
                    "Give it to another optimizer, such as torch.optim.AdamW."
                )
            if parameter.dim() < 2:
                self.param_groups.pop()
                raise ValueError(
                    f"egop.optim.{type(self).__name__} steps tensors of two or more dimensions, but got a parameter of "
                    f"shape {tuple(parameter.shape)}. Give vectors to another optimizer; in "
                    "egop.ReparameterizedOptimizer use outside=torch.optim.AdamW."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            parts = [
                (group, weights, list(map(_dense_gradient, weights)))
                for group in self.param_groups
                if (weights := [each for each in group["params"] if each.grad is not None and each.numel()])
            ]
            self.step_parts(parts)
        return loss

    def step_parts(self, parts: Sequence[Part]) -> None:
        """Step some weights of each group along these gradients."""
        if self.is_recordable and _is_small(parts):
            self._step_recorded(parts)
        else:
            for part in parts:
                self._step_group(*part, *_rates(part[0]))

    @abc.abstractmethod
    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the updates for momentum matrices with any leading dimensions, up to their scale."""

    def compute_directions(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Update the momenta of weights of one shape and return the matrices to transform."""
        means = self._states(weights, "exp_avg")
        momentum, nesterov, last = group["momentum"], group["nesterov"], group["matrices_last"]
        return self._elementwise.update_moments(
            weights, gradients, means, momentum=momentum, nesterov=nesterov, last=last
        )

    def compute_updates(self, group: Mapping[str, Any], weights: list[Tensor], matrices: Tensor) -> Tensor:
        """Return the updates for weights of one shape, up to their scale."""
        return self.transform(matrices, group)

    def compute_scales(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the factor for each matrix of updates, without the learning rate."""
        return rms_scales(updates, group["update_rms"])

    def lookahead(self, weights: Sequence[Tensor], gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the momenta after a step with these gradients, and their transforms, without changing any state.

        Args:
            weights: weights of one shape.
            gradients: their gradients, stacked.
        """
        index_of = {id(weight): index for index, weight in enumerate(weights)}
        momenta, transformed = torch.empty_like(gradients), torch.empty_like(gradients)
        for group in self.param_groups:
            indices = [index_of[id(weight)] for weight in group["params"] if id(weight) in index_of]
            if indices:
                # Nearly always, these are all weights in order.
                part = slice(None) if indices == list(range(len(weights))) else indices
                means = [self.state.get(weights[i], {}).get("exp_avg", torch.zeros_like(weights[i])) for i in indices]
                momenta[part] = torch.stack(means).lerp(gradients[part], 1 - group["momentum"])
                matrices = _as_matrices(momenta[part], last=group["matrices_last"])
                transformed[part] = self.transform(matrices, group).reshape(momenta[part].shape)
        return momenta, transformed

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a loaded state, without its graphs."""
        super().__setstate__(state)
        self._reset_graphs()

    def _states(self, weights: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return the state tensors with this name, initialized to zero."""
        states = [self.state[weight] for weight in weights]
        for state, weight in zip(states, weights, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [state[name] for state in states]

    def _step_group(
        self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], lr: Any, kept: Any
    ) -> None:
        tasks = []
        for indices in self._group_by_layout(group, weights):
            own = [weights[index] for index in indices], [gradients[index] for index in indices]
            tasks.append(functools.partial(self._step_stack, group, *own, lr, kept))
        run_in_branches(tasks)

    def _step_stack(
        self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], lr: Any, kept: Any
    ) -> None:
        """Step weights of one shape."""
        directions = self.compute_directions(group, weights, gradients)
        if weights[0].dtype in (torch.float16, torch.bfloat16):  # too few digits to recognize rounding errors
            directions = directions.float()
        updates = self.compute_updates(group, weights, directions)
        scales = self.compute_scales(updates, group) * lr
        self._elementwise.apply_updates(weights, updates, scales, kept, last=group["matrices_last"])

    def _group_by_layout(self, group: Mapping[str, Any], weights: Sequence[Tensor]) -> list[list[int]]:
        """Group the indices of weights by shape, strides, dtype and device, once for all steps."""
        layouts = [(weight.shape, weight.stride(), weight.dtype, weight.device) for weight in weights]
        known, grouped = self._grouped.get(id(group), (None, []))
        if known != layouts:
            by_layout: dict[Any, list[int]] = {}
            for index, layout in enumerate(layouts):
                by_layout.setdefault(layout, []).append(index)
            # Largest first, so that small ones run in parallel with them.
            grouped = sorted(by_layout.values(), key=lambda indices: -len(indices) * weights[indices[0]].numel())
            self._grouped[id(group)] = layouts, grouped
        return grouped

    def _step_recorded(self, parts: Sequence[Part]) -> None:
        """Step with a CUDA graph, which reads gradients and rates from its own buffers."""
        rates = {id(group): self._buffer_rates(group, weights[0]) for group, weights, _ in parts}
        buffered, tensors = [], []
        for group, weights, gradients in parts:
            buffers = self._buffer_gradients(weights, gradients)
            buffered.append((group, weights, buffers, *rates[id(group)]))
            tensors += [*weights, *buffers, *self._graph_inputs(group, weights), *rates[id(group)]]
        self._graph.run(tensors, self, buffered, _recorded_settings(group for group, _, _ in parts))
        # Autograd does not see what a graph writes, but must notice that older autograd graphs are invalid.
        torch.autograd.graph.increment_version([weight for _, weights, _ in parts for weight in weights])

    def _graph_inputs(self, group: Mapping[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Return the tensors that a step reads besides weights, gradients and rates. Counters stay on the CPU."""
        return [tensor for weight in weights for tensor in self.state[weight].values() if tensor.dim()]

    def _buffer_gradients(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        buffers = [self._gradient_buffers.setdefault(weight, torch.empty_like(weight)) for weight in weights]
        copy_all(buffers, gradients)
        return buffers

    def _buffer_rates(self, group: Mapping[str, Any], weight: Tensor) -> list[Tensor]:
        key = id(group), weight.dtype, weight.device
        buffers = self._rate_buffers.setdefault(key, [weight.new_empty(()), weight.new_empty(())])
        for buffer, value in zip(buffers, _rates(group), strict=True):
            buffer.copy_(value) if isinstance(value, Tensor) else buffer.fill_(value)
        return buffers

    def _reset_graphs(self) -> None:
        """Drop all graphs and their buffers, because the tensors of this optimizer may have changed."""
        self._graph = InPlaceGraph(_step_all, Recorder(branched=True))
        self._elementwise = ElementwiseOps(any_column_order=self.is_recordable)
        self._rate_buffers: dict[Any, list[Tensor]] = {}  # by group, dtype and device
        self._gradient_buffers: dict[Tensor, Tensor] = {}
        self._grouped: dict[int, tuple[list[Any], list[list[int]]]] = {}  # layouts and indices, by group


def _step_all(optimizer: MatrixOptimizer, parts: Sequence[Any], settings: str) -> None:
    """Step all groups; :class:`InPlaceGraph` records this once for each value of the settings."""
    for part in parts:
        optimizer._step_group(*part)


def rms_scales(matrices: Tensor, rms: float) -> Tensor:
    """Return the factor that gives each matrix this root mean square; 0 for a zero matrix."""
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=dtype)
    return torch.where(lengths > 0, rms * math.sqrt(math.prod(matrices.shape[-2:])) / lengths, 0)


def _recorded_settings(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return the settings that a CUDA graph is recorded with: all but the rates, which it reads from buffers."""
    rates = ("params", "lr", "weight_decay")
    return str([{key: value for key, value in group.items() if key not in rates} for group in groups])


def _check_hyperparameters(defaults: Mapping[str, Any]) -> None:
    for name in ("lr", "weight_decay", "update_rms", "eps"):
        if name in defaults:
            check_nonnegative(name, defaults[name])
    if "momentum" in defaults:
        check_fraction("momentum", defaults["momentum"])
    if "betas" in defaults:
        betas = defaults["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}.")
        for index, beta in enumerate(betas):
            check_fraction(f"betas[{index}]", beta)
    if "iterations" in defaults:
        check_positive_int("iterations", defaults["iterations"])


def _dense_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TypeError("egop.optim does not take sparse gradients. Use sparse=False in the embedding.")
    return weight.grad


def _rates(group: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the learning rate and the fraction of a weight that weight decay leaves."""
    return group["lr"], 1 - group["lr"] * group["weight_decay"]


def _is_small(parts: Sequence[Part]) -> bool:
    """Return True if launching a step takes longer than computing it and the rates fit the weights' precision."""
    weights = [weight for _, weights, _ in parts for weight in weights]
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    small = sum(weight.nbytes for weight in weights) <= SMALL_NETWORK_BYTES
    return small and kinds in ({("cuda", torch.float32)}, {("cuda", torch.float64)})


def _as_matrices(tensors: Tensor, *, last: bool) -> Tensor:
    return tensors if last or tensors.dim() == 3 else tensors.flatten(2)
