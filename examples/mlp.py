"""A small fully connected network on the digits that ship with egop-lab, in original and in EGOP coordinates.

Train both:        python examples/mlp.py
Will it help here? egop diagnose examples/mlp.py:factory
"""

import copy

import torch
from torch import nn

import egop
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.models.small import cross_entropy

STEPS = 300


def factory() -> egop.Objective:
    """Return a 64-32-10 network, its loss and its batches: all that egop needs to know."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    batches = Batches(*digits().train.batch, size=300, generator=torch.Generator().manual_seed(0))
    return egop.Objective(model, cross_entropy, batches)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train in a plain loop; return the final loss over the whole training set."""
    data = digits().train
    batches = Batches(*data.batch, size=300, generator=torch.Generator().manual_seed(1))
    stream = (batch for _ in iter(int, 1) for batch in batches)  # pass after pass
    for _, batch in zip(range(steps), stream, strict=False):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(model, data.batch).item()


def main(steps: int = STEPS) -> None:
    """Train the same model with AdamW in both coordinates; the learning rate suits the original ones."""
    objective = factory()
    model, plain = objective.module, copy.deepcopy(objective.module)
    loss = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.03), steps)
    print(f"original coordinates: training loss {loss:.2e} after {steps} steps")

    basis = egop.estimate(objective)
    optimizer = egop.ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=0.03)
    loss = train(model, optimizer, steps)
    print(f"EGOP coordinates:     training loss {loss:.2e} after {steps} steps")


if __name__ == "__main__":
    main()
