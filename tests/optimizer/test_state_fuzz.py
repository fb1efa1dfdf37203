"""A damaged state dict is refused and changes nothing, or training continues from it without an error."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import egop
from damage import WRONG
from egop.optimizer.state import ABOUT, encode_about, read_about


def build_model():
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def make_batch(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def compute_loss(model, inputs):
    return F.mse_loss(model(inputs), inputs[:, :2].sin())


def estimate_basis(model, structure):
    objective = egop.Objective(model, compute_loss, [make_batch(99)])
    return egop.estimate(objective, structure=structure, samples=4, progress=False)


def wrap(optimizer_class, structure=None, **options):
    """Return a function that makes an optimizer of a model."""

    def make(model):
        basis = None if structure is None else estimate_basis(model, structure)
        return egop.ReparameterizedOptimizer(model, optimizer_class, basis, **options)

    return make


OPTIMIZERS = {
    "EGOP": lambda model: egop.EGOP(model, lr=0.01, every=2),
    "AdamW": wrap(torch.optim.AdamW, egop.Full(), lr=0.01, amsgrad=True),
    "Adam": wrap(torch.optim.Adam, refresh=egop.Online(every=2, structure=egop.Kronecker())),
    "SGD": wrap(torch.optim.SGD, egop.Reduced(rank=3), lr=0.01, momentum=0.9),
    "Adagrad": wrap(torch.optim.Adagrad, refresh=egop.Online(every=2, tolerance=0.01), lr=0.01),
    "Sinkhorn": wrap(egop.optim.Sinkhorn, refresh=egop.Aligned(), lr=0.01, outside=torch.optim.RMSprop),
}


def train(model, optimizer, first, steps):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        compute_loss(model, make_batch(step)).backward()
        optimizer.step()


def mutate(state, generator):
    """Return a copy of a state dict with one value removed, renamed or replaced, and what was done."""
    state = copy.deepcopy(state)
    place, key = state, generator.choice(["state", "state", "param_groups"])
    for _ in range(generator.choice([1, 2, 2, 2, 2, 2])):
        if not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place = place[key]
        key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if key == ABOUT and generator.random() < 0.8:
        about = read_about(place)
        part = generator.choice([about, about.get("block", about)])
        done = mutate_value(part, generator.choice(sorted(part)), generator)
        place[ABOUT] = encode_about(about)
        return state, f"{ABOUT}: {done}"
    return state, mutate_value(place, key, generator)


def mutate_value(place, key, generator):
    """Change one value of a dict or list; return what was done."""
    value = place[key]
    kinds = ["remove", "replace", "replace"] + ["rename"] * isinstance(place, dict)
    kinds += ["tensor"] * 5 * isinstance(value, torch.Tensor) + ["length"] * 2 * isinstance(value, (list, tuple))
    kind = generator.choice(kinds)
    if kind == "remove":
        place.pop(key)
        return f"{key!r} removed"
    if kind == "rename":
        place["other"] = place.pop(key)
        return f"{key!r} renamed"
    if kind == "replace":  # with few iterations, which are carried out
        place[key] = generator.choice([3] if key == "iterations" else [*WRONG, float("inf"), (0.5, 2.0)])
    elif kind == "length":
        place[key] = generator.choice([value[:-1], value + value])
    else:
        place[key] = mutate_tensor(value, generator)
    return f"{key!r} is {place[key]!r:.200}"


def mutate_tensor(value, generator):
    flat = value.reshape(-1)
    dtype = generator.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64])
    changes = {
        "shorter": lambda: flat[:-1],
        "longer": lambda: torch.cat([flat, flat]),
        "empty": lambda: flat[:0],
        "deeper": lambda: value.unsqueeze(0),
        "transposed": lambda: value.mT if value.dim() > 1 else -value.to(torch.int64),
        "cast": lambda: value.to(dtype),
        "nan": lambda: torch.full_like(value, float("nan"), dtype=torch.float32),
        "list": value.tolist,
        "sparse": lambda: value.to_sparse() if value.dim() else value,
    }
    return changes[generator.choice(sorted(changes))]()


def take_snapshot(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict(), optimizer.basis.encode(model.state_dict())])


def is_equal(one, other):
    """Return True if two nested values hold the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return one == other


def check_mutations(make, count, seed):
    """Load mutated state dicts; return how many were refused."""
    generator, refused = random.Random(seed), 0
    model = build_model()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    state, target = copy.deepcopy(optimizer.state_dict()), None
    for _ in range(count):
        mutated, done = mutate(state, generator)
        if target is None:
            model = build_model()
            target = make(model)
            train(model, target, 7, 2)
            before = take_snapshot(model, target)
        try:
            target.load_state_dict(mutated)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert "state dict" in message, done
            assert is_equal(take_snapshot(model, target), before), f"{done}: changed although refused"
            continue
        try:
            train(model, target, 3, 3)
            target.state_dict()
        except Exception as error:
            raise AssertionError(f"{done}: accepted, and then {type(error).__name__}: {error}") from error
        target = None
    return refused


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_state_dict_is_refused_or_training_continues(name):
    assert 10 < check_mutations(OPTIMIZERS[name], 40, seed=1) < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_many_mutated_state_dicts_are_refused_or_training_continues(name):
    assert check_mutations(OPTIMIZERS[name], 500, seed=2) > 200
