"""
Where the eigenvectors come from
================================

Draw points at random, take the gradient of the loss at each, and look at the cloud of gradients. It is long where the
loss varies strongly and thin where it hardly varies. The EGOP matrix is the mean of the gradients' outer products,
and its eigenvectors are the axes of this cloud.
"""

import matplotlib.pyplot as plt
import torch

generator = torch.Generator().manual_seed(3)
features = torch.randn(200, 2, generator=generator) @ torch.tensor([[1.0, 0.7], [0.0, 0.5]])


def loss(theta):
    """Return the loss of a robust regression on two correlated inputs, with its minimum in the middle."""
    return (features @ theta).cosh().log().mean()


points = torch.randn(300, 2, generator=generator)
gradients = torch.func.vmap(torch.func.grad(loss))(points)
egop_matrix = gradients.T @ gradients / len(gradients)
eigenvalues, vectors = torch.linalg.eigh(egop_matrix)

# %%
# ``egop.estimate`` does this for every weight of a network: it draws from the initialization, and never forms a matrix
# that is larger than its structure needs.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
grid = torch.linspace(-3, 3, 80)
xy = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1)
heights = torch.func.vmap(loss)(xy.reshape(-1, 2)).reshape(80, 80)
left.contour(grid, grid, heights, 12, colors="#999999", linewidths=0.8)
some = slice(0, 60)
left.quiver(*points[some].T, *-gradients[some].T, color="#0072b2", width=0.005, angles="xy")
left.set(title="Random points, and where they would go", aspect="equal", xlim=(-3, 3), ylim=(-3, 3))

right.scatter(*gradients.T, s=9, color="#0072b2", alpha=0.6)
for value, vector in zip(eigenvalues, vectors.T, strict=True):
    arrow = 1.5 * value.sqrt() * vector
    right.annotate("", arrow.tolist(), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "#d55e00", "lw": 2.5})
right.set(title="Their gradients, and the eigenvectors", aspect="equal")
right.axhline(0, color="#999999", linewidth=0.8, zorder=0)
right.axvline(0, color="#999999", linewidth=0.8, zorder=0)
