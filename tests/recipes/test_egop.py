"""EGOP: PolarAdam in a rotated basis for weight matrices, and AdamW for the rest."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import cases
import egop
from egop.optim import RotatedPolarAdam
from explicit import distance, identical
from processes import run
from recordings import record_on_the_cpu
from training import WRAPPERS, steps, weights
from training import network as sharded_network

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
LAST = 9  # steps, past several renewals


class Network(nn.Module):
    """A network with a stem, an embedding, layers, experts, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.stem = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 10) / 3)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens):
        x = self.stem(self.embedding(tokens).mT).mT
        x = x + self.down(self.up(self.norm(x)).tanh())
        x = x + torch.einsum("bti,eij,ekj->btk", x, self.experts, self.experts).tanh()
        return self.head(x)


ROTATED = ["experts", "stem.weight", "up.weight", "down.weight"]
GAINS = {"up.weight": math.sqrt(12 / 8)}  # roots of outputs over inputs above 1
LEFT = {"embedding.weight": "an embedding", "head.weight": "the output head"}


def network(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().to(dtype)


def backward(model, step):
    tokens = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(model, optimizer, first=0, last=LAST):
    for step in range(first, last):
        backward(model, step)
        optimizer.step()
    return cases.parameters_of(model)


def make(params, **options):
    return egop.EGOP(params, **(SETTINGS | {"every": 3} | options))


def make_parts(model, kind, names=tuple(ROTATED), **options):
    """Return the two optimizers that EGOP stands for."""
    named = dict(model.named_parameters())
    matrices = [
        {"params": [named[name]], "matrices_last": name == "experts", "update_rms": 0.4 * GAINS.get(name, 1.0)}
        for name in ROTATED
        if name in names
    ]
    others = [parameter for name, parameter in named.items() if name not in names]
    return kind(matrices, **SETTINGS, **options), torch.optim.AdamW(others, **SETTINGS)


def train_parts(model, parts, last=LAST):
    for step in range(last):
        backward(model, step)
        for part in parts:
            part.step()
    return cases.parameters_of(model)


# --- what it computes ---


@pytest.mark.parametrize("rotate", [True, False])
def test_it_equals_its_parts_bit_for_bit(rotate):
    model, other = network(), network()
    kind, options = (RotatedPolarAdam, {"every": 3}) if rotate else (egop.optim.PolarAdam, {})
    parts = make_parts(other, kind, **options)
    optimizer = make(model, rotate=rotate)
    assert identical(train(model, optimizer), train_parts(other, parts))
    assert sorted(block.name for block in optimizer.plan.chosen) == sorted(ROTATED)
    assert optimizer.plan.unrotated == LEFT


def test_basis_stays_orthonormal_and_follows_the_momentum():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 40)
    weight = model.up.weight  # 12 x 8: its columns are rotated
    basis = optimizer.basis["up.weight"].tensors["basis"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8).double(), rtol=0, atol=1e-14)
    momentum = optimizer.state[weight]["exp_avg"]
    gram, original = momentum.mT @ momentum, basis @ momentum.mT @ momentum @ basis.mT

    def share(matrix):  # off the diagonal
        return float((matrix - matrix.diagonal().diag()).norm() / matrix.norm())

    assert share(gram) < 0.8 * share(original)
    change = optimizer.basis["experts"]
    assert change.tensors["basis"].shape == (3, 8, 8)


def test_excluded_weights_are_left_to_adamw():
    model, other = network(), network()
    optimizer = make(model, exclude=["up.*", "experts"])
    parts = make_parts(other, RotatedPolarAdam, ("stem.weight", "down.weight"), every=3)
    assert identical(train(model, optimizer), train_parts(other, parts))
    assert optimizer.plan.unrotated == LEFT | {"up.weight": "excluded", "experts": "excluded"}


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_options_reach_adamw(option):
    model, other = network(), network()
    optimizer = make(model, **{option: True})
    assert distance(train(model, optimizer), train(other, make(other))) < 1e-12
    assert optimizer.param_groups[0][option] is True


