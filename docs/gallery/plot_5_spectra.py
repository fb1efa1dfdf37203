"""
Spectra
=======

A rotation can help where the eigenvalues of the EGOP matrix fall fast: the loss then varies along few directions. The
*stable rank* says how many. Here the same network sees three kinds of inputs, and its first layer has three spectra.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import egop

generator = torch.Generator().manual_seed(0)
rotation = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q
noise = torch.randn(1024, 32, generator=generator)
falling = torch.arange(1, 33) ** -1.0
kinds = {
    "white inputs": noise,
    "correlated inputs, along the axes": noise * falling,
    "correlated inputs, across the axes": noise * falling @ rotation.T,
}


def loss_fn(model, batch):
    """Return the mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


# %%
# The density of the leading eigenvector tells the last two apart. Their spectra are alike, but along the axes the
# leading direction is a coordinate already (density 1/32), and Adam needs no help.

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, inputs), color in zip(kinds.items(), ("#999999", "#009e73", "#d55e00"), strict=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
    targets = torch.randn(1024, 16)  # nothing to learn: what is seen comes from the inputs
    objective = egop.Objective(model, loss_fn, [(inputs, targets)])
    basis = egop.estimate(objective, structure={"0.weight": egop.Shared()}, samples=300, progress=False)
    spectrum = basis.spectrum["0.weight"]
    print(f"{name}: stable rank {spectrum.stable_rank:.1f} of 32, density {spectrum.density[0]:.2f}")
    axes.semilogy(range(1, 33), spectrum.decay, color=color, label=name, linewidth=6 if "along" in name else 2)
axes.set(
    title="The spectrum of the first layer, for three kinds of inputs", xlabel="k", ylabel="eigenvalue k over the first"
)
axes.legend()
