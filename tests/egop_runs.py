"""A small network, and its training with EGOP or with the two optimizers that EGOP stands for."""

from __future__ import annotations

import math

import torch
from torch import nn

import cases
import egop

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
LAST = 9  # steps, past several renewals


class Network(nn.Module):
    """A network with a stem, an embedding, layers, experts, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.stem = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 10) / 3)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.stem(self.embedding(tokens).mT).mT
        x = x + self.down(self.up(self.norm(x)).tanh())
        x = x + torch.einsum("bti,eij,ekj->btk", x, self.experts, self.experts).tanh()
        return self.head(x)


ROTATED = ["experts", "stem.weight", "up.weight", "down.weight"]
GAINS = {"up.weight": math.sqrt(12 / 8), "stem.weight": 3.0}  # of an update's size, where not 1
LEFT = {"embedding.weight": "an embedding", "head.weight": "the output head"}


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().to(dtype)


def backward(model, step):
    tokens = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(model, optimizer, first=0, last=LAST):
    for step in range(first, last):
        backward(model, step)
        optimizer.step()
    return cases.parameters_of(model)


def make(params, **options):
    return egop.EGOP(params, **(SETTINGS | {"every": 3} | options))


def make_parts(model, kind, names=tuple(ROTATED), **options):
    """Return the two optimizers that EGOP stands for."""
    named = dict(model.named_parameters())
    matrices = [
        {"params": [named[name]], "matrices_last": name == "experts", "update_rms": 0.4 * GAINS.get(name, 1.0)}
        for name in ROTATED
        if name in names
    ]
    others = [parameter for name, parameter in named.items() if name not in names]
    return kind(matrices, **SETTINGS, **options), torch.optim.AdamW(others, **SETTINGS)


def train_parts(model, parts, last=LAST):
    for step in range(last):
        backward(model, step)
        for part in parts:
            part.step()
    return cases.parameters_of(model)


def make_groups(model, **first):
    """Return groups as frameworks make them: unnamed tensors with and without weight decay."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": decayed, **first}, {"params": others, "weight_decay": 0.0}]