def test_adamw_steps_a_model_with_nothing_to_rotate():
    model, other = (nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=r"no weight matrix, so AdamW steps all parameters.*an embedding") as said:
        optimizer = egop.EGOP(model, **SETTINGS)
    assert said[0].filename == __file__
    plain = torch.optim.AdamW(other.parameters(), **SETTINGS)
    for step in range(3):
        for each, its in ((model, optimizer), (other, plain)):
            each.zero_grad()
            each(torch.arange(5) + step % 2).pow(3).sum().backward()
            its.step()
    assert identical(cases.parameters_of(model), cases.parameters_of(other))


def test_step_does_not_depend_on_the_memory_layout():
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 40, 2), nn.Tanh(), nn.Conv2d(40, 4, 1)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 3)).double().to(memory_format=layout)
        optimizer = egop.EGOP(model, lr=0.02, every=3)
        for step in range(8):
            inputs = torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(step)).double()
            model.zero_grad()
            model(inputs.to(memory_format=layout)).sin().square().mean().backward()
            optimizer.step()
        ends.append(cases.parameters_of(model))
    assert distance(*ends) < 1e-12


def test_recorded_steps_equal_computed_steps(monkeypatch):
    ends, counts = [], {}
    for recorded in (False, True):
        model = network()
        optimizer = make(model)
        counts = record_on_the_cpu(monkeypatch) if recorded else {}
        train(model, optimizer, 0, 8)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(train(model, optimizer, 8, 20))
    assert identical(*ends)
    assert counts["replayed"] > counts["recorded"] > 0


# --- parameters and groups ---


def make_groups(model, **first):
    """Return groups as frameworks make them: unnamed tensors with and without weight decay."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": decayed, **first}, {"params": others, "weight_decay": 0.0}]


@pytest.mark.parametrize("given", ["names with the model", "parameters with the model", "names", "generator"])
def test_parameters_may_be_given_in_any_form(given):
    model, other = network(), network()
    expected = train(other, make(other))
    if given == "names":
        with pytest.warns(UserWarning, match=r"guessed from names and shapes.*model=model") as said:
            optimizer = make(model.named_parameters())
        assert said[0].filename == __file__
    elif given == "generator":
        optimizer = make((pair for pair in model.named_parameters()), model=model)
    else:
        optimizer = make(model.named_parameters() if given.startswith("names") else model.parameters(), model=model)
    assert identical(train(model, optimizer), expected)


def test_groups_have_their_own_settings():
    """From the group, written later, or by a scheduler; for matrices and all others."""
    model, other = network(), network()
    optimizer = make(make_groups(model, lr=0.02, betas=(0.5, 0.6)), model=model)
    parts = make_parts(other, RotatedPolarAdam, every=3)
    decayed = {parameter for parameter in other.parameters() if parameter.dim() > 1}
    embeddings = [other.embedding.weight, other.head.weight]
    parts[1].param_groups[0]["params"] = embeddings
    parts[1].add_param_group({"params": [each for each in other.parameters() if each not in decayed]})
    for group in [*parts[0].param_groups, parts[1].param_groups[0]]:
        group |= {"lr": 0.02, "betas": (0.5, 0.6)}
    parts[1].param_groups[1]["weight_decay"] = 0.0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(6):
        for each in (model, other):
            backward(each, step)
        for each in (optimizer, *parts):
            each.step()
        scheduler.step()
        for part in parts:
            for group in part.param_groups:
                group["lr"] *= 0.5
    assert identical(cases.parameters_of(model), cases.parameters_of(other))


def test_updates_are_smaller_in_networks_without_normalization_layers():
    plain, custom = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), network()
    custom.norm = nn.Identity()
    for model, expected in ((plain, 0.2), (custom, 0.2), (network(), 0.4), (nn.Sequential(plain, nn.RMSNorm(2)), 0.4)):
        optimizer = egop.EGOP(model, lr=0.5, weight_decay=0.0, every=3)
        assert optimizer.param_groups[0]["update_rms"] == expected
    assert egop.EGOP(plain, update_rms=0.3).param_groups[0]["update_rms"] == 0.3


class Conv1D(nn.Module):
    """A linear layer stored as (inputs, outputs), as in transformers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.nf, self.weight = outputs, nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


