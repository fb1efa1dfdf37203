import pytest
import torch

import egop
from egop_lab.experiments import controls
from egop_lab.experiments.controls import (
    DIGITS,
    FASHION,
    LINEAR,
    ControlsExperiment,
    RandomRuns,
    VectorFactorization,
    compute_gain,
    draw_rotation,
    judge_rotation,
)
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.experiments.linear_networks import LinearNetworksExperiment
from egop_lab.experiments.tuned_experiment import Method
from egop_lab.training import batched
from egop_lab.training import linear as linear_problem
from egop_lab.training.batched import EGOP, ORIGINAL, RANDOM
from egop_lab.training.context import Context
from egop_lab.training.digits import DigitsProblem
from egop_lab.training.linear import LinearProblem
from egop_lab.training.records import Store
from egop_lab.training.tuning import TUNING
from fakes import faked

CPU = torch.device("cpu")


class Rows(batched.Problem):
    """A quartic loss of a 3 x 4 matrix, whose rows may be rotated; or of one vector."""

    def __init__(self, turn=None, flat=False):
        generator = torch.Generator().manual_seed(0)
        self.data, self.first = torch.randn(2, 9, 12, generator=generator, dtype=torch.float64).split([8, 1], dim=1)
        self.turn, self.flat = torch.eye(4, dtype=torch.float64) if turn is None else turn, flat

    def start(self):
        start = self.first[:, 0].unflatten(-1, (3, 4)) @ self.turn
        return {"weight": start.flatten(1) if self.flat else start}

    def losses(self, point, step):
        weight = point["weight"].unflatten(-1, (3, 4)) if self.flat else point["weight"]
        values = torch.einsum("tnd,trd->trn", self.data, (weight @ self.turn.mT).flatten(-2)) - 1
        return (values.square() + 0.1 * values.pow(4)).mean(-1)

    def evaluate(self, point):
        return {"loss": self.losses(point, 0)}


def rotation(size, *trials):
    return torch.linalg.qr(torch.randn(*trials, size, size, dtype=torch.float64))[0]


def curve(optimizer, problem, basis=None):
    return batched.train(problem, optimizer, [0.05, 0.01], 60, basis=basis)[0]["loss"]


def test_rotating_its_vectors_changes_nothing_for_vector_adam():
    turned = rotation(4)
    assert torch.allclose(curve("VectorAdam", Rows()), curve("VectorAdam", Rows(turned)), rtol=1e-8)
    assert not torch.allclose(curve("Adam", Rows()), curve("Adam", Rows(turned)), rtol=1e-2)


def test_no_basis_helps_vector_adam_where_the_parameter_is_one_vector():
    basis = batched.Basis(((("weight",), rotation(12, 2)),))
    assert torch.allclose(curve("VectorAdam", Rows(flat=True)), curve("VectorAdam", Rows(flat=True), basis), rtol=1e-8)
    assert not torch.allclose(curve("Adam", Rows(flat=True)), curve("Adam", Rows(flat=True), basis), rtol=1e-2)


def test_the_first_step_of_vector_adam_moves_each_vector_by_the_learning_rate():
    problem = Rows()
    leaf = problem.start()["weight"][:, None].requires_grad_()
    (gradient,) = torch.autograd.grad(problem.losses({"weight": leaf}, 0).sum(), leaf)
    rule = controls.batched.OPTIMIZERS["VectorAdam"]([leaf], torch.tensor([0.1]), torch.zeros(1), [True])
    before = leaf.detach().clone()
    rule.step([gradient])
    assert torch.allclose((leaf - before).norm(dim=-1), torch.full((2, 1, 3), 0.1, dtype=torch.float64))


