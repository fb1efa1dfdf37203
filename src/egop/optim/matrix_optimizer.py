"""Base class of the matrix optimizers: momentum, stacks of weights of one shape, updates of equal size."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.distributed import is_sharded
from egop.numerics import (
    SMALL_NETWORK_BYTES,
    InPlaceGraph,
    Recorder,
    check_fraction,
    check_nonnegative,
    check_positive_int,
    copy_all,
    outside_inference_mode,
    run_in_branches,
    without_autocast,
)
from egop.optim.elementwise import MatrixStack
from egop.optim.sharded import ShardedMatrix

# A parameter group, its weights that have a gradient, their gradients, and their states.
Part = tuple[Mapping[str, Any], list[Tensor], list[Tensor], list[dict[str, Tensor]]]

_CHECKS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("lr", "weight_decay", "update_rms", "eps"), check_nonnegative),
    "momentum": check_fraction,
    "iterations": check_positive_int,
}
_RECORDABLE = (torch.float32, torch.float64)  # dtypes of weights
_MAX_STACKINGS = 16  # sets of weights of a group whose stacks are kept; one is enough if all weights have gradients


class MatrixOptimizer(Optimizer, abc.ABC):
    """Base class of optimizers that transform the momentum of a weight as a whole matrix.

    Updates are scaled to a given root mean square, so that learning rates are similar to AdamW's. Weights of one
    shape are stepped together. A weight of more than two dimensions (a convolution) is a matrix with one row per
    output. The moments are plain tensors of the weight's shape: ``exp_avg`` is linear in the gradients and is rotated
    exactly, ``exp_avg_sq`` is rotated by the squared rotation (see :mod:`egop.optimizer.moments`).

    On a GPU the steps of small networks are recorded as a CUDA graph if the class itself, not a base class, sets
    ``recordable = True``. Its directions, updates and scales may then depend on tensors alone (no counters, no random
    numbers), and permuting the columns of a matrix must permute its update in the same way. :meth:`compute_rates` is
    not recorded.

    Args:
        params: weights of two or more dimensions, or parameter groups of them.
        defaults: the settings: ``lr``, ``weight_decay`` and ``update_rms``; ``momentum`` and ``nesterov`` too, unless
            the subclass has its own :meth:`compute_directions`.
    """

    # Tells egop.ReparameterizedOptimizer that coordinates must be matrices, not vectors.
    works_on_matrices = True
    recordable = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        _check_hyperparameters(defaults)
        # matrices_last: whether a tensor of more than two dimensions is a stack of matrices, as egop's coordinates are.
        super().__init__(params, defaults | {"matrices_last": False})
        self.reset_graphs()

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

    @outside_inference_mode
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
            parts = []
            for group in self.param_groups:
                weights = [weight for weight in group["params"] if weight.grad is not None and weight.numel()]
                gradients, states = list(map(_dense_gradient, weights)), [self.state[weight] for weight in weights]
                parts.append((group, weights, gradients, states))
            self.step_parts(parts)
        return loss

    def step_parts(self, parts: Sequence[Part]) -> None:
        """Step some weights of each group."""
        graph = self._graph
        stacks = [stack for part in parts for stack in self._form_stacks(*part)]
        if self._graph is not graph:  # the stacks formed before a reset are not kept
            stacks = [stack for part in parts for stack in self._form_stacks(*part)]
        self._step_stacks(stacks)
        for stack in stacks:
            stack.gradients, stack.states = [], []  # so that zero_grad() frees the gradients

    @abc.abstractmethod
    def transform(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the updates for momentum matrices with any leading dimensions, up to their scale."""

    def compute_directions(self, stack: MatrixStack) -> Tensor:
        """Update the momenta of weights of one shape and return the matrices to transform."""
        momentum, nesterov = stack.group["momentum"], stack.group["nesterov"]
        return stack.update_moments(stack.gradients, stack.get_state("exp_avg"), momentum=momentum, nesterov=nesterov)

    def compute_updates(self, stack: MatrixStack, matrices: Tensor) -> Tensor:
        """Return the updates for weights of one shape, up to their scale."""
        return self.transform(matrices, stack.group)

    def compute_scales(self, updates: Tensor, directions: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the factor for each matrix of updates, which were made of directions, without the learning rate."""
        return rms_scales(updates, group["update_rms"])

    def compute_rates(self, stack: MatrixStack) -> tuple[Any, Any]:
        """Return the learning rate, and the fraction of a weight that weight decay leaves."""
        lr = stack.group["lr"]
        return lr, 1 - lr * stack.group["weight_decay"]

    def lookahead(self, weights: Sequence[Tensor], gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the momenta after a step with these stacked gradients, and their transforms; change no state."""
        index_of = {id(weight): index for index, weight in enumerate(weights)}
        momenta, transformed = torch.empty_like(gradients), torch.empty_like(gradients)
        for group in self.param_groups:
            indices = [index_of[id(weight)] for weight in group["params"] if id(weight) in index_of]
            if indices:
                # Nearly always, these are all weights in order.
                part = slice(None) if indices == list(range(len(weights))) else indices
                means = [self.state.get(weights[i], {}).get("exp_avg", torch.zeros_like(weights[i])) for i in indices]
                momenta[part] = torch.stack(means).lerp(gradients[part], 1 - group["momentum"])
                matrices = momenta[part] if group["matrices_last"] else momenta[part].flatten(2)
                transformed[part] = self.transform(matrices, group).reshape(momenta[part].shape)
        return momenta, transformed

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a loaded state, without its graphs."""
        super().__setstate__(state)
        self.reset_graphs()

    def _form_stacks(
        self,
        group: Mapping[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> list[MatrixStack]:
        """Stack weights by shape, strides, dtype and device, once for all steps."""
        layouts = [(weight.shape, weight.stride(), weight.dtype, weight.device) for weight in weights]
        key = (id(group), *map(id, weights))
        known, indexed = self._stacks.get(key, (None, []))
        if known != layouts:
            if known is not None or sum(first == id(group) for first, *_ in self._stacks) == _MAX_STACKINGS:
                self.reset_graphs()  # they read addresses that the stacks hold
            by_layout: dict[Any, list[int]] = {}
            for index, layout in enumerate(layouts):
                by_layout.setdefault((layout, index if is_sharded(weights[index]) else None), []).append(index)
            # Largest first, so that small ones run in parallel with them.
            parts = sorted(by_layout.values(), key=lambda part: -len(part) * weights[part[0]].numel())
            indexed = [(self._make_stack([weights[index] for index in part], group), part) for part in parts]
            self._stacks[key] = layouts, indexed
        for stack, indices in indexed:
            stack.gradients = [gradients[index] for index in indices]
            stack.states = [states[index] for index in indices]
        return [stack for stack, _ in indexed]

    def _make_stack(self, weights: list[Tensor], group: Mapping[str, Any]) -> MatrixStack:
        if is_sharded(weights[0]):
            return ShardedMatrix(weights, group)
        return MatrixStack(weights, group, any_column_order=self._is_recordable)

    def _step_stacks(self, stacks: Sequence[MatrixStack]) -> None:
        rates = [self.compute_rates(stack) for stack in stacks]
        if self._is_recorded(stacks, rates):
            self._step_recorded(stacks, rates)
        else:
            for stack, own in zip(stacks, rates, strict=True):
                self._step_stack(stack, *own)

    def _is_recorded(self, stacks: Sequence[MatrixStack], rates: Sequence[tuple[Any, Any]]) -> bool:
        """Return True if launching a step takes longer than computing it and buffers can hold the rates."""
        if not self._is_recordable or not stacks or not stacks[0].weights[0].is_cuda:
            return False
        firsts = [stack.weights[0] for stack in stacks]
        if len({(weight.device, weight.dtype) for weight in firsts}) > 1 or firsts[0].dtype not in _RECORDABLE:
            return False
        if any(map(is_sharded, firsts)) or any(isinstance(lr, Tensor) and lr.numel() > 1 for lr, _ in rates):
            return False
        return sum(weight.nbytes for stack in stacks for weight in stack.weights) <= SMALL_NETWORK_BYTES

    def _step_stack(self, stack: MatrixStack, lr: Any, kept: Any) -> None:
        directions = self.compute_directions(stack)
        if stack.weights[0].dtype in (torch.float16, torch.bfloat16):  # too few digits to recognize rounding errors
            directions = directions.float()
        updates = self.compute_updates(stack, directions)
        stack.apply_updates(updates, self.compute_scales(updates, directions, stack.group) * lr, kept)

    def _step_recorded(self, stacks: Sequence[MatrixStack], rates: Sequence[tuple[Any, Any]]) -> None:
        """Step with a CUDA graph, which reads gradients and rates from its own buffers."""
        self._buffer_gradients(stacks)
        buffers = self._buffer_rates(rates, stacks[0].weights[0])
        tensors = [buffer for pair in buffers for buffer in pair]
        for stack in stacks:
            # Counters stay on the CPU.
            state = [tensor for state in stack.states for tensor in state.values() if tensor.dim()]
            tensors += [*stack.weights, *stack.gradients, *state]
        self._graph.run(tensors, self, stacks, buffers, _recorded_settings(stacks))
        # Autograd does not see what a graph writes, but must notice that older autograd graphs are invalid.
        torch.autograd.graph.increment_version([weight for stack in stacks for weight in stack.weights])

    def _buffer_gradients(self, stacks: Sequence[MatrixStack]) -> None:
        gradients, known = [gradient for stack in stacks for gradient in stack.gradients], self._gradient_buffers
        for stack in stacks:
            known.update({weight: torch.empty_like(weight) for weight in stack.weights if weight not in known})
            stack.gradients = [known[weight] for weight in stack.weights]
        copy_all([buffer for stack in stacks for buffer in stack.gradients], gradients)

    def _buffer_rates(self, rates: Sequence[tuple[Any, Any]], weight: Tensor) -> list[tuple[Tensor, ...]]:
        """Copy the two rates of each stack to buffers, numbers all at once."""
        flat = [rate for pair in rates for rate in pair]
        numbers = [0.0 if isinstance(rate, Tensor) else float(rate) for rate in flat]
        # Rows of at least 16 bytes: kernels want aligned addresses.
        fresh = torch.tensor(numbers, dtype=weight.dtype, device="cpu").unsqueeze(-1).repeat(1, 4)
        key = len(flat), weight.dtype, weight.device
        if key not in self._rate_buffers:
            self._rate_buffers[key] = weight.new_empty(fresh.shape)
        buffer = self._rate_buffers[key]
        buffer.copy_(fresh, non_blocking=True)
        places = buffer[:, 0].unbind()
        for place, rate in zip(places, flat, strict=True):
            if isinstance(rate, Tensor):
                place.copy_(rate.reshape(()))
        return list(zip(places[::2], places[1::2], strict=True))

    def reset_graphs(self) -> None:
        """Drop all graphs and their buffers, because the tensors of this optimizer may have changed."""
        self._is_recordable = bool(vars(type(self)).get("recordable"))
        self._graph = InPlaceGraph(_step_all, Recorder(branched=True))
        self._rate_buffers: dict[Any, Tensor] = {}  # by number, dtype and device
        self._gradient_buffers: dict[Tensor, Tensor] = {}
        # By group and weights: their layouts, and stacks with the indices of their weights.
        self._stacks: dict[tuple[int, ...], tuple[list[Any], list[tuple[MatrixStack, list[int]]]]] = {}


def _step_all(optimizer: MatrixOptimizer, stacks: Sequence[MatrixStack], rates: Sequence[Any], settings: str) -> None:
    """Step all stacks; :class:`InPlaceGraph` records this once for each value of the settings."""
    pairs = zip(stacks, rates, strict=True)
    run_in_branches([functools.partial(optimizer._step_stack, stack, *rates) for stack, rates in pairs])


def rms_scales(matrices: Tensor, rms: float) -> Tensor:
    """Return the factor that gives each matrix this root mean square; 0 for a zero matrix."""
    rows, columns = matrices.shape[-2:]
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=dtype)
    scales: Tensor = lengths.reciprocal_().mul_(rms * math.sqrt(rows * columns))
    return scales.nan_to_num_(nan=0.0, posinf=0.0)


def _recorded_settings(stacks: Iterable[MatrixStack]) -> str:
    """Return the settings that a CUDA graph is recorded with: all but the rates, which it reads from buffers."""
    rates = ("params", "lr", "weight_decay")
    groups = {id(stack.group): stack.group for stack in stacks}
    found = [{key: value for key, value in group.items() if key not in rates} for group in groups.values()]
    return str((found, [list(groups).index(id(stack.group)) for stack in stacks]))


def _check_hyperparameters(defaults: Mapping[str, Any]) -> None:
    if missing := [name for name in ("lr", "weight_decay", "update_rms") if name not in defaults]:
        raise TypeError(f"The defaults of an egop.optim.MatrixOptimizer must include {', '.join(missing)}.")
    for name, check in _CHECKS.items():
        if name in defaults:
            check(name, defaults[name])
    if "betas" in defaults:
        betas = defaults["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise TypeError(f"betas must be two numbers, got {betas!r}.")
        for index, beta in enumerate(betas):
            check_fraction(f"betas[{index}]", beta)


def _dense_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TypeError("egop.optim does not support sparse gradients: use sparse=False in embeddings.")
    return weight.grad
