"""What the optimizers for matrices have in common: momentum, weights of one shape as one stack, updates of one size."""

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
    check_nonnegative,
    copy_all,
    run_in_branches,
    without_autocast,
)
from egop.optim.entries import Entries

# A group of the optimizer, weights of it that have a gradient, and these.
Part = tuple[Mapping[str, Any], list[Tensor], list[Tensor]]


class MatrixOptimizer(Optimizer, abc.ABC):
    """Steps weights by a map of their momentum that sees a whole matrix.

    Every update is scaled to the same root mean square, so that learning rates are of the order of AdamW's. Weights of
    one shape are stepped together. A weight of more than two dimensions (a kernel) is a matrix with a row for each
    output. All state is plain tensors of the weight's shape: ``exp_avg`` is linear in the gradients and follows a
    rotation exactly, ``exp_avg_sq`` by the squared rotation (see :mod:`egop.optimizer.moments`).

    On a GPU the steps of small networks are recorded as a CUDA graph, if the class itself (not one that it inherits
    from) has ``recordable = True``: its step then has to be work on tensors alone, without counters and random numbers,
    and what it does to a matrix the same whatever the order of the columns.
    """

    # Told to egop.ReparameterizedOptimizer: coordinates that are matrices will do, vectors will not.
    works_on_matrices = True
    recordable = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_nonnegative("lr", defaults["lr"])
        check_nonnegative("weight_decay", defaults["weight_decay"])
        check_nonnegative("update_rms", defaults["update_rms"])
        # Whether a tensor of more than two dimensions is a stack of matrices, its last two; egop's coordinates are.
        super().__init__(params, defaults | {"matrices_last": False})
        self._record_anew()

    @property
    def is_recordable(self) -> bool:
        """Whether its class says that of itself."""
        return bool(vars(type(self)).get("recordable"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of weights, each of two dimensions or more."""
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
                    "egop.ReparameterizedOptimizer by outside=torch.optim.AdamW."
                )

    def directions(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Take in the gradients of weights of one shape, and say what is mapped: the momenta, if no more is kept."""
        means = self._states(weights, "exp_avg")
        momentum, nesterov, last = group["momentum"], group["nesterov"], group["matrices_last"]
        return self._entries.take_in(weights, gradients, means, momentum=momentum, nesterov=nesterov, last=last)

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
            parts = [
                (group, weights, list(map(_gradient, weights)))
                for group in self.param_groups
                if (weights := [each for each in group["params"] if each.grad is not None and each.numel()])
            ]
            if self.is_recordable and _is_small(parts):
                self._step_recorded(parts)
            else:
                for part in parts:
                    self._step(*part, *_rates(part[0]))
        return loss

    def _step(
        self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], lr: Any, kept: Any
    ) -> None:
        works = []
        for places in _alike(weights):  # of one shape, so that they are mapped together
            own = [weights[place] for place in places], [gradients[place] for place in places]
            works.append(functools.partial(self._step_alike, group, *own, lr, kept))
        run_in_branches(works)

    def _step_alike(
        self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor], lr: Any, kept: Any
    ) -> None:
        """Step weights of one shape."""
        directions = self.directions(group, weights, gradients)
        if directions.dtype in (torch.float16, torch.bfloat16):  # whose few digits are no measure of what is rounding
            directions = directions.float()
        updates = self.updates(group, weights, directions)
        scales = self.scales(updates, group) * lr
        self._entries.take_off(weights, updates, scales, kept, last=group["matrices_last"])

    def _step_recorded(self, parts: Sequence[Part]) -> None:
        """The same by a recording, in which gradients and rates have places of their own: they change, it does not."""
        rates = {id(group): self._rates_in_place(group, weights[0]) for group, weights, _ in parts}
        placed, tensors = [], []
        for group, weights, gradients in parts:
            slots = self._in_place(group, weights, gradients)
            placed.append((group, weights, slots, *rates[id(group)]))
            states = [tensor for weight in weights for tensor in self.state[weight].values()]
            tensors += [*weights, *slots, *states, *rates[id(group)]]
        self._again.run(tensors, self, placed, recorded_settings(group for group, _, _ in parts))
        # A recording writes behind autograd's back, which is to see that a graph from before no longer holds.
        torch.autograd.graph.increment_version([weight for _, weights, _ in parts for weight in weights])

    def _in_place(self, group: Mapping[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        if group["matrices_last"]:  # egop's coordinates have them where they had them before
            return gradients
        slots = [self._slots.setdefault(weight, torch.empty_like(weight)) for weight in weights]
        copy_all(slots, gradients)
        return slots

    def _rates_in_place(self, group: Mapping[str, Any], weight: Tensor) -> list[Tensor]:
        key = id(group), weight.dtype, weight.device
        places = self._rates.setdefault(key, [weight.new_empty(()), weight.new_empty(())])
        for place, value in zip(places, _rates(group), strict=True):
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        return places

    def _record_anew(self) -> None:
        """Without what was recorded: it goes with tensors that may no longer be those of this optimizer."""
        self._again = InPlaceGraph(_steps, Recorder(branched=True))
        self._entries = Entries(any_order=self.is_recordable)
        self._rates: dict[Any, list[Tensor]] = {}  # by group
        self._slots: dict[Tensor, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies, and for a state that is loaded."""
        super().__setstate__(state)
        self._record_anew()

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
                # Nearly always all of them, in their order.
                part = slice(None) if inside == list(range(len(weights))) else inside
                means = [self.state.get(weights[i], {}).get("exp_avg", torch.zeros_like(weights[i])) for i in inside]
                momenta[part] = torch.stack(means).lerp(gradients[part], 1 - group["momentum"])
                matrices = _as_matrices(momenta[part], last=group["matrices_last"])
                mapped[part] = self.mapped(matrices, group).reshape(momenta[part].shape)
        return momenta, mapped

    @abc.abstractmethod
    def mapped(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The map itself, of matrices with any leading dimensions."""

    def updates(self, group: Mapping[str, Any], weights: list[Tensor], matrices: Tensor) -> Tensor:
        """What is taken off the weights, but for its size."""
        return self.mapped(matrices, group)

    def scales(self, updates: Tensor, group: Mapping[str, Any]) -> Tensor:
        """What each matrix of updates is multiplied by, to have the size that the group says."""
        return rms_scales(updates, group["update_rms"])

    def _states(self, weights: Sequence[Tensor], name: str) -> list[Tensor]:
        """What is kept of each weight by this name; zeros at first."""
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return [self.state[weight][name] for weight in weights]


def _steps(optimizer: MatrixOptimizer, parts: Sequence[Any], settings: str) -> None:
    """What is recorded; the settings are told apart by :class:`InPlaceGraph`."""
    for part in parts:
        optimizer._step(*part)


def rms_scales(matrices: Tensor, size: float) -> Tensor:
    """What each of some matrices is to be multiplied by to have this root mean square; 0 for one of zeros."""
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=dtype)
    return torch.where(lengths > 0, size * math.sqrt(math.prod(matrices.shape[-2:])) / lengths, 0)


def _alike(weights: Sequence[Tensor]) -> Iterable[list[int]]:
    """The places of those that have one shape, layout, precision and device."""
    groups: dict[Any, list[int]] = {}
    for place, weight in enumerate(weights):
        groups.setdefault((weight.shape, weight.stride(), weight.dtype, weight.device), []).append(place)
    # The largest first: where they are worked on side by side, the small ones are beside them.
    return sorted(groups.values(), key=lambda places: -len(places) * weights[places[0]].numel())


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise TypeError("egop.optim does not take sparse gradients. Use sparse=False in the embedding.")
    return weight.grad


def _rates(group: Mapping[str, Any]) -> tuple[Any, Any]:
    """The learning rate, and what weight decay leaves of a weight."""
    return group["lr"], 1 - group["lr"] * group["weight_decay"]


def recorded_settings(groups: Iterable[Mapping[str, Any]]) -> str:
    """What a recording has in it: all of these groups but the rates."""
    rates = ("params", "lr", "weight_decay")
    return str([{key: value for key, value in group.items() if key not in rates} for group in groups])


def _is_small(parts: Sequence[Part]) -> bool:
    """Whether launching the work of a step takes longer than doing it; rates in half precision would be rounded."""
    weights = [weight for _, weights, _ in parts for weight in weights]
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    small = sum(weight.nbytes for weight in weights) <= SMALL_NETWORK_BYTES
    return small and kinds in ({("cuda", torch.float32)}, {("cuda", torch.float64)})


def _as_matrices(tensors: Tensor, *, last: bool) -> Tensor:
    """A stack of weights as a stack of matrices."""
    return tensors if last or tensors.dim() == 3 else tensors.flatten(2)
