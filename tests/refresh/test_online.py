"""Online: a basis kept current from the training gradients."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import cases
import egop
from cases import DEEP, MLP
from egop.numerics import eigenbasis, orthonormality_error, random_orthonormal
from egop.refresh.eigenbases import off_diagonal_share, power_iteration
from explicit import basis_of, distance, identical, logistic

RENEWABLE = [egop.Full(), egop.Shared(), egop.Kronecker()]
# All blocks at once, so that it is known when a basis changes. For turns see test_turns.py.
REFRESHES = [egop.Online(every=2, spread=False), egop.Online(every=2, tolerance=1e-6)]


def with_structure(refresh, structure, **options):
    return dataclasses.replace(refresh, structure=structure, **options)


def make_optimizer(model, refresh, basis=None, kind=torch.optim.Adam, **arguments):
    return egop.ReparameterizedOptimizer(model, kind, basis, refresh=refresh, **{"lr": 0.01} | arguments)


def steps(model, optimizer, count, first=0, case=MLP):
    """Train, and return the gradients of each step."""
    seen = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        logistic(model, case.batches()[step % 4]).backward()
        seen.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
    return seen


def dense(optimizer):
    return {name: change.dense() for name, change in optimizer.basis.items()}


def matrices(structure, gradient):
    """Return the Gram matrices of one gradient."""
    if structure == egop.Full():
        return {"basis": torch.outer(gradient.flatten(), gradient.flatten())}
    if structure == egop.Shared():
        return {"basis": gradient.mT @ gradient}
    return {"left": gradient @ gradient.mT, "right": gradient.mT @ gradient}


# --- running means ---


@pytest.mark.parametrize("decay", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("structure", RENEWABLE, ids=str)
def test_gram_matrices_are_running_means(structure, decay):
    model = MLP.build()
    optimizer = make_optimizer(model, egop.Online(every=3, decay=decay, structure=structure))
    seen = steps(model, optimizer, 8)
    for name in ("0.weight", "2.weight"):
        expected = matrices(structure, seen[0][name])
        for gradients in seen[1:]:
            for key, gram in matrices(structure, gradients[name]).items():
                expected[key] = decay * expected[key] + (1 - decay) * gram
        for key, gram in optimizer.refresher.grams.by_block[name].items():
            torch.testing.assert_close(gram, expected[key], rtol=0, atol=1e-13)


# --- renewals ---


@pytest.mark.parametrize("refresh", REFRESHES, ids=["iterated", "drifted"])
@pytest.mark.parametrize("structure", RENEWABLE, ids=str)
def test_without_a_basis_the_first_gradient_gives_one(structure, refresh):
    model = MLP.build()
    optimizer = make_optimizer(model, with_structure(refresh, structure))
    assert len(optimizer.basis) == 0
    (seen,) = steps(model, optimizer, 1)
    assert list(optimizer.basis) == ["0.weight", "2.weight"]
    for name, change in optimizer.basis.items():
        for key, gram in matrices(structure, seen[name]).items():
            values, vectors = eigenbasis(gram)
            some = values > 1e-10 * values[0]  # directions without gradient are arbitrary
            torch.testing.assert_close(change.tensors[key][:, some], vectors[:, some], rtol=0, atol=1e-12)
            assert orthonormality_error(change.tensors[key]) < 1e-12


@pytest.mark.parametrize("refresh", REFRESHES, ids=["iterated", "drifted"])
@pytest.mark.parametrize("structure", RENEWABLE, ids=str)
def test_refresh_starts_from_a_given_basis(structure, refresh):
    """In that case the refresh's structure is ignored."""
    basis = basis_of(MLP, structure=structure)
    model, plain = MLP.build(), MLP.build()
    optimizer = make_optimizer(model, refresh, basis)
    other = egop.ReparameterizedOptimizer(plain, torch.optim.Adam, basis, lr=0.01)
    steps(model, optimizer, 1)
    steps(plain, other, 1)
    assert identical(cases.parameters_of(model), cases.parameters_of(plain))
    assert identical(dense(optimizer), {name: change.dense() for name, change in basis.items()})
    steps(model, optimizer, 1, first=1)
    assert not any(torch.equal(dense(optimizer)[name], basis[name].dense()) for name in basis)
    assert {change.kind for change in optimizer.basis.values()} == {type(structure).__name__}


