"""A small transformer that predicts the next character of Python source, with AdamW and with EGOP.

Train both:        python examples/transformer.py
Will it help here? egop diagnose examples/transformer.py:factory
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR, SequentialLR

import egop

STEPS, CONTEXT, WIDTH = 300, 32, 48
# The text to learn is egop's own source, which is there wherever egop is.
TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(egop.__file__).parent.glob("*.py")))
CODES = torch.tensor([min(ord(letter), 127) for letter in TEXT])


class Transformer(nn.Module):
    """Two layers of causal attention over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of each next character."""
        embedded = self.letters(codes) + self.positions.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy of every next character."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches(count: int, seed: int) -> list[Tensor]:
    """Draw random pieces of the text, 32 to a batch."""
    starts = torch.randint(len(CODES) - CONTEXT, (count, 32, 1), generator=torch.Generator().manual_seed(seed))
    return list(CODES[starts + torch.arange(CONTEXT + 1)])


def factory() -> egop.Objective:
    """Return the model, its loss and its batches: all that egop needs to know."""
    torch.manual_seed(0)
    return egop.Objective(Transformer(), loss_fn, batches(100, seed=0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train with warm-up and decay; return the mean loss on other pieces at the end."""
    rise, fall = max(1, steps // 10), max(1, 2 * steps // 5)
    warm_up, decay = LinearLR(optimizer, 0.1, total_iters=rise), LinearLR(optimizer, 1.0, 0.0, total_iters=fall)
    scheduler = SequentialLR(optimizer, [warm_up, decay], [steps - fall])
    for batch in batches(steps, seed=1):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return sum(loss_fn(model, batch).item() for batch in batches(20, seed=2)) / 20


def main(steps: int = STEPS) -> None:
    """Train the same model with both, each at its best learning rate of 1, 2 and 5 times powers of ten."""
    loss = train(model := factory().module, torch.optim.AdamW(model.parameters(), lr=2e-2), steps)
    print(f"AdamW: loss {loss:.3f} after {steps} steps")
    loss = train(model := factory().module, egop.EGOP(model, lr=1e-2), steps)
    print(f"EGOP:  loss {loss:.3f} after {steps} steps")


if __name__ == "__main__":
    main()
