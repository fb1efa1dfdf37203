"""The small GPT: what it sees, how it starts, and which of its weights get a basis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from egop.basis import make_plan
from egop.estimation import Objective, partition_objective
from egop_lab.models.gpt import GPT, Block, initialize_

SMALL = {"vocabulary": 11, "layers": 2, "width": 12, "heads": 3, "context": 8}


def small(seed=0):
    return initialize_(GPT(**SMALL), torch.Generator().manual_seed(seed))


def test_every_position_gets_logits():
    model = small()
    assert model(torch.zeros(5, 8, dtype=torch.long)).shape == (5, 8, 11)
    assert model(torch.zeros(5, 3, dtype=torch.long)).shape == (5, 3, 11)


def test_no_position_sees_what_follows_it():
    model = small()
    tokens = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    one, two = model(tokens)[0], model(other)[0]
    assert torch.equal(one[:5], two[:5])
    assert (one[5:] != two[5:]).any(-1).all()


def test_the_order_of_the_past_matters():
    model = small()
    one, two = (model(torch.tensor([order]))[0, -1] for order in ([1, 2, 3], [2, 1, 3]))
    assert not torch.allclose(one, two)


def test_attention_is_that_of_torch():
    block = Block(12, 3)
    torch.manual_seed(0)
    stream = torch.randn(2, 5, 12)
    reference = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(block.qkv.weight)
        reference.out_proj.weight.copy_(block.mixed.weight)
        block.narrower.weight.zero_()
    inside = block.norm1(stream)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = stream + reference(inside, inside, inside, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(block(stream), expected)


def test_the_size_that_is_benchmarked():
    model = GPT()
    blocks = 6 * (12 * 384**2 + 2 * 384)
    assert sum(each.numel() for each in model.parameters()) == blocks + 3 * 256 * 384 + 384
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_the_start_is_gpt_2s():
    model = initialize_(GPT(layers=2, width=96, heads=4), torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            expected = 0.01 if "mixed" in name or "narrower" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_a_seed_gives_a_start():
    one, same, other = ({k: v for k, v in small(seed).state_dict().items() if "norm" not in k} for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_without_a_generator_the_global_one_is_used():
    starts = []
    for _ in range(2):
        torch.manual_seed(3)
        starts.append(initialize_(GPT(**SMALL)).head.weight.clone())
    assert torch.equal(*starts)


def test_the_plan_leaves_embeddings_and_head():
    objective = Objective(small(), lambda model, batch: model(batch).mean(), [torch.zeros(1, 8, dtype=torch.long)])
    plan = make_plan(*partition_objective(objective, "parameter"), "auto", 2**30)
    assert plan.unrotated == {
        "tokens.weight": "an embedding",
        "positions.weight": "an embedding",
        "head.weight": "the output head",
    }
    assert {block.name for block in plan.chosen} == {
        f"blocks.{layer}.{name}.weight" for layer in range(2) for name in ("qkv", "mixed", "wider", "narrower")
    }


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="9 tokens are more than the context of 8"):
        small()(torch.zeros(1, 9, dtype=torch.long))
