"""
One loss, two coordinate systems
================================

A long valley that lies across the axes. Adagrad scales each coordinate separately, so it cannot point along the
valley. In the eigenbasis of the gradients the valley lies along an axis, and the same optimizer with the same
learning rate goes straight. Nothing about the loss has changed.
"""

import math

import matplotlib.pyplot as plt
import torch

import egop

angle = math.radians(40)
V = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
H = V @ torch.diag(torch.tensor([1.0, 0.02])) @ V.T


def loss(theta):
    """Return a quadratic loss with curvatures 1 and 0.02 along axes that are rotated by 40 degrees."""
    return theta @ H @ theta / 2


START = V @ torch.tensor([1.0, 1.3])

# %%
# The basis comes from gradients at random points. ``V`` is known here; ``egop.estimate`` has to find it.

objective = egop.Objective.from_function(loss, {"theta": START.clone().requires_grad_()})
generator = torch.Generator().manual_seed(0)
basis = egop.estimate(objective, rho=egop.Gaussian(), samples=200, generator=generator, progress=False)
found = basis["theta"].dense().float()
print("found:", found, "true:", V, sep="\n")

# %%
# Adagrad in both coordinate systems, from the same point.


def path(basis):
    """Return the points that Adagrad visits, with or without a basis."""
    theta = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.Adagrad([theta], lr=0.4)
    if basis is not None:
        optimizer = egop.ReparameterizedOptimizer([("theta", theta)], torch.optim.Adagrad, basis, lr=0.4)
    points = [theta.detach().clone()]
    for _ in range(150):
        optimizer.zero_grad()
        loss(theta).backward()
        optimizer.step()
        points.append(theta.detach().clone())
    return torch.stack(points)


paths = {"original": path(None), "eigenbasis": path(basis)}
colors = {"original": "#0072b2", "eigenbasis": "#d55e00"}

# %%
# Left and middle: what the optimizer sees, in the coordinates that it works in. Right: the loss.

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
grid = torch.linspace(-1.7, 1.7, 200)
xy = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1)
for axes, name, turn in ((left, "original", torch.eye(2)), (middle, "eigenbasis", found)):
    hessian = turn.T @ H @ turn  # of the loss in these coordinates
    heights = ((xy @ hessian) * xy).sum(-1) / 2
    axes.contour(grid, grid, heights, levels=[0.002, 0.01, 0.04, 0.15, 0.4, 0.8], colors="#999999", linewidths=0.8)
    seen = paths[name] @ turn
    axes.plot(*seen.T, color=colors[name], linewidth=2)
    axes.plot(*seen[0], "o", color=colors[name])
    axes.plot(0, 0, "+", color="#7f7f7f", markersize=10)
    axes.set(title=f"{name} coordinates", aspect="equal")
for name, points in paths.items():
    right.semilogy([loss(point).item() + 1e-12 for point in points], color=colors[name], label=name, linewidth=2)
right.set(title="Loss by step", xlabel="step", ylim=(1e-9, 1))
right.legend()