LAYERS = {
    "more outputs": (lambda: nn.Linear(4, 9, bias=False), (8, 4), 1.5),
    "more inputs": (lambda: nn.Linear(9, 4, bias=False), (8, 9), 1.0),
    "inputs first": (lambda: Conv1D(4, 9), (8, 4), 1.5),
    "convolution": (lambda: nn.Conv2d(1, 9, 2, bias=False), (8, 1, 3, 3), 1.5),
    "transposed convolution": (lambda: nn.ConvTranspose2d(1, 9, 2, bias=False), (8, 1, 3, 3), 1.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_size_of_an_update_depends_on_inputs_and_outputs(name):
    build, shape, gain = LAYERS[name]
    layer = build()
    optimizer = egop.EGOP(layer, lr=0.5, weight_decay=0.0)
    before = layer.weight.detach().clone()
    layer(torch.randn(shape)).square().mean().backward()
    optimizer.step()
    moved = float((layer.weight - before).square().mean().sqrt())
    assert moved == pytest.approx(0.5 * 0.2 * gain, rel=1e-4)


def test_defaults_are_adamws():
    group, expected = egop.EGOP(network()).param_groups[0], torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults
    assert {key: group[key] for key in ("lr", "eps", "weight_decay")} == {
        key: expected[key] for key in ("lr", "eps", "weight_decay")
    }


def test_frozen_and_added_layers_are_stepped_once_they_have_gradients():
    model = network()
    model.up.requires_grad_(False)
    named = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("down")}
    optimizer = make(named.items(), model=model)
    train(model, optimizer, 0, 2)
    assert "up.weight" not in optimizer.basis
    model.up.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 0.1})
    before = cases.parameters_of(model)
    train(model, optimizer, 2, 4)
    assert set(optimizer.basis) == set(ROTATED)
    assert not torch.equal(before["up.weight"], model.up.weight)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_parameters_without_gradients_stay():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    backward(model, 3)
    model.up.weight.grad = model.norm.weight.grad = None
    before = cases.parameters_of(model)
    optimizer.step()
    after = cases.parameters_of(model)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {"up.weight", "norm.weight"}


def test_complex_and_empty_parameters_are_left_to_adamw():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.phase = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.linear(x) @ self.phase.real) + self.empty.sum()

    model = Odd()
    optimizer = egop.EGOP(model, lr=0.01)
    before = model.phase.detach().clone()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    assert optimizer.plan.unrotated["phase"] == "complex numbers"
    assert not torch.equal(before, model.phase)


# --- state ---

WAYS = ["state", "torch's tools", "deepcopy", "pickle", "inference mode"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("saved", [1, 3, 4])  # before and after a renewal
@pytest.mark.parametrize("way", WAYS)
def test_training_resumes_exactly(way, saved, dtype, tmp_path):
    model, other = network(dtype), network(dtype)
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, saved)
    if way == "deepcopy":
        other, again = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other, again = pickle.loads(pickle.dumps((model, optimizer)))
    elif way == "torch's tools":
        other.load_state_dict(model.state_dict())
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(other, again, state)
    else:
        with torch.inference_mode(way == "inference mode"):
            torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
        model_state, state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(model_state)
        again.load_state_dict(state)
    assert identical(train(model, optimizer, saved, LAST), train(other, again, saved, LAST))


def test_state_of_a_compiled_model_fits_the_plain_one():
    model, other = network(), network()
    compiled = torch.compile(model, backend="eager")
    optimizer, again = make(compiled, exclude=["up.weight"]), make(other, exclude=["up.weight"])
    train(compiled, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert identical(train(model, optimizer, 3, LAST), train(other, again, 3, LAST))


def test_loaded_state_is_a_copy():
    model, other = network(), network()
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, 3)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    first = train(model, optimizer, 3, LAST)
    assert identical(first, train(other, again, 3, LAST))


def snapshot(model, optimizer):
    return copy.deepcopy([cases.parameters_of(model), optimizer.state_dict()])


