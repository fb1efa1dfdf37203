"""Stacked runs are the same as runs one at a time, in original and in EGOP coordinates."""

import pytest
import torch

import egop
from egop_lab.builders import TORCH
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.instances import Trials

SEEDS = [3, 8]
RATES = [0.01, 0.002]


class Quartic(Trials):
    """Two parameters, each with a curved, coupled loss of its own per trial."""

    samples = 40

    def __init__(self, seeds):
        self.seeds = list(seeds)
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        self.data = torch.stack([torch.randn(8, 7, generator=g, dtype=torch.float64) for g in generators])
        self.first = torch.stack([torch.randn(7, generator=g, dtype=torch.float64) for g in generators])

    def single_trial(self, seed):
        return type(self)([seed])

    def start(self):
        return {"matrix": self.first[:, :4].unflatten(-1, (2, 2)), "vector": self.first[:, 4:]}

    def losses(self, point, step):
        whole = torch.cat([point["matrix"].flatten(-2), point["vector"]], dim=-1)
        values = torch.einsum("tnd,trd->trn", self.data, whole) - 1 - 0.1 * (step % 3)
        return (values.square() + 0.1 * values.pow(4)).mean(-1)

    def evaluate(self, point):
        return {"loss": self.losses(point, 0), "first": point["matrix"][..., 0, 0]}


def one_at_a_time(optimizer, seed, rate, steps, basis=None, cosine=False, **options):
    problem = Quartic([seed])
    leaves = {name: torch.nn.Parameter(value[0].clone()) for name, value in problem.start().items()}
    kind, own = TORCH[optimizer]
    biases = {"weight_decay": 0.0} if optimizer == "AdamW" else {}
    if basis is None:
        groups = [{"params": [leaves["matrix"]]}, {"params": [leaves["vector"]], **biases}]
        stepper = kind(groups, lr=rate, **own, **options)
    else:
        groups = [{"params": [("matrix", leaves["matrix"])]}, {"params": [("vector", leaves["vector"])], **biases}]
        stepper = egop.ReparameterizedOptimizer(groups, kind, basis, lr=rate, **own, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, steps) if cosine else None

    def point():
        return {name: value[None, None] for name, value in leaves.items()}

    curve = [problem.evaluate(point())["loss"].item()]
    for step in range(steps):
        stepper.zero_grad()
        problem.losses(point(), step).sum().backward()
        stepper.step()
        if schedule is not None:
            schedule.step()
        curve.append(problem.evaluate(point())["loss"].item())
    return curve


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adagrad", "SGD", "SGD+momentum"])
def test_stacked_runs_are_the_runs_one_at_a_time(optimizer):
    found, _ = batched.train(Quartic(SEEDS), optimizer, RATES, 30)
    for row, seed in enumerate(SEEDS):
        for column, rate in enumerate(RATES):
            expected = one_at_a_time(optimizer, seed, rate, 30)
            assert found["loss"][row, column].tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "SGD", "SGD+momentum"])
def test_in_egop_coordinates_they_are_those_of_the_optimizer(optimizer):
    problem = Quartic(SEEDS)
    found, _ = batched.train(problem, optimizer, RATES, 30, basis=problem.basis(EGOP))
    for row, seed in enumerate(SEEDS):
        basis = egop.estimate(
            problem.objective(seed),
            rho=egop.Gaussian(),
            partition="parameter",
            structure=egop.Full(),
            samples=problem.samples,
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )
        for column, rate in enumerate(RATES):
            expected = one_at_a_time(optimizer, seed, rate, 30, basis)
            assert found["loss"][row, column].tolist() == pytest.approx(expected, rel=1e-10)


def test_coordinates_change_adam_but_not_sgd():
    problem = Quartic(SEEDS)
    turned = problem.basis(EGOP)
    assert problem.basis(ORIGINAL) is None
    for optimizer, same in (("Adam", False), ("SGD", True)):
        one, other = (batched.train(problem, optimizer, RATES, 20, basis=b)[0]["loss"] for b in (None, turned))
        assert torch.allclose(one, other, rtol=1e-9) == same


def test_every_run_has_its_own_weight_decay():
    decays = [0.5, 0.1]
    found, _ = batched.train(Quartic(SEEDS), "AdamW", RATES, 30, weight_decays=decays)
    for column, (rate, decay) in enumerate(zip(RATES, decays, strict=True)):
        expected = one_at_a_time("AdamW", SEEDS[0], rate, 30, weight_decay=decay)
        assert found["loss"][0, column].tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("structure", [egop.Auxiliary(rank=2), egop.Reduced(rank=2)])
