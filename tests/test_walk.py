"""A newcomer's walk: the README's line on two networks of their own, beside AdamW with the same learning rate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import egop

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
RATE, DECAY = map(
    float, re.search(r"^optimizer = egop\.EGOP\(model, lr=(\S+), weight_decay=(\S+)\)", README, re.M).groups()
)
STEPS = 120


class Convolutions(nn.Sequential):
    """57,000 parameters, for images of 3 × 16 × 16."""

    def __init__(self):
        layers = [
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
        ]
        layers += [nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(64, 10))


class Language(nn.Module):
    """A GPT of 470,000 parameters, for 64 tokens of 64 kinds."""

    def __init__(self, width=112, context=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def images(generator, count):
    """Ten patterns, each at a random place, in noise."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(16, (count,), generator=generator).tolist()
    moved = torch.stack([patterns[label].roll(shift, -1) for label, shift in zip(labels.tolist(), shifts, strict=True)])
    return moved + torch.randn(moved.shape, generator=generator), labels


def sequences(generator, count):
    """A step of a permutation, or with probability 0.2 any token; the next token is to be told."""
    following = torch.randperm(64, generator=torch.Generator().manual_seed(7))
    tokens = [torch.randint(64, (count,), generator=generator)]
    for _ in range(64):
        jumps = torch.rand(count, generator=generator) < 0.2
        tokens.append(torch.where(jumps, torch.randint(64, (count,), generator=generator), following[tokens[-1]]))
    whole = torch.stack(tokens, 1)
    return whole[:, :-1], whole[:, 1:]


def ends_at(network, batch, make):
    torch.manual_seed(0)
    model = network()
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs, labels = batch(generator, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        inputs, labels = batch(torch.Generator().manual_seed(2), 256)
        return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).item()


@pytest.mark.slow
@pytest.mark.parametrize(("network", "batch", "size"), [(Convolutions, images, 57e3), (Language, sequences, 470e3)])
def test_the_line_of_the_readme_ends_lower_than_adamw_with_the_same_rate(network, batch, size):
    assert sum(each.numel() for each in network().parameters()) == pytest.approx(size, rel=0.05)
    rotated = ends_at(network, batch, lambda model: egop.EGOP(model, lr=RATE, weight_decay=DECAY))
    usual = ends_at(network, batch, lambda model: torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY))
    assert rotated < usual
