"""What a newcomer runs, as a program: a line of code on two networks, beside AdamW at its best learning rate.

Its argument is the line; it prints, as JSON, where egop is and how each network ended. ``test_walk.py`` starts it where
egop has been installed.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import egop

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
        self.tokens, self.positions = nn.Embedding(64, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def images(generator, count):
    """Draw one of ten patterns at a random position, plus noise; return images and labels."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(16, (count,), generator=generator).tolist()
    moved = torch.stack([patterns[label].roll(shift, -1) for label, shift in zip(labels.tolist(), shifts, strict=True)])
    return moved + torch.randn(moved.shape, generator=generator), labels


def sequences(generator, count):
    """Draw sequences that follow a permutation, but jump with probability 0.2; return inputs and next tokens."""
    following = torch.randperm(64, generator=torch.Generator().manual_seed(7))
    tokens = [torch.randint(64, (count,), generator=generator)]
    for _ in range(64):
        jumps = torch.rand(count, generator=generator) < 0.2
        tokens.append(torch.where(jumps, torch.randint(64, (count,), generator=generator), following[tokens[-1]]))
    whole = torch.stack(tokens, 1)
    return whole[:, :-1], whole[:, 1:]


def train(model, batch, optimizer):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs, labels = batch(generator, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        inputs, labels = batch(torch.Generator().manual_seed(2), 256)
        return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).item()


def started(network):
    torch.manual_seed(0)
    return network()


def walk(line, network, batch, lr):
    names = {"egop": egop, "torch": torch, "model": started(network)}
    exec(line.replace("lr=1e-3", f"lr={lr}"), names)  # the very words of the README
    settings = {key: names["optimizer"].param_groups[0][key] for key in ("lr", "weight_decay")}
    usual = started(network)
    return {
        "parameters": sum(each.numel() for each in usual.parameters()),
        "optimizer": type(names["optimizer"]).__name__,
        "egop": train(names["model"], batch, names["optimizer"]),
        "AdamW": train(usual, batch, torch.optim.AdamW(usual.parameters(), **settings)),
    }


if __name__ == "__main__":
    found = {
        # Of 1e-3, 4e-3 and 1e-2 these are AdamW's best rates.
        "convolutions": walk(sys.argv[1], Convolutions, images, 4e-3),
        "language": walk(sys.argv[1], Language, sequences, 1e-3),
    }
    print(json.dumps({"egop": egop.__file__, "version": egop.__version__, **found}))
