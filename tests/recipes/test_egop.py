"""EGOP: PolarAdam in a rotated basis for weight matrices, and AdamW for the rest."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import cases
import egop
from egop.optim import RotatedPolarAdam
from egop_runs import (
    GAINS,
    LEFT,
    ROTATED,
    SETTINGS,
    backward,
    make,
    make_groups,
    make_parts,
    network,
    train,
    train_parts,
)
from explicit import distance, identical
from recordings import record_on_the_cpu

# --- what it computes ---


@pytest.mark.parametrize("outside_lr", [1.0, 2.0])
@pytest.mark.parametrize("rotate", [True, False])
def test_it_equals_its_parts_bit_for_bit(rotate, outside_lr):
    model, other = network(), network()
    kind, options = (RotatedPolarAdam, {"every": 3}) if rotate else (egop.optim.PolarAdam, {})
    parts = make_parts(other, kind, **options)
    parts[1].param_groups[0]["lr"] *= outside_lr
    optimizer = make(model, rotate=rotate, outside_lr=outside_lr)
    assert identical(train(model, optimizer), train_parts(other, parts))
    assert sorted(block.name for block in optimizer.plan.chosen) == sorted(ROTATED)
    assert optimizer.plan.unrotated == LEFT


def test_basis_stays_orthonormal_and_follows_the_momentum():
    model = network()
    optimizer = make(model, lr=0.001)
    train(model, optimizer, 0, 40)
    weight = model.up.weight  # 12 x 8: its columns are rotated
    basis = optimizer.basis["up.weight"].tensors["basis"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8).double(), rtol=0, atol=1e-14)
    momentum = optimizer.state[weight]["exp_avg"]
    gram, original = momentum.mT @ momentum, basis @ momentum.mT @ momentum @ basis.mT

    def share(matrix):  # off the diagonal
        return float((matrix - matrix.diagonal().diag()).norm() / matrix.norm())

    assert share(gram) < 0.5 * share(original)
    change = optimizer.basis["experts"]
    assert change.tensors["basis"].shape == (3, 8, 8)


def test_excluded_weights_are_left_to_adamw():
    model, other = network(), network()
    optimizer = make(model, exclude=["u?", "experts"])  # a layer, and a weight
    parts = make_parts(other, RotatedPolarAdam, ("stem.weight", "down.weight"), every=3)
    assert identical(train(model, optimizer), train_parts(other, parts))
    assert optimizer.plan.unrotated == LEFT | {"up.weight": "excluded", "experts": "excluded"}


def test_a_pattern_that_names_a_module_excludes_all_weights_in_it():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 2))
    assert make(model, exclude=["0"]).plan.unrotated == {
        "0.0.weight": "excluded",
        "0.1.weight": "excluded",
        "2.weight": "the output head",
    }


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"rotate": False}, "rotate applies to all weights"),
        ({"lr": -0.1}, "Invalid lr value: -0.1"),
        ({"betas": (1.5, 2)}, r"betas\[0\]"),
        ({"outside_lr": -1.0}, "Invalid outside_lr value: -1.0"),
    ],
)
def test_settings_of_a_group_are_checked(setting, words):
    model = network()
    with pytest.raises(ValueError, match=words):
        egop.EGOP([{"params": list(model.named_parameters()), **setting}], model=model)


def test_the_size_of_updates_is_shown():
    assert "updates of square matrices: a root mean square of 0.4 times lr\n" in str(egop.EGOP(network()))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    text = str(egop.EGOP(model))
    assert "1.6 times as large as Adam's; if the model normalizes by functions, pass update_rms=0.4\n" in text


def test_tables_of_positions_are_left_to_adamw():
    model = network()
    tables = {"pos": 2, "pos_embed": 3, "position_table": 2, "cls_token": 2, "wpe": 2, "emb": 2, "token_emb": 2}
    for name, size in (tables | {"deposit": 2, "member": 2, "embedded": 2, "slope": 2}).items():
        setattr(model, name, nn.Parameter(torch.zeros(5, 6)[None] if size == 3 else torch.zeros(5, 6)))
    left = egop.EGOP(model).plan.unrotated
    assert left == LEFT | dict.fromkeys([*tables, "embedded"], "a table of positions or tokens")


def test_plan_leaves_out_what_is_frozen():
    model = network()
    model.up.requires_grad_(False)
    model.embedding.requires_grad_(False)
    optimizer = egop.EGOP(model)
    assert {block.name for block in optimizer.plan.chosen} == set(ROTATED) - {"up.weight"}
    assert optimizer.plan.unrotated == {"head.weight": "the output head"}
    assert repr(optimizer).startswith("EGOP(3 rotated weights, AdamW for 6 other parameters")


@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_options_reach_adamw(option):
    model, other = network(), network()
    optimizer = make(model, **{option: True})
    assert distance(train(model, optimizer), train(other, make(other))) < 1e-12
    assert optimizer.param_groups[0][option] is True


def test_adamw_steps_a_model_with_nothing_to_rotate():
    model, other = (nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6)).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=r"no weight matrix, so AdamW updates all parameters.*an embedding") as said:
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
        optimizer = egop.EGOP(model, lr=0.005, every=3)
        for step in range(8):
            inputs = torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(step)).double()
            model.zero_grad()
            model(inputs.to(memory_format=layout)).sin().square().mean().backward()
            optimizer.step()
        ends.append(cases.parameters_of(model))
    assert distance(*ends) < 1e-12


@pytest.mark.parametrize("update_rms", [0.4, "adam"])
def test_recorded_steps_equal_computed_steps(update_rms, monkeypatch):
    ends, counts = [], {}
    for recorded in (False, True):
        model = network()
        optimizer = make(model, update_rms=update_rms)
        counts = record_on_the_cpu(monkeypatch) if recorded else {}
        train(model, optimizer, 0, 8)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(train(model, optimizer, 8, 20))
    assert identical(*ends)
    assert counts["replayed"] > counts["recorded"] > 0


# --- parameters and groups ---


@pytest.mark.parametrize("given", ["names with the model", "parameters with the model", "names", "generator"])
def test_parameters_may_be_given_in_any_form(given):
    model, other = network(), network()
    expected = train(other, make(other))
    if given == "names":
        with pytest.warns(UserWarning, match=r"guessed from names and shapes.*model=model") as said:
            optimizer = egop.EGOP(model.named_parameters(), **SETTINGS, every=3)
        assert said[0].filename == __file__
    elif given == "generator":
        optimizer = make((pair for pair in model.named_parameters()), model=model)
    else:
        optimizer = make(model.named_parameters() if given.startswith("names") else model.parameters(), model=model)
    assert identical(train(model, optimizer), expected)


def test_groups_have_their_own_settings():
    """Settings come from the group, a later write or a scheduler, for matrices and all other parameters."""
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


def test_size_of_updates_follows_adams_direction_in_networks_without_normalization_layers():
    plain, custom = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), network()
    custom.norm = nn.Identity()
    normed = nn.Sequential(plain, nn.RMSNorm(2))
    for model, expected in ((plain, "adam"), (custom, "adam"), (network(), 0.4), (normed, 0.4)):
        optimizer = egop.EGOP(model, lr=0.5, weight_decay=0.0, every=3)
        assert optimizer.param_groups[0]["update_rms"] == expected
    assert egop.EGOP(plain, update_rms=0.3).param_groups[0]["update_rms"] == 0.3
    with pytest.raises(ValueError, match=r"Invalid update_rms value: 'adams'\. Must be a number or 'adam'\."):
        egop.EGOP(plain, update_rms="adams")


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
    "patches": (lambda: nn.Conv2d(1, 9, 2, stride=2, bias=False), (8, 1, 4, 4), 1.5),
    "transposed patches": (lambda: nn.ConvTranspose2d(1, 9, 2, stride=2, bias=False), (8, 1, 4, 4), 1.5),
    "convolution": (lambda: nn.Conv2d(1, 9, 2, bias=False), (8, 1, 3, 3), 3.0),
    "transposed convolution": (lambda: nn.ConvTranspose2d(1, 9, 2, bias=False), (8, 1, 3, 3), 3.0),
    "wide convolution": (lambda: nn.Conv2d(1, 64, 2, bias=False), (8, 1, 3, 3), 4.0),
    "convolution of single pixels": (lambda: nn.Conv2d(4, 9, 1, bias=False), (8, 4, 3, 3), 1.5),
}


@pytest.mark.parametrize("update_rms", [0.3, "adam"])
@pytest.mark.parametrize("name", LAYERS)
def test_size_of_an_update_depends_on_inputs_and_outputs(name, update_rms):
    build, shape, gain = LAYERS[name]
    torch.manual_seed(0)
    layer = build()
    optimizer = egop.EGOP(layer, lr=0.5, eps=1e-20, weight_decay=0.0, update_rms=update_rms)
    before = layer.weight.detach().clone()
    layer(torch.randn(shape)).square().mean().backward()
    optimizer.step()
    moved = float((layer.weight.detach() - before).square().mean().sqrt())
    if update_rms == "adam":
        gain = 1.5 if gain == 3.0 else gain  # convolutions are not different from other layers
        update_rms = 1.6  # Adam's first direction is a sign
    assert moved == pytest.approx(0.5 * update_rms * gain, rel=1e-4)


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
            self.quantized = nn.Parameter(torch.ones(3, 3).to(torch.float8_e4m3fn), requires_grad=False)
            self.codes = nn.Parameter(torch.ones(3, 3, dtype=torch.int8), requires_grad=False)
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


# --- messages ---


def test_metrics_are_plain_numbers():
    model = network()
    optimizer = make(model)
    assert optimizer.metrics() == {}
    train(model, optimizer, 0, 20)
    found = optimizer.metrics()
    rotation = {"off_diagonal", "orthogonality_error", "failed_renewals"}
    assert set(found) == {"relative_update", "stable_rank", "nonfinite"} | rotation
    assert found["orthogonality_error"] < 1e-12
    assert found["nonfinite"] == found["failed_renewals"] == 0
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
    assert optimizer.metrics()["nonfinite"] == optimizer.metrics()["failed_renewals"] == 1
    optimizer.state[model.down.weight]["exp_avg"].fill_(1e200)  # finite, but its squares are not
    found = optimizer.metrics()
    assert (found["nonfinite"], found["failed_renewals"]) == (1, 2)
    plain = network()
    train(plain, unrotated := make(plain, rotate=False), 0, 2)
    assert set(unrotated.metrics()) == {"relative_update", "stable_rank", "nonfinite"}


def test_relative_update_follows_adams_direction():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = egop.EGOP(model, lr=0.1, weight_decay=0.0)
    weight, sizes = model[0].weight, []
    for step in range(60):
        optimizer.zero_grad()
        model(torch.randn(9, 6, generator=torch.Generator().manual_seed(step)).double()).square().mean().backward()
        before = weight.detach().clone()
        expected = optimizer.metrics().get("relative_update", 0.0)
        optimizer.step()
        sizes.append((float((weight.detach() - before).norm() / before.norm()), expected))
    moved, expected = (sum(each) for each in zip(*sizes[20:], strict=True))
    assert expected == pytest.approx(moved, rel=0.3)


def test_text_says_what_is_rotated():
    optimizer = make(network())
    assert repr(optimizer) == "EGOP(4 rotated weights, AdamW for 8 other parameters, lr=0.01)"
    assert "embedding.weight" in str(optimizer)
    assert repr(make(network(), rotate=False)).startswith("EGOP(4 weights without rotation")


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
    "a pattern without a match": (
        lambda: egop.EGOP(network(), exclude=["u"]),
        ValueError,
        "'u' in exclude matches no parameter. The weights are ",
    ),
    "a weight to exclude": (lambda: egop.EGOP(m := network(), exclude=[m.up.weight]), TypeError, "got Parameter"),
    "no rate": (lambda: egop.EGOP(network(), lr=None), TypeError, "lr must be a number, got None"),
    "swapped arguments": (lambda: egop.EGOP(1e-3, network()), TypeError, "lr must be a number, got Network"),
    "several rates": (lambda: egop.EGOP(network(), torch.ones(2)), TypeError, r"got a tensor of shape \(2,\)"),
    "no model": (lambda: egop.EGOP(None), TypeError, "The model or its parameters come first, got None"),
    "rotate": (lambda: egop.EGOP(network(), rotate="no"), TypeError, "rotate must be True or False, got 'no'"),
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
