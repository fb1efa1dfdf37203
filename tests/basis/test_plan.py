"""Which structure each block gets, and why some get none."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import cases
import egop
from egop.basis import plan as planning
from egop.basis.partition import partition_parameters
from egop.basis.plan import make_plan
from egop.basis.roles import Role, find_roles

GIB = 2**30


class Language(nn.Module):
    """Embedding, attention, a small and a wide layer, a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.small = nn.Linear(16, 8)
        self.large = nn.Linear(100, 80)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)


def parts_of(module, partition="parameter"):
    parameters = dict(module.named_parameters())
    layers = find_roles(parameters, module)
    return partition_parameters(parameters, layers, partition), layers


def plan_of(module, structure="auto", memory=GIB, partition="parameter", **options):
    return make_plan(*parts_of(module, partition), structure, memory, **options)


def kinds(plan):
    return {block.name: type(structure).__name__ for block, structure in plan.chosen.items()}


def linear(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 2))


def test_auto_shares_bases_and_skips_embeddings_and_heads():
    plan = plan_of(Language())
    weights = ["attention.in_proj_weight", "attention.out_proj.weight", "small.weight", "large.weight"]
    assert kinds(plan) == dict.fromkeys(weights, "Shared")
    assert plan.unrotated == {"embedding.weight": "an embedding", "head.weight": "the output head"}


def test_auto_uses_a_dense_basis_for_vectors():
    tensors, layers = (
        {"theta": torch.zeros(9), "column": torch.zeros(9, 1)},
        dict.fromkeys(("theta", "column"), Role("weight")),
    )
    plan = make_plan(partition_parameters(tensors, layers, "parameter"), layers, "auto", GIB)
    assert kinds(plan) == {"theta": "Full", "column": "Full"}


def test_what_is_asked_for_by_name_is_not_left():
    asked = {"embedding.weight": egop.Shared(), "head*": egop.Kronecker(), "*": egop.Identity()}
    plan = plan_of(Language(), asked)
    assert kinds(plan)["embedding.weight"] == "Shared"
    assert kinds(plan)["head.weight"] == "Kronecker"
    assert set(kinds(plan).values()) == {"Shared", "Kronecker", "Identity"}


def test_blocks_without_a_matching_pattern_are_not_rotated():
    plan = plan_of(Language(), {"small.weight": egop.Full()})
    assert kinds(plan) == {"small.weight": "Full"}
    assert set(plan.unrotated.values()) == {"no pattern matches it"}
    assert "embedding.weight" in plan.unrotated


def test_very_wide_layers_are_not_rotated():
    plan = plan_of(nn.Sequential(nn.Linear(planning.WIDTH_LIMIT + 1, 2), nn.Linear(6, 5), nn.Linear(5, 2)))
    assert kinds(plan) == {"1.weight": "Shared"}
    assert plan.unrotated["0.weight"] == "too wide: a basis would take too long"
    widest = plan_of(nn.Sequential(nn.Linear(planning.WIDTH_LIMIT, 64), nn.Linear(5, 2)))
    assert kinds(widest) == {"0.weight": "Shared"}


def test_layers_with_too_costly_bases_are_not_rotated():
    """Decomposing a basis of width n takes about n³ operations: here, with 4 rows of n entries, n²/4 per entry."""
    limit = int((4 * planning.WORK_LIMIT) ** 0.5)
    for width, expected in ((limit, {"0.weight": "Shared"}), (limit + 1, {})):
        plan = plan_of(nn.Sequential(nn.Linear(width, 4), nn.Linear(5, 2)))
        assert kinds(plan) == expected
    assert plan.unrotated["0.weight"] == "too wide: a basis would take too long"


def test_experts_mistaken_for_a_convolution_are_not_rotated():
    """A basis for four rows of 64 x 112 columns would take minutes; as four matrices it is cheap."""
    experts, layers = {"experts": torch.zeros(4, 64, 112)}, {"experts": Role("weight")}
    plan = make_plan(partition_parameters(experts, layers, "parameter"), layers, "auto", 2 * GIB)
    assert "too long" in plan.unrotated["experts"]
    layers = {"experts": Role("weight", stacked=1)}
    plan = make_plan(partition_parameters(experts, layers, "parameter"), layers, "auto", 2 * GIB)
    assert kinds(plan) == {"experts": "Shared"}


def test_what_is_no_weight_is_left_with_the_reason():
    vit = nn.Module()
    vit.token, vit.table = nn.Parameter(torch.zeros(1, 1, 6)), nn.Parameter(torch.zeros(1, 5, 6))
    vit.layer, vit.head = nn.Linear(6, 6), nn.Linear(6, 2)
    plan = plan_of(vit, candidates=(egop.Kronecker(), egop.Shared()), partition="layer")
    assert kinds(plan) == {"table": "Kronecker", "layer.weight": "Kronecker"}
    assert plan.unrotated == {"token": "a vector: it has one row or column", "head.weight": "the output head"}


@pytest.mark.parametrize(("size", "expected"), [(planning.FULL_LIMIT, ["theta"]), (planning.FULL_LIMIT + 1, [])])
def test_auto_limits_dense_bases_to_a_number_of_entries(size, expected):
    layers = {"theta": Role("weight")}
    plan = make_plan(partition_parameters({"theta": torch.zeros(size)}, layers, "parameter"), layers, "auto", GIB)
    assert list(kinds(plan)) == expected


RICH = (egop.Kronecker(), egop.Shared())


