"""
What Adam sees
==============

Adam keeps one number for each coordinate: the mean square of its gradient, the diagonal of the EGOP matrix. What is off
the diagonal says how coordinates vary together, and Adam ignores it. In the eigenbasis there is nothing to ignore.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import egop

# %%
# The first layer of a small network, with inputs that are correlated, as pixels or features usually are.

torch.manual_seed(0)
mixing = torch.randn(12, 12) @ torch.diag(torch.arange(1, 13) ** -0.7)
inputs = torch.randn(512, 12) @ mixing.T
targets = torch.sin(inputs @ torch.randn(12, 1))
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
objective = egop.Objective(
    model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), [(inputs, targets)]
)
basis = egop.estimate(objective, structure={"0.weight": egop.Shared()}, samples=200, progress=False)
print(basis)

# %%
# The mean outer products of the rows of the layer's gradient, over points drawn as the network was: first in the
# coordinates of the weights, then in the basis that was found from *other* draws.


def mean_outer_product(draws=200):
    """Estimate E[gᵀg] of the first weight's gradient at fresh initializations."""
    total = torch.zeros(12, 12)
    for _ in range(draws):
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        gradient = torch.autograd.grad((model(inputs) - targets).square().mean(), model[0].weight)[0]
        total += gradient.T @ gradient / draws
    return total


original = mean_outer_product()
V = basis["0.weight"].tensors["basis"]
turned = V.T @ original @ V

figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.9), layout="constrained")
for each, matrix, name in zip(axes, (original, turned), ("original coordinates", "eigenbasis"), strict=True):
    shown = matrix.abs() / matrix.abs().max()
    drawn = each.imshow(shown.clamp_min(1e-4).log10(), cmap="viridis", vmin=-4, vmax=0)
    diagonal = matrix.diagonal().square().sum() / matrix.square().sum()
    each.set(title=f"{name}: {100 * diagonal:.0f} % on the diagonal", xticks=[], yticks=[])
figure.colorbar(drawn, ax=axes, label="size of the entry over the largest, log10")
