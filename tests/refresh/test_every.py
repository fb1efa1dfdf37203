"""Every: the paper's periodic variant."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch

import cases
import egop
from cases import MLP
from explicit import basis_of, distance, identical, logistic

POLICIES = ["rotate", "keep", "reset"]


def every(model, steps=3, **options):
    objective = egop.Objective(model, logistic, MLP.batches())
    return egop.Every(steps, objective, **{"samples": 20, "structure": egop.Full()} | options)


def make_optimizer(model, basis=None, kind=torch.optim.Adam, **options):
    return egop.ReparameterizedOptimizer(model, kind, basis, refresh=every(model, **options), lr=0.01)


def steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        logistic(model, MLP.batches()[step % 4]).backward()
        optimizer.step()


def dense(optimizer):
    return {name: change.dense() for name, change in optimizer.basis.items()}


@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
def test_each_estimate_uses_the_current_parameters(structure):
    """At steps 0, 3 and 6, before the step, the basis is that of egop.estimate."""
    model = MLP.build()
    optimizer = make_optimizer(model, structure=structure)
    for step in range(7):
        expected = None
        if step % 3 == 0:
            generator = torch.Generator().manual_seed(step // 3)
            objective = egop.Objective(model, logistic, MLP.batches())
            kind = structure if step == 0 else next(iter(optimizer.basis.values())).structure()
            expected = cases.estimate(objective, structure=kind, samples=20, generator=generator, rho=egop.Recentered())
        steps(model, optimizer, 1, step)
        if expected is not None:
            assert all(torch.equal(dense(optimizer)[name], change.dense()) for name, change in expected.items())
    assert optimizer.refresher.renewals == 3


def test_a_given_basis_is_used_until_the_first_renewal():
    basis = basis_of(MLP)
    model, plain = MLP.build(), MLP.build()
    optimizer = make_optimizer(model, basis, steps=4)
    other = egop.ReparameterizedOptimizer(plain, torch.optim.Adam, basis, lr=0.01)
    steps(model, optimizer, 4)
    steps(plain, other, 4)
    assert identical(cases.parameters_of(model), cases.parameters_of(plain))
    assert identical(dense(optimizer), dense(other))
    steps(model, optimizer, 1)
    assert not any(torch.equal(dense(optimizer)[name], dense(other)[name]) for name in basis)


def test_without_a_basis_the_first_step_estimates_one():
    model = MLP.build()
    optimizer = make_optimizer(model, structure={"0.weight": egop.Shared()}, partition="parameter")
    assert len(optimizer.basis) == 0
    steps(model, optimizer, 1)
    assert {name: change.kind for name, change in optimizer.basis.items()} == {"0.weight": "Shared"}
    steps(model, optimizer, 6)
    assert optimizer.refresher.renewals == 3


def test_sampling_does_not_change_gradients_or_random_state():
    """A renewal between backward and step leaves gradients, buffers and random states unchanged."""
    case = cases.MODELS[2]  # BatchNorm
    model = case.build()
    objective = egop.Objective(model, logistic, case.batches())
    refresh = egop.Every(1, objective, samples=3, structure=egop.Full())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, refresh=refresh, lr=0.0)
    logistic(model, case.batches()[0]).backward()
    before = cases.state_of(model)
    optimizer.step()
    after = cases.state_of(model)
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"parameters"}  # by rounding, since they are encoded and decoded
    assert optimizer.refresher.renewals == 1


@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_renewing_an_unchanged_basis_changes_nothing(kind, structure, monkeypatch):
    basis = basis_of(MLP, structure=structure)
    model, plain = MLP.build(), MLP.build()
    optimizer = make_optimizer(model, basis, kind, steps=2, moments="rotate")
    monkeypatch.setattr("egop.refresh.every.estimate_plan", lambda *_, **__: copy.deepcopy(basis))
    steps(model, optimizer, 12)
    assert optimizer.refresher.renewals == 5
    other = egop.ReparameterizedOptimizer(plain, kind, basis, lr=0.01)
    steps(plain, other, 12)
    assert identical(cases.parameters_of(model), cases.parameters_of(plain))
    for one, two in zip(optimizer.blocks, other.blocks, strict=True):
        for here, there in zip(one.coordinates, two.coordinates, strict=True):
            assert identical(optimizer.inner.state[here], other.inner.state[there])


def test_estimates_at_one_point_with_one_seed_are_identical():
    """With a full-batch objective, sampled around the origin with the same draws each time."""
    batch = MLP.batches()[:1]
    model, plain = MLP.build(), MLP.build()
    objective = egop.Objective(model, logistic, batch)
    rho = egop.Gaussian()
    basis = cases.estimate(objective, rho=rho, samples=60, generator=torch.Generator().manual_seed(0))
    refresh = egop.Every(2, objective, rho=rho, samples=60)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, refresh=refresh, lr=0.01)
    other = egop.ReparameterizedOptimizer(plain, torch.optim.Adam, basis, lr=0.01)
    for _ in range(6):
        optimizer.refresher.renewals = 0  # because it is part of the seed
        steps(model, optimizer, 1)
        steps(plain, other, 1)
    assert identical(dense(optimizer), dense(other))
    assert identical(cases.parameters_of(model), cases.parameters_of(plain))


@pytest.mark.parametrize("policy", POLICIES)
def test_moments_follow_the_policy_at_each_renewal(policy):
    model = MLP.build()
    optimizer = make_optimizer(model, basis_of(MLP), steps=3, moments=policy)
    steps(model, optimizer, 3)
    (block, *_) = optimizer.blocks
    before, old = copy.deepcopy(optimizer.inner.state[block.coordinates[0]]), block.change.dense()
    optimizer.renew_basis()
    after, new = optimizer.inner.state[block.coordinates[0]], block.change.dense()
    assert not torch.equal(old, new)
    if policy == "reset":
        assert after == {}
    else:
        expected = new.mT @ old @ before["exp_avg"] if policy == "rotate" else before["exp_avg"]
        torch.testing.assert_close(after["exp_avg"], expected, rtol=0, atol=1e-13)


def test_renewals_do_not_change_sgd():
    """In exact arithmetic SGD is the same in every basis."""
    model, plain = MLP.build(), MLP.build()
    steps(model, make_optimizer(model, kind=torch.optim.SGD), 20)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.01), 20)
    assert distance(cases.parameters_of(model), cases.parameters_of(plain)) < 1e-12


def test_reduced_continues_from_its_projection_if_the_rest_is_dropped():
    model = MLP.build()
    optimizer = make_optimizer(
        model, basis_of(MLP, structure=egop.Reduced(rank=3, keep_rest=False)), kind=torch.optim.SGD
    )
    steps(model, optimizer, 3)
    optimizer.renew_basis()
    for block in optimizer.blocks:
        V, weight = block.change.tensors["basis"], block.parameters[0].detach().flatten()
        torch.testing.assert_close(V @ (V.mT @ weight), weight, rtol=0, atol=1e-12)


# --- failures ---


class Fragile:
    """Return NaN for a range of calls, all of which come from sampling."""

    def __init__(self):
        self.broken = False

    def __call__(self, model, batch):
        return logistic(model, batch) * (float("nan") if self.broken else 1.0)


def refuse(*_, **__):
    raise torch.linalg.LinAlgError("did not converge")


@pytest.mark.parametrize("start", ["given", "none"])
@pytest.mark.parametrize("how", ["gradients", "decomposition"])
def test_a_failed_estimate_keeps_the_old_basis_and_training_continues(how, start, monkeypatch):
    loss, model = Fragile(), MLP.build()
    objective = egop.Objective(model, loss, MLP.batches())
    refresh = egop.Every(2, objective, samples=20, structure=egop.Full())
    basis = basis_of(MLP) if start == "given" else None
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, refresh=refresh, lr=0.01)
    if how == "gradients":
        loss.broken = True
    else:
        monkeypatch.setattr(torch.linalg, "svd", refuse)
        monkeypatch.setattr(torch.linalg, "eigh", refuse)
    before, losses = dense(optimizer), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, optimizer, 7)
    failures = 3 if start == "given" else 4  # without a basis, the first step tries, too
    assert optimizer.refresher.failures == failures
    assert identical(dense(optimizer), before)
    (warning,) = [each for each in caught if "could not be renewed" in str(each.message)]
    assert "stays as it is" in str(warning.message)
    assert "optimizer.refresher.failures" in str(warning.message)
    loss.broken = False
    monkeypatch.undo()
    for step in range(20):
        losses.append(logistic(model, MLP.batches()[0]).item())
        steps(model, optimizer, 1, step)
    assert optimizer.refresher.failures == failures
    assert len(optimizer.basis) == 2
    assert not identical(dense(optimizer), before)
    assert losses[-1] < losses[0]


# --- bad input ---

OBJECTIVE = MLP.objective()
REFUSED = {
    "no objective": (lambda: egop.Every(5), TypeError, r"egop\.Every needs an egop\.Objective .*use egop\.Online\(\)"),
    "a model": (lambda: egop.Every(5, MLP.build()), TypeError, r"needs an egop\.Objective to sample gradients of, got"),
    "no steps": (
        lambda: egop.Every(0, OBJECTIVE),
        ValueError,
        r"Invalid every value: 0\. Must be a whole number of at",
    ),
    "half steps": (lambda: egop.Every(2.5, OBJECTIVE), ValueError, r"Invalid every value: 2\.5"),
    "no samples": (lambda: egop.Every(5, OBJECTIVE, samples=0), ValueError, "Invalid samples value: 0"),
    "moments": (lambda: egop.Every(5, OBJECTIVE, moments="turn"), ValueError, "Invalid moments value: 'turn'"),
    "rho": (lambda: egop.Every(5, OBJECTIVE, rho="here"), TypeError, r"rho must be a distribution .*, got 'here'"),
    "structure": (lambda: egop.Every(5, OBJECTIVE, structure="full"), TypeError, "Invalid structure value: 'full'"),
    "structure by name": (
        lambda: egop.Every(5, OBJECTIVE, structure={"0.weight": egop.Full}),
        TypeError,
        r"Pattern '0\.weight' needs a structure such as egop\.Full\(\), got .*\. Call it: egop\.Full\(\)\.",
    ),
    "a center": (
        lambda: egop.Every(5, OBJECTIVE, rho=egop.Gaussian(center={})),
        ValueError,
        "The center has no value for the parameters",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_settings_are_refused(what):
    make, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("refresh", ["online", 10, egop.Online, object()])
def test_an_invalid_refresh_is_refused_and_nothing_changes(refresh):
    model = MLP.build()
    before = cases.state_of(model)
    with pytest.raises(TypeError, match=r"refresh must be egop\.Every\(.* or your own egop\.Refresh, got"):
        egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh)
    assert cases.state_of(model) == before


def test_a_refresh_class_that_was_not_called_is_refused():
    with pytest.raises(TypeError, match=r"got <class 'egop.*'>\. Call it: egop\.Online\(\)\.$"):
        egop.ReparameterizedOptimizer(MLP.build(), torch.optim.Adam, refresh=egop.Online)


# --- objectives of other models ---


def by_function(tensors):
    """Return the objective as a function of the model's parameters."""
    model = MLP.build()

    def loss(batch, **values):
        return cases.cross_entropy(lambda x: torch.func.functional_call(model, values, (x,)), batch)

    return egop.Objective.from_function(loss, tensors, MLP.batches())


