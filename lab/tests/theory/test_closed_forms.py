"""What is known in closed form: least squares, matrix factorisation, Kronecker products."""

from __future__ import annotations

import pytest
import torch

import egop
from convex_problems import assert_at_most, draw_decaying, draw_orthonormal
from egop_lab import theory


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DATA = {
    "square": draw_decaying(6, 6, 1.0, 0),
    "tall": draw_decaying(20, 5, 0.5, 1),
    "wide": draw_decaying(4, 7, 0.5, 2),
    "no decay": draw_decaying(6, 6, 0.0, 3),
    "one column": draw_decaying(5, 1, 0.0, 4),
}


@pytest.mark.parametrize("name", DATA)
def test_the_least_squares_egop_is_the_mean_over_any_isotropic_rho(name):
    data, targets = DATA[name], normal(len(DATA[name]))
    d = data.shape[1]
    center, scale = normal(d, seed=1), 0.7
    directions = draw_orthonormal(d, d, torch.Generator().manual_seed(0)).mT
    points = center + scale * d**0.5 * torch.cat([directions, -directions])
    gradients = (points @ data.mT - targets) @ data
    expected = gradients.mT @ gradients / len(points)
    torch.testing.assert_close(theory.least_squares_egop(data, targets, center=center, scale=scale), expected)


