"""Which parameters form a block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import cases
import egop
from egop.basis.partition import Block, match, partition_parameters
from egop.basis.roles import find_roles


def blocks_of(model, partition):
    """Return the parameters of each block, by block name."""
    objective = egop.Objective(model, cases.cross_entropy, []) if isinstance(model, nn.Module) else model
    basis = cases.estimate(objective, partition=partition, structure=egop.Identity())
    return {name: list(change.block.parameters) for name, change in basis.items()}


class CenteringNorm(nn.Module):
    """A custom norm layer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 4))


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.rnn = nn.GRU(4, 4)
        self.norms = nn.ModuleList(
            [nn.LayerNorm([3, 4]), nn.BatchNorm2d(3), nn.GroupNorm(1, 4), nn.RMSNorm([3, 4]), CenteringNorm()]
        )
        self.attention = nn.MultiheadAttention(4, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("head_first", [False, True])
def test_head_tied_to_the_embedding_is_the_only_head(head_first):
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7)
    head.weight = embedding.weight
    hidden = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*([head, *hidden, embedding] if head_first else [embedding, *hidden, head]))
    roles = {name: layer.kind for name, layer in find_roles(dict(model.named_parameters()), model).items()}
    assert [roles[f"{place}.weight"] for place in (0, 1, 2)] == ["embedding", "weight", "weight"]


def test_layer_partition_groups_weights_and_skips_biases_and_norms():
    assert blocks_of(Everything(), "layer") == {
        "embedding.weight": ["embedding.weight"],
        "rnn": ["rnn.weight_ih_l0", "rnn.weight_hh_l0"],
        "attention.in_proj_weight": ["attention.in_proj_weight"],
        "attention.out_proj.weight": ["attention.out_proj.weight"],
    }


def test_parameter_partition_makes_each_weight_a_block():
    assert blocks_of(Everything(), "parameter") == {
        name: [name]
        for name in (
            "embedding.weight",
            "rnn.weight_ih_l0",
            "rnn.weight_hh_l0",
            "attention.in_proj_weight",
            "attention.out_proj.weight",
        )
    }


def test_global_partition_is_one_block():
    assert blocks_of(cases.mlp(), "global") == {"global": ["0.weight", "2.weight"]}


def test_block_of_one_tensor_has_its_name_in_every_partition():
    for partition in ("global", "layer", "parameter", {"mine": "*weight"}):
        assert blocks_of(nn.Linear(2, 3), partition) == {"weight": ["weight"]}


def test_patterns_include_biases_and_norms_they_name():
    model = cases.convolutional()
    partition = {"first": ["0.*"], "norm": "1.*", "head": ["*.weight", "5.bias"]}
    partition["head"] = ["5.weight", "5.b?as"]
    assert blocks_of(model, partition) == {
        "first": ["0.weight", "0.bias"],
        "norm": ["1.weight", "1.bias"],
        "head": ["5.weight", "5.bias"],
    }
    assert blocks_of(model, {"biases": ["*bias"]}) == {"biases": ["0.bias", "1.bias", "5.bias"]}


def test_the_members_of_a_block_are_in_the_order_of_the_model():
    assert blocks_of(cases.mlp(), {"all": ["2.*", "0.bias", "*.weight"]}) == {
        "all": ["0.weight", "0.bias", "2.weight", "2.bias"]
    }


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("global", {"global": ["theta", "phi"]}),
        ("layer", {"theta": ["theta"], "phi": ["phi"]}),
        ("parameter", {"theta": ["theta"], "phi": ["phi"]}),
        ({"p": "ph*"}, {"phi": ["phi"]}),
    ],
)
def test_every_tensor_of_a_function_is_a_weight(partition, expected):
    tensors = {"theta": torch.zeros(3), "phi": torch.zeros(2, 2)}
    objective = egop.Objective.from_function(lambda theta, phi: theta.sum() + phi.sum(), tensors)
    assert blocks_of(objective, partition) == expected


@pytest.mark.parametrize("partition", ["layer", "parameter", "global", {"everything": "*"}])
def test_parameters_without_entries_are_in_no_block(partition):
    model = cases.mlp()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.forward = lambda x: model[2](torch.tanh(model[0](x)))
    found = blocks_of(model, partition)
    assert found
    assert "empty" not in [name for names in found.values() for name in names]