def test_random_rotations_have_the_blocks_of_egop(monkeypatch):
    monkeypatch.setattr(linear_problem, "WIDTHS", (10, 5, 4, 10))
    problem = LinearProblem([3, 4], 2000, 150, torch.float64, CPU)
    basis = controls.draw_rotations(problem)
    assert [names for names, _ in basis.blocks] == [(name,) for name in linear_problem.NAMES]
    for _, v in basis.blocks:
        assert v.dtype == torch.float64
        assert torch.allclose(v.mT @ v, torch.eye(v.shape[-1], dtype=v.dtype).expand_as(v), atol=1e-10)
        assert not torch.allclose(v[0], v[1]), "each trial has its own"
    start = dict(DigitsProblem([0], CPU).network(0).named_parameters())
    weights = {name: value.detach() for name, value in start.items() if name == "2.weight"}
    partial = draw_rotation(weights, 1, {"2.weight": egop.Auxiliary(rank=5)})
    assert partial["2.weight"].kind == "Auxiliary"
    assert partial["2.weight"].tensors["basis"].shape == (320, 5)


@pytest.mark.parametrize(
    ("egops", "random", "verdict"),
    [(1e-4, 1e-2, "holds"), (1e-4, 1e-3, "does not hold"), (1e-1, 1e-1, "does not hold"), (1e-4, 1e-1, "holds")],
)
def test_a_random_rotation_may_give_less_than_half_of_the_gain(egops, random, verdict):
    losses = {ORIGINAL: {0.1: 1e-2, 0.2: float("inf")}, EGOP: {0.1: egops, 0.2: 1e-9}, RANDOM: {0.1: random, 0.2: 1e-9}}
    assert judge_rotation(DIGITS, "Adam", losses).verdict == verdict
    assert compute_gain(losses, ORIGINAL) == 0


class Toy(ControlsExperiment):
    @property
    def settings(self):
        trials = {DIGITS: 1, LINEAR: 1, FASHION: 1}
        return super().settings | {"trials": trials, "VectorAdam rates": [0.04, 0.1]}


def test_a_toy_run_does_each_control_once(tmp_path, monkeypatch):
    monkeypatch.setattr(linear_problem, "WIDTHS", (10, 5, 4, 10))
    for one in (DigitsExperiment, LinearNetworksExperiment):
        small = one().settings | {"epochs": 1, "tuning trials": 1}
        rates = {name: rates[:1] for name, rates in small["rates"].items()}
        changed = small | {"rates": rates} | ({"samples": 2000} if "samples" in small else {})
        monkeypatch.setattr(one, "settings", changed)
    monkeypatch.setattr(VectorFactorization, "run", lambda self, context: None)
    monkeypatch.setattr(Toy, "_run_fashion", lambda self, context: None)
    store = Store(tmp_path / "controls.jsonl")
    for _ in range(2):
        Toy("quick", store).run(Context(progress=False))
        assert len(store) == 2 + 2 + 2 * 2
    assert {run.config["seed"] for run in Toy("quick", store).records(optimizer="VectorAdam")} == {0, TUNING}
    assert all(run.result["final"] > 0 for run in store)


def test_vector_adam_is_tuned_as_the_others_are(tmp_path):
    def outcome(config):
        count = config["steps"] // config["record every"] + 1
        fall = 8.0 if config["lr"] == 0.1 else 1.0
        return {"excess": [10.0 ** (-fall * k / (count - 1)) for k in range(count)], "error": [0.1] * count}

    one = faked(VectorFactorization, outcome, tmp_path)
    (case,) = one.starts()
    assert one.choose_rate(case, Method("VectorAdam")) == 0.1
    assert one.steps_to(Method("VectorAdam"), 1e-4, case) == pytest.approx(500)
    assert {run.config["experiment"] for run in one.store} == {"controls"}


def test_fashion_mnist_gets_as_many_random_directions(tmp_path, monkeypatch):
    runs = object.__new__(RandomRuns)
    runs.context = Context()
    monkeypatch.setattr(RandomRuns, "start", lambda self, seed: torch.nn.Sequential(torch.nn.Linear(9, 4)))
    basis, seconds = runs.basis(5, 0)
    assert (basis["0.weight"].tensors["basis"].shape, seconds) == ((36, 5), 0.0)
    assert runs.basis(50, 0)[0]["0.weight"].kind == "Full"