# The bytes of linear(20, 10)'s first layer: Kronecker (20² + 10²) x 4, Shared 20² x 4.
@pytest.mark.parametrize(("memory", "expected"), [(2000, "Kronecker"), (1999, "Shared"), (1600, "Shared")])
def test_memory_limit_is_exact(memory, expected):
    assert kinds(plan_of(linear(20, 10), memory=memory, candidates=RICH)) == {"0.weight": expected}


def test_memory_goes_to_as_many_blocks_as_possible_then_to_richer_bases():
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)), nn.Linear(20, 2))
    both, shared = 2 * 20**2 * 4, 20**2 * 4
    for richer in range(4):
        memory = richer * both + (3 - richer) * shared
        plan = plan_of(model, memory=memory, candidates=RICH)
        assert sorted(kinds(plan).values()) == ["Kronecker"] * richer + ["Shared"] * (3 - richer)
        assert list(kinds(plan)) == ["0.weight", "1.weight", "2.weight"]  # the order of the model
        assert sum(structure.cost(block).bytes for block, structure in plan.chosen.items()) <= memory
    some = plan_of(model, memory=2 * shared, candidates=RICH)
    assert list(kinds(some).values()) == ["Shared"] * 2
    assert some.unrotated == {"2.weight": "needs at least 1.6 KiB; 0 B are left", "3.weight": "the output head"}


def test_memory_too_small_for_any_basis_raises_and_changes_nothing():
    model = cases.MLP.build()
    before = cases.state_of(model)
    message = r"No basis fits into memory=100 B: the smallest, of block '0\.weight', takes 288 B\. Raise memory="
    with pytest.raises(MemoryError, match=message):
        cases.estimate(cases.MLP.objective(model), structure="auto", memory=100)
    with pytest.raises(MemoryError, match="No basis fits into memory=10 B"):
        train_online(model, memory=10)
    assert cases.state_of(model)["parameters"] == before["parameters"]


def train_online(model, **options):
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.SGD, refresh=egop.Online(**options), lr=0.1)
    cases.train(model, optimizer, cases.MLP.batches(), 1)


def test_bases_that_do_not_fit_raise_and_the_message_names_the_largest():
    blocks = [cases.block(name, **{name: (3, 3)}) for name in "ab"] + [cases.block("c", c=(4, 3))]
    message = (
        "The bases need 2.4 KiB, more than memory=2.0 KiB. The largest, of block 'c', takes 1.1 KiB. Raise memory=, "
        "choose a smaller structure such as egop.Shared() or egop.Auxiliary(rank=...), or leave the block out."
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        make_plan(blocks, {}, egop.Full(), 2048)
    assert len(make_plan(blocks, {}, egop.Full(), 2 * 648 + 1152).chosen) == 3


def test_the_table_has_bytes_and_says_why_weights_are_left_out():
    lines = str(plan_of(Language())).splitlines()
    assert re.split(r" {2,}", lines[0]) == ["block", "structure", "shape", "basis"]
    rows = {line.split()[0]: re.split(r" {2,}", line)[1:] for line in lines[2:-2]}
    assert rows["large.weight"] == ["Shared", "80 x 100", "39.1 KiB"]
    assert len(rows) == 5  # with the total
    assert lines[-2:] == [
        "embedding.weight is not rotated: an embedding",
        "head.weight is not rotated: the output head",
    ]


def test_the_plan_is_printed_while_a_basis_is_estimated(capsys):
    objective = cases.MLP.objective()
    egop.estimate(objective, samples=2, progress=True)
    assert "0.weight     Shared" in capsys.readouterr().err
    basis = egop.estimate(objective, samples=2, progress=False)
    assert capsys.readouterr().err == ""
    assert "2.weight" not in basis
    assert basis.unrotated == {"2.weight": "the output head"}
    assert "the output head" in str(basis)


def test_the_candidates_may_be_others():
    plan = plan_of(Language(), candidates=(egop.Kronecker(), egop.Shared()))
    assert set(kinds(plan).values()) == {"Kronecker"}
    sides, inputs = (16**2 + 8**2) * 4, 16**2 * 4
    plan = plan_of(
        nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2)), memory=inputs, candidates=(egop.Kronecker(), egop.Shared())
    )
    assert inputs < sides
    assert kinds(plan) == {"0.weight": "Shared"}


def test_block_of_several_tensors_is_kept_or_split():
    model = cases.MODELS[3].build()  # a GRU
    assert kinds(plan_of(model, egop.Full(), partition="layer")) == {"rnn": "Full", "head.weight": "Full"}
    divided = {"rnn.weight_ih_l0": "Shared", "rnn.weight_hh_l0": "Shared", "head.weight": "Shared"}
    assert kinds(plan_of(model, egop.Shared(), partition="layer")) == divided


@pytest.mark.parametrize("structure", ["full", None, egop.Full, 3])
def test_value_that_is_not_a_structure_raises(structure):
    with pytest.raises(
        TypeError, match=r"Invalid structure value: .*Must be 'auto', a structure such as egop\.Full\(\)"
    ):
        plan_of(Language(), structure)


def test_invalid_mappings_raise():
    with pytest.raises(ValueError, match=r"Pattern 'encoder\*' matches no block\. Available: embedding\.weight"):
        plan_of(Language(), {"encoder*": egop.Full()})
    with pytest.raises(TypeError, match=r"Pattern 'small\*' needs a structure such as egop\.Full\(\), got 'full'\.$"):
        plan_of(Language(), {"small*": "full"})


def test_structure_class_raises_with_a_hint_to_call_it():
    for structure in (egop.Shared, {"small*": egop.Shared}):
        with pytest.raises(TypeError, match=r"<class '.*Shared'>\..* Call it: egop\.Shared\(\)\.$"):
            plan_of(Language(), structure)
