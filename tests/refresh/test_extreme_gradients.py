"""Gradients of extreme scale: what the inner optimizer survives alone, it also survives with a refresh."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from egop.optimizer.moments import rotate_squares
from egop.refresh.eigenbases import iterate, off_diagonal_share
from explicit import identical
from recordings import record_on_the_cpu

STRUCTURES = [egop.Kronecker(), egop.Shared(), egop.Full()]
REFRESHES = {
    "in turn": egop.Online(every=3),
    "all at once": egop.Online(every=3, spread=False),
    "when drifted": egop.Online(every=3, tolerance=0.01),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIMIZERS = [torch.optim.AdamW, torch.optim.Adagrad]

pytestmark = pytest.mark.filterwarnings("ignore:The basis could not be renewed")


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.device)


def run(model, optimizer, count, first=0, spike=None, size=1.0):
    for step in range(first, first + count):
        gradients(model, step, size if step == spike else 1.0)
        optimizer.step()


def make_optimizer(model, refresh, kind=torch.optim.AdamW, **changed):
    settings = {"structure": egop.Kronecker()} | changed
    return egop.ReparameterizedOptimizer(model, kind, refresh=dataclasses.replace(refresh, **settings), lr=1e-2)


def tensors_of(optimizer):
    """Copy everything that a renewal may change: bases, coordinates and moments."""
    found = {}
    for block in optimizer.blocks:
        found |= {(block.name, key): value.clone() for key, value in block.change.tensors.items()}
        for coordinate in block.coordinates:
            found[block.name, "coordinates"] = coordinate.detach().clone()
            state = optimizer.inner.state.get(coordinate, {})
            found |= {(block.name, key): value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return found


def is_finite(tensors):
    return all(torch.isfinite(tensor).all() for tensor in tensors)


def has_no_nan(tensors):
    return not any(torch.isnan(tensor).any() for tensor in tensors)


# Scale and step of the spike: the first step, a step that renews bases, and one in between.
SPIKES = [(1e18, 3), (1e19, 0), (1e20, 2), (1e22, 0), (1e22, 2), (1e22, 3), (1e37, 3)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_huge_gradient_leaves_the_weights_finite_without_a_basis(kind):
    for size, spike in SPIKES:
        model = network()
        run(model, kind(model.parameters(), lr=1e-2), 10, spike=spike, size=size)
        assert is_finite(model.parameters())


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("refresh", REFRESHES.values(), ids=list(REFRESHES))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_huge_gradient_leaves_the_weights_finite_in_a_basis(kind, refresh, structure):
    for size, spike in SPIKES:
        model = network()
        optimizer = make_optimizer(model, refresh, kind, structure=structure)
        run(model, optimizer, 10, spike=spike, size=size)
        assert is_finite(model.parameters())
        assert is_finite(gram for own in optimizer.refresher.grams.by_block.values() for gram in own.values())
        assert has_no_nan(tensors_of(optimizer).values())  # second moments may be infinite, as without a basis
        assert all(cases.round_trip_error(change) < 1e-5 for change in optimizer.basis.values())


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("refresh", REFRESHES.values(), ids=list(REFRESHES))
def test_training_and_renewals_continue_after_a_huge_gradient(refresh, structure):
    """With SGD, which has no memory of it; the step itself has a learning rate of zero."""
    model = network()
    optimizer = make_optimizer(model, refresh, torch.optim.SGD, structure=structure)
    run(model, optimizer, 4)
    gradients(model, 4, 1e22)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    run(model, optimizer, 3, first=5)
    before, failures = tensors_of(optimizer), optimizer.refresher.failures
    assert failures == 2  # one for each block
    run(model, optimizer, 12, first=8)
    after = tensors_of(optimizer)
    assert optimizer.refresher.failures == failures
    assert not any(torch.equal(before[key], after[key]) for key in before)
    assert is_finite(after.values())


@pytest.mark.parametrize("how", ["computed", "recorded", pytest.param("on a GPU", marks=needs_gpu)])
@pytest.mark.parametrize("moments", ["rotate", "keep", "reset"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_failed_renewal_leaves_its_block_unchanged_bit_for_bit(structure, moments, how, monkeypatch):
    if how == "recorded":
        record_on_the_cpu(monkeypatch)
    model = network().to("cuda" if how == "on a GPU" else "cpu")
    optimizer = make_optimizer(model, egop.Online(every=1, spread=False), structure=structure, moments=moments)
    run(model, optimizer, 6)
    seen = {}
    monkeypatch.setattr(optimizer.refresher, "_renew", renewing(optimizer, seen))
    gradients(model, 6)
    model[2].weight.grad[0] *= 1e22
    optimizer.step()
    assert optimizer.basis  # waits for a running renewal
    after = tensors_of(optimizer)
    assert optimizer.refresher.failures == 1
    for (name, key), value in seen.items():
        if name == "2.weight":
            assert torch.equal(after[name, key], value), key
        elif key in egop_keys(structure):
            assert not torch.equal(after[name, key], value)


def egop_keys(structure):
    return ("left", "right") if structure == egop.Kronecker() else ("basis",)


def renewing(optimizer, seen):
    """Wrap the renewal so that it first records all tensors in ``seen``."""
    original = optimizer.refresher._renew

    def renew(*arguments):
        seen.update(tensors_of(optimizer))
        return original(*arguments)

    return renew


def test_the_first_usable_gradient_gives_the_first_basis():
    """Neither a zero gradient (the first of a LoRA layer) nor one whose Gram matrix overflows is usable."""
    for scale, failures in ((0.0, 0), (1e22, 2)):
        model, other = network(), network()
        optimizer, expected = (make_optimizer(each, egop.Online(every=50), torch.optim.SGD) for each in (model, other))
        optimizer.param_groups[0]["lr"] = 0.0
        gradients(model, 0, scale)
        optimizer.step()
        assert all(
            torch.equal(own, torch.eye(len(own)))
            for key, own in tensors_of(optimizer).items()
            if key[1] in "left right"
        )
        assert optimizer.refresher.failures == failures
        resumed = network()
        again = make_optimizer(resumed, egop.Online(every=50), torch.optim.SGD)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each, own in ((model, optimizer), (other, expected), (resumed, again)):
            gradients(each, 1)
            own.step()
        for each in (optimizer, again):
            assert all(each.basis[name].equals(change) for name, change in expected.basis.items())
            assert identical(each.refresher.grams.by_block["0.weight"], expected.refresher.grams.by_block["0.weight"])


@pytest.mark.parametrize("refresh", REFRESHES.values(), ids=list(REFRESHES))
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-30, 1e-42])
def test_zero_and_tiny_gradients_do_no_harm(scale, refresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        optimizer = make_optimizer(model, refresh)
        for step in range(10):
            gradients(model, step, scale)
            model[0].weight.grad[3] = 0  # a dead unit
            optimizer.step()
    assert optimizer.refresher.failures == 0
    assert is_finite(model.parameters())
    assert all(cases.round_trip_error(change) < 1e-5 for change in optimizer.basis.values())


def test_a_basis_with_a_zero_gram_matrix_stays_bit_for_bit():
    basis = torch.linalg.qr(torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0))).Q
    gram = torch.stack([torch.zeros(7, 7), torch.diag(torch.arange(7.0))])
    fresh, sound = iterate(gram, basis)
    assert sound.all()
    assert torch.equal(fresh[0], basis[0])
    assert not torch.equal(fresh[1], basis[1])


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_the_drift_check_does_not_depend_on_the_gradient_scale(scale):
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    gram, basis = rows.mT @ rows, torch.eye(6)
    expected = off_diagonal_share(gram.double(), basis.double())
    torch.testing.assert_close(off_diagonal_share(scale * gram, basis), expected.float(), rtol=1e-5, atol=0)


def test_overflowed_second_moments_only_affect_entries_mixed_with_them():
    block = egop.basis.partition.Block("w", ("w",), (torch.Size([2, 3]),), torch.float32)
    rotation = torch.eye(3)  # infinity times its zeros is NaN
    change = egop.Shared().change(block, {"basis": rotation})
    squares = torch.tensor([[1.0, torch.inf, 2.0], [3.0, 4.0, 5.0]])
    (moved,) = rotate_squares((squares,), change, {"basis": rotation})
    assert torch.equal(moved[0], torch.full((3,), torch.inf))
    assert torch.equal(moved[1], squares[1])


def test_adamax_magnitudes_whose_squares_overflow_stay_finite():
    model = network()
    optimizer = make_optimizer(model, egop.Online(every=2), torch.optim.Adamax)
    run(model, optimizer, 12, spike=3, size=1e25)
    assert is_finite(tensors_of(optimizer).values())


def test_gradients_skipped_by_a_scaler_are_not_observed():
    model, other = network(), network()
    optimizer, expected = make_optimizer(model, egop.Online(every=2)), make_optimizer(other, egop.Online(every=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    for step in range(8):
        if step == 3:
            gradients(model, 100, torch.inf)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        for each, own in ((model, optimizer), (other, expected)):
            gradients(each, step)
            own.step()
    assert identical(tensors_of(optimizer), tensors_of(expected))