def test_with_leading_directions_they_are_those_of_the_optimizer(structure, optimizer):
    problem = Quartic(SEEDS)
    bases = [
        egop.estimate(problem.objective(seed), rho=egop.Gaussian(), partition="parameter", structure=structure,
                      samples=9, generator=torch.Generator().manual_seed(seed), progress=False)
        for seed in SEEDS
    ]  # fmt: skip
    found, _ = batched.train(problem, optimizer, RATES, 30, basis=batched.Basis.stack(bases))
    for row, (seed, basis) in enumerate(zip(SEEDS, bases, strict=True)):
        for column, rate in enumerate(RATES):
            expected = one_at_a_time(optimizer, seed, rate, 30, basis)
            assert found["loss"][row, column].tolist() == pytest.approx(expected, rel=1e-10)


def test_bases_of_other_kinds_are_not_stacked():
    objective = Quartic(SEEDS).objective(SEEDS[0])
    shared = {"matrix": egop.Shared(), "vector": egop.Full()}
    basis = egop.estimate(
        objective, rho=egop.Gaussian(), partition="parameter", structure=shared, samples=9, progress=False
    )
    with pytest.raises(ValueError, match="Shared blocks cannot be stacked"):
        batched.Basis.stack([basis])


def test_the_schedule_can_go_step_by_step_whatever_is_recorded():
    schedule = batched.cosine(30)
    found, _ = batched.train(Quartic(SEEDS), "Adam", RATES, 30, schedule=schedule, schedule_every=1, record_every=10)
    expected = one_at_a_time("Adam", SEEDS[1], RATES[0], 30, cosine=True)
    assert found["loss"][1, 0].tolist() == pytest.approx(expected[::10], rel=1e-10)


def test_the_schedule_goes_with_the_records_by_default():
    seen = []
    batched.train(Quartic(SEEDS), "SGD", [0.0], 25, schedule=lambda done: seen.append(done) or 1.0, record_every=10)
    assert seen == [0, 1, 2]


class Drawn(Quartic):
    """Batches are tensors of two shapes."""

    def batch(self, step):
        rows = 8 if step % 4 else 5
        orders = [torch.randperm(8, generator=torch.Generator().manual_seed(seed + step))[:rows] for seed in self.seeds]
        return torch.stack(orders).to(self.data.device)

    def losses(self, point, batch):
        whole = torch.cat([point["matrix"].flatten(-2), point["vector"]], dim=-1)
        data = self.data.gather(1, batch[..., None].expand(-1, -1, 7))
        return (torch.einsum("tnd,trd->trn", data, whole) - 1).square().mean(-1)

    def evaluate(self, point):
        return {"loss": self.losses(point, torch.arange(8, device=self.data.device).expand(len(self.seeds), 8))}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("optimizer", list(batched.OPTIMIZERS))
def test_replayed_steps_are_the_steps_taken_one_by_one(optimizer, turned):
    problem = Drawn(SEEDS)
    problem.data, problem.first = problem.data.cuda(), problem.first.cuda()
    turns = torch.linalg.qr(torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    basis = batched.Basis(((("matrix",), turns.cuda()),)) if turned else None
    replayed, plain = (
        batched.train(problem, optimizer, RATES, 40, basis=basis, schedule=batched.cosine(4), record_every=10, graphs=g)
        for g in (True, False)
    )
    assert torch.allclose(replayed[0]["loss"], plain[0]["loss"], rtol=1e-10)


def test_what_is_recorded_begins_with_the_start_and_ends_with_the_last_step():
    every, _ = batched.train(Quartic(SEEDS), "Adam", RATES, 25)
    some, seconds = batched.train(Quartic(SEEDS), "Adam", RATES, 25, record_every=10)
    assert every["loss"].shape == (2, 2, 26)
    assert torch.equal(some["loss"], every["loss"][..., [0, 10, 20, 25]])
    assert torch.equal(some["first"][:, 0, 0], Quartic(SEEDS).start()["matrix"][:, 0, 0])
    assert seconds > 0


@pytest.mark.parametrize("turned", [False, True])
def test_a_rate_that_diverges_does_not_touch_the_others(turned):
    problem = Quartic(SEEDS)
    basis = problem.basis(EGOP) if turned else None
    with_it, _ = batched.train(problem, "SGD", [0.01, 1e6, 0.002], 30, basis=basis)
    without, _ = batched.train(problem, "SGD", RATES, 30, basis=basis)
    assert not with_it["loss"][:, 1, -1].isfinite().any()
    assert torch.allclose(with_it["loss"][:, [0, 2]], without["loss"], rtol=1e-12)
