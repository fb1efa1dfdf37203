"""Networks so small that a training takes a second: for studies of many problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Adapted", "Bigrams", "Elementwise", "Factors", "Recurrent", "adapted", "convolutions", "depthwise", "tanh"]


Kind = Callable[..., nn.RNNBase]


def tanh(*widths: int) -> nn.Sequential:
    """Build linear layers with tanh between them."""
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def convolutions(channels: int = 8) -> nn.Sequential:
    """Build two convolutions and a linear layer for 8 x 8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * channels, 10)),
    )


def depthwise(channels: int = 16) -> nn.Sequential:
    """Build depthwise convolutions between a pointwise one and a linear layer, for 8 x 8 pixels."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, channels, 1), nn.ReLU()),
        *(nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * channels, 10)),
    )


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on its last state or on all states.

    Args:
        kind: ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``.
        inputs: the size of an input; for symbols, that of their embedding.
        width: the size of the state.
        outputs: the outputs of the linear layer.
        symbols: the number of symbols, if inputs are symbols; outputs are then those of all states.
    """

    def __init__(
        self, kind: Callable[..., nn.RNNBase], inputs: int, width: int, outputs: int, symbols: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, inputs) if symbols else None
        self.layer = kind(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs for the last state, (n, outputs), or for all states, (n, length, outputs)."""
        if self.embedding is not None:
            return self.head(self.layer(self.embedding(inputs))[0])
        return self.head(self.layer(inputs)[0][:, -1])


class Factors(nn.Module):
    """Two thin matrices and their product, (rows, columns)."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(rows, rank))
        self.right = nn.Parameter(torch.empty(columns, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small normal entries."""
        nn.init.normal_(self.left, std=0.1)
        nn.init.normal_(self.right, std=0.1)

    def forward(self) -> Tensor:
        """Return the product."""
        return self.left @ self.right.T


class Elementwise(nn.Module):
    """A matrix whose entries each multiply one input."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.empty(rows, columns))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw standard normal entries."""
        nn.init.normal_(self.entries)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs, (n, rows, columns), by the entries."""
        return inputs * self.entries


class Bigrams(nn.Module):
    """A table of logits for each symbol after each symbol, and nothing else."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.table = nn.Embedding(symbols, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of the next symbols."""
        return self.table(symbols)


class Adapted(nn.Module):
    """A frozen linear layer plus a low-rank one (LoRA), which starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of both layers."""
        return self.frozen(inputs) + self.up(self.down(inputs))


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """Freeze all parameters of the model and add adapters to its linear layers, in place."""
    model.requires_grad_(False)
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Adapted(child, rank))
    return model
