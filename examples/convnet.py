"""A small convolution net on the 8 x 8 digits that ship with egop-lab, in original and in EGOP coordinates.

Train both:        python examples/convnet.py
Will it help here? egop diagnose examples/convnet.py:factory
"""

import copy

import torch
from torch import nn

import egop
from egop_lab.data.batches import Batches
from egop_lab.data.digits import digits
from egop_lab.models.small import cross_entropy

STEPS = 200


def network() -> nn.Module:
    """Build three convolutions with normalisation and a linear head."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def batches(seed: int) -> Batches:
    """Return batches of 200 training images, in a new order on every pass."""
    return Batches(*digits().train.batch, size=200, generator=torch.Generator().manual_seed(seed), drop_last=True)


def factory() -> tuple[nn.Module, object, Batches]:
    """Return the model, its loss and its batches; ``egop diagnose`` builds an objective from them."""
    torch.manual_seed(0)
    return network(), cross_entropy, batches(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train in a plain loop; return the final loss over the whole training set."""
    stream = (batch for _ in iter(int, 1) for batch in batches(1))  # pass after pass
    for _, batch in zip(range(steps), stream, strict=False):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(model, digits().train.batch).item()


def main(steps: int = STEPS) -> None:
    """Train the same model with AdamW in both coordinates: one basis for all kernels of a layer."""
    plain, loss_fn, data = factory()
    changed = copy.deepcopy(plain)
    loss = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), steps)
    print(f"original coordinates: training loss {loss:.2e} after {steps} steps")

    objective = egop.Objective(changed, loss_fn, data)
    basis = egop.estimate(objective, structure=egop.Shared())
    optimizer = egop.ReparameterizedOptimizer(changed.named_parameters(), torch.optim.AdamW, basis, lr=3e-3)
    loss = train(changed, optimizer, steps)
    print(f"EGOP coordinates:     training loss {loss:.2e} after {steps} steps")


if __name__ == "__main__":
    main()
