"""What the optimizers for matrices have in common: momentum, weights of one shape as one stack, updates of one size."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.numerics import check_not_negative, without_autocast


class MatrixOptimizer(Optimizer, abc.ABC):
    """Steps weights by a map of their momentum that sees a whole matrix.

    Every update is scaled to the same root mean square, so that learning rates of AdamW's size are right. Weights of
    one shape are stepped together. A weight of more than two dimensions (a kernel) is a matrix with a row for each
    output. All state is plain tensors of the weight's shape: ``exp_avg`` is linear in the gradients and follows a
    rotation exactly, ``exp_avg_sq`` by the squared rotation (see :mod:`egop.optimizer.moments`).
    """

    # Told to egop.ReparameterizedOptimizer: coordinates that are matrices will do, vectors will not.
    works_on_matrices = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_not_negative("lr", defaults["lr"])
        check_not_negative("weight_decay", defaults["weight_decay"])
        check_not_negative("update_rms", defaults["update_rms"])
        # Whether a tensor of more than two dimensions is a stack of matrices, its last two; egop's coordinates are.
        super().__init__(params, defaults | {"matrices_last": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of weights, each of two dimensions or more."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() < 2:
                self.param_groups.pop()
                raise ValueError(
                    f"egop.optim.{type(self).__name__} steps tensors of two or more dimensions, but got a parameter of "
                    f"shape {tuple(parameter.shape)}. Give vectors to another optimizer; in "
                    "egop.ReparameterizedOptimizer by outside=torch.optim.AdamW."
                )

    def directions(self, group: Mapping[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Take in the gradients of weights of one shape, and say what is mapped: the momenta, if no more is kept."""
        return self.momenta(group, weights)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            for group in self.param_groups:
                for weights in _alike(group["params"]):
                    self._step(group, weights)
        return loss

    def _step(self, group: Mapping[str, Any], weights: list[Tensor]) -> None:
        inputs = torch.stack(self.directions(group, weights))
        if inputs.dtype in (torch.float16, torch.bfloat16):  # whose few digits are no measure of what is rounding
            inputs = inputs.float()
        updates = self.updates(group, weights, _as_matrices(inputs, last=group["matrices_last"]))
        updates = updates.mul_(group["lr"]).reshape(inputs.shape).to(weights[0].dtype)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, updates.unbind())

    def lookahead(self, weights: Sequence[Tensor], gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The momenta that a step with these gradients has, and what they are mapped to; nothing is changed.

        Args:
            weights: of one shape.
            gradients: theirs, stacked.
        """
        place_of = {id(weight): place for place, weight in enumerate(weights)}
        momenta, mapped = torch.empty_like(gradients), torch.empty_like(gradients)
        for group in self.param_groups:
            inside = [place_of[id(weight)] for weight in group["params"] if id(weight) in place_of]
            if inside:
                means = [self.state.get(weights[i], {}).get("exp_avg", torch.zeros_like(weights[i])) for i in inside]
                momenta[inside] = torch.stack(means).lerp(gradients[inside], 1 - group["momentum"])
                matrices = _as_matrices(momenta[inside], last=group["matrices_last"])
                mapped[inside] = self.mapped(matrices, group).reshape(momenta[inside].shape)
        return momenta, mapped

    @abc.abstractmethod
    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The map itself, of matrices with any leading dimensions."""

    def updates(self, group: Mapping[str, Any], weights: list[Tensor], matrices: Tensor) -> Tensor:
        """What is taken off the weights, but for the learning rate."""
        return self.scaled(self.mapped(matrices, group), group)

    def scaled(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Updates of the size that the group says."""
        return scaled_to(updates, group["update_rms"])

    def momenta(self, group: Mapping[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """The running means of the gradients, these taken in; with Nesterov a step ahead."""
        gradients = [_gradient(weight) for weight in weights]
        means = [self._state(weight, "exp_avg") for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, means, group["momentum"]) if group["nesterov"] else means
        return list(ahead)

    def _state(self, weight: Tensor, name: str) -> Tensor:
        state = self.state[weight]
        if name not in state:
            state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        tensor: Tensor = state[name]
        return tensor


def scaled_to(updates: Tensor, size: float) -> Tensor:
    """Each of some matrices with this root mean square; one of zeros stays so."""
    squares = updates.square().mean((-2, -1), keepdim=True)
    return updates * torch.where(squares > 0, size * squares.rsqrt(), 0)


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those that have a gradient, by shape, precision and device."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter.numel():
            groups.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
    yield from groups.values()


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TypeError("egop.optim does not take sparse gradients. Use sparse=False in the embedding.")
    return weight.grad


def _as_matrices(tensors: Tensor, *, last: bool) -> Tensor:
    """A stack of weights as a stack of matrices."""
    return tensors if last or tensors.dim() == 3 else tensors.flatten(2)
