"""Random sequences of all that people and frameworks do to an optimizer: a resumed copy always goes on bit for bit."""

from __future__ import annotations

import copy
import functools
import gc
import random

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import egop

SEQUENCES, LENGTH, PARTS = 240, 6, 2


class Net(nn.Module):
    """Three small layers; the last one joins the training when a group is added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.late(torch.tanh(self.second(torch.tanh(self.first(x)))))


@functools.cache
def basis_of(structure, dtype, seed):
    """Estimate a basis of the first two layers for a loss unrelated to the model's."""
    tensors = {"first.weight": torch.zeros(4, 3, dtype=dtype), "second.weight": torch.zeros(2, 4, dtype=dtype)}
    objective = egop.Objective.from_function(lambda **values: sum((v**2).sum() for v in values.values()), tensors)
    generator = torch.Generator().manual_seed(seed)
    options = {"rho": egop.Gaussian(), "samples": 5, "partition": "parameter", "generator": generator}
    return egop.estimate(objective, structure=structure, progress=False, **options)


class Run:
    """A training to which anything may happen."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.steps, self.grown = dice, 0, False
        self.kind, self.arguments = dice.choice(
            [
                (torch.optim.AdamW, {"lr": 0.01}),
                (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
                (torch.optim.Adagrad, {"lr": 0.05}),
                (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
            ]
        )
        self.structure = dice.choice([egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=2)])
        online = egop.Online(every=2, spread=dice.random() < 0.5, structure=self.structure)
        refreshes = [None, online, egop.Online(every=2, tolerance=0.1, structure=self.structure)]
        self.refresh = dice.choice(refreshes[: 1 if isinstance(self.structure, egop.Auxiliary) else 3])
        self.given = self.refresh is None and dice.random() < 0.8
        self.dtype = dice.choice([torch.float64, torch.float32, torch.bfloat16])
        self.model, self.optimizer = self.fresh()

    def fresh(self):
        """Return a new model and optimizer, with the second parameter group if it has been added by now."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Net().to(self.dtype)
        early = [(name, each) for name, each in model.named_parameters() if not name.startswith("late")]
        basis = self.basis(0) if self.given else None
        optimizer = egop.ReparameterizedOptimizer(early, self.kind, basis, refresh=self.refresh, **self.arguments)
        if self.grown:
            optimizer.add_param_group(self.late_group(model))
        return model, optimizer

    def late_group(self, model):
        """Return the parameter group that is added."""
        return {"params": [(f"late.{name}", each) for name, each in model.late.named_parameters()], "lr": 0.02}

    def basis(self, seed):
        """Return a basis of the first two layers."""
        return basis_of(self.structure, self.dtype, seed)

    # --- what may happen ---

    def step(self):
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(self.dtype)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def save_and_load(self):
        weights, state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        frozen = [name for name, each in self.model.named_parameters() if not each.requires_grad]
        self.model, self.optimizer = self.fresh()
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        loads = [lambda: self.model.load_state_dict(weights), lambda: self.optimizer.load_state_dict(state)]
        self.dice.shuffle(loads)
        for load in loads:
            load()

    def look(self):
        get_optimizer_state_dict(self.model, self.optimizer)

    def look_and_load(self):
        state = copy.deepcopy(get_optimizer_state_dict(self.model, self.optimizer))
        set_optimizer_state_dict(self.model, self.optimizer, state)

    def replace(self):
        name, old = self.dice.choice(list(self.model.named_parameters()))
        module, _, own = name.rpartition(".")
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        setattr(self.model.get_submodule(module), own, new)
        for group in self.optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]

    def freeze(self):
        self.dice.choice(list(self.model.parameters())[:4]).requires_grad_(False)

    def unfreeze(self):
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)

    def grow(self):
        if not self.grown:
            self.optimizer.add_param_group(self.late_group(self.model))
            self.grown = True

    def rebase(self):
        if self.optimizer.blocks:
            names = {block.name for block in self.optimizer.blocks}
            basis = self.basis(self.dice.randrange(1, 4))
            if names <= basis.keys():
                self.optimizer.rebase(basis, moments="reset" if names < basis.keys() else "rotate")

    def copied(self):
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))

    def peek(self):
        self.optimizer.state.items()

    ACTIONS = (
        step,
        step,
        step,
        save_and_load,
        look,
        look_and_load,
        replace,
        freeze,
        unfreeze,
        grow,
        rebase,
        copied,
        peek,
    )


def outcome(run):
    """Return everything that training continues from."""
    found = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    for index, entry in run.optimizer.state_dict()["state"].items():
        found |= {f"{index} {key}": value.clone() for key, value in entry.items() if isinstance(value, torch.Tensor)}
    return found


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(torch.nan_to_num(value.double()), torch.nan_to_num(other[key].double()))
        for key, value in one.items()
    )


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """Exempt existing objects from garbage collection: torch's tools run it often, which is slow after many tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_resumed_copy_goes_on_bit_for_bit(part):
    for number in range(part * SEQUENCES // PARTS, (part + 1) * SEQUENCES // PARTS):
        dice = random.Random(number)
        run, done = Run(dice), []
        for _ in range(LENGTH):
            action = dice.choice(Run.ACTIONS)
            done.append(action.__name__)
            action(run)
        other = copy.copy(run)
        other.model, other.optimizer = run.model, run.optimizer
        other.save_and_load()
        for _ in range(2):
            run.step()
            other.step()
        assert same(outcome(run), outcome(other)), (number, run.kind, run.structure, run.refresh, run.dtype, done)