REFUSED = {
    "AdamW": (
        lambda model: torch.optim.AdamW(model.parameters()),
        "it was saved by another optimizer",
    ),
    "no rotation": (lambda model: make(model, rotate=False), "saved with rotate=False, and this optimizer has"),
    "fewer groups": (lambda model: make(make_groups(model), model=model), "has 2 parameter groups"),
    "another choice": (lambda model: make(model, exclude=["up.weight"]), r"'up.weight' has .*Must be .*'basis'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_state_of_another_optimizer_is_refused_and_nothing_changes(kind):
    build, message = REFUSED[kind]
    model, other = network(), network()
    train(other, saved := build(other), 0, 2)
    train(model, optimizer := make(model), 3, 5)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())
    now = snapshot(model, optimizer)
    assert identical(before[0], now[0])
    for key, state in before[1]["state"].items():
        assert identical(state, now[1]["state"][key])


def test_state_of_another_model_is_refused_with_both_shapes():
    model, other = nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)
    saved, optimizer = egop.EGOP(other), egop.EGOP(model)
    other(torch.ones(2, 4)).square().sum().backward()
    saved.step()
    with pytest.raises(ValueError, match=r"'weight' has a tensor of shape \(5, 4\) .*Must be .* \(3, 4\)"):
        optimizer.load_state_dict(saved.state_dict())
    renamed = nn.ParameterDict({"other": model.weight})
    with pytest.raises(ValueError, match="other parameters than this optimizer: 'weight' instead of 'other'"):
        egop.EGOP(renamed).load_state_dict(optimizer.state_dict())


def test_state_follows_a_replaced_parameter():
    """As frameworks do that wrap, move or shard a model after the optimizer was made."""
    model, other = network(), network()
    optimizer = make(model)
    train(model, optimizer, 0, 4)
    moved = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["params"] = [moved.get_parameter(name) for name in group["param_names"]]
    assert identical(train(moved, optimizer, 4, LAST), train(other, make(other)))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 2).double())
    with pytest.raises(ValueError, match=r"'experts' of shape \(3, 8, 10\) was replaced by one of shape \(2, 2\)"):
        train(moved, optimizer, 4, 5)


def test_edited_state_is_used():
    model, other = network(), network()
    optimizer, again = make(model), make(other)
    train(model, optimizer, 0, 4)
    train(other, again, 0, 4)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    assert not identical(train(model, optimizer, 4, 6), train(other, again, 4, 6))


# --- precision ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_that_half_precision_would_round_away_add_up(dtype):
    model, start = network(dtype), network(dtype)
    optimizer = make(model, lr=1e-5, weight_decay=0.0)
    train(model, optimizer, 0, 30)
    master = optimizer.state[model.up.weight]["master"]
    assert master.dtype is torch.float32
    assert torch.equal(master.to(dtype), model.up.weight)
    assert (master - start.up.weight.float()).abs().mean() > 1e-5


def test_a_weight_in_half_precision_that_was_written_to_is_read_again():
    model = network(torch.bfloat16)
    optimizer = make(model, lr=0.0)
    train(model, optimizer, 0, 2)
    with torch.no_grad():
        model.up.weight.fill_(0.5)
    train(model, optimizer, 2, 3)
    assert (model.up.weight == 0.5).all()


def test_gradient_scaler_and_autocast():
    model, other = network(torch.float32), network(torch.float32)
    optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = make(other)
    for step in range(5):
        before = cases.parameters_of(model)
        backward(model, step)
        scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad.mul_(1024.0 if step != 2 else torch.inf)
        with torch.autocast("cpu", torch.bfloat16):
            scaler.step(optimizer)
        scaler.update(1024.0)
        if step == 2:
            assert identical(before, cases.parameters_of(model))
            continue
        backward(other, step)
        plain.step()
    assert distance(cases.parameters_of(model), cases.parameters_of(other)) < 1e-5


def test_gradient_that_is_not_finite_does_not_spoil_the_basis():
    model = network()
    optimizer = make(model)
    train(model, optimizer, 0, 3)
    backward(model, 3)
    model.up.weight.grad[0, 0] = torch.nan
    optimizer.step()
    train(model, optimizer, 4, LAST)
    assert model.up.weight.isnan().all()
    assert optimizer.state[model.up.weight]["basis"].isfinite().all()


# --- several processes ---


