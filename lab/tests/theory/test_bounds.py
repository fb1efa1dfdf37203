"""The paper's inequalities, with both sides printed (``pytest -s`` shows them)."""

from __future__ import annotations

import doctest
import functools
import importlib
import itertools
import math
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import egop
from convex_problems import PROBLEMS, Setting, assert_at_most, draw_orthonormal, quadratic
from egop.basis import Block
from egop_lab import theory
from egop_lab.theory.common import eigenbasis

MODULES = [module.name for module in pkgutil.iter_modules(theory.__path__) if module.name != "common"]
SETTINGS = [(problem, offset) for problem in PROBLEMS for offset in (0.0, 1.0)]
every_setting = pytest.mark.parametrize(
    "setting", SETTINGS, ids=[f"{problem}-offset-{offset}" for problem, offset in SETTINGS], indirect=True
)


@pytest.fixture
def setting(request):
    return cached_setting(*request.param)


@functools.cache
def cached_setting(problem, offset):
    return Setting(problem, offset)


@every_setting
def test_the_settings_satisfy_the_assumptions(setting):
    centered = setting.points - setting.center
    covariance = centered.mT @ centered / len(centered)
    torch.testing.assert_close(setting.points.mean(0), setting.center)
    torch.testing.assert_close(covariance, setting.scale**2 * torch.eye(len(covariance), dtype=torch.float64))
    assert_at_most("|θ_c − θ*| against c", float((setting.center - setting.problem.minimizer).norm()), setting.scale)
    largest = theory.largest_hessian_lipschitz(setting.delta, **setting.assumption)
    assert_at_most("H against what Assumption 2 allows", setting.problem.hessian_lipschitz, largest)
    assert_at_most("delta against the leading density squared", setting.delta, float(setting.spectrum.density[0]) ** 2)
    hessians = setting.hessians_in_ball()
    changes = float(torch.linalg.matrix_norm(hessians - setting.hessian, 2).max())
    allowed = setting.problem.hessian_lipschitz * setting.diameter
    assert_at_most("change of the Hessian against H·D", changes, allowed, unit=setting.hessian_norm)


@every_setting
def test_the_egop_is_that_of_the_quadratic_up_to_gamma(setting):
    slope = setting.hessian @ (setting.center - setting.problem.minimizer)
    straight = theory.quadratic_egop(setting.hessian, slope, scale=setting.scale)
    error = torch.linalg.matrix_norm(setting.egop - straight, 2)
    top = float(setting.spectrum.eigenvalues[0])
    assert_at_most("‖P − G‖ against γ", float(error), setting.gamma, unit=top)
    assert_at_most("γ against δ λ₁", setting.gamma, setting.delta * top)


@every_setting
def test_lemma_2_and_corollary_1_are_below_the_smoothness_sum_in_original_coordinates(setting):
    signs = theory.smoothness_lower_bound(setting.egop, scale=setting.scale, gamma=setting.gamma)
    dense = theory.density_lower_bound(setting.spectrum, scale=setting.scale, gamma=setting.gamma)
    measured = theory.smoothness_sum_bounds(setting.hessian).lower
    assert_at_most("Corollary 1 against Lemma 2", dense, signs)
    assert_at_most("Lemma 2 against the smoothness sum", signs, measured)
    assert dense > 0, "the setting is one in which the bound says something"


@every_setting
def test_lemma_3_is_above_the_smoothness_sum_in_the_eigenbasis(setting):
    hessians = setting.basis.mT @ setting.hessians_in_ball() @ setting.basis
    constants = theory.reparameterized_constants(setting.spectrum.eigenvalues, **setting.lemma)
    for sign in (1, -1):
        lowest = torch.linalg.eigvalsh(torch.diag(constants) - sign * hessians).min()
        assert lowest >= -1e-9 * constants.max(), "the constants of the proof dominate every Hessian in the ball"
    bound = theory.reparameterized_upper_bound(setting.spectrum.eigenvalues, **setting.lemma)
    assert_at_most("sum of the proof's constants against Lemma 3", float(constants.sum()), bound)
    assert_at_most("measured sum against Lemma 3", theory.smoothness_sum_bounds(hessians, tolerance=1e-4).upper, bound)


