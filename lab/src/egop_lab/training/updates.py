"""Update rules for batched runs, each run with its own learning rate: the same numbers as torch's optimizers.

torch's optimizers take one learning rate for a parameter group, so many rates would be many groups, each with its own
small kernels. Here the rate is a tensor, one a run, and a step is a handful of tensor operations whatever the number of
runs. Nothing in a step depends on the host, so that a step can be recorded as a CUDA graph.
"""

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

_BETAS = (0.9, 0.999)
_MOMENTUM = 0.9


class Rule(abc.ABC):
    """Update rule that steps stacked parameters, (trials, runs, *shape) each, in place.

    Each run has its learning rate, which may be changed in place between steps, and its weight decay, if the rule has
    one, for those of the leaves that are ``decayed``.
    """

    def __init__(self, leaves: Sequence[Tensor], rates: Tensor, decays: Tensor, decayed: Sequence[bool]) -> None:
        self.leaves, self.rates, self.decays, self.decayed = leaves, rates, decays, decayed
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 - not every rule has a state
        """Create the state."""

    @abc.abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one step."""

    def zeros(self) -> list[Tensor]:
        """Return state tensors of zeros, one like each leaf."""
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in self.leaves]


class SGD(Rule):
    """``torch.optim.SGD``."""

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.sub_(_per_run(self.rates, leaf) * gradient)


class Momentum(SGD):
    """``torch.optim.SGD`` with momentum 0.9."""

    def prepare(self) -> None:
        self._buffers = self.zeros()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for buffer, gradient in zip(self._buffers, gradients, strict=True):
            buffer.mul_(_MOMENTUM).add_(gradient)
        super().step(self._buffers)


class Adagrad(Rule):
    """``torch.optim.Adagrad``."""

    def prepare(self) -> None:
        self._sums = self.zeros()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for leaf, total, gradient in zip(self.leaves, self._sums, gradients, strict=True):
            total.addcmul_(gradient, gradient)
            leaf.sub_(_per_run(self.rates, leaf) * gradient / total.sqrt().add_(1e-10))


class Adam(Rule):
    """``torch.optim.Adam``."""

    def prepare(self) -> None:
        self._means, self._squares = self.zeros(), self.zeros()
        self._count = torch.zeros((), dtype=torch.float64, device=self.rates.device)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        first, second = _BETAS
        self._count += 1
        rates = self.rates / (1 - first**self._count)
        root = (1 - second**self._count).sqrt()
        states = zip(self.leaves, self._means, self._squares, gradients, strict=True)
        for leaf, mean, square, gradient in states:
            mean.lerp_(gradient, 1 - first)
            self.update_square(square, gradient)
            leaf.sub_(_per_run(rates, leaf) * mean / square.sqrt().div_(root).add_(1e-8))

    def update_square(self, square: Tensor, gradient: Tensor) -> None:
        """Update the running mean of squares."""
        square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])


class AdamW(Adam):
    """``torch.optim.AdamW``."""

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        for leaf, decayed in zip(self.leaves, self.decayed, strict=True):
            if decayed:
                leaf.mul_(_per_run(1 - self.rates * self.decays, leaf))
        super().step(gradients)


class VectorAdam(Adam):
    """VectorAdam (Ling et al., 2022): Adam with one second moment per vector, from its squared norm.

    A vector is a row, the last dimension of a leaf. Rotating all rows of a weight rotates the steps and changes nothing
    else, so no basis of the rows can help or hurt.
    """

    def prepare(self) -> None:
        super().prepare()
        self._squares = [square[..., :1].clone() for square in self._squares]

    def update_square(self, square: Tensor, gradient: Tensor) -> None:
        square.lerp_(gradient.square().sum(-1, keepdim=True), 1 - _BETAS[1])


# Named as in egop_lab.builders.TORCH: the paper's four optimizers, AdamW, and one that torch does not have.
OPTIMIZERS: dict[str, type[Rule]] = {
    "Adam": Adam,
    "AdamW": AdamW,
    "Adagrad": Adagrad,
    "SGD": SGD,
    "SGD+momentum": Momentum,
    "VectorAdam": VectorAdam,
}


def _per_run(values: Tensor, leaf: Tensor) -> Tensor:
    """Reshape one number per run so that it multiplies a leaf, in the leaf's dtype (else all would become float64)."""
    return values.to(leaf.dtype).reshape(-1, *[1] * (leaf.dim() - 2))
