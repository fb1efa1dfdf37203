"""Runs of optimizers that cannot be stacked: they minimise, are annealed, and end well."""

import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytest.importorskip("pytorch_optimizer")

from egop_lab.methods import SMALL
from egop_lab.training import batched


class Valley(batched.Problem):
    """½‖A W B‖² with badly scaled A and B: its Hessian is a Kronecker product."""

    def start(self):
        return {"W": torch.ones(1, 4, 3, dtype=torch.float64)}

    def losses(self, point, step):
        left = torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)[:, None]
        return 0.5 * (left * point["W"]).square().sum((-2, -1))

    def evaluate(self, point):
        return {"loss": self.losses(point, 0), "size": point["W"].norm(dim=(-2, -1))}


NAMES = list(SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline_minimises(name):
    found, seconds = batched.train_single(Valley(), name, 0.05, 60, record_every=25)
    assert {key: len(curve) for key, curve in found.items()} == {"loss": 4, "size": 4}
    assert found["loss"][-1] < 0.5 * found["loss"][0]
    assert seconds > 0


def test_shampoo_is_what_its_paper_says():
    found, _ = batched.train_single(Valley(), "Shampoo", 0.1, 1)
    weight = torch.ones(4, 3, dtype=torch.float64)
    gradient = torch.tensor([1.0, 0.3, 0.1, 0.03], dtype=torch.float64)[:, None] ** 2 * weight

    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix + 1e-6 * torch.eye(len(matrix), dtype=torch.float64))
        return vectors * values**-0.25 @ vectors.mT

    stepped = weight - 0.1 * root(gradient @ gradient.mT) @ gradient @ root(gradient.mT @ gradient)
    expected = Valley().losses({"W": stepped[None, None]}, 0).item()
    assert found["loss"][1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_the_learning_rate_is_annealed_step_by_step(name):
    rates = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    batched.train_single(Valley(), name, 0.1, 4, cosine=True, record_every=2)
    handle.remove()
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(4)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_diverges_ends_with_nan_and_keeps_its_length(name):
    found, _ = batched.train_single(Valley(), name, 1e200, 20, record_every=5)
    assert len(found["loss"]) == 5
    assert not math.isfinite(found["loss"][-1])