@every_setting
def test_the_root_of_the_egop_is_above_the_hessian_in_any_coordinates(setting):
    bound = theory.hessian_upper_bound(setting.egop, scale=setting.scale, gamma=setting.gamma)
    assert torch.linalg.eigvalsh(bound - setting.hessian).min() >= -1e-7 * setting.hessian_norm
    rotated = setting.basis.mT @ bound @ setting.basis
    constants = theory.reparameterized_constants(setting.spectrum.eigenvalues, scale=setting.scale, gamma=setting.gamma)
    torch.testing.assert_close(rotated, torch.diag(constants), atol=1e-7 * setting.hessian_norm, rtol=0)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_roots_keep_the_order_of_matrices_and_squares_do_not(rank):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        factors = torch.randn(2, 6, rank, generator=generator, dtype=torch.float64)
        smaller = factors[0] @ factors[0].mT
        larger = smaller + factors[1] @ factors[1].mT
        root = theory.square_root(larger)
        torch.testing.assert_close(root @ root, larger)
        assert torch.linalg.eigvalsh(root - theory.square_root(smaller)).min() >= -1e-6
    smaller, larger = torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    assert torch.linalg.eigvalsh(larger @ larger - smaller @ smaller).min() < -0.1


@every_setting
def test_a_hessian_maps_no_vector_further_than_its_form_allows(setting):
    vectors = torch.randn(50, len(setting.hessian), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = vectors @ setting.hessian
    left, right = images.square().sum(1), setting.hessian_norm * (vectors * images).sum(1)
    assert (left <= right * (1 + 1e-9)).all()


@every_setting
def test_the_constants_of_a_hessian_are_those_of_the_definition(setting):
    """|f(a) − f(b) − ⟨∇f(b), a − b⟩| ≤ ½ Σ L_i (a − b)_i² at points all over the ball."""
    bounds = theory.smoothness_sum_bounds(setting.hessian, tolerance=1e-3)
    change = setting.problem.hessian_lipschitz * setting.diameter
    one, other = setting.points, setting.points.flip(0).roll(1, 0)
    losses = [torch.func.vmap(setting.problem.loss)(at) for at in (one, other)]
    slopes = (torch.func.vmap(setting.problem.gradient)(other) * (one - other)).sum(1)
    allowed = ((bounds.constants + change) * (one - other).square()).sum(1) / 2
    assert ((losses[0] - losses[1] - slopes).abs() <= allowed * (1 + 1e-6) + 1e-14).all()


def measured_ratio(setting: Setting) -> float:
    """Bound the true ratio from above: the numerator holds in the whole ball, the denominator at the minimum."""
    rotated = setting.basis.mT @ setting.hessian @ setting.basis
    everywhere = setting.problem.hessian_lipschitz * setting.diameter * len(rotated)
    upper = theory.smoothness_sum_bounds(rotated).upper + everywhere
    return upper / theory.smoothness_sum_bounds(setting.hessian).lower


@every_setting
def test_the_smoothness_ratio_is_below_its_bound(setting):
    assert_at_most("ratio", measured_ratio(setting), theory.smoothness_ratio_bound(setting.spectrum, setting.delta))


def test_strong_decay_with_dense_eigenvectors_gives_a_small_ratio_and_no_decay_a_ratio_of_one():
    strong = Setting(quadratic(40, exponent=1.0))
    assert_at_most("strong decay", measured_ratio(strong), theory.smoothness_ratio_bound(strong.spectrum))
    assert measured_ratio(strong) < 0.1
    none = Setting(quadratic(40, exponent=0.0), offset=0.0)
    print("no decay:", measured_ratio(none))
    assert measured_ratio(none) == pytest.approx(1, abs=1e-4)
    assert theory.leading_ratio(none.spectrum) >= 1


def test_the_leading_term_bounds_a_centred_quadratic_by_itself():
    for exponent, seed in itertools.product((0.3, 0.6, 1.0), range(5)):
        setting = Setting(quadratic(exponent=exponent, seed=seed), offset=0.0, seed=seed)
        assert_at_most("centred", measured_ratio(setting), theory.leading_ratio(setting.spectrum))


def test_the_factor_two_is_needed_when_rho_is_not_centred_at_the_minimum():
    d = 12
    dense = torch.full((d,), d**-0.5, dtype=torch.float64)
    hessian = (torch.eye(d, dtype=torch.float64) + torch.outer(dense, dense)) / 2  # eigenvalues 1 (of dense) and 1/2
    spectrum = theory.compute_spectrum(theory.quadratic_egop(hessian, hessian @ dense))  # one standard deviation away
    ratio = float(hessian.trace()) / theory.smoothness_sum_bounds(hessian).lower
    assert_at_most("the leading term against the ratio", 1.1 * theory.leading_ratio(spectrum), ratio)
    assert_at_most("the ratio against the bound", ratio, theory.smoothness_ratio_bound(spectrum))


@pytest.mark.parametrize(("step", "eps"), [(0.2, 1e-8), (1.0, 0.3), (3.0, 1e-8)])
@every_setting
def test_the_averaged_regret_of_constrained_adagrad_is_below_theorem_1_in_both_coordinates(setting, step, eps):
    steps, lr = 25, step * setting.diameter
    sums = theory.smoothness_sum_bounds(setting.hessian, tolerance=1e-3)
    ratio = theory.smoothness_ratio_bound(setting.spectrum, setting.delta)
    for coordinates, total in (("original", sums.lower), ("eigenbasis", ratio * sums.lower)):
        theta = torch.zeros(setting.problem.dimension, dtype=torch.float64)  # measured from the centre of the ball
        theta[0] = setting.radius
        theta.requires_grad_()
        block = egop.Full().change(Block.from_tensors("theta", {"theta": theta}), {"basis": setting.basis})
        basis = None if coordinates == "original" else egop.Basis([block])
        optimizer = egop.ReparameterizedOptimizer(
            [("theta", theta)], theory.BallConstrainedAdagrad, basis, lr=lr, radius=setting.radius, eps=eps
        )
        regret = 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            loss = setting.problem.loss(setting.center + theta)
            loss.backward()
            optimizer.step()
            regret += (loss.item() - setting.problem.loss(setting.problem.minimizer).item()) / steps
            assert theta.norm() <= setting.radius * (1 + 1e-12)
        bound = theory.regret_bound(total, diameter=setting.diameter, lr=lr, steps=steps, eps=eps)
        assert_at_most(f"averaged regret, {coordinates}", regret, bound)


@pytest.mark.parametrize("dimension", [1, 2, 7, 12, 13, 30])
def test_the_best_signs_are_the_maximum_or_at_least_those_of_the_eigenvectors(dimension):
    for seed in range(5):
        matrix = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        matrix = matrix @ matrix.mT
        spectrum = theory.compute_spectrum(matrix)
        bound = theory.smoothness_lower_bound(matrix, scale=0.5)
        assert_at_most("densities against signs", theory.density_lower_bound(spectrum, scale=0.5), bound)
        if dimension <= 13:
            every = torch.tensor(list(itertools.product((1.0, -1.0), repeat=dimension)), dtype=torch.float64)
            best = float(((every @ matrix) * every).sum(-1).max() / spectrum.eigenvalues[0].sqrt())
            assert bound <= best * (1 + 1e-12)
            assert bound == pytest.approx(best, rel=1e-9 if dimension <= 12 else 0.05)


def test_assumption_2_and_the_delta_it_needs_are_inverse():
    for delta, bent in itertools.product((1e-14, 1e-6, 0.2, 0.9), (0.0, 0.3, 1e6)):
        terms = {"egop_norm": 3.7, "hessian_norm": bent, "diameter": 0.4}
        largest = theory.largest_hessian_lipschitz(delta, **terms)
        assert theory.needed_delta(largest, **terms) == pytest.approx(delta, rel=1e-12)
        printed = (math.sqrt(delta * 3.7 + 0.4**2 * bent**2) - 0.4 * bent) / 0.4**2
        assert largest == pytest.approx(printed, rel=1e-6, abs=1e-9 * max(bent, 1))
    assert theory.largest_hessian_lipschitz(0.0, egop_norm=1.0, hessian_norm=0.0, diameter=1.0) == 0


def test_the_bound_with_delta_is_at_most_what_the_paper_prints():
    spectrum = Setting(quadratic()).spectrum
    top, rank, d = float(spectrum.density[0]), spectrum.stable_rank, len(spectrum.eigenvalues)
    for delta in (0.0, 0.01, 0.9 * top):
        printed = math.sqrt(1 + delta) * (2 * rank / (d * (top - delta)) + 6 * math.sqrt(delta) / (top - delta))
        assert_at_most("with constants", theory.smoothness_ratio_bound(spectrum, delta), printed)
    assert theory.smoothness_ratio_bound(spectrum) == pytest.approx(2 * theory.leading_ratio(spectrum))
    assert theory.smoothness_ratio_bound(spectrum, top) == math.inf


def test_a_spectrum_of_leading_eigenvalues_needs_to_be_told_the_dimension():
    whole = theory.compute_spectrum(torch.diag(torch.tensor([4.0, 1.0, 0.0, 0.0])))
    part = egop.Spectrum(whole.eigenvalues[:2], whole.density[:2], samples=0)
    assert theory.leading_ratio(part, dimension=4) == theory.leading_ratio(whole)
    assert theory.smoothness_ratio_bound(part, 0.1, dimension=4) == theory.smoothness_ratio_bound(whole, 0.1)
    bounds = [theory.density_lower_bound(s, scale=1.0, dimension=4) for s in (part, whole)]
    assert bounds[0] == bounds[1]


def test_densities_match_an_estimated_basis():
    theta = torch.zeros(5, dtype=torch.float64)
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    objective = egop.Objective.from_function(lambda theta: (matrix @ theta).square().sum(), {"theta": theta})
    basis = egop.estimate(objective, rho=egop.Gaussian(), structure=egop.Full(), samples=50, progress=False)
    spectrum = basis.spectrum["theta"]
    torch.testing.assert_close(theory.densities(basis["theta"].dense()), spectrum.density)


def test_a_random_direction_has_a_density_of_two_over_pi():
    vectors = draw_orthonormal(2000, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(theory.densities(vectors), torch.full((20,), 2 / math.pi).double(), atol=0.03, rtol=0)


@every_setting
def test_the_egop_in_its_eigenbasis_is_diagonal(setting):
    values, V = eigenbasis(setting.egop)
    gradients = torch.func.vmap(torch.func.grad(lambda x: setting.problem.loss(V @ x)))(setting.points @ V)
    egop_there = gradients.mT @ gradients / len(gradients)
    torch.testing.assert_close(egop_there, torch.diag(values), atol=1e-10 * float(values[0]), rtol=0)


SPECTRUM = egop.Spectrum(torch.ones(2).double(), torch.ones(2).double(), samples=0)


def test_a_matrix_of_zeros_has_bounds_of_zero():
    nothing = torch.zeros(3, 3)
    assert theory.smoothness_lower_bound(nothing, scale=1.0) == 0
    assert theory.density_lower_bound(theory.compute_spectrum(nothing), scale=1.0) == 0


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_run(module):
    if module == "smoothness":
        pytest.importorskip("cvxpy")
    found = importlib.import_module(f"egop_lab.theory.{module}")
    results = doctest.testmod(found, extraglobs={"torch": torch, "theory": theory})
    assert results.failed == 0
    assert results.attempted > 0


def test_every_function_is_documented_with_an_example_and_a_reference():
    for name in theory.__all__:
        if name != "SmoothnessSum":
            assert all(part in getattr(theory, name).__doc__ for part in ("Example:", "Reference:")), name


def test_the_example_in_the_documentation_runs():
    page = Path(__file__).parents[3] / "docs" / "theory.md"
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0
    model = torch.nn.Linear(3, 2)
    objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(4, 3)])
    given = {"egop": egop, "model": model, "basis": egop.estimate(objective, samples=8, progress=False)}
    for code in re.findall(r"^```python\n(?!>>>)(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(code, given)