MODEL = "Build it from the model that is trained: egop.Objective(model, loss_fn, batches)."
TENSORS = "Give it the tensors that are trained: egop.Objective.from_function(function, tensors)."
OF_ANOTHER = {
    "a copy": (lambda model: MLP.objective(copy.deepcopy(model)), MODEL),
    "another one": (lambda model: MLP.objective(), MODEL),
    "tensors": (lambda model: by_function(cases.parameters_of(model)), TENSORS),
}


@pytest.mark.parametrize("basis", [None, basis_of(MLP)], ids=["no basis", "a basis"])
@pytest.mark.parametrize("what", OF_ANOTHER)
def test_an_objective_of_another_model_is_refused_and_nothing_changes(what, basis):
    make, advice = OF_ANOTHER[what]
    model = MLP.build()
    before = cases.state_of(model)
    message = (
        "The objective of egop.Every has parameters of its own, which this optimizer does not train: "
        f"'0.weight', '0.bias', '2.weight', …. {advice}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, refresh=egop.Every(3, make(model)))
    assert cases.state_of(model) == before


OF_THE_SAME = {
    "compiled": lambda model: MLP.objective(torch.compile(model, backend="eager")),
    "tensors": lambda model: by_function(dict(model.named_parameters())),
    "detached": lambda model: by_function({name: each.detach() for name, each in model.named_parameters()}),
}


@pytest.mark.parametrize("what", OF_THE_SAME)
def test_an_objective_may_wrap_the_trained_model_differently(what):
    model = MLP.build()
    objective = OF_THE_SAME[what](model)
    refresh = egop.Every(2, objective, samples=8, structure={"*weight": egop.Full()}, partition="parameter")
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh, lr=0.01)
    steps(model, optimizer, 2)
    before = dense(optimizer)
    steps(model, optimizer, 1)
    assert not any(torch.equal(dense(optimizer)[name], before[name]) for name in before)


