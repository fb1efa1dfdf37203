"""Estimation divided among processes gives the basis of one process, the same bits on all, and never hangs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import egop
from egop.basis.structures import low_rank
from egop.estimation import partition_objective, processes, sampling
from processes import run
from training import batch, loss_of, network, sharded, steps, weights

GAUSSIAN = egop.Gaussian(0.5)


def pair_loss(model, pair):
    return loss_of(model, *pair)


def data():
    return [torch.cat(each) for each in zip(*(batch(step) for step in range(5)), strict=True)]


def objective(model=None, loss=pair_loss, batches=None):
    loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)  # passes of 15 batches
    return egop.Objective(network() if model is None else model, loss, loader if batches is None else batches)


def estimated(its_objective, structure="auto", samples=None, rho=GAUSSIAN, partition="parameter", **options):
    options = {"progress": False} | options
    return egop.estimate(its_objective, rho=rho, structure=structure, samples=samples, partition=partition, **options)


def values(basis):
    """Return everything a basis consists of, as tensors."""
    found = {f"{name}/{key}": tensor for name, change in basis.items() for key, tensor in change.tensors.items()}
    for name, spectrum in basis.spectrum.items():
        found |= {f"{name}/values": spectrum.eigenvalues, f"{name}/density": spectrum.density}
        found[f"{name}/counts"] = torch.tensor(spectrum.samples, dtype=torch.float64)
    return found


def quadratic():
    """Return gradients that span 12 directions: a sketch that keeps more loses nothing."""
    matrix = torch.randn(12, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theta = torch.zeros(40, dtype=torch.float64)
    return egop.Objective.from_function(lambda theta: (matrix @ theta).square().sum() / 2, {"theta": theta})


def normed(seed):
    """Return a model whose gradients depend on buffers and on a frozen layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        model(torch.randn(20, 5).double())
    model[2].requires_grad_(False)
    return model.eval()


class Shuffled:
    """Batches in a new order on every pass, drawn from one generator."""

    def __init__(self, size, generator):
        self.size, self.generator = size, generator

    def __iter__(self):
        order = torch.randperm(len(data()[0]), generator=self.generator)
        return zip(*(tensor[order].split(self.size) for tensor in data()), strict=True)


class Zigzag(egop.Distribution):
    """A distribution that draws point by point."""

    def draw(self, its_objective, generator):
        shapes = {name: value.shape for name, value in its_objective.parameters.items()}
        return {name: torch.rand(shape, generator=generator).double() - 0.5 for name, shape in shapes.items()}


STRUCTURES = {
    "Full": (egop.Full(), 150),
    "Full of few": (egop.Full(), 21),
    "Shared": (egop.Shared(), 40),
    "Shared of few": (egop.Shared(), 1),
    "Kronecker": (egop.Kronecker(), 40),
    "Auxiliary": (egop.Auxiliary(rank=4), 30),
    "Reduced": (egop.Reduced(rank=4), 30),
    "mixed": (
        {"0.*": egop.extras.RandomRotation(), "2.*": egop.Identity(), "4.*": egop.Shared(), "*": egop.Reduced(rank=2)},
        9,
    ),
}
RHOS = {"initialisation": egop.Initialization(), "current": egop.Recentered(0.3), "one by one": Zigzag()}


def all_cases(rank, world):
    """Make every kind of estimate, by name, with points in many small groups."""
    sampling.BLOCK_POINTS = 40
    found = {name: values(estimated(objective(), *case)) for name, case in STRUCTURES.items()}
    found |= {f"from {name}": values(estimated(objective(), egop.Shared(), 93, rho)) for name, rho in RHOS.items()}
    found["loop"] = values(estimated(objective(), egop.Shared(), 10, sampling="loop"))
    found["three draws"] = values(estimated(objective(), egop.Full(), 3))
    found["one draw"] = values(estimated(objective(), egop.Full(), 1))
    # Another state, and another generator, on every process: the first one's count.
    generator = torch.Generator().manual_seed(5 + rank)
    model = normed(rank)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = objective(model)
    found["own state"] = values(estimated(other, egop.Shared(), 20, egop.Recentered(0.1), generator=generator))
    found["own state"] |= {"next": torch.rand(1, generator=generator)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Batches with a generator of their own, which two estimates go on with.
    source = Shuffled(8, torch.Generator().manual_seed(1))
    found |= {f"batches, {k}": values(estimated(objective(batches=source), egop.Shared(), 37)) for k in range(2)}
    low_rank._ROWS_BYTES = 0  # the smallest sketches: of 20 rows
    found["sketched"] = values(estimated(quadratic(), egop.Reduced(rank=5), 90))
    low_rank._ROWS_BYTES = 512 * 2**20
    found["every"], found["every, bases"] = periodic(rank, world)
    return found


def periodic(rank, world):
    """Train with a basis that is estimated again and again, first before the first step."""
    model = network() if world == 1 else DistributedDataParallel(network())
    every = egop.Every(2, objective(model), samples=11, rho=egop.Recentered(0.1), structure=egop.Shared())
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=every, lr=0.02)
    steps(model, optimizer, rank=rank, world=world)
    assert optimizer.refresher.renewals == 4
    return weights(model), values(optimizer.basis)


