"""Training 2n steps equals n steps, save, new process, load, n steps: bit for bit."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
import egop
from cases import FEW_OPTIMIZERS, OptimizerCase
from egop.optimizer.state import read_about
from explicit import LAYOUTS, Explicit, Wrapped, case_and_basis, distance, identical, over_layouts_and_optimizers, train
from processes import run

STEPS = 6
ADAMW = OptimizerCase("AdamW", torch.optim.AdamW, {"lr": 0.01})
INNER = [
    *FEW_OPTIMIZERS,
    OptimizerCase("NAdam", torch.optim.NAdam, {"lr": 0.01}),
    OptimizerCase("Adam-amsgrad", torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
]


@dataclass(frozen=True)
class Resume:
    """One training that is interrupted: where, with what, and how it is taken up again."""

    layout: str
    optimizer: OptimizerCase
    dtype: torch.dtype = torch.float32
    model_first: bool = True  # or load the optimizer before the model
    with_basis: bool = False  # or make the optimizer without one, and have it from the state dict
    groups: bool = False

    def __str__(self) -> str:
        order = "model-first" if self.model_first else "optimizer-first"
        return "-".join(
            [self.layout, str(self.optimizer), str(self.dtype).removeprefix("torch."), order]
            + ["with-basis"] * self.with_basis
            + ["groups"] * self.groups
        )

    def case(self) -> cases.ModelCase:
        """Return the model and its batches in this precision."""
        case, _ = case_and_basis(self.layout)
        return cases.ModelCase(case.name, case.module, case.inputs, case.outputs, self.dtype)

    def start(self, with_basis: bool = True) -> tuple[Wrapped, torch.optim.lr_scheduler.LRScheduler]:
        """Build the model, its optimizer and a scheduler."""
        model = self.case().build()
        names = [name for name, _ in model.named_parameters()]
        groups: list[dict[str, Any]] = [{"names": names[:2], "lr": 0.03}, {"names": names[2:], "weight_decay": 0.1}]
        options = {"groups": groups} if self.groups else {}
        side = Wrapped(model, case_and_basis(self.layout)[1] if with_basis else None, self.optimizer, **options)
        return side, torch.optim.lr_scheduler.CosineAnnealingLR(side.optimizer, 2 * STEPS)

    def train(self, side: Wrapped, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Train for half of the steps."""
        for step in range(STEPS):
            train(side, self.case().batches()[step % 4 :], 1)
            scheduler.step()

    def first_half(self, path: Path) -> dict[str, torch.Tensor]:
        """Train, save, and train on: the weights to be reached again."""
        side, scheduler = self.start()
        self.train(side, scheduler)
        state = {
            "model": side.model.state_dict(),
            "optimizer": side.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        torch.save(state, path / f"{self}.half")
        self.train(side, scheduler)
        return side.weights()

    def second_half(self, path: Path) -> None:
        """Load the state in another process, continue training, and save the weights."""
        state = torch.load(path / f"{self}.half", weights_only=True)
        side, scheduler = self.start(self.with_basis)
        train(side, self.case().batches(), 2)  # whatever was before is gone after loading
        loads = [
            lambda: side.model.load_state_dict(state["model"]),
            lambda: side.optimizer.load_state_dict(state["optimizer"]),
        ]
        for load in loads if self.model_first else reversed(loads):
            load()
        scheduler.load_state_dict(state["scheduler"])
        self.train(side, scheduler)
        torch.save(side.weights(), path / f"{self}.whole")


RESUMED = [
    *[Resume(layout, optimizer) for layout in LAYOUTS for optimizer in (INNER if layout == "blocks" else INNER[:2])],
    *[Resume(layout, ADAMW, model_first=False) for layout in LAYOUTS],
    *[Resume(layout, ADAMW, dtype=torch.bfloat16, model_first=first) for layout in LAYOUTS for first in (True, False)],
    *[Resume("batched", optimizer, with_basis=True, groups=True) for optimizer in INNER],
    *[Resume("identity", optimizer, dtype=torch.float64, groups=True) for optimizer in INNER],
]


def go_on(rank, world, path):
    """Run the second half of each training in a new process."""
    for resume in RESUMED:
        resume.second_half(Path(path))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the weights after uninterrupted training, and the folder of those that a new process resumed to."""
    path = tmp_path_factory.mktemp("resumed")
    straight = {str(resume): resume.first_half(path) for resume in RESUMED}
    run(go_on, 1, str(path))
    return straight, path


@pytest.mark.parametrize("resume", RESUMED, ids=str)
def test_a_resumed_training_is_the_same_bit_for_bit(resume, resumed):
    straight, path = resumed
    weights = torch.load(path / f"{resume}.whole", weights_only=True)
    assert identical(weights, straight[str(resume)])
    assert {value.dtype for value in weights.values()} == {resume.dtype}


def halfway(layout="batched", optimizer=ADAMW):
    case, basis = case_and_basis(layout)
    side = Wrapped(case.build(), basis, optimizer)
    train(side, case.batches(), STEPS)
    return case, basis, side


@over_layouts_and_optimizers
def test_training_goes_on_from_the_models_weights_when_those_of_the_state_dict_are_others(layout, optimizer):
    case, basis, side = halfway(layout, optimizer)
    explicit = Explicit(case.build(), basis, optimizer)
    train(explicit, case.batches(), STEPS)
    other = Wrapped(case.build(), None, optimizer)
    other.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    explicit.write(other.weights())  # the moments of the one, the weights of the other
    assert distance(*(train(each, case.batches(), STEPS) for each in (other, explicit))) < 1e-10


@pytest.mark.parametrize("optimizer", FEW_OPTIMIZERS, ids=str)
def test_hyperparameters_and_basis_come_from_the_state_dict(optimizer):
    case, basis, side = halfway(optimizer=optimizer)
    side.optimizer.param_groups[0]["lr"] = 0.123
    other = egop.ReparameterizedOptimizer(case.build(), optimizer.kind, **optimizer.arguments | {"lr": 7.0})
    other.load_state_dict(side.optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.123
    assert all(torch.equal(other.basis[name].dense(), basis[name].dense()) for name in basis)


def test_the_state_dict_is_plain_data_and_tensors():
    _, basis, side = halfway()
    file = io.BytesIO()
    torch.save(side.optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    abouts = [read_about(entry) for entry in state["state"].values()]
    assert [about["block"]["name"] for about in abouts if "block" in about] == list(basis)
    assert {about["optimizer"] for about in abouts} == {"AdamW"}
    assert all(isinstance(value, torch.Tensor) for entry in state["state"].values() for value in entry.values())
    assert state["param_groups"][0]["lr"] == 0.01


@pytest.mark.parametrize("layout", ["blocks", "batched"])
def test_a_loaded_optimizer_has_bases_coordinates_and_moments_of_its_own(layout):
    case, _, side = halfway(layout)
    straight = copy.deepcopy(side)
    other = Wrapped(case.build(), None, ADAMW)
    other.model.load_state_dict(side.model.state_dict())
    state = copy.deepcopy(side.optimizer.state_dict())
    other.optimizer.load_state_dict(state)
    for entry in state["state"].values():
        for tensor in entry.values():
            tensor.detach().zero_()
    expected = train(straight, case.batches(), STEPS)
    assert identical(train(other, case.batches(), STEPS), expected)
    assert identical(train(side, case.batches(), STEPS), expected)


@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_a_state_dict_moves_on_with_the_optimizer_as_with_every_torch_optimizer(kind):
    """Its tensors are the optimizer's own; copy it to get a snapshot in memory."""
    case, _, side = halfway()
    if kind == "plain":
        side.optimizer = torch.optim.AdamW(side.model.parameters())
        train(side, case.batches(), 1)
    state = side.optimizer.state_dict()["state"]
    kept = copy.deepcopy(state)
    train(side, case.batches(), 1)
    assert not any(torch.equal(state[index]["exp_avg"], kept[index]["exp_avg"]) for index in kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_leaves_the_training_as_it_is(layout):
    case, _, side = halfway(layout)
    straight = copy.deepcopy(side)
    weights = copy.deepcopy(side.model.state_dict())
    side.model.load_state_dict({name: 0 * value for name, value in weights.items()})
    side.optimizer.state_dict()  # saved while averaged weights, say, stand in for the trained ones
    side.model.load_state_dict(weights)
    assert identical(*(train(each, case.batches(), STEPS) for each in (side, straight)))


def test_moments_lie_in_memory_as_their_parameters_do(tmp_path):
    """Fused kernels read both as one run of numbers: otherwise the moments of one weight would move another."""
    inputs = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)

    def started():
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=0.1, fused=True)

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        return cases.parameters_of(model)

    model, optimizer = started()
    steps(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "half")
    other, loaded = started()
    for each, state in zip((other, loaded), torch.load(tmp_path / "half", weights_only=True), strict=True):
        each.load_state_dict(state)
    assert loaded.inner.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    assert identical(steps(other, loaded, 3), steps(model, optimizer, 3))


@pytest.mark.parametrize("structure", [egop.Full(), egop.Shared(), egop.Kronecker()], ids=str)
def test_a_random_rotation_rounds_alike_after_a_resume(structure):
    """It comes from a decomposition whose result is stored column by column."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7)
    objective = egop.Objective(model, lambda model, x: model(x).square().mean(), [torch.randn(4, 5)])
    basis = egop.estimate(objective, structure=egop.extras.RandomRotation(like=structure), progress=False)
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.1)
    other = copy.deepcopy(model)
    loaded = egop.ReparameterizedOptimizer(other, torch.optim.AdamW, lr=0.1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(5):
        x = torch.randn(4, 5)
        for each, own in ((model, optimizer), (other, loaded)):
            own.zero_grad()
            each(x).square().mean().backward()
            own.step()
    assert identical(cases.parameters_of(model), cases.parameters_of(other))