def test_an_objective_may_have_parameters_that_are_not_trained():
    model = MLP.build()
    refresh = every(model, structure={"2.weight": egop.Full()}, partition="parameter")
    optimizer = egop.ReparameterizedOptimizer([("2.weight", model[2].weight)], torch.optim.Adam, refresh=refresh)
    steps(model, optimizer, 1)
    assert list(optimizer.basis) == ["2.weight"]


def test_renew_basis_without_a_refresh_is_refused():
    optimizer = egop.ReparameterizedOptimizer(MLP.build(), torch.optim.Adam, basis_of(MLP))
    with pytest.raises(RuntimeError, match=r"This optimizer has no refresh=, which says how a basis is renewed"):
        optimizer.renew_basis()


# --- frozen and unfrozen ---


def test_a_frozen_block_keeps_its_basis_and_is_renewed_again_once_it_trains():
    model = MLP.build()
    optimizer = make_optimizer(model, steps=2)
    steps(model, optimizer, 1)
    first = dense(optimizer)
    model[0].weight.requires_grad_(False)
    steps(model, optimizer, 4)
    frozen = dense(optimizer)
    assert torch.equal(frozen["0.weight"], first["0.weight"])
    assert not torch.equal(frozen["2.weight"], first["2.weight"])
    model[0].weight.requires_grad_()
    steps(model, optimizer, 2)
    assert not torch.equal(dense(optimizer)["0.weight"], first["0.weight"])
    assert optimizer.refresher.failures == 0


