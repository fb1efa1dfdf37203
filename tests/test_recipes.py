"""EGOP: PolarAdam in an online basis, and AdamW for the rest."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from explicit import identical

LR, DECAY, BETAS = 0.01, 0.1, (0.8, 0.9)


class Network(nn.Module):
    """A network with a stem, an embedding, layers, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.stem = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.stem(self.embedding(tokens).mT).mT
        return self.head(x + self.down(self.up(self.norm(x)).tanh()))


ROTATED = ["stem.weight", "up.weight", "down.weight"]
LEFT = {"embedding.weight": "an embedding", "head.weight": "the output head"}


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().double()


def backward(model, step):
    tokens = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(model, optimizer, first=0, last=7):
    for step in range(first, last):
        backward(model, step)
        optimizer.step()
    return cases.parameters_of(model)


def written_out(params, *, model=None, outside=(), **options):
    """Combine the parts of EGOP by hand."""
    settings = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "eps": 1e-6} | options
    return egop.ReparameterizedOptimizer(
        params,
        egop.optim.PolarAdam,
        refresh=egop.Online(every=2, structure=egop.Shared(side="smaller"), spread=False),
        outside=(torch.optim.AdamW, {key: settings[key] for key in ("betas", "eps")} | dict(outside)),
        model=model,
        **settings,
    )


def one_line(params, **options):
    settings = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "eps": 1e-6, "every": 2} | options
    return egop.EGOP(params, **settings)


def test_egop_equals_its_parts_bit_for_bit():
    model, other = network(), network()
    optimizer = one_line(model)
    assert identical(train(model, optimizer), train(other, written_out(other)))
    assert list(optimizer.basis) == ROTATED
    assert optimizer.refresher.unrotated == LEFT
    assert isinstance(optimizer, torch.optim.Optimizer)


def groups_of(model, **first):
    """Return groups as frameworks make them: unnamed tensors with and without weight decay."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": decayed, **first}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize("given", ["names", "names with the model", "groups"])
def test_parameters_may_be_given_in_any_form(given):
    model, other = network(), network()
    if given == "groups":
        optimizer = one_line(groups_of(model, lr=0.02), model=model)
        expected = train(other, written_out(groups_of(other, lr=0.02), model=other))
    elif given == "names":
        with pytest.warns(UserWarning, match="guessed from names and shapes") as said:
            optimizer = one_line(model.named_parameters())
        assert said[0].filename.endswith("test_recipes.py")
        expected = train(other, written_out(other))
    else:
        optimizer = one_line(model.named_parameters(), model=model)
        expected = train(other, written_out(other))
    assert identical(train(model, optimizer), expected)


def test_defaults_are_those_of_the_signature():
    group = egop.EGOP(network()).param_groups[0]
    expected = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert {key: group[key] for key in expected} == expected


def test_hyperparameters_apply_to_all_parameters():
    """Whether from a group, a scheduler or written later; betas and eps too."""
    model, other = network(), network()
    optimizer = one_line(groups_of(model, betas=(0.5, 0.6)), model=model)
    given = [group | {"outside/betas": group.get("betas", BETAS)} for group in groups_of(other, betas=(0.5, 0.6))]
    literal = written_out(given, model=other)
    assert identical(train(model, optimizer, 0, 3), train(other, literal, 0, 3))
    for mine, its in zip(optimizer.param_groups, literal.param_groups, strict=True):
        mine["betas"] = its["betas"] = its["outside/betas"] = (0.7, 0.8)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, literal)]
    for step in range(3, 6):
        assert identical(train(model, optimizer, step, step + 1), train(other, literal, step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 8)


@pytest.mark.parametrize("way", ["state", "to its parts", "from its parts", "deepcopy", "pickle", "copy"])
def test_training_resumes_exactly(way, tmp_path):
    model, other = network(), network()
    optimizer = (written_out if way == "from its parts" else one_line)(model)
    train(model, optimizer, 0, 3)
    again = (written_out if way == "to its parts" else one_line)(other)
    if way == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    elif way == "copy":
        other, again = copy.deepcopy((model, copy.copy(optimizer)))
    else:
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
        weights, state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(weights)
        again.load_state_dict(state)
    assert type(again) is (egop.ReparameterizedOptimizer if way == "to its parts" else egop.EGOP)
    assert identical(train(model, optimizer, 3, 7), train(other, again, 3, 7))


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_options_reach_adamw(option):
    model, other = network(), network()
    optimizer = one_line(model, **{option: True})
    assert identical(train(model, optimizer), train(other, written_out(other, outside={option: True})))
    assert optimizer.param_groups[0][f"outside/{option}"] is True


def test_adamw_steps_a_model_with_nothing_to_rotate():
    model, other = (nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    optimizer, plain = one_line(model), torch.optim.AdamW(other.parameters(), LR, BETAS, 1e-6, DECAY)
    for step in range(3):
        for each, its in ((model, optimizer), (other, plain)):
            each.zero_grad()
            each(torch.arange(5) + step % 2).pow(3).sum().backward()
            if step == 0 and its is optimizer:
                with pytest.warns(
                    UserWarning, match="no weight to rotate, so for now the optimizer leaves all parameters to AdamW"
                ):
                    its.step()
            else:
                its.step()
    assert identical(cases.parameters_of(model), cases.parameters_of(other))


def test_unfrozen_layer_gets_a_basis():
    model = network()
    model.up.requires_grad_(False)
    optimizer = one_line(model)
    train(model, optimizer, 0, 2)
    assert "up.weight" not in optimizer.basis
    model.up.requires_grad_(True)
    train(model, optimizer, 2, 4)
    assert set(optimizer.basis) == set(ROTATED)


def test_repr_names_the_optimizer_and_its_settings():
    assert repr(one_line(network())).startswith("EGOP(")


def test_construction_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model := network(), one_line(model), 0, 1)


MISTAKES = {
    "parameters without names": (lambda: egop.EGOP(network().parameters()), TypeError, r"model=model"),
    "no parameters": (lambda: egop.EGOP([]), ValueError, "empty parameter list"),
    "a model of others": (
        lambda: egop.EGOP(network().parameters(), model=network()),
        ValueError,
        "does not belong to the model",
    ),
    "every": (lambda: egop.EGOP(network(), every=0), ValueError, "every"),
    "betas": (lambda: egop.EGOP(network(), betas=(0.9, 1.5)), ValueError, r"betas\[1\]"),
    "a negative rate": (lambda: egop.EGOP(network(), lr=-1.0), ValueError, "lr"),
    "memory": (lambda: egop.EGOP(network(), memory="lots"), ValueError, "lots"),
    "maximize": (
        lambda: egop.EGOP([{"params": list(network().named_parameters()), "maximize": True}]),
        ValueError,
        "PolarAdam has no maximize.*Negate the loss",
    ),
    "inside another": (
        lambda: egop.ReparameterizedOptimizer(network(), egop.EGOP, lr=0.1),
        TypeError,
        r"EGOP runs an optimizer in a basis itself.*egop\.EGOP\(model, \.\.\.\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_to_do(mistake):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


def test_error_for_bases_over_the_limit_says_what_to_raise():
    model = network()
    optimizer = one_line(model, memory="1KiB")
    before = cases.parameters_of(model)
    backward(model, 0)
    with pytest.raises(MemoryError, match=r"more than memory=1\.0 KiB\. .*Raise memory="):
        optimizer.step()
    assert identical(before, cases.parameters_of(model))