@pytest.fixture(scope="module")
def two():
    """Return the errors of two processes, within a minute so that a hang is noticed."""
    return run(errors, 2, timeout=60)


@pytest.fixture(scope="module")
def alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK_POINTS", sampling.BLOCK_POINTS)  # put back afterwards
        return all_cases(0, 1)


@pytest.mark.slow
def test_basis_equals_that_of_one_process_and_is_the_same_everywhere(alone):
    ranks = run(all_cases, 3)  # whose shares differ in size
    for case, tensors in alone.items():
        for found in ranks:
            assert set(found[case]) == set(tensors)
        for name, value in tensors.items():
            for found in ranks:
                assert torch.equal(found[case][name], ranks[0][case][name]), f"{case}: {name} differs between processes"
            torch.testing.assert_close(ranks[0][case][name], value, rtol=1e-10, atol=1e-10, msg=f"{case}: {name}")


class OddError(Exception):
    """An error type that egop does not know."""


def failing(where, error=None, model=None):
    """Return a loss that fails on one process in its third draw, by a nonfinite value or an error."""
    calls = []

    def loss(model, pair):
        calls.append(1)
        if processes.rank() != where or len(calls) < 3:
            return pair_loss(model, pair)
        if error is not None:
            raise error
        return pair_loss(model, pair) * torch.nan

    return objective(model, loss)


def not_converged(*_):
    raise torch.linalg.LinAlgError("did not converge")


