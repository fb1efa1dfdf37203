"""
When it does not help
=====================

One least-squares problem in three coordinate systems. For SGD a rotation changes nothing. For Adam it does, unless the
axes are the right basis already.
"""

import warnings

import matplotlib.pyplot as plt
import torch

import egop

warnings.filterwarnings("ignore", "SGD takes the same steps")  # egop says so too

d = 30
generator = torch.Generator().manual_seed(0)
rotation = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
stretched = torch.diag(torch.arange(1, d + 1) ** -1.5)
problems = {  # the data, and where training starts
    "across the axes": (stretched @ rotation.T, rotation @ torch.ones(d)),
    "along the axes": (stretched, torch.ones(d)),
}


def train(problem, optimizer_class, structure, lr, steps=200):
    """Return the loss by step, in the given coordinates."""
    inputs, start = problem

    def loss(theta):
        return (inputs @ theta).square().sum()

    objective = egop.Objective.from_function(loss, {"theta": start.clone().requires_grad_()})
    basis = egop.estimate(objective, rho=egop.Gaussian(), structure=structure, samples=300, progress=False)
    theta = torch.nn.Parameter(start.clone())
    optimizer = egop.ReparameterizedOptimizer([("theta", theta)], optimizer_class, basis, lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(theta)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


# %%
# The random rotation is the control: not every other basis helps, only a good one.

coordinates = {"original": egop.Identity(), "random rotation": egop.extras.RandomRotation(seed=0), "EGOP": egop.Full()}
cases = [
    ("SGD, across the axes", "across the axes", torch.optim.SGD, 0.2),
    ("Adam, across the axes", "across the axes", torch.optim.Adam, 0.05),
    ("Adam, along the axes", "along the axes", torch.optim.Adam, 0.05),
]
figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), sharey=True, layout="constrained")
for axes, (title, problem, optimizer_class, lr) in zip(panels, cases, strict=True):
    looks = (("-", "#0072b2"), (":", "#999999"), ("--", "#d55e00"))
    for (name, structure), (style, color) in zip(coordinates.items(), looks, strict=True):
        losses = train(problems[problem], optimizer_class, structure, lr)
        axes.semilogy(losses, style, color=color, linewidth=2, label=name)
    axes.set(title=title, xlabel="step")
panels[0].set(ylabel="loss")
panels[1].legend()
