"""A small transformer that predicts the next character of Python source, in original and in EGOP coordinates.

Its basis is learnt from the training gradients as they come: for transformers one estimated up front is not enough.

Train both:        python examples/transformer.py
Will it help here? egop diagnose examples/transformer.py:factory
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop

STEPS, CONTEXT, WIDTH = 300, 32, 48
# The text to learn is egop's own source, which is there wherever egop is.
TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(egop.__file__).parent.glob("*.py")))
CODES = torch.tensor([min(ord(letter), 127) for letter in TEXT])


class Transformer(nn.Module):
    """Two layers of causal attention over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of each next character."""
        embedded = self.letters(codes) + self.places.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of every next character."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches(count: int, seed: int) -> list[Tensor]:
    """LocalShards of the text, 32 to a batch."""
    starts = torch.randint(len(CODES) - CONTEXT, (count, 32, 1), generator=torch.Generator().manual_seed(seed))
    return list(CODES[starts + torch.arange(CONTEXT + 1)])


def factory() -> egop.Objective:
    """Return the model, its loss and its batches: all that egop needs to know."""
    torch.manual_seed(0)
    return egop.Objective(Transformer(), loss_fn, batches(100, seed=0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Plain training; the mean loss on other pieces at the end."""
    for batch in batches(steps, seed=1):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        return sum(loss_fn(model, batch).item() for batch in batches(20, seed=2)) / 20


def main(steps: int = STEPS) -> None:
    """Train the same model with AdamW in both coordinates."""
    plain, changed = factory().module, factory().module
    loss = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps)
    print(f"original coordinates: loss {loss:.3f} after {steps} steps")
    optimizer = egop.ReparameterizedOptimizer(changed, torch.optim.AdamW, lr=3e-3, refresh=egop.Online())
    loss = train(changed, optimizer, steps)
    print(f"EGOP coordinates:     loss {loss:.3f} after {steps} steps")


if __name__ == "__main__":
    main()
