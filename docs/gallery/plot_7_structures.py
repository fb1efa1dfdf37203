"""
Structures
==========

A basis for all mn entries of a weight is an mn × mn matrix. Smaller structures take a fraction of that: a basis for
each side keeps the whole gain here, a few directions keep some of it. The network has two linear layers, of which the
first is rotated; Adam has the same learning rate throughout.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import egop

generator = torch.Generator().manual_seed(0)
rotation = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q
inputs = torch.randn(500, 16, generator=generator) * torch.arange(1, 17) ** -1.5 @ rotation.T
targets = inputs @ torch.randn(16, 6, generator=generator)


def loss_fn(model, batch):
    """Return the mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


def train(structure, steps=200):
    """Return the final loss, and the size of the bases in bytes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(12, 6, bias=False))
    objective = egop.Objective(model, loss_fn, [(inputs, targets)])
    basis = egop.estimate(objective, structure={"0.weight": structure}, samples=300, progress=False)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, (inputs, targets)).backward()
        optimizer.step()
    return loss_fn(model, (inputs, targets)).item(), sum(change.nbytes for change in basis.values())


structures = {
    "Identity()": egop.Identity(),
    "RandomRotation": egop.extras.RandomRotation(seed=0),
    "Auxiliary(rank=16)": egop.Auxiliary(rank=16),
    "Shared()": egop.Shared(),
    "Kronecker()": egop.Kronecker(),
    "Full()": egop.Full(),
}
found = {name: train(structure) for name, structure in structures.items()}

# %%
# The controls are grey: original coordinates, and a random rotation.

figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
colors = ["#999999", "#999999", "#56b4e9", "#d55e00", "#0072b2", "#009e73"]
for place, ((loss, size), color) in enumerate(zip(found.values(), colors, strict=True)):
    axes.plot(loss, place, "o", color=color, markersize=9)
    axes.annotate(f"{loss:.0e}, {size / 1024:.1f} KiB", (loss, place), (8, -4), textcoords="offset points")
axes.set(title="Loss after 200 steps, and the bytes of the bases: lower is better", xscale="log")
axes.set_yticks(range(len(found)), list(found))
axes.set_xlim(right=100 * max(loss for loss, _ in found.values()))
axes.invert_yaxis()
