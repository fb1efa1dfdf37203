"""Networks so small that a training takes a second: for studies of many problems."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


def tanh(*widths: int) -> nn.Sequential:
    """Build linear layers with tanh between them."""
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """A recurrent layer (``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``) over embedded symbols, and a linear head."""

    def __init__(self, kind: Callable[..., nn.RNNBase], inputs: int, width: int, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, inputs)
        self.layer = kind(inputs, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the outputs for all states, (n, length, symbols)."""
        return self.head(self.layer(self.embedding(symbols))[0])


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
