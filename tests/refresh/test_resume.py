"""A refresh resumes bit for bit at every phase, also in a new process."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import cases
import egop
from cases import MLP, OptimizerCase
from explicit import identical, logistic
from processes import run

PERIOD, STEPS = 3, 8
ADAM = OptimizerCase("Adam", torch.optim.Adam, {"lr": 0.01})
MOMENTUM = OptimizerCase("SGD-momentum", torch.optim.SGD, {"lr": 0.02, "momentum": 0.9})
DROPPING = egop.Reduced(rank=3, keep_rest=False)


@dataclass(frozen=True)
class Resume:
    """A run that is interrupted after some steps."""

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
            "drifted": lambda: egop.Online(every=PERIOD, tolerance=0.05, decay=0.7, structure=self.structure),
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
        """Build everything again, load the saved state and finish the run."""
        model, optimizer = self.start(given=False)
        self.train(model, optimizer, 0, 2)  # loading must replace this
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.train(model, optimizer, self.after, STEPS)
        return outcome(model, optimizer)


def outcome(model, optimizer):
    """Collect the final weights, bases, moments and counts."""
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
    *[Resume(kind, given=given) for kind in ("Every", "Online", "drifted") for given in (False, True)],
    *[Resume("Every", structure) for structure in cases.STRUCTURES if structure != egop.Kronecker()],
    *[Resume("Online", structure, MOMENTUM) for structure in (egop.Full(), egop.Shared())],
    *[Resume(kind, dtype=torch.bfloat16) for kind in ("Every", "Online")],
]
# All phases for the first case of each refresh. The others are interrupted before any step and between two renewals.
INTERRUPTED = [
    replace(case, after=phase) for case in CASES for phase in (PHASES if case == Resume(case.kind) else (0, PERIOD + 1))
]


def go_on(rank, world, folder):
    """Finish the interrupted runs in a new process."""
    for each in INTERRUPTED:
        half = torch.load(Path(folder) / f"{each}.half", weights_only=True)
        torch.save(each.finish(half), Path(folder) / f"{each}.whole")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the results of uninterrupted runs, and the folder with the saved states and the resumed results."""
    path = tmp_path_factory.mktemp("refreshed")
    straight = {}
    for case in CASES:
        model, optimizer = case.start(case.given)
        for phase in range(STEPS):
            interrupted = replace(case, after=phase)
            if interrupted in INTERRUPTED:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, path / f"{interrupted}.half")
            case.train(model, optimizer, phase, phase + 1)
        straight[str(case)] = outcome(model, optimizer)
    run(go_on, 1, str(path))
    return straight, path


@pytest.mark.parametrize("case", INTERRUPTED, ids=str)
def test_a_resumed_run_is_bit_identical(case, saved):
    straight, path = saved
    found = torch.load(path / f"{case}.whole", weights_only=True)
    expected = straight[str(replace(case, after=0))]
    assert expected["counts"][1] >= 2  # bases were renewed
    assert identical(found, expected)


def test_a_basis_that_dropped_the_rest_is_not_dropped_again_while_loading():
    """A second projection would change the last bits."""
    case = Resume("Every", DROPPING)
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 2)
    other, loaded = case.start(given=False)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert identical(cases.parameters_of(other), cases.parameters_of(model))


DAMAGES = ["egop/clock", "egop/about", "egop/refresh/phase", "egop/refresh/gram/left", "egop/coordinates/0"]


@pytest.mark.parametrize("missing", [*DAMAGES, "param_groups", "state"])
@pytest.mark.parametrize("places", ["first", "all"])
def test_a_damaged_state_dict_changes_nothing(missing, places):
    case = Resume("Online")
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 4)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 99.0
    for entry in state["state"].values():
        entry["egop/clock"] = torch.tensor([99, 9, 9, 1])
    for entry in list(state["state"].values())[: 1 if places == "first" else None]:
        entry.pop(missing, None)
    state.pop(missing, None)
    other, loaded = case.start(given=False)
    case.train(other, loaded, 0, 3)
    twin, straight = copy.deepcopy((other, loaded))
    with pytest.raises(ValueError, match=r"damaged|not a state dict of"):
        loaded.load_state_dict(state)
    assert loaded.param_groups[0]["lr"] == 0.01
    assert loaded.refresher.counts() == straight.refresher.counts()
    case.train(other, loaded, 3, 8)
    case.train(twin, straight, 3, 8)
    assert identical(outcome(other, loaded), outcome(twin, straight))


def test_loading_copies_the_running_means():
    case = Resume("Online")
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, 2)
    other, loaded = case.start(given=False)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    kept = {key: gram.clone() for key, gram in optimizer.refresher.grams.by_block["0.weight"].items()}
    case.train(other, loaded, 2, 5)
    assert identical(optimizer.refresher.grams.by_block["0.weight"], kept)


# --- states loaded with another refresh ---


def saved_by(kind, structure=None, after=4):
    """Return the state of a run with this refresh, or of one without a refresh in a basis of this structure."""
    structure = structure or egop.Kronecker()
    if kind is None:
        model = MLP.build()
        basis = cases.estimate(egop.Objective(model, logistic, MLP.batches()), structure=structure, samples=8)
        return egop.ReparameterizedOptimizer(model, torch.optim.Adam, basis, lr=0.01).state_dict()
    case = Resume(kind, structure)
    model, optimizer = case.start(given=False)
    case.train(model, optimizer, 0, after)
    return optimizer.state_dict()


def plain():
    return egop.ReparameterizedOptimizer(MLP.build(), torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(("kind", "after"), [("Online", 4), ("Every", 4), ("drifted", 0)])
def test_loading_renewed_bases_without_a_refresh_warns(kind, after):
    state, optimizer = saved_by(kind, after=after), plain()
    with pytest.warns(UserWarning, match="This optimizer has no refresh=, so they stay fixed") as caught:
        optimizer.load_state_dict(state)
    assert [warning.filename for warning in caught] == [__file__]


def test_bases_that_the_refresh_cannot_renew_are_refused():
    _, optimizer = Resume("Online").start(given=False)
    with pytest.raises(ValueError, match="Online cannot renew bases of structure Reduced"):
        optimizer.load_state_dict(saved_by(None, egop.Reduced(rank=3)))


FITTING = [("Online", "auto"), ("Online", egop.Shared()), ("drifted", egop.Kronecker()), ("Every", egop.Kronecker())]


@pytest.mark.parametrize("kind", [None, "Online"])
def test_loading_bases_that_fit_the_refresh_does_not_warn(kind):
    optimizers = [plain()] * (kind is None)
    optimizers += [Resume(name, structure).start(given=False)[1] for name, structure in FITTING]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in optimizers:
            optimizer.load_state_dict(saved_by(kind))


def test_every_renews_bases_learnt_online():
    model, optimizer = Resume("Every").start(given=False)
    optimizer.load_state_dict(saved_by("Online"))
    before = {name: change.dense() for name, change in optimizer.basis.items()}
    Resume("Every").train(model, optimizer, 4, 4 + PERIOD)
    assert not any(torch.equal(change.dense(), before[name]) for name, change in optimizer.basis.items())


def test_online_refuses_a_state_without_gram_matrices():
    _, optimizer = Resume("Online").start(given=False)
    with pytest.raises(ValueError, match="saved with another refresh: it has no Gram matrices"):
        optimizer.load_state_dict(saved_by("Every"))