def test_each_renewal_is_one_power_iteration():
    model = MLP.build()
    optimizer = make_optimizer(model, egop.Online(every=2, structure=egop.Kronecker(), spread=False))
    steps(model, optimizer, 3)
    before = {name: change.tensors for name, change in optimizer.basis.items()}
    steps(model, optimizer, 1, first=3)
    for name, change in optimizer.basis.items():
        for key, gram in optimizer.refresher.grams.by_block[name].items():
            expected = power_iteration(gram, before[name][key])
            torch.testing.assert_close(change.tensors[key], expected, rtol=0, atol=1e-12)
    optimizer.renew_basis()  # decomposes from scratch
    for name, change in optimizer.basis.items():
        for key, gram in optimizer.refresher.grams.by_block[name].items():
            torch.testing.assert_close(change.tensors[key], eigenbasis(gram)[1], rtol=0, atol=1e-12)


def test_auto_chooses_kronecker_and_skips_embeddings_and_heads():
    model = DEEP.build()
    optimizer = make_optimizer(model, egop.Online())
    steps(model, optimizer, 1, case=DEEP)
    kinds = {name: change.kind for name, change in optimizer.basis.items()}
    assert kinds == {"0.weight": "Kronecker", "2.weight": "Kronecker", "4.weight": "Kronecker"}


@pytest.mark.parametrize("structure", RENEWABLE, ids=str)
def test_renewals_do_not_change_sgd_with_momentum(structure):
    """In exact arithmetic SGD with momentum is the same in every basis."""
    model, plain = MLP.build(), MLP.build()
    refresh = egop.Online(every=1, structure=structure)
    steps(model, make_optimizer(model, refresh, kind=torch.optim.SGD, momentum=0.9), 25)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), 25)
    assert distance(cases.parameters_of(model), cases.parameters_of(plain)) < 1e-12


def test_with_a_tolerance_a_basis_is_renewed_only_if_it_has_drifted():
    model = MLP.build()
    patient = make_optimizer(model, egop.Online(every=1, tolerance=0.99, structure=egop.Kronecker()))
    steps(model, patient, 10)
    assert patient.refresher.renewals == 1  # only the first basis
    found = dense(patient)
    steps(model, patient, 5)
    assert identical(dense(patient), found)
    strict = make_optimizer(model, egop.Online(every=1, tolerance=1e-6, structure=egop.Kronecker()))
    steps(model, strict, 10)
    assert strict.refresher.renewals == 10  # in its own eigenbasis the first gradient has not drifted
    for name, change in strict.basis.items():
        for key, gram in strict.refresher.grams.by_block[name].items():
            assert off_diagonal_share(gram, change.tensors[key]) < 1e-12


# --- power iteration ---


def gram_with(values, seed=0):
    V = random_orthonormal(len(values), len(values), torch.Generator().manual_seed(seed))
    return V * torch.tensor(values, dtype=torch.float64) @ V.mT, V


def test_power_iteration_converges_to_the_eigenvectors_strongest_first():
    gram, V = gram_with([8.0, 4.0, 2.0, 1.0, 0.5])
    basis = torch.eye(5, dtype=torch.float64)
    for _ in range(60):
        basis = power_iteration(gram, basis)
    torch.testing.assert_close((basis * V).sum(0).abs(), torch.ones(5).double(), rtol=0, atol=1e-12)
    assert off_diagonal_share(gram, basis) < 1e-9
    assert orthonormality_error(basis) < 1e-13


def test_signs_and_order_are_stable():
    """A basis that already diagonalizes stays, whatever the signs of its vectors."""
    gram, V = gram_with([8.0, 4.0, 2.0, 1.0, 0.5])
    basis = V * torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0]).double()
    torch.testing.assert_close(power_iteration(gram, basis), basis, rtol=0, atol=1e-12)
    shuffled = basis[:, [2, 0, 4, 1, 3]]
    torch.testing.assert_close(power_iteration(gram, shuffled), basis, rtol=0, atol=1e-12)


