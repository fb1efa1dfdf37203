"""Blocks are renewed in turn, and no step waits for the GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cases
import egop
from cases import DEEP
from egop.numerics import GraphedFunction, Recorder, orthonormality_error
from egop.refresh import eigenbases
from egop.refresh.online import assign_turns
from explicit import distance, identical, logistic

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        logistic(model, DEEP.batches()[step % 4]).backward()
        optimizer.step()


def tensors(optimizer):
    return {
        (name, key): value.clone() for name, change in optimizer.basis.items() for key, value in change.tensors.items()
    }


def online(model, kind=torch.optim.Adam, refresh=None, **arguments):
    refresh = refresh or egop.Online(every=4, structure=egop.Kronecker())
    return egop.ReparameterizedOptimizer(model, kind, refresh=refresh, **{"lr": 0.01} | arguments)


def test_every_block_is_renewed_once_per_round_and_never_all_in_one_step():
    model = DEEP.build()
    optimizer = online(model)
    steps(model, optimizer, 4)
    for first in (4, 8):
        renewed = []
        for step in range(first, first + 4):
            before = tensors(optimizer)
            steps(model, optimizer, 1, first=step)
            after = tensors(optimizer)
            renewed.append({name for name, key in before if not torch.equal(before[name, key], after[name, key])})
        assert sorted(name for names in renewed for name in names) == sorted(optimizer.basis)
        assert max(map(len, renewed)) < len(optimizer.basis)
    assert optimizer.refresher.renewals == 1 + 3  # the first one, and three rounds


def test_the_steps_of_a_round_have_similar_costs():
    widths = [8] * 12 + [16] * 3 + [32] * 10
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))
    optimizer = online(model, refresh=egop.Online(structure=egop.Shared()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    costs = [0] * 10
    each = {block.name: block.change.tensors["basis"].shape[-1] ** 3 for block in optimizer.blocks}
    for name, turn in assign_turns(each, 10, {}).items():
        costs[turn] += each[name]
    assert sum(costs) == sum(width**3 for width in widths)
    assert max(costs) <= sum(costs) / 10 + 32**3  # no more than one block above an equal share


def test_turns_do_not_change_sgd_with_momentum():
    model, plain = DEEP.build(), DEEP.build()
    steps(model, online(model, torch.optim.SGD, momentum=0.9), 25)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9), 25)
    assert distance(cases.parameters_of(model), cases.parameters_of(plain)) < 1e-12


def test_a_copy_and_a_resumed_run_take_the_same_turns():
    model = DEEP.build()
    optimizer = online(model)
    steps(model, optimizer, 6)
    pair = copy.deepcopy((model, optimizer))
    resumed = DEEP.build()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    other = online(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), pair, (resumed, other)):
        steps(*each, 7, first=6)
    assert identical(cases.parameters_of(model), cases.parameters_of(pair[0]))
    assert identical(cases.parameters_of(model), cases.parameters_of(resumed))


def test_a_basis_that_was_read_does_not_change_later():
    model = DEEP.build()
    optimizer = online(model)
    steps(model, optimizer, 2)
    seen = optimizer.basis
    kept = {name: change.dense() for name, change in seen.items()}
    steps(model, optimizer, 4, first=2)
    assert identical({name: change.dense() for name, change in seen.items()}, kept)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_low_precision_products_keep_bases_orthonormal_and_points_unchanged(precision, device):
    """With SGD no change of basis may move the point: errors would accumulate over forty renewals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48)).to(device)
    optimizer = online(model, torch.optim.SGD, egop.Online(every=1, structure=egop.Kronecker()), lr=0.0)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    inputs = torch.randn(256, 64, device=device)
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for _ in range(40):
            optimizer.zero_grad()
            model(inputs).sin().square().mean().backward()
            optimizer.step()
        for change in optimizer.basis.values():
            for vectors in change.tensors.values():
                assert orthonormality_error(vectors.double()) < 1e-5
    finally:
        torch.set_float32_matmul_precision(kept)
    rounding = {"highest": 1e-5, "high": 2e-3, "medium": 2e-2}[precision]  # of the last decoding only
    for parameter, value in zip(model.parameters(), start, strict=True):
        assert torch.linalg.vector_norm(parameter - value) <= rounding * torch.linalg.vector_norm(value)
    for block in optimizer.blocks:  # the point itself, decoded exactly
        (decoded,) = block.change.decode([coordinate.detach() for coordinate in block.coordinates])
        (value,) = [each for each in start if each.shape == decoded.shape]
        assert torch.linalg.vector_norm(decoded - value) < 1e-5 * torch.linalg.vector_norm(value)


