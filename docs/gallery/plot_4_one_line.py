"""
EGOP instead of AdamW
=====================

A small convolutional network on made-up images. ``egop.EGOP`` replaces AdamW; nothing else changes. The learning rate
matters more than anything else, so both are trained with three.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import egop

# %%
# The images are blurred noise of 12 × 12 pixels. The class is the one of ten blurred patterns that fits best.

generator = torch.Generator().manual_seed(0)
blur = torch.ones(1, 1, 5, 5) / 5
patterns = F.conv2d(torch.randn(10, 1, 16, 16, generator=generator), blur)
images = F.conv2d(torch.randn(1000, 1, 16, 16, generator=generator), blur)
labels = (images.flatten(1) @ patterns.flatten(1).T).argmax(1)


def network():
    """Return the network; every call gives the same weights."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(12, 24, 3, padding=1, stride=2), nn.ReLU()),
        nn.Flatten(),
        *(nn.Linear(216, 48), nn.ReLU()),
        nn.Linear(48, 10),
    )


def train(make, steps=100):
    """Return the loss over all images, every ten steps."""
    model = network()
    optimizer = make(model)
    order = torch.Generator().manual_seed(2)
    losses = []
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                losses.append(F.cross_entropy(model(images), labels).item())
        chosen = torch.randint(len(images), (128,), generator=order)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    return losses


# %%
# Only the line that creates the optimizer differs.

makes = {
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1),
    "egop.EGOP": lambda model, lr: egop.EGOP(model, lr=lr, weight_decay=0.1),
}
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for axes, (name, make) in zip(panels, makes.items(), strict=True):
    for lr, color in ((3e-3, "#56b4e9"), (1e-2, "#d55e00"), (3e-2, "#009e73")):
        losses = train(lambda model, make=make, lr=lr: make(model, lr))
        axes.semilogy(range(0, 101, 10), losses, color=color, label=f"lr {lr:g}: {losses[-1]:.2g}", linewidth=2)
    axes.set(title=name, xlabel="step")
    axes.legend(title="loss at the end")
panels[0].set(ylabel="loss")
