"""estimate: from an objective to a basis."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import cases
import egop

# --- least squares, where the EGOP matrix is known ---


def least_squares(rows=8, columns=5):
    generator = torch.Generator().manual_seed(4)
    A = torch.randn(rows, columns, generator=generator, dtype=torch.float64) / rows**0.5
    y = torch.randn(rows, generator=generator, dtype=torch.float64)
    objective = egop.Objective.from_function(
        lambda theta: (A @ theta - y).square().sum() / 2, {"theta": torch.full((columns,), 9.0, dtype=torch.float64)}
    )
    # the gradient is AᵀAθ − Aᵀy, and E θθᵀ = I
    return objective, (A.mT @ A) @ (A.mT @ A) + torch.outer(A.mT @ y, A.mT @ y)


def matrix_of(basis, block):
    """Rebuild P̂ from its eigenvectors and eigenvalues."""
    V = basis[block].dense()
    return V * basis.spectrum[block].eigenvalues @ V.mT


def relative_error(found, expected):
    return (torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)).item()


def estimated(objective, samples, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    return cases.estimate(objective, rho=egop.Gaussian(), samples=samples, generator=generator, **options)


def test_least_squares_converges_to_the_closed_form_at_the_monte_carlo_rate():
    objective, P = least_squares()
    numbers = np.array([64, 256, 1024, 4096])

    def error(samples, seed):
        return relative_error(matrix_of(estimated(objective, samples, seed, structure=egop.Full()), "theta"), P)

    errors = [np.mean([error(int(samples), seed) for seed in range(6)]) for samples in numbers]
    slope = np.polyfit(np.log(numbers), np.log(errors), 1)[0]
    assert -0.6 < slope < -0.4
    assert errors[-1] < 0.05


def test_center_shifts_the_closed_form():
    objective, P = least_squares()
    center = {"theta": torch.tensor([1.0, 0, -2, 0, 3]).double()}
    theta = center["theta"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective.loss({"theta": theta}, None), theta)
    # E ∇∇ᵀ = AᵀA Cov(θ) AᵀA + ∇f(c)∇f(c)ᵀ, whose first term is what the origin has beside (Aᵀy)(Aᵀy)ᵀ
    zero = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    (at_zero,) = torch.autograd.grad(objective.loss({"theta": zero}, None), zero)
    expected = P - torch.outer(at_zero, at_zero) + torch.outer(gradient, gradient)
    basis = cases.estimate(objective, rho=egop.Gaussian(center=center), samples=4000)
    assert relative_error(matrix_of(basis, "theta"), expected) < 0.05


# --- the estimate is the mean outer product of the sampled gradients ---


@pytest.mark.parametrize("partition", cases.PARTITIONS, ids=str)
@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_basis_is_the_eigenbasis_of_the_mean_outer_product(case, partition):
    basis = cases.estimate(case.objective(), rho=egop.Gaussian(), partition=partition, samples=30)
    gradients = cases.sample(case.objective(), egop.Gaussian(), 30, method="loop")
    for name, change in basis.items():
        P = torch.zeros(change.block.size, change.block.size, dtype=torch.float64)
        for i in range(30):
            g = torch.cat([gradients[each][i].flatten() for each in change.block.parameters])
            P += torch.outer(g, g) / 30
        torch.testing.assert_close(matrix_of(basis, name), P, rtol=0, atol=1e-10 * P.trace().item())
        expected = torch.linalg.eigvalsh(P).flip(0).clamp_min(0)
        torch.testing.assert_close(basis.spectrum[name].eigenvalues, expected, rtol=0, atol=1e-10 * P.trace().item())


def test_same_generator_gives_same_basis_and_default_seed_is_zero():
    default, zero, one = (
        cases.estimate(cases.MLP.objective(), **options)
        for options in (
            {},
            {"generator": torch.Generator().manual_seed(0)},
            {"generator": torch.Generator().manual_seed(1)},
        )
    )
    torch.testing.assert_close(default["0.weight"].dense(), zero["0.weight"].dense(), rtol=0, atol=1e-10)
    assert (default["0.weight"].dense() - one["0.weight"].dense()).abs().max() > 0.1


def test_default_rho_is_the_initialization():
    drawn = []

    class Watched(nn.Linear):
        def reset_parameters(self):
            drawn.append(self)
            super().reset_parameters()

    model = Watched(6, 3).double()
    drawn.clear()
    cases.estimate(egop.Objective(model, cases.cross_entropy, cases.MLP.batches()), samples=5)
    assert len(drawn) >= 5  # a few more to see what it does


def test_default_samples_are_the_size_of_the_largest_block():
    basis = egop.estimate(cases.MLP.objective(), structure=egop.Full(), progress=False)
    assert {name: spectrum.samples for name, spectrum in basis.spectrum.items()} == {"0.weight": 30, "2.weight": 30}


def test_basis_has_the_precision_of_the_model():
    model = cases.mlp()
    batches = [(x.float(), y) for x, y in cases.MLP.batches()]
    basis = cases.estimate(egop.Objective(model, cases.cross_entropy, batches))
    assert basis["0.weight"].tensors["basis"].dtype == torch.float32
    assert basis.spectrum["0.weight"].eigenvalues.dtype == torch.float64
    # the basis is computed in float64 and rounded, not computed in float32
    V = basis["0.weight"].dense()
    torch.testing.assert_close(V.mT @ V, torch.eye(30).double(), rtol=0, atol=5e-7)


# --- structures by block ---


def test_first_matching_pattern_chooses_the_structure():
    basis = cases.estimate(cases.DEEP.objective(), structure={"0.*": egop.Identity(), "[02].*": egop.Full()})
    assert {name: change.kind for name, change in basis.items()} == {"0.weight": "Identity", "2.weight": "Full"}
    assert list(basis.unrotated) == ["4.weight", "6.weight"]
    assert "no pattern matches it" in str(basis)


def test_identity_needs_no_gradients():
    calls = []
    objective = egop.Objective(cases.mlp(), lambda model, batch: calls.append(batch), [1])
    basis = egop.estimate(objective, structure=egop.Identity(), progress=False)
    assert list(basis) == ["0.weight", "2.weight"]
    assert calls == []


def test_auto_chooses_shared_bases_within_the_memory():
    basis = cases.estimate(cases.DEEP.objective(), structure="auto")
    assert {change.kind for change in basis.values()} == {"Shared"}
    # three bases of 16 x 16 in float64 take 2 KiB each
    lean = cases.estimate(cases.DEEP.objective(), structure="auto", memory="5KiB")
    assert 0 < sum(change.nbytes for change in lean.values()) <= 5 * 1024


# --- log lines and side effects ---


def test_progress_is_shown_by_default(capsys):
    egop.estimate(cases.MLP.objective(), structure=egop.Full(), samples=12)
    assert "12/12" in capsys.readouterr().err
    egop.estimate(cases.MLP.objective(), structure=egop.Full(), samples=12, progress=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def white(rows=4, columns=12):
    """Build a loss whose gradients are white noise, with no directions to find."""
    return egop.Objective.from_function(lambda w: w.square().sum() / 2, {"w": torch.zeros(rows, columns)})


def test_too_few_samples_log_how_many_to_ask_for(caplog):
    basis = cases.estimate(white(), rho=egop.Gaussian(), structure=egop.Shared(), samples=6)
    (said,) = caplog.messages
    assert said.startswith("6 draws are too few for the basis of 'w'")
    assert "Use samples=24" in said
    assert "(6 draws: lower bound)" in str(basis)


def test_enough_samples_log_nothing(caplog):
    direction = torch.randn(12, generator=torch.Generator().manual_seed(0))
    objective = egop.Objective.from_function(lambda w: (w @ direction).square().sum(), {"w": torch.zeros(4, 12)})
    basis = cases.estimate(objective, rho=egop.Gaussian(), structure=egop.Shared(), samples=6)
    assert caplog.messages == []
    assert "draws" not in str(basis)


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
@pytest.mark.parametrize(
    "rho", [None, egop.Gaussian(), egop.Ball(1.0), egop.Recentered(), egop.Recentered(0.1)], ids=str
)
def test_model_is_restored(case, rho):
    model = case.build()
    cases.cross_entropy(model, case.batches()[0]).backward()
    before = cases.state_of(model)
    cases.estimate(case.objective(model), rho=rho, samples=5)
    assert cases.state_of(model) == before


def test_model_is_restored_if_a_decomposition_fails(monkeypatch):
    model = cases.MLP.build()
    before = cases.state_of(model)

    def fail(*arguments, **options):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(torch.linalg.LinAlgError):
        cases.estimate(cases.MLP.objective(model))
    assert cases.state_of(model) == before


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rho": "normal"}, TypeError, r"rho must be a distribution such as egop.Gaussian\(\), got 'normal'"),
        ({"rho": egop.Gaussian}, TypeError, r"rho must be a distribution such as egop.Gaussian\(\), got <class"),
        ({"partition": "rows"}, ValueError, "Invalid partition value: 'rows'. Must be 'global', 'layer', 'parameter'"),
        ({"partition": {"a": "9.*"}}, ValueError, r"Pattern '9.\*' matches no parameter. Available: 0.weight"),
        ({"partition": {"a": "*", "b": "0.*"}}, ValueError, "'0.weight' is in two blocks, 'a' and 'b'"),
        ({"structure": "full"}, TypeError, "Invalid structure value: 'full'. Must be 'auto', a structure such as"),
        ({"structure": egop.Full}, TypeError, "Invalid structure value: <class"),
        ({"structure": None}, TypeError, "Invalid structure value: None"),
        ({"structure": {"9.*": egop.Full()}}, ValueError, r"Pattern '9.\*' matches no block. Available: 0.weight,"),
        ({"structure": {"0.*": "full"}}, TypeError, r"structure such as egop.Full\(\), got 'full'"),
        ({"samples": 0}, ValueError, "Invalid samples value: 0. Must be a whole number of at least 1"),
        ({"samples": -3}, ValueError, "Invalid samples value: -3"),
        ({"samples": 1.5}, ValueError, "Invalid samples value: 1.5"),
        ({"samples": "all"}, ValueError, "Invalid samples value: 'all'"),
        ({"memory": "plenty"}, ValueError, "Invalid memory value: 'plenty'. Must be .*such as '2GiB'"),
        ({"memory": -1}, ValueError, "Invalid memory value: -1"),
        ({"memory": "1KiB"}, MemoryError, r"more than memory=1.0 KiB.*'0.weight', takes 7.0 KiB"),
        ({"memory": "8KiB"}, MemoryError, r"The bases need .*more than memory=8.0 KiB"),  # each of the two fits
        ({"sampling": "fast"}, ValueError, "Invalid sampling method: 'fast'. Must be 'auto', 'loop' or 'vmap'"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_and_leave_the_model_alone(options, error, message):
    objective = cases.MLP.objective()
    before = cases.state_of(objective.module)
    with pytest.raises(error, match=message):
        cases.estimate(objective, **options)
    assert cases.state_of(objective.module) == before


def test_other_types_than_objective_raise():
    with pytest.raises(
        TypeError, match=r"must be an egop.Objective, got Sequential. Use egop.Objective\(model, loss_fn, b"
    ):
        egop.estimate(cases.mlp())


# --- gradients that are zero ---


def another_models_loss():
    """Build a loss whose gradient is that of another model."""
    other = cases.MLP.build()
    return lambda model, batch: cases.cross_entropy(other, batch) + 0 * cases.cross_entropy(model, batch)


@pytest.mark.parametrize("structure", ["auto", egop.Shared(), egop.Auxiliary(rank=2)], ids=str)
def test_loss_that_never_reaches_the_parameters_raises(structure):
    model = cases.MLP.build()
    before = cases.state_of(model)
    objective = egop.Objective(model, another_models_loss(), cases.MLP.batches())
    message = r"gradient.* is exactly zero at all 20 draws.*uses the model it is given"
    with pytest.raises(ValueError, match=message):
        egop.estimate(objective, samples=20, structure=structure, progress=False)
    assert cases.state_of(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
def test_layer_without_gradient_has_a_valid_basis(structure):
    model = cases.DEEP.build()
    name = next(name for name, weight in model.named_parameters() if weight.dim() == 2)
    dead = model.get_parameter(name)

    def without(model, batch):
        own = {each: value for each, value in model.named_parameters() if each != name}
        return torch.func.functional_call(model, own | {name: dead.detach()}, batch[:1]).square().mean()

    objective = egop.Objective(model, without, cases.DEEP.batches())
    basis = egop.estimate(objective, samples=12, structure=structure, partition="parameter", progress=False)
    change = basis[name]
    value = torch.randn(dead.shape, dtype=dead.dtype, generator=torch.Generator().manual_seed(0))
    coordinates = change.encode([value])
    (back,) = change.decode(coordinates)
    assert back.isfinite().all()
    if change.is_complete:
        torch.testing.assert_close(back, value)
    torch.testing.assert_close(change.encode([back]), coordinates)


def test_identical_gradients_log_a_warning(caplog):
    model = cases.MLP.build()

    def said(rho, batches):
        caplog.clear()
        objective = egop.Objective(model, cases.cross_entropy, cases.MLP.batches(batches))
        egop.estimate(objective, samples=5, structure=egop.Full(), progress=False, rho=rho, sampling="loop")
        return [record.getMessage() for record in caplog.records]

    (line,) = said(egop.Recentered(), 1)
    assert "the same gradient 5 times" in line
    assert "more than one batch" in line
    assert said(egop.Recentered(), 2) == said(egop.Recentered(0.01), 1) == []