@needs_gpu
@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_no_step_waits_for_the_device(structure):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)).cuda()
    optimizer = online(model, torch.optim.AdamW, egop.Online(every=3, structure=structure), fused=True)
    inputs = torch.randn(16, 64, device="cuda")
    for step in range(15):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        # The first step decomposes, and in the second round the renewals are recorded.
        torch.cuda.set_sync_debug_mode("error" if step > 6 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.refresher.failures == 0
    for change in optimizer.basis.values():
        assert cases.round_trip_error(change) < 1e-5


@needs_gpu
def test_replayed_renewals_equal_computed_ones():
    """For several shapes, and with NaN input."""
    replayed = GraphedFunction(eigenbases.iterate, Recorder())
    generator = torch.Generator("cuda").manual_seed(0)
    for count, size in [(1, 96), (3, 40), (1, 96), (1, 96), (3, 40), (1, 96), (3, 40)]:
        rows = torch.randn(count, 200, size, generator=generator, device="cuda")
        gram = rows.mT @ rows
        basis = torch.linalg.qr(torch.randn(count, size, size, generator=generator, device="cuda"))[0]
        for input in (gram, torch.full_like(gram, torch.nan)):
            for found, expected in zip(replayed(input, basis), eigenbases.iterate(input, basis), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert replayed(gram, basis)[1].all()
        assert not replayed(torch.full_like(gram, torch.nan), basis)[1].any()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"every": 10}, {"every": 3}), ({"every": 4, "spread": False}, {"every": 4}), ({"every": 3}, {"every": 10})],
)
def test_a_state_can_be_loaded_with_another_schedule(saved, loaded):
    """Turns beyond the new round are assigned again, and so are turns that were not spread."""
    model = DEEP.build()
    optimizer = online(model, refresh=egop.Online(**saved))
    steps(model, optimizer, 12)
    other = online(model, refresh=egop.Online(**loaded))
    other.load_state_dict(optimizer.state_dict())
    before = other.basis
    steps(model, other, 2 * loaded["every"])
    after = other.basis
    assert not any(after[name].equals(before[name]) for name in before)
    assert len(set(other.refresher.turns.values())) > 1


def test_renew_basis_before_any_step_does_nothing():
    optimizer = online(DEEP.build())
    optimizer.renew_basis()
    assert optimizer.refresher.renewals == 0


def test_the_refresher_prints_its_settings_and_counts():
    model = DEEP.build()
    optimizer = online(model, refresh=egop.Online(every=4, tolerance=0.5))
    steps(model, optimizer, 1)
    assert str(optimizer.refresher) == "Online(every=4, tolerance=0.5): 1 step, 1 renewal, 0 failures"


@pytest.mark.parametrize("options", [{"spread": False}, {"tolerance": 1e-3}], ids=str)
def test_a_step_in_which_nothing_is_due_only_updates_gram_matrices(options, monkeypatch):
    model = DEEP.build()
    optimizer = online(model, refresh=egop.Online(every=4, **options))
    steps(model, optimizer, 4)

    def refuse(*_, **__):
        raise AssertionError

    for name in ("_renew", "_find_drifted", "count_failures", "prepare", "_list_undecided"):
        monkeypatch.setattr(optimizer.refresher, name, refuse)
    for name in ("_arrange", "find_ranges"):
        monkeypatch.setattr(optimizer.refresher.grams, name, refuse)
    before = {name: gram["left"].clone() for name, gram in optimizer.refresher.grams.by_block.items()}
    steps(model, optimizer, 3, first=4)
    assert not any(torch.equal(optimizer.refresher.grams.by_block[name]["left"], gram) for name, gram in before.items())
