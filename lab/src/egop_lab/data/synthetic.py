"""Synthetic data: features of a given spectrum, tables, sequences of symbols."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["COPY_SYMBOLS", "SUM_SYMBOLS", "WORD_SYMBOLS", "copies", "features", "friedman", "rotation", "sums", "words"]

SUM_SYMBOLS = 13  # digits, +, = and ;
WORD_SYMBOLS = 27  # letters and the space
COPY_SYMBOLS = 16


def rotation(size: int, generator: torch.Generator) -> Tensor:
    """Draw a random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


def features(count: int, size: int, generator: torch.Generator, *, decay: float, dense: bool) -> Tensor:
    """Draw Gaussian features whose deviations fall as k^-decay: along the axes, or along random directions."""
    scales = torch.arange(1, size + 1) ** -decay
    drawn = torch.randn(count, size, generator=generator) * scales
    return drawn @ rotation(size, generator) if dense else drawn


def friedman(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw Friedman's first function of ten uniform features, of which five matter; standardised, with some noise."""
    x = torch.rand(count, 10, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (y - 14.4) / 4.9 + 0.05 * torch.randn(count, generator=generator)
    return (x - 0.5) * 12**0.5, y[:, None]


def words(length: int, generator: torch.Generator, *, vocabulary: int = 48) -> Tensor:
    """Draw a text of made-up words, each followed by one of a few others; frequent words are short."""
    letters = [torch.randint(1, WORD_SYMBOLS, (2 + place // 12,), generator=generator) for place in range(vocabulary)]
    spelled = [torch.cat([word, torch.zeros(1, dtype=torch.long)]) for word in letters]
    weights = 1.0 / torch.arange(1, vocabulary + 1)
    followers = torch.multinomial(weights.expand(vocabulary, -1), 6, generator=generator)
    choices = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1]), length // 3, replacement=True, generator=generator)
    text, word, written = [], 0, 0
    for choice in choices.tolist():
        text.append(spelled[word])
        written += len(spelled[word])
        word = int(followers[word, choice])
        if written >= length:
            break
    return torch.cat(text)[:length]


def sums(length: int, generator: torch.Generator) -> Tensor:
    """Write additions of two numbers below 100, one after the other: ``12+07=019;``."""
    pairs = torch.randint(100, (length // 10 + 1, 2), generator=generator)
    text = "".join(f"{a:02d}+{b:02d}={a + b:03d};" for a, b in pairs.tolist())
    return torch.tensor(["0123456789+=;".index(symbol) for symbol in text[:length]])


def copies(count: int, half: int, generator: torch.Generator) -> Tensor:
    """Draw rows of random symbols, each written twice: (count, 2 half)."""
    rows = torch.randint(COPY_SYMBOLS, (count, half), generator=generator)
    return torch.cat([rows, rows], 1)