def test_directions_without_gradient_stay_where_they_are():
    gram, V = gram_with([4.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(power_iteration(gram, V), V, rtol=0, atol=1e-8)
    basis = random_orthonormal(4, 4, torch.Generator().manual_seed(5))
    nothing = torch.zeros(4, 4, dtype=torch.float64)
    torch.testing.assert_close(power_iteration(nothing, basis), basis, rtol=0, atol=1e-14)
    assert off_diagonal_share(nothing, basis) == 0


def test_off_diagonal_is_the_share_of_the_frobenius_norm():
    gram = torch.tensor([[3.0, 4.0], [4.0, 0.0]], dtype=torch.float64)
    assert off_diagonal_share(gram, torch.eye(2).double()).item() == pytest.approx((32 / 41) ** 0.5)
    assert off_diagonal_share(gram, eigenbasis(gram @ gram)[1]) < 1e-12


# --- failures ---


class Careful(torch.optim.SGD):
    """SGD that ignores non-finite gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().step(closure)


def refuse(*_, **__):
    raise torch.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("refresh", REFRESHES, ids=["iterated", "drifted"])
@pytest.mark.parametrize("start", ["given", "none"])
@pytest.mark.parametrize("how", ["gradient", "decomposition"])
def test_a_failed_renewal_keeps_the_old_basis_and_training_continues(how, start, refresh, monkeypatch):
    model = MLP.build()
    basis = basis_of(MLP, structure=egop.Kronecker()) if start == "given" else None
    optimizer = make_optimizer(model, with_structure(refresh, egop.Kronecker()), basis, Careful, lr=0.1)
    steps(model, optimizer, 3)
    before, renewals = dense(optimizer), optimizer.refresher.renewals
    if how == "gradient":
        logistic(model, MLP.batches()[0]).backward()
        for index in (0, 2):
            model[index].weight.grad[1, 1] = float("nan")
    else:
        for name in ("qr", "eigh", "svd"):
            monkeypatch.setattr(torch.linalg, name, refuse)
        logistic(model, MLP.batches()[0]).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        if how == "decomposition":
            steps(model, optimizer, 2)
    assert optimizer.refresher.failures == (2 if how == "gradient" else 4)  # for each of the two blocks
    assert len([each for each in caught if "could not be renewed" in str(each.message)]) == 1
    assert identical(dense(optimizer), before)
    monkeypatch.undo()
    failures, loss = optimizer.refresher.failures, logistic(model, MLP.batches()[0]).item()
    steps(model, optimizer, 20)
    assert optimizer.refresher.failures == failures
    assert optimizer.refresher.renewals > renewals + 1
    assert not any(torch.equal(dense(optimizer)[name], before[name]) for name in before)
    assert all(
        torch.isfinite(gram).all() for own in optimizer.refresher.grams.by_block.values() for gram in own.values()
    )
    assert logistic(model, MLP.batches()[0]).item() < loss


def test_one_failed_block_does_not_stop_the_others_from_being_renewed():
    model = MLP.build()
    optimizer = make_optimizer(model, egop.Online(every=1, structure=egop.Kronecker()), kind=Careful)
    steps(model, optimizer, 2)
    before = dense(optimizer)
    logistic(model, MLP.batches()[3]).backward()
    model[0].weight.grad[0, 0] = float("inf")
    with pytest.warns(
        UserWarning, match=r"could not be renewed and stays as it is \(the gradients' Gram matrix is not"
    ):
        optimizer.step()
    assert torch.equal(dense(optimizer)["0.weight"], before["0.weight"])
    assert not torch.equal(dense(optimizer)["2.weight"], before["2.weight"])
    assert optimizer.refresher.failures == 1


# --- bad input ---

REFUSED = {
    "every": (lambda: egop.Online(every=0), r"Invalid every value: 0\. Must be a whole number of at least 1"),
    "decay of one": (lambda: egop.Online(decay=1.0), r"Invalid decay value: 1\.0\. Must be at least 0 and below 1"),
    "negative decay": (lambda: egop.Online(decay=-0.1), r"Invalid decay value: -0\.1"),
    "moments": (lambda: egop.Online(moments="turn"), "Invalid moments value: 'turn'"),
    "half steps": (lambda: egop.Online(every=1.5, tolerance=0.1), r"Invalid every value: 1\.5"),
    "no tolerance": (lambda: egop.Online(tolerance=0), r"Invalid tolerance value: 0\. Must be between 0 and 1"),
    "all tolerance": (lambda: egop.Online(tolerance=1.0), r"Invalid tolerance value: 1\.0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_settings_are_refused(what):
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        make()


def test_an_invalid_structure_is_refused():
    with pytest.raises(TypeError, match=r"Invalid structure value: 'shared'\. Must be 'auto', a structure such as"):
        egop.Online(structure="shared")
    with pytest.raises(TypeError, match=r"Pattern '0\.\*' needs a structure .*\. Call it: egop\.Shared\(\)\.$"):
        egop.Online(structure={"0.*": egop.Shared})


@pytest.mark.parametrize("refresh", REFRESHES, ids=["iterated", "drifted"])
@pytest.mark.parametrize("structure", [egop.Auxiliary(rank=3), egop.Reduced(rank=3), egop.Identity()], ids=str)
def test_structures_that_cannot_be_renewed_are_refused_and_nothing_changes(structure, refresh):
    message = rf"egop\.Online cannot renew bases of structure {type(structure).__name__}\. Use egop\.Every"
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match=message):
        make_optimizer(model, refresh, basis_of(MLP, structure=structure))
    assert cases.state_of(model) == before
    optimizer = make_optimizer(model, with_structure(refresh, structure))
    with pytest.raises(ValueError, match=message):
        steps(model, optimizer, 1)
    assert cases.state_of(model)["parameters"] == before["parameters"]


def test_the_first_settings_can_be_positional():
    assert egop.Online(5, 0.9) == egop.Online(every=5, decay=0.9)