def train_wrapped(rank, world, kind):
    """Train with FSDP2 or DDP; return the weights, and whether the moments are sharded."""
    model = WRAPPERS[kind](sharded_network())
    optimizer = egop.EGOP(model, lr=0.02, every=3)
    steps(model, optimizer, rank=rank, world=world)
    is_sharded = all(hasattr(state["exp_avg"], "placements") for state in optimizer.state.values())
    return weights(model) | {"sharded": torch.tensor(is_sharded)}


def resume_sharded(rank, world, dtype):
    """Save in the middle with torch's tools, continue in a fresh model, and compare with going on."""
    model, other = (WRAPPERS["FSDP2"](sharded_network().to(dtype)) for _ in range(2))
    optimizer, again = egop.EGOP(model, lr=0.02, every=3), egop.EGOP(other, lr=0.02, every=3)
    run_steps(model, optimizer, 0, 4, rank, world)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((model, optimizer), (other, again)):
        run_steps(each, its, 4, 4, rank, world)
    return weights(model), weights(other)


def run_steps(model, optimizer, first, count, rank, world):
    dtype = next(model.parameters()).dtype
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(world * step + rank)
        inputs = torch.randn(6, 5, generator=generator).to(dtype)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :3].sin()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_two_processes_train_like_one(kind):
    two = run(train_wrapped, 2, kind)
    (one,) = run(train_wrapped, 1, "plain")
    assert all(bool(each.pop("sharded")) == (kind == "FSDP2") for each in two)
    one.pop("sharded")
    for each in two:
        assert distance(each, one) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sharded_training_resumes_exactly(dtype):
    for one, other in run(resume_sharded, 2, dtype):
        assert identical(one, other)


# --- messages ---


def test_metrics_are_plain_numbers():
    model = network()
    optimizer = make(model)
    assert optimizer.metrics() == {}
    train(model, optimizer, 0, 20)
    found = optimizer.metrics()
    assert set(found) == {"relative_update", "stable_rank", "off_diagonal", "orthogonality_error", "nonfinite"}
    assert found["orthogonality_error"] < 1e-12
    assert found["nonfinite"] == 0
    assert 0 < found["off_diagonal"] < 1
    ranks, sizes = [], []
    for name in ROTATED:
        weight = model.get_parameter(name)
        momentum = optimizer.state[weight]["exp_avg"]
        for matrix in momentum if name == "experts" else [momentum.flatten(1)]:
            squares = torch.linalg.svdvals(matrix).square()
            ranks.append((float(squares.mean() / squares.max()), 1 / len(momentum) if name == "experts" else 1))
        sizes.append(0.01 * 0.4 * GAINS.get(name, 1.0) * math.sqrt(weight.numel()) / float(weight.detach().norm()))
    assert found["relative_update"] == pytest.approx(sum(sizes) / 4)
    assert found["stable_rank"] == pytest.approx(sum(rank * share for rank, share in ranks) / 4)
    model.up.weight.grad.fill_(torch.inf)
    optimizer.step()
    assert optimizer.metrics()["nonfinite"] == 1
    plain = network()
    train(plain, unrotated := make(plain, rotate=False), 0, 2)
    assert set(unrotated.metrics()) == {"relative_update", "stable_rank", "nonfinite"}


def test_text_says_what_is_rotated():
    optimizer = make(network())
    assert repr(optimizer) == "EGOP(4 rotated weights, AdamW for 8 other parameters, lr=0.01)"
    assert "embedding.weight" in str(optimizer)
    assert "<table" in optimizer._repr_html_()
    assert repr(make(network(), rotate=False)).startswith("EGOP(4 unrotated weights")


def test_construction_and_training_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model := network(), make(model), 0, 3)


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
    "a pattern without a match": (lambda: egop.EGOP(network(), exclude=["u"]), ValueError, "'u' matches no weight"),
    "maximize": (
        lambda: egop.EGOP([{"params": list(network().named_parameters()), "maximize": True}], model=None),
        ValueError,
        "has no option maximize",
    ),
    "inside another": (
        lambda: egop.ReparameterizedOptimizer(network(), egop.EGOP, lr=0.1),
        TypeError,
        r"EGOP runs an optimizer in a basis itself.*egop\.EGOP\(model, \.\.\.\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_to_do(mistake):
    build, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        build()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = egop.EGOP(model)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(TypeError, match=r"sparse=False"):
        optimizer.step()
