"""Convex problems with known Hessian Lipschitz constants, and settings that satisfy the paper's assumptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from egop_lab import theory
from egop_lab.theory.common import eigenbasis


@dataclass(frozen=True)
class Problem:
    """A convex loss of one vector; the name is the test id."""

    name: str
    dimension: int
    loss: Callable[[Tensor], Tensor]
    hessian_lipschitz: float

    def __str__(self) -> str:
        return self.name

    def gradient(self, theta: Tensor) -> Tensor:
        return torch.func.grad(self.loss)(theta)

    def hessian(self, theta: Tensor) -> Tensor:
        return torch.func.hessian(self.loss)(theta)

    @cached_property
    def minimizer(self) -> Tensor:
        """The minimum, by Newton's method with steps halved until they descend."""
        theta = torch.zeros(self.dimension, dtype=torch.float64)
        while self.gradient(theta).norm() > 1e-13:
            step = torch.linalg.solve(self.hessian(theta), self.gradient(theta))
            size = 1.0
            while self.loss(theta - size * step) > self.loss(theta) + 1e-15 and size > 1e-10:
                size /= 2
            theta = theta - size * step
        return theta


def assert_at_most(what: str, left: float, right: float, unit: float = 0.0) -> None:
    """Print both sides and assert left ≤ right up to rounding (of numbers the size of ``unit``, if given)."""
    print(f"{what}: {left:.6g} ≤ {right:.6g}")
    assert left <= right + 1e-9 * max(abs(left), abs(right), unit), f"{what}: {left!r} > {right!r}"


def draw_orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw orthonormal columns, uniformly by Haar measure."""
    vectors, triangle = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    return vectors * triangle.diagonal().sign()


def draw_decaying(rows: int, columns: int, exponent: float, seed: int) -> Tensor:
    """Draw a matrix with singular values k^−exponent and random, hence dense, singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    count = min(rows, columns)
    left, right = draw_orthonormal(rows, count, generator), draw_orthonormal(columns, count, generator)
    return left * torch.arange(1, count + 1, dtype=torch.float64) ** -exponent @ right.mT