def test_for_a_standard_normal_rho_it_is_what_the_paper_states_and_what_estimation_finds():
    data, targets = DATA["tall"], normal(20)
    stated = (data.mT @ data) @ (data.mT @ data) + torch.outer(data.mT @ targets, data.mT @ targets)
    exact = theory.least_squares_egop(data, targets)
    torch.testing.assert_close(exact, stated)
    objective = egop.Objective.from_function(
        lambda theta: (data @ theta - targets).square().sum() / 2, {"theta": torch.zeros(5, dtype=torch.float64)}
    )
    basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Full(), samples=20_000, progress=False)
    found = basis.spectrum["theta"].eigenvalues
    torch.testing.assert_close(found, theory.compute_spectrum(exact).eigenvalues, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", DATA)
def test_the_eigenvalues_of_least_squares_interlace(name):
    data = DATA[name]
    for seed in range(5):
        targets = normal(len(data), seed=seed)
        values = theory.compute_spectrum(theory.least_squares_egop(data, targets)).eigenvalues
        lower, upper = theory.least_squares_interlacing(data, targets)
        for k in range(len(values)):
            assert_at_most(f"σ_{k + 1}⁴ against λ_{k + 1}", float(lower[k]), float(values[k]) + 1e-12)
            assert_at_most(f"λ_{k + 1} against its upper end", float(values[k]), float(upper[k]) + 1e-12)
        singular = torch.linalg.svdvals(data)
        for k in range(1, min(data.shape)):
            decay = float((singular[k - 1] / singular[0]) ** 4)
            assert_at_most(f"decay of λ_{k + 1}", float(values[k] / values[0]), decay)


def test_the_interval_that_the_proof_prints_is_one_index_too_low():
    data, targets = DATA["square"], 3 * normal(6)
    values = theory.compute_spectrum(theory.least_squares_egop(data, targets)).eigenvalues
    assert values[1] > torch.linalg.svdvals(data)[1] ** 4


def test_decay_of_the_data_bounds_decay_of_the_egop():
    for seed in range(5):
        data, factor = draw_decaying(6, 6, 1.0, seed), normal(6, 6, seed=seed)
        inner = factor @ factor.mT
        values = theory.compute_spectrum(data.mT @ inner @ data).eigenvalues
        for k, bound in enumerate(theory.data_decay_bound(data, inner)):
            assert_at_most(f"decay of λ_{k + 1}", float(values[k] / values[0]), float(bound))


@pytest.mark.parametrize("shape", [(4, 3, 2, 1), (5, 2, 3, 2), (1, 4, 4, 3), (9, 3, 3, 2)])
def test_the_hessian_of_a_matrix_factorisation_is_lipschitz_with_the_stated_constant(shape):
    m, rows, columns, rank = shape
    measurements, targets, radius = normal(m, rows, columns), normal(m, seed=1), 1.5
    size = (rows + columns) * rank

    def loss(theta):
        L, R = theta[: rows * rank].reshape(rows, rank), theta[rows * rank :].reshape(columns, rank)
        return ((measurements * (L @ R.mT)).sum((1, 2)) - targets).square().sum()

    stated = theory.matrix_factorization_lipschitz(measurements, radius)
    sharp = theory.matrix_factorization_lipschitz(measurements, radius, norm="operator")
    assert sharp <= stated * (1 + 1e-12)
    largest = 0.0
    for seed in range(20):
        pair = normal(2, size, seed=seed)
        one, other = radius * pair / pair.norm(dim=1, keepdim=True)
        other = other if seed % 2 else one + 1e-3 * (other - one)
        change = torch.func.hessian(loss)(one) - torch.func.hessian(loss)(other)
        largest = max(largest, float(torch.linalg.matrix_norm(change, 2) / (one - other).norm()))
    assert_at_most("measured against the operator norm", largest, sharp)
    assert_at_most("measured against the paper", largest, stated)


def a_factorisation(shape, seed=0):
    """Draw measurements, targets, a point and a direction; also return the loss and its arguments as one vector."""
    m, rows, columns, rank = shape
    measurements, targets = normal(m, rows, columns, seed=seed), normal(m, seed=seed + 1)
    pairs = [(normal(rows, rank, seed=seed + s), normal(columns, rank, seed=seed + s + 1)) for s in (2, 4)]

    def loss(theta):
        L, R = theta[: rows * rank].reshape(rows, rank), theta[rows * rank :].reshape(columns, rank)
        return ((measurements * (L @ R.mT)).sum((1, 2)) - targets).square().sum()

    vectors = [torch.cat([part.flatten() for part in pair]) for pair in pairs]
    return measurements, targets, pairs, loss, vectors


@pytest.mark.parametrize("shape", [(4, 3, 2, 1), (1, 4, 4, 3), (9, 3, 3, 2)])
def test_the_curvature_of_a_matrix_factorisation_is_that_of_its_hessian_and_of_differences(shape):
    for seed in range(3):
        measurements, targets, (point, direction), loss, (theta, v) = a_factorisation(shape, 10 * seed)
        stated = theory.matrix_factorization_curvature(measurements, targets, point, direction)
        assert stated == pytest.approx(float(v @ torch.func.hessian(loss)(theta) @ v), rel=1e-12, abs=1e-12)
        step = 1e-3
        differences = (loss(theta + step * v) - 2 * loss(theta) + loss(theta - step * v)) / step**2
        assert stated == pytest.approx(float(differences), rel=1e-4, abs=1e-4)


def test_the_hessian_blocks_of_low_rank_matrix_factorisation_are_kronecker_products():
    for seed in range(3):
        A, L, R = draw_decaying(5, 4, 0.5, seed), normal(4, 2, seed=seed), normal(3, 2, seed=seed + 1)
        targets = normal(5, 3, seed=seed + 2)

        def of_left(x, A=A, R=R, targets=targets):
            return (A @ x.reshape(4, 2) @ R.mT - targets).square().sum() / 2

        def of_right(x, A=A, L=L, targets=targets):
            return (A @ L @ x.reshape(3, 2).mT - targets).square().sum() / 2

        factors = theory.matrix_factorization_blocks(A, L, R)
        for loss, at, pair, sizes in ((of_left, L, factors[0], (4, 2)), (of_right, R, factors[1], (3, 2))):
            block = torch.func.hessian(loss)(at.flatten())
            torch.testing.assert_close(torch.kron(*pair), block)
            assert theory.kronecker_residual(block, *sizes) < 1e-14


def test_the_hessian_blocks_of_other_measurements_are_not_kronecker_products():
    _, _, _, loss, (theta, _) = a_factorisation((9, 3, 3, 2))
    assert theory.kronecker_residual(torch.func.hessian(loss)(theta)[:6, :6], 3, 2) > 0.05


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (3, 4), (4, 1), (1, 1)])
def test_rotating_a_matrix_from_both_sides_is_one_rotation_of_its_entries(rows, columns):
    left, right = (draw_orthonormal(size, size, torch.Generator().manual_seed(size)) for size in (rows, columns))
    V = theory.kronecker_rotation(left, right)
    torch.testing.assert_close(V @ V.mT, torch.eye(rows * columns, dtype=torch.float64))
    for seed in range(3):
        gradient = normal(rows, columns, seed=seed)
        torch.testing.assert_close((V @ gradient.flatten()).reshape(rows, columns), left.mT @ gradient @ right)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 2), (4, 5), (3, 4)])