def refused(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def errors(rank, world):
    """Return what each process reports when one of them fails."""
    shared = egop.Shared()
    block = partition_objective(objective(), "parameter")[0][0]
    found = {
        "not finite": refused(lambda: estimated(failing(1), shared, 16, sampling="loop")),
        "loss": refused(lambda: estimated(failing(0, ValueError("of mine")), shared, 16, sampling="loop")),
        "odd": refused(lambda: estimated(failing(1, OddError("strange")), shared, 16, sampling="loop")),
        "samples": refused(lambda: estimated(objective(), shared, 8 + rank)),
        "structure": refused(lambda: estimated(objective(), egop.Kronecker() if rank else shared, 8)),
        "argument": refused(lambda: estimated(objective(), "fast" if rank else shared, 8)),
        "rho": refused(lambda: estimated(objective(), shared, 8, Zigzag() if rank else GAUSSIAN)),
        "batches": refused(lambda: estimated(objective(batches=[] if rank else None), shared, 8)),
        "model": refused(lambda: estimated(objective(normed(0) if rank else None), {"0.*": shared}, 8)),
    }
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(type(shared.accumulator(block)), "finish", not_converged)
        found["decomposition"] = refused(lambda: estimated(objective(), shared, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "_ROWS_BYTES", 0)  # sketches of 20 rows: full only when they are merged
        if rank == 0:
            patch.setattr("egop.numerics.sketch.RowSketch._compress", not_converged)
        found["merge"] = refused(lambda: estimated(quadratic(), egop.Reduced(rank=5), 36))
    model = DistributedDataParallel(network())
    every = egop.Every(3, failing(1, model=model), samples=6, structure=shared)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=every, lr=0.02)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        steps(model, optimizer, rank=rank, world=world)
    assert "could not be renewed" in str(warned[0].message)
    found["renewals"] = [optimizer.refresher.renewals, optimizer.refresher.failures]
    model = network()
    found["after"] = values(estimated(objective(model), shared, 8))["0.weight/basis"]  # nothing was left behind
    assert all(torch.equal(*each) for each in zip(weights(model).values(), weights(network()).values(), strict=True))
    return found


def test_error_in_one_process_is_raised_in_all(two):
    first, second = two
    finite = "FloatingPointError: {}The loss is not finite at draw 9. The points may be too far out"
    assert second["not finite"].startswith(finite.format(""))
    assert first["not finite"].startswith(finite.format("Process 1 failed. FloatingPointError: "))
    assert first["loss"] == "ValueError: of mine"
    assert second["loss"] == "ValueError: Process 0 failed. ValueError: of mine"
    assert second["odd"] == "OddError: strange"
    assert first["odd"] == "RuntimeError: Process 1 failed. OddError: strange"
    for name, text in {
        "samples": "samples is 8 in process 0 and 9 in process 1",
        "structure": "the structures is [('0.weight', Shared(side='input')",
        "rho": "rho is 'Gaussian' in process 0 and 'Zigzag' in process 1",
        "model": "the model is [('0.weight', (7, 5), torch.float64)",
    }.items():
        assert first[name] == second[name]
        assert f"The processes were given different arguments: {text}" in first[name]
    assert second["argument"].startswith("TypeError: Invalid structure value: 'fast'")
    assert first["argument"].startswith("TypeError: Process 1 failed. TypeError: Invalid structure value: 'fast'")
    assert second["batches"].startswith("ValueError: The batches are empty")
    assert first["batches"].startswith("ValueError: Process 1 failed. ValueError: The batches are empty")
    assert second["decomposition"] == "_LinAlgError: did not converge"
    assert first["decomposition"] == "_LinAlgError: Process 1 failed. _LinAlgError: did not converge"
    assert first["merge"] == "_LinAlgError: did not converge"
    assert second["merge"] == "_LinAlgError: Process 0 failed. _LinAlgError: did not converge"
    assert first["renewals"] == second["renewals"] == [3, 3]
    alone = estimated(objective(), egop.Shared(), 8)["0.weight"].tensors["basis"]
    for found in (first, second):
        torch.testing.assert_close(found["after"], alone, rtol=1e-10, atol=1e-10)


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_process_group_of_one_changes_nothing(request):
    alone = values(estimated(objective(), egop.Full(), 20))
    request.getfixturevalue("group_of_one")
    found = values(estimated(objective(), egop.Full(), 20))
    assert set(found) == set(alone)
    assert all(torch.equal(value, alone[name]) for name, value in found.items())


@pytest.mark.usefixtures("group_of_one")
def test_objective_unwraps_a_model_for_parallel_training():
    model = network()
    parallel = DistributedDataParallel(model)
    for wrapped in (parallel, torch.compile(parallel, backend="eager")):
        assert objective(wrapped).module is model
    assert "0.weight" in objective(DistributedDataParallel(torch.compile(model, backend="eager"))).parameters


@pytest.mark.usefixtures("group_of_one")
def test_points_are_not_sampled_in_a_sharded_model():
    model = network()
    made_before = objective(model)
    sharded(model)
    for function in (lambda: objective(model), lambda: estimated(made_before, egop.Shared(), 3)):
        with pytest.raises(TypeError, match=r"'0\..*before fully_shard is called.*egop\.Online\(\)"):
            function()


@pytest.mark.parametrize(
    ("world", "rho"), [*((3, rho) for rho in (GAUSSIAN, *RHOS.values())), (100, RHOS["one by one"])]
)
def test_draw_has_the_same_point_and_batch_on_every_process(world, rho, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK_POINTS", 40)

    def drawn(share):
        generator = torch.Generator().manual_seed(2)
        chunks = sampling.sample_gradients(objective(), rho, 90, generator=generator, names=["0.weight"], share=share)
        return [gradient for chunk in chunks for gradient in chunk["0.weight"]]

    shares = [range(rank * 90 // world, (rank + 1) * 90 // world) for rank in range(world)]
    found = [gradient for share in shares for gradient in drawn(share)]
    torch.testing.assert_close(torch.stack(found), torch.stack(drawn(None)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [1, 3, 4, 7])
def test_work_is_divided_evenly(world, monkeypatch):
    monkeypatch.setattr(processes, "world_size", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        shares.append(processes.local_share(10))
    assert [draw for share in shares for draw in share] == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