def quadratic(dimension: int = 12, exponent: float = 1.0, seed: int = 0) -> Problem:
    """Return half of a least-squares problem; its Hessian has eigenvalues k^(−2 exponent)."""
    data = draw_decaying(dimension, dimension, exponent, seed)
    targets = torch.randn(dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Problem(
        f"quadratic-{exponent}-{seed}", dimension, lambda x: (data @ x - data @ targets).square().sum() / 2, 0.0
    )


def log_sum_exp(dimension: int = 8, exponent: float = 0.5, seed: int = 0) -> Problem:
    """Return log Σ exp(⟨a_i, θ⟩ − b_i), with every −a_i among the a_i so that it has a minimum.

    The third derivative in directions u, v, v is the mean of (x − E x)(y − E y)² for x = ⟨a, u⟩, y = ⟨a, v⟩ under the
    softmax weights. For vectors no longer than R that is at most 2R · R².
    """
    half = 2 * draw_decaying(3 * dimension, dimension, exponent, seed)
    data = torch.cat([half, -half])
    offsets = torch.randn(len(data), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
    longest = float(data.norm(dim=1).max())
    return Problem(
        f"log-sum-exp-{exponent}-{seed}", dimension, lambda x: torch.logsumexp(data @ x - offsets, 0), 2 * longest**3
    )


def logistic(dimension: int = 6, exponent: float = 0.5, seed: int = 0) -> Problem:
    """Return logistic regression on inseparable labels; the third derivative of log(1 + eˣ) is below 1/(6√3)."""
    generator = torch.Generator().manual_seed(seed)
    data = 8 * draw_decaying(60, dimension, exponent, seed)
    wanted = torch.randn(dimension, generator=generator, dtype=torch.float64)
    labels = torch.where(torch.rand(60, generator=generator, dtype=torch.float64) < torch.sigmoid(data @ wanted), 1, -1)
    lipschitz = float(data.norm(dim=1).pow(3).mean()) / (6 * math.sqrt(3))
    return Problem(
        f"logistic-{exponent}-{seed}",
        dimension,
        lambda x: torch.nn.functional.softplus(-labels * (data @ x)).mean(),
        lipschitz,
    )


PROBLEMS = [
    *(quadratic(exponent=exponent, seed=seed) for seed, exponent in enumerate((0.0, 0.5, 1.0))),
    *(log_sum_exp(exponent=exponent, seed=seed) for seed, exponent in enumerate((0.2, 0.5, 1.0))),
    *(logistic(exponent=exponent, seed=seed) for seed, exponent in enumerate((0.2, 0.5, 1.0))),
]


class Setting:
    """A problem with a rho and a ball that satisfy Assumptions 1 and 2 exactly, without sampling error.

    rho is uniform on the points θ_c ± c√d q over the columns q of orthogonal matrices: its mean is θ_c and its
    covariance c² I to the last digit, and every expectation over it is a finite sum. The ball is the smallest one
    around θ_c that contains these points, and c is as large as delta ≤ β₁²/2 allows.

    Args:
        problem: the loss.
        offset: the distance of θ_c from the minimum, in units of c; at most 1.
    """

    def __init__(self, problem: Problem, offset: float = 1.0, seed: int = 0) -> None:
        self.problem, d = problem, problem.dimension
        generator = torch.Generator().manual_seed(seed)
        directions = torch.cat([draw_orthonormal(d, d, generator) for _ in range(4)], 1).mT
        away = draw_orthonormal(d, 1, generator).squeeze(-1)
        self.hessian = problem.hessian(problem.minimizer)
        self.hessian_norm = float(torch.linalg.eigvalsh(self.hessian)[-1])
        self.scale = 1.0
        while True:
            self.center = problem.minimizer + offset * self.scale * away
            self.radius = self.scale * math.sqrt(d)
            self.points = self.center + self.radius * torch.cat([directions, -directions])
            gradients = torch.func.vmap(problem.gradient)(self.points)
            self.egop = gradients.mT @ gradients / len(self.points)
            self.spectrum, (_, self.basis) = theory.compute_spectrum(self.egop), eigenbasis(self.egop)
            self.delta = theory.needed_delta(problem.hessian_lipschitz, **self.assumption)
            if self.delta <= float(self.spectrum.density[0]) ** 2 / 2:
                break
            self.scale /= 2
        distances = (self.points - problem.minimizer).norm(dim=1)
        self.gamma = theory.egop_error(
            problem.hessian_lipschitz,
            hessian_norm=self.hessian_norm,
            third_moment=float(distances.pow(3).mean()),
            fourth_moment=float(distances.pow(4).mean()),
        )

    @property
    def diameter(self) -> float:
        """The diameter of the ball."""
        return 2 * self.radius

    @property
    def assumption(self) -> dict[str, float]:
        """The arguments of Assumption 2, apart from H and delta."""
        top = float(self.spectrum.eigenvalues[0])
        return {"egop_norm": top, "hessian_norm": self.hessian_norm, "diameter": self.diameter}

    @property
    def lemma(self) -> dict[str, float]:
        """The arguments of Lemma 3, apart from the eigenvalues."""
        return {
            "scale": self.scale,
            "gamma": self.gamma,
            "hessian_lipschitz": self.problem.hessian_lipschitz,
            "diameter": self.diameter,
        }

    def hessians_in_ball(self, count: int = 20) -> Tensor:
        """Return the Hessians at points all over the ball, including its surface."""
        generator = torch.Generator().manual_seed(1)
        inside = torch.randn(count, self.problem.dimension, generator=generator, dtype=torch.float64)
        inside = inside / inside.norm(dim=1, keepdim=True) * torch.linspace(0.3, 1, count, dtype=torch.float64)[:, None]
        return torch.func.vmap(self.problem.hessian)(self.center + self.radius * inside)
