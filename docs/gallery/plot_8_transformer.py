"""
A small transformer
===================

A basis estimated once, before training, does little for transformers: at the start the gradients of most layers look
like noise. ``egop.EGOP`` learns its bases during training. The text is the source code of ``egop``.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import egop

CONTEXT, WIDTH = 32, 32
source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(egop.__file__).parent.glob("*/*.py")))
codes = torch.tensor([min(ord(letter), 127) for letter in source])


class Transformer(nn.Module):
    """Two layers of causal attention over characters."""

    def __init__(self):
        super().__init__()
        self.letters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes):
        """Return the logits of each next character."""
        return self.head(self.layers(self.letters(codes) + self.positions.weight, mask=self.mask, is_causal=True))


def train(make, steps=200):
    """Return the training loss by step."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(codes) - CONTEXT, (12, 1), generator=generator)
        batch = codes[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


# %%
# Of the learning rates 0.003, 0.01 and 0.03, the middle one is AdamW's best. ``EGOP`` uses the same.

found = {
    "AdamW, lr 0.01": train(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)),
    "EGOP, lr 0.01": train(lambda model: egop.EGOP(model, lr=0.01)),
}
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, losses), color in zip(found.items(), ("#009e73", "#d55e00"), strict=True):
    smooth = losses.unfold(0, 20, 1).mean(1)
    axes.plot(range(20, len(losses) + 1), smooth, color=color, linewidth=2, label=f"{name}: {smooth[-1]:.2f}")
axes.set(title="Training loss, mean of 20 steps", xlabel="step", ylabel="loss of a character")
axes.legend()