def test_some_rotations_of_entries_are_none_of_the_two_sides(rows, columns):
    size = rows * columns
    V = theory.rotation_beyond_kronecker(rows, columns)
    torch.testing.assert_close(V.mT @ V, torch.eye(size, dtype=torch.float64))
    signs = torch.ones(size // 2, dtype=torch.float64)
    torch.testing.assert_close(V[:, 0], torch.cat([signs, signs]) / size**0.5)
    torch.testing.assert_close(V[:, 1], torch.cat([signs, -signs]) / size**0.5)
    # The paper's order of entries, column by column, has the sides the other way round.
    for sides in ((rows, columns), (columns, rows)):
        assert theory.kronecker_residual(V, *sides) > 0.3
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            pair = [draw_orthonormal(side, side, generator) for side in sides]
            assert (theory.kronecker_rotation(*pair) - V).norm() > 0.3 * V.norm()


SHAPES = [
    (2, 2),
    (3, 4),
    ((2, 3), (4, 1)),
    ((1, 5), (3, 2)),
    ((4, 1), (1, 3)),
    (1, 6),
    (6, 1),
    ((3, 2), (2, 3)),
    (1, 1),
]


def sides(shape):
    return (shape, shape) if isinstance(shape, int) else shape


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_kronecker_product_has_no_residual_and_gives_its_factors_back(shapes):
    A, B = normal(*sides(shapes[0])), normal(*sides(shapes[1]), seed=1)
    product = torch.kron(A, B)
    assert theory.kronecker_residual(product, *shapes) < 1e-14
    one, other = theory.nearest_kronecker(product, *shapes)
    assert (one.shape, other.shape) == (A.shape, B.shape)
    torch.testing.assert_close(torch.kron(one, other), product)
    torch.testing.assert_close(one.norm(), other.norm())


def alternating_least_squares(matrix, left, right):
    """Return the smallest ‖H − A⊗B‖_F / ‖H‖_F over many starts; block by block, with no SVD and no rearrangement."""
    (m, n), (p, q) = sides(left), sides(right)
    blocks = [[matrix[i * p : (i + 1) * p, j * q : (j + 1) * q] for j in range(n)] for i in range(m)]
    best = float("inf")
    for seed in range(5):
        B = normal(p, q, seed=seed)
        for _ in range(2000):
            A = torch.stack([torch.stack([(block * B).sum() for block in row]) for row in blocks]) / B.square().sum()
            B = sum(A[i, j] * blocks[i][j] for i in range(m) for j in range(n)) / A.square().sum()
            step = float((matrix - torch.kron(A, B)).norm() / matrix.norm())
            if best - 1e-15 < step < best + 1e-15:
                break
            best = min(best, step)
    return best


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_kronecker_residual_is_that_of_alternating_least_squares(shapes):
    (m, n), (p, q) = sides(shapes[0]), sides(shapes[1])
    for seed in range(2):
        matrix = normal(m * p, n * q, seed=seed)
        residual = theory.kronecker_residual(matrix, *shapes)
        brute = alternating_least_squares(matrix, *shapes)
        print(f"{shapes}: {residual:.12f} and {brute:.12f}")
        assert residual == pytest.approx(brute, abs=1e-7)
        nearest = torch.kron(*theory.nearest_kronecker(matrix, *shapes))
        assert float((matrix - nearest).norm() / matrix.norm()) == pytest.approx(residual, abs=1e-12)


def test_the_hessian_of_a_linear_layer_is_a_kronecker_product_and_with_a_mask_it_is_not():
    data = draw_decaying(10, 4, 0.5, 0)

    def hessian(mask):
        def loss(theta):
            return (data @ (mask * theta.reshape(4, 3))).square().sum() / 2

        return torch.func.hessian(loss)(torch.zeros(12, dtype=torch.float64))

    assert theory.kronecker_residual(hessian(torch.ones(4, 3).double()), 4, 3) < 1e-14
    assert theory.kronecker_residual(hessian(1 + normal(4, 3)), 4, 3) > 0.05


def test_a_matrix_of_zeros_is_a_kronecker_product():
    assert theory.kronecker_residual(torch.zeros(6, 6), 2, 3) == 0
    assert torch.kron(*theory.nearest_kronecker(torch.zeros(6, 6), 2, 3)).abs().max() == 0
