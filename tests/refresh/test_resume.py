"""A refresh survives save and resume at every phase, bit for bit, also in a new process.

Run as a program, this file is that new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import cases
import egop
from cases import MLP, OptimizerCase
from explicit import identical, logistic

PERIOD, STEPS = 3, 8
ADAM = OptimizerCase("Adam", torch.optim.Adam, {"lr": 0.01})
MOMENTUM = OptimizerCase("SGD-momentum", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9})
DROPPING = egop.Reduced(3, keep_rest=False)


@dataclass(frozen=True)
class Resume:
    """One training, interrupted after some steps."""

    kind: str
    structure: egop.Structure = egop.Kronecker()  # noqa: RUF009 - frozen
    optimizer: OptimizerCase = ADAM
    given: bool = False
    after: int = 0
    dtype: torch.dtype = torch.float64

    def __str__(self):
        start = "given" if self.given else "none"
        return f"{self.kind}-{self.structure}-{self.optimizer}-{start}-{self.dtype}-{self.after}"

    def case(self):
        return replace(MLP, dtype=self.dtype)

    def start(self, given):
        model = self.case().build()
        objective = egop.Objective(model, logistic, self.case().batches())
        refresh = {
            "Every": lambda: egop.Every(PERIOD, objective, samples=8, structure=self.structure),
            "Online": lambda: egop.Online(every=PERIOD, decay=0.7, structure=self.structure),
            "WhenDrifted": lambda: egop.WhenDrifted(
                check_every=PERIOD, tolerance=0.05, decay=0.7, structure=self.structure
            ),
        }[self.kind]()
        basis = cases.estimate(objective, structure=self.structure, samples=8) if given else None
        return model, egop.ReparameterizedOptimizer(
            model, self.optimizer.kind, basis, refresh=refresh, **self.optimizer.arguments
        )

    def train(self, model, optimizer, first, last):
        batches = self.case().batches()
        for step in range(first, last):
            optimizer.zero_grad()
            logistic(model, batches[step % 4]).backward()
            optimizer.step()

    def finish(self, state):
        """In another place: everything anew, then what was saved."""
        model, optimizer = self.start(given=False)
        self.train(model, optimizer, 0, 2)  # whatever was before is gone after loading
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.train(model, optimizer, self.after, STEPS)
        return outcome(model, optimizer)


def outcome(model, optimizer):
    """The weights, the bases, the moments and the counts at the end."""
    found = cases.parameters_of(model)
    for block in optimizer.blocks:
        name = block.change.block.name
        found |= {f"{name}/{key}": tensor for key, tensor in block.change.tensors.items()}
        for i, coordinate in enumerate(block.coordinates):
            found |= {f"{name}/{i}": coordinate.detach()}
            found |= {f"{name}/{i}/{key}": value for key, value in optimizer.inner.state[coordinate].items()}
    refresher = optimizer.refresher
    return found | {"counts": torch.tensor([refresher.steps, refresher.renewals, refresher.failures])}


PHASES = range(PERIOD + 3)  # before any step, and at every offset of a period
CASES = [
    *[Resume(kind, given=given) for kind in ("Every", "Online", "WhenDrifted") for given in (False, True)],
    *[Resume("Every", structure) for structure in cases.STRUCTURES if structure != egop.Kronecker()],
    *[Resume("Online", structure, MOMENTUM) for structure in (egop.Full(), egop.Shared())],
    *[Resume(kind, dtype=torch.bfloat16) for kind in ("Every", "Online")],
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What straight training came to, and the folder with what was saved at each phase and gone on with elsewhere."""
    path = tmp_path_factory.mktemp("refreshed")
    straight = {}
    for case in CASES:
        model, optimizer = case.start(case.given)
        for phase in range(STEPS):
            if phase in PHASES:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, path / f"{replace(case, after=phase)}.half")
            case.train(model, optimizer, phase, phase + 1)
        straight[str(case)] = outcome(model, optimizer)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, path], check=True, env=environment)
    return straight, path


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_training_is_the_same_bit_for_bit(case, phase, saved):
    straight, path = saved
    found = torch.load(path / f"{replace(case, after=phase)}.whole", weights_only=True)
    expected = straight[str(case)]
    assert expected["counts"][1] >= 2  # bases were renewed
    assert identical(found, expected)


def test_a_basis_that_dropped_the_rest_is_not_dropped_again_while_loading():
    """Projecting what is already projected would change its last bits."""
    case = Resume("Every", DROPPING)
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 2)
    other, loaded = case.start(given=False)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert identical(cases.parameters_of(other), cases.parameters_of(model))


def test_a_state_dict_that_is_damaged_leaves_the_refresh_as_it_was():
    case = Resume("Online")
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 4)
    state = optimizer.state_dict()
    state["egop"]["refresh"] = {"steps": 99, "renewals": 9, "failures": 9}
    _, other = case.start(given=False)
    with pytest.raises(ValueError, match="incomplete or damaged"):
        other.load_state_dict(state)
    assert (other.refresher.steps, other.refresher.renewals, other.refresher.failures) == (0, 0, 0)
    assert len(other.basis) == 0


def test_a_copy_of_the_running_means_is_loaded():
    case = Resume("Online")
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 2)
    other, loaded = case.start(given=False)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    kept = {key: gram.clone() for key, gram in optimizer.refresher.grams["0.weight"].items()}
    case.train(other, loaded, 2, 5)
    assert identical(optimizer.refresher.grams["0.weight"], kept)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for each in CASES:
        for interrupted in (replace(each, after=phase) for phase in PHASES):
            half = torch.load(folder / f"{interrupted}.half", weights_only=True)
            torch.save(interrupted.finish(half), folder / f"{interrupted}.whole")
