"""A plain training loop, AdamW and EGOP side by side: ``python docs/recipes/with_plain_loop.py``."""

import torch
from torch import nn
from torch.nn import functional as F

import egop

STEPS, LR = 150, 3e-2  # the best rate for AdamW of 1e-2, 3e-2 and 1e-1
TOKENS, CONTEXT, WIDTH = 64, 32, 64


class Transformer(nn.Module):
    """Two layers of causal attention over made-up tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens):
        """Return the logits of each next token."""
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight, mask=self.mask, is_causal=True))


def make_batches(count, seed):
    """Return sequences in which each token follows from two before it, or with probability 0.2 is random."""
    table = torch.randint(TOKENS, (TOKENS, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = list(torch.randint(TOKENS, (2, 32), generator=generator))
        for _ in range(CONTEXT - 1):
            noise = torch.randint(5 * TOKENS, (32,), generator=generator)
            tokens.append(torch.where(noise < TOKENS, noise, table[tokens[-1], tokens[-2] % 4]))
        yield torch.stack(tokens, dim=1)


def train(make_optimizer):
    """Train with warm-up and decay; return the loss on batches that were not trained on."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS, pct_start=0.1, cycle_momentum=False)
    for batch in make_batches(STEPS, seed=1):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        test = torch.cat(list(make_batches(10, seed=2)))
        return F.cross_entropy(model(test[:, :-1]).flatten(0, 1), test[:, 1:].flatten()).item()


if __name__ == "__main__":
    print(f"AdamW: loss {train(lambda model: torch.optim.AdamW(model.parameters(), lr=LR)):.3f}")
    print(f"EGOP:  loss {train(lambda model: egop.EGOP(model, lr=LR)):.3f}")