@pytest.mark.parametrize("structure", ["auto", egop.Shared()], ids=str)
def test_empty_parameters_do_not_change_training(structure):
    plain, other = cases.MLP.build(), cases.MLP.build()
    other.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    for model in (plain, other):
        model.forward = lambda x, model=model: model[2](torch.tanh(model[0](x)))
        objective = cases.MLP.objective(model)
        basis = cases.estimate(objective, structure=structure)
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=0.01)
        cases.train(model, optimizer, cases.MLP.batches(), 3)
        online = egop.ReparameterizedOptimizer(
            model, torch.optim.AdamW, refresh=egop.Online(structure=structure), lr=0.01
        )
        cases.train(model, online, cases.MLP.batches(), 3)
    after = cases.parameters_of(other)
    assert after.pop("empty").shape == (0, 3)
    assert all(torch.equal(value, after[name]) for name, value in cases.parameters_of(plain).items())


def test_what_is_no_weight_forms_no_block_with_weights():
    model = nn.Module()
    model.mixer = nn.Module()
    model.mixer.A_log, model.mixer.weight = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4, 3))
    parameters = dict(model.named_parameters())
    blocks = partition_parameters(parameters, find_roles(parameters, model), "layer")
    assert [block.name for block in blocks] == ["mixer.A_log", "mixer.weight"]


def test_block_has_shapes_and_size():
    block = Block.from_tensors("b", {"w": torch.zeros(3, 2), "s": torch.zeros(()), "v": torch.zeros(4)})
    assert block.parameters == ("w", "s", "v")
    assert block.shapes == (torch.Size([3, 2]), torch.Size([]), torch.Size([4]))
    assert block.size == 11


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_block_has_at_least_single_precision(given_dtype, expected):
    assert Block.from_tensors("b", {"w": torch.zeros(2, dtype=given_dtype)}).dtype == expected


@given(
    st.sets(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=6), st.text("ab.*?", min_size=1, max_size=4)
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_patterns_match_like_file_names(names, pattern):
    def matches(name, pattern):  # brute force
        if not pattern:
            return not name
        if pattern[0] == "*":
            return any(matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
        return bool(name) and pattern[0] in ("?", name[0]) and matches(name[1:], pattern[1:])

    names = sorted(names)
    expected = [name for name in names if matches(name, pattern)]
    if expected:
        assert match([pattern], names, "parameter") == expected
    else:
        with pytest.raises(ValueError, match="matches no parameter"):
            match([pattern], names, "parameter")


# --- bad input ---


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("row", "Invalid partition value: 'row'. Must be 'global', 'layer', 'parameter' or a mapping"),
        (None, "Invalid partition value: None"),
        (
            {"a": ["9.weight"]},
            r"Pattern '9.weight' matches no parameter. Available: 0.weight, 0.bias, 2.weight, 2.bias",
        ),
        ({"a": ["0.*", "nothing*"]}, "Pattern 'nothing.' matches no parameter"),
        ({"a": ["0.WEIGHT"]}, "Pattern '0.WEIGHT' matches no parameter"),
        ({"a": ["*.weight"], "b": ["2.*"]}, "'2.weight' is in two blocks, 'a' and 'b'"),
        ({}, r"A partition needs at least one block, and each block a pattern: \{'all': \['\*'\]\}"),
        ({"a": []}, "each block a pattern"),
        ({"a": "0.weight", "0.weight": ["2.*"]}, "Two blocks are named '0.weight'.*another name"),
    ],
)
def test_invalid_partition_raises_and_changes_nothing(partition, message):
    model = cases.mlp()
    before = cases.state_of(model)
    with pytest.raises(ValueError, match=message):
        blocks_of(model, partition)
    assert cases.state_of(model) == before


@pytest.mark.parametrize("partition", ["global", "layer", "parameter"])
def test_model_without_weights_raises_with_advice(partition):
    with pytest.raises(
        ValueError, match=r"no weights of two or more dimensions outside norm layers.*partition=\{'all'"
    ):
        blocks_of(nn.LayerNorm([3, 3]), partition)
    assert blocks_of(nn.LayerNorm([3, 3]), {"all": "*"}) == {"all": ["weight", "bias"]}


def test_block_with_mixed_precision_raises():
    model = cases.mlp()
    model[2].double()
    with pytest.raises(
        ValueError,
        match=r"Block 'global' mixes dtypes or devices: '0.weight' is torch.float32 on cpu, '2.weight' is torch.float",
    ):
        blocks_of(model, "global")
    assert len(blocks_of(model, "layer")) == 2


def test_pattern_does_not_match_frozen_parameters():
    model = cases.mlp()
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"Pattern '0.weight' matches no parameter. Available: 2.weight, 2.bias"):
        blocks_of(model, {"a": "0.weight"})