def test_sampling_leaves_frozen_weights_at_their_values():
    model = MLP.build()
    seen = []

    def watched(model, batch):
        seen.append(model[0].weight.detach().clone())
        return logistic(model, batch)

    objective = egop.Objective(model, watched, MLP.batches())
    refresh = egop.Every(1, objective, rho=egop.Recentered(0.1), samples=5, structure=egop.Full())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh, lr=0.01)
    model[0].weight.requires_grad_(False)
    steps(model, optimizer, 2)
    assert seen
    assert all(torch.equal(weight, model[0].weight) for weight in seen)


def test_training_continues_if_all_blocks_are_frozen():
    model = MLP.build()
    for given in (None, basis_of(MLP)):
        optimizer = make_optimizer(model, given, steps=1)
        steps(model, optimizer, 1)
        for weight in (model[0].weight, model[2].weight):
            weight.requires_grad_(False)
        before = dense(optimizer)
        steps(model, optimizer, 2)
        assert identical(dense(optimizer), before)
        for weight in (model[0].weight, model[2].weight):
            weight.requires_grad_()


def test_zero_gradients_keep_the_basis_and_training_continues():
    model = MLP.build()
    off = []
    objective = egop.Objective(model, lambda model, batch: (not off) * logistic(model, batch), MLP.batches())
    refresh = egop.Every(2, objective, samples=20, structure=egop.Full())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh, lr=0.01)
    steps(model, optimizer, 1)
    before = dense(optimizer)
    off.append(True)
    with pytest.warns(UserWarning, match="could not be renewed and stays as it is"):
        steps(model, optimizer, 4)
    assert identical(dense(optimizer), before)
    assert optimizer.refresher.failures == 2


def test_a_first_basis_without_any_gradient_is_refused():
    model, other = MLP.build(), MLP.build()
    objective = egop.Objective(model, lambda _, batch: logistic(other, batch), MLP.batches())
    refresh = egop.Every(2, objective, samples=20, structure=egop.Full())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.Adam, refresh=refresh, lr=0.01)
    with pytest.raises(ValueError, match="does not reach these parameters"):
        steps(model, optimizer, 1)
