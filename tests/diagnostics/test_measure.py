"""egop.diagnose: does my loss have spectral decay, what would a basis cost, and was that enough samples?"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import cases
import egop
from egop.basis.spectrum import Spectrum, _descending
from egop.diagnostics import measure, rules
from egop.diagnostics.measure import Gathering
from egop.estimation import chunks
from egop.numerics.linalg import random_orthonormal

DIMENSION = 30


def quadratic(scales, *, rotated, interrupt_at=None):
    """½ Σ s_k (q_k·θ)², in a random basis q or on the axes; its EGOP eigenvalues are s²."""
    generator = torch.Generator().manual_seed(0)
    Q = random_orthonormal(len(scales), len(scales), generator) if rotated else torch.eye(len(scales)).double()
    calls = []

    def loss(theta):
        calls.append(1)
        if len(calls) == interrupt_at:
            raise KeyboardInterrupt
        return (scales * (Q.mT @ theta).square()).sum() / 2

    objective = egop.Objective.from_function(loss, {"theta": torch.zeros(len(scales), dtype=torch.float64)})
    return objective, calls


def decaying(power=2.0, dimension=DIMENSION):
    return torch.arange(1, dimension + 1).double() ** -power


def diagnosed(objective, **options):
    return egop.diagnose(objective, progress=False, **options)


# --- problems whose answer is known ---


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("samples", [None, 10 * DIMENSION])
def test_no_decay_is_not_told_from_noise(rotated, samples):
    objective, _ = quadratic(torch.ones(DIMENSION).double(), rotated=rotated)
    found = diagnosed(objective, samples=samples)
    (block,) = found.blocks
    assert block.verdict == "leave"
    assert f"in {samples or DIMENSION} draws no direction matters more than in white noise" in block.advice
    assert "Nothing here suggests" in str(found)
    assert "Refresh" not in str(found), "there is no basis to renew"
    assert found.code == ""


STRUCTURES = [egop.Full(), egop.Shared(), egop.Shared(side="output"), egop.Kronecker()]


def noise(kind):
    """A loss whose gradients are white noise; the rows of one draw are independent, or all alike but for their size."""
    if kind == "independent":
        return egop.Objective.from_function(lambda w: w.square().sum() / 2, {"w": torch.zeros(6, 10).double()})

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return w.sum()

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            return grad * torch.outer(w[:, 0], w[0])

    def loss(w):
        return Outer.apply(w)

    return egop.Objective.from_function(loss, {"w": torch.zeros(6, 10).double()})


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("kind", ["independent", "alike"])
@pytest.mark.parametrize("samples", [2, 5, 16, 60, 700])
def test_white_noise_is_left_however_many_draws(structure, kind, samples):
    (block,) = diagnosed(noise(kind), structure=structure, samples=samples).blocks
    assert block.verdict == "leave", block.advice
    assert block.samples == samples


def planted(rank=4, dimension=40, floor=0.2):
    """Gradients along a few directions that are dense, and little noise."""
    scales = torch.full((dimension,), floor).double()
    scales[:rank] = 1
    return quadratic(scales, rotated=True)[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_spectrum_is_found_with_the_draws_it_needs_and_not_before(monkeypatch, seed):
    monkeypatch.setattr(rules, "COSTLY", math.inf)

    def block_of(samples):
        return diagnosed(planted(), samples=samples, generator=torch.Generator().manual_seed(seed)).blocks[0]

    few, many = block_of(8), block_of(400)
    assert few.verdict == "sample more"
    assert "samples=32 or so" in few.advice
    assert "enough" not in few.advice
    assert block_of(160).verdict == many.verdict == "use"
    assert many.stable_rank == pytest.approx(4 + 36 * 0.2, rel=0.1)


@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_rows_of_one_draw_are_one_draw(structure):
    """As in a small GPT: each gradient has many rows, which span little."""
    (block,) = diagnosed(noise("alike"), structure=structure, samples=16).blocks
    assert block.samples == 16
    assert "enough" not in block.advice
    assert block.stable_rank > 0.5 * block.dimension, "the spectrum of few draws is steep by chance"


def test_draws_are_added_until_the_answer_is_clear(monkeypatch):
    monkeypatch.setattr(rules, "COSTLY", math.inf)
    monkeypatch.setattr(egop.Full, "samples", lambda self, block: 6)
    found = diagnosed(planted())
    assert found.blocks[0].verdict == "use"
    assert found.draws == found.wanted == found.blocks[0].samples
    assert found.draws in (12, 24, 48, 96)
    assert diagnosed(noise("independent")).draws >= 60, "more draws may show what few do not"
    short = diagnosed(planted(), budget=0)
    assert (short.draws, short.blocks[0].verdict) == (6, "sample more")


def test_the_budget_ends_the_first_draws_too_but_not_those_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_POINTS", 8)
    assert diagnosed(planted(), budget=0).draws == 8
    assert diagnosed(planted(), budget=0, samples=20).draws == 20


def test_draws_that_were_added_are_those_of_one_stream(monkeypatch):
    monkeypatch.setattr(egop.Full, "samples", lambda self, block: 6)
    found = diagnosed(planted())
    gradients = cases.sample(planted(), egop.Gaussian(), 96)["theta"][: found.draws]
    expected = torch.linalg.eigvalsh(gradients.mT @ gradients / found.draws).flip(0)
    torch.testing.assert_close(found.basis.spectrum["theta"].eigenvalues, expected.clamp_min(0))


def eigenbasis_network(rotated):
    """A layer whose inputs have independent entries of many scales, or the same rotated."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(1, 25).double() ** -1.0
    Q = random_orthonormal(24, 24, generator) if rotated else torch.eye(24).double()
    batches = [torch.randn(16, 24, generator=generator, dtype=torch.float64) * scales @ Q.mT for _ in range(50)]
    model = nn.Sequential(nn.Linear(24, 12, bias=False), nn.Tanh(), nn.Linear(12, 3)).double()
    return egop.Objective(model, lambda model, batch: model(batch).square().mean(), batches)


def test_a_network_in_its_own_eigenbasis_is_left_and_the_same_rotated_is_not(monkeypatch):
    monkeypatch.setattr(rules, "COSTLY", math.inf)
    left, advised = (
        diagnosed(eigenbasis_network(rotated), structure={"0.*": egop.Shared()}).blocks[0] for rotated in (False, True)
    )
    assert left.verdict == "leave"
    assert "the axes are already as good" in left.advice
    assert left.one_norm > 0.95
    assert advised.verdict == "use"
    assert advised.one_norm < 0.8


def test_decay_along_the_axes_is_called_aligned():
    objective, _ = quadratic(decaying(), rotated=False)
    (block,) = diagnosed(objective).blocks
    assert block.verdict == "leave"
    assert "the axes are already as good" in block.advice
    assert block.density == pytest.approx(1 / DIMENSION, rel=0.5)
    assert block.ratio > 1


def test_decay_in_dense_directions_gets_a_recommendation(monkeypatch):
    monkeypatch.setattr(rules, "COSTLY", math.inf)  # a function this small is faster than any basis
    objective, _ = quadratic(decaying(), rotated=True)
    found = diagnosed(objective)
    (block,) = found.blocks
    assert block.verdict == "use"
    assert "Use egop.Full()" in block.advice
    assert f"samples={DIMENSION}" in block.advice
    assert block.ratio < 0.2
    assert block.stability > 0.9
    assert found.verdict.startswith("A change of basis is promising for 1 of 1 blocks.")


def test_zero_gradients_and_single_entries_are_left():
    objective = egop.Objective.from_function(lambda a, b: 0 * a.sum() + b.square().sum(), {
        "a": torch.zeros(3), "b": torch.zeros(1),
    })  # fmt: skip
    zero, single = diagnosed(objective).blocks
    assert "every sampled gradient was zero" in zero.advice
    assert zero.stability is None
    assert "one entry" in single.advice


# --- the numbers ---


def test_the_numbers_are_those_of_the_spectrum():
    objective, _ = quadratic(decaying(), rotated=True)
    found = diagnosed(objective, samples=60)
    basis = egop.estimate(objective, rho=egop.Gaussian(), samples=60, progress=False, stability=True)
    (block,), spectrum = found.blocks, basis.spectrum["theta"]
    assert block.density == pytest.approx(spectrum.density[0].item())
    assert (block.stability, block.chance) == pytest.approx((spectrum.stability, spectrum.chance))
    assert block.surprise == pytest.approx(spectrum.surprise)
    gradients = cases.sample(objective, egop.Gaussian(), 60)["theta"]
    halves = [half.mT @ half for half in (gradients[::2], gradients[1::2])]
    vectors = [torch.linalg.eigh(half).eigenvectors.flip(1) for half in halves]
    held = [(V.mT @ half @ V).diagonal() / half.trace() for V, half in zip(vectors, halves[::-1], strict=True)]
    held_out = Spectrum(_descending((held[0] + held[1]) / 2 * spectrum.eigenvalues.sum()), spectrum.density, 60)
    assert block.eigenvalues == pytest.approx(held_out.eigenvalues.tolist())
    assert block.stable_rank == pytest.approx(held_out.stable_rank)
    assert block.ratio == pytest.approx(egop.theory.leading_ratio(held_out))
    assert block.effective_dimension == held_out.effective_dimension(0.9)
    assert (block.size, block.dimension, block.samples, found.draws) == (30, 30, 60, 60)
    assert block.bytes == basis["theta"].nbytes
    torch.testing.assert_close(found.basis["theta"].dense(), basis["theta"].dense())


def test_the_cost_is_measured_against_the_models_own_pass():
    found = diagnosed(cases.MLP.objective(), samples=20)
    assert found.pass_seconds > 0
    for block in found.blocks:
        if block.structure is not None:
            assert block.cost == pytest.approx(block.seconds / found.pass_seconds)
    assert found.cost == pytest.approx(sum(block.cost for block in found.blocks if block.cost is not None))


@pytest.mark.parametrize("structure", [s for s in cases.STRUCTURES if not isinstance(s, egop.Full)], ids=str)
def test_every_structure_can_be_diagnosed(structure):
    found = diagnosed(cases.MLP.objective(), structure=structure, samples=30)
    assert all(block.advice for block in found.blocks)
    assert str(found)


@pytest.mark.parametrize("case", cases.MODELS, ids=str)
def test_the_model_is_left_as_it_was(case):
    model = case.build()
    before = cases.state_of(model)
    diagnosed(case.objective(model), samples=6)
    assert cases.state_of(model) == before


# --- rules, on numbers made up for them ---


def block_with(**numbers):
    usual = {
        "name": "w", "shapes": ((10, 10),), "size": 100, "structure": "Full", "dimension": 100, "samples": 200,
        "stable_rank": 5.0, "density": 0.5, "ratio": 0.1, "effective_dimension": 8, "one_norm": 0.5,
        "stability": 0.9, "chance": 0.1, "surprise": 50.0, "cost": 0.1,
    }  # fmt: skip
    return egop.BlockDiagnosis(**usual | numbers)


@pytest.mark.parametrize(
    ("numbers", "verdict", "words"),
    [
        ({}, "use", "Use egop.Full()"),
        ({"structure": None, "why": "an embedding"}, "leave", "an embedding"),
        ({}, "use", "samples=200 were enough"),
        ({"surprise": 3.0}, "leave", "in 200 draws no direction matters more than in white noise"),
        ({"samples": 3}, "leave", "in 3 draws no direction matters more than in white noise"),
        ({"samples": 1, "stability": None, "surprise": None}, "sample more", "one draw cannot be compared"),
        ({"stable_rank": 90.0, "one_norm": 0.97}, "leave", "flat"),
        ({"one_norm": 0.97}, "leave", "the axes are already as good"),
        ({"stability": 0.06, "chance": 0.12}, "sample more", "agree to 0.06 (chance: 0.12) only"),
        ({"stability": 0.54}, "sample more", "agree to 0.54 (chance: 0.10) only"),
        ({"stability": 0.56}, "use", "Use egop.Full()"),
        ({"stability": 0.3, "samples": 1000}, "use", "Use egop.Full()"),
        ({"ratio": 1.4}, "leave", "promises nothing"),
        ({"cost": 3.0}, "leave", "costs 3 times a forward and backward pass"),
        ({"cost": 3.0, "leaner": ("Shared", 0.2)}, "use", "Use egop.Shared()"),
        ({"cost": 3.0, "leaner": ("Shared", 0.2)}, "use", "with structure=egop.Shared(), or --structure shared."),
        ({"cost": 3.0, "leaner": ("Shared", 2.0)}, "leave", "costs 3 times"),
        ({"cost": None, "stability": None}, "use", "Use egop.Full()"),
    ],
)
def test_the_rules(numbers, verdict, words):
    found, said = rules.decide(block_with(**numbers), online=False)
    assert found == verdict
    assert words in said


def test_the_time_of_a_step_is_said_to_be_that_of_the_measured_bases():
    advised = block_with(cost=1.5, leaner=("Shared", 0.2), verdict="use")
    found = egop.Diagnosis((advised,), None, 200, 200, 0.01, rules.PLAIN, online=False)
    assert found.verdict.endswith(" With the bases in the table a training step takes about 2.5 times as long.")


def test_a_model_with_attention_or_embeddings_is_told_to_learn_its_basis_in_training():
    found = diagnosed(cases.MODELS[4].objective(), samples=10)
    assert found.online
    assert "refresh=egop.Online()" in found.refresh
    measured = [block for block in found.blocks if block.structure is not None]
    assert measured
    assert all(block.verdict == "online" for block in measured)
    embedded = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 3))
    batches = [(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, dtype=torch.long))]
    assert diagnosed(egop.Objective(embedded, cases.cross_entropy, batches), samples=4).online
    assert not diagnosed(cases.MLP.objective(), samples=4).online


def test_a_convolution_net_is_told_of_renewing_every_epoch():
    assert "egop.Every(" in diagnosed(cases.MODELS[2].objective(), samples=4).refresh


def wide_layer():
    """A basis of all entries costs far more than the pass of a layer that sees one input."""
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2)).double()
    batches = [torch.randn(1, 48, generator=torch.Generator().manual_seed(seed)).double() for seed in range(9)]
    return egop.Objective(model, lambda model, batch: model(batch).square().mean(), batches)


def test_auto_does_not_take_what_costs_more_than_a_pass(monkeypatch):
    monkeypatch.setattr(measure, "_pass_seconds", lambda objective: 1e-4)
    seconds = {"Full": 5e-4, "Shared": 1e-5}
    monkeypatch.setattr(measure, "_change_seconds", lambda change: seconds[change.kind])
    found = diagnosed(wide_layer(), samples=20)
    block = found.blocks[0]
    assert block.structure == found.basis["0.weight"].kind == "Shared"
    assert "Full would cost 5 times a forward and backward pass" in block.why
    assert "Full" not in found.code
    seconds["Full"] = 5e-5
    assert diagnosed(wide_layer(), samples=20).blocks[0].structure == "Full"


def test_the_code_names_what_is_advised_and_runs():
    blocks = [block_with(name=f"layers.{index}.weight", verdict="use") for index in range(3)]
    others = [block_with(name="first.weight", verdict="use", structure="Shared"), block_with(verdict="leave")]
    found = egop.Diagnosis((*blocks, *others), None, 200, 200, 0.01, rules.PLAIN, online=False)
    sampled, made = found.code.splitlines()
    assert '{"layers.*.weight": egop.Full(), "first.weight": egop.Shared()}, samples=200)' in sampled
    assert made == "optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=lr)"
    mixed = replace(found, blocks=(*blocks, block_with(name="layers.7.weight", verdict="leave")))
    assert '"layers.0.weight": egop.Full(), "layers.1.weight"' in mixed.code
    objective = eigenbasis_network(rotated=True)
    found = diagnosed(objective, structure=egop.Shared(side="output"))
    advised = replace(found, blocks=tuple(replace(block, verdict="use", leaner=None) for block in found.blocks))
    names = {"egop": egop, "torch": torch, "objective": objective, "model": objective.module, "lr": 0.1}
    exec(advised.code.replace("samples=", "progress=False, samples="), names)
    assert {change.structure() for change in names["basis"].values()} == {egop.Shared(side="output")}
    online = replace(found, blocks=(block_with(verdict="online"),))
    assert "refresh=egop.Online()" in online.code


def test_what_is_not_clear_is_neither_promising_nor_to_be_renewed():
    unclear = egop.Diagnosis((block_with(verdict="sample more"),), None, 200, 200, 0.01, rules.PLAIN, online=False)
    assert unclear.verdict.startswith("Whether a change of basis would help is not clear yet. For 1 of 1 blocks")
    assert "promising" not in unclear.verdict
    assert "Refresh" not in str(unclear)
    assert unclear.code == ""


def test_layers_that_are_alike_are_one_row():
    layers = [
        block_with(name=f"layers.{k}.weight", stable_rank=5.0 + k, one_norm=0.5 + 0.1 * k, verdict="use",
                   advice=f"Use egop.Full(): about {5.0 + k:.1f} of 100 directions matter.")
        for k in range(3)
    ]  # fmt: skip
    other = replace(layers[0], name="layers.3.weight", verdict="leave", advice="Leave it: the spectrum is flat.")
    said = str(egop.Diagnosis((*layers, other), None, 200, 200, 0.01, rules.PLAIN, online=False))
    rows = [line for line in said.splitlines() if line.startswith("layers.")]
    assert len(rows) == 2
    assert rows[0].startswith("layers.*.weight (3 alike)")
    assert "5.0–7.0 of 100" in rows[0]
    assert "about 7.0 of 100 directions matter" in said, "the words of the least promising one"


# --- interruptions ---


def test_ctrl_c_while_sampling_gives_a_partial_diagnosis_of_what_was_sampled():
    dimension = 400
    # the plain passes that are timed and compared come first, then one call for each chunk
    objective, calls = quadratic(decaying(2.0, dimension), rotated=True)
    diagnosed(objective, samples=2000)
    objective, _ = quadratic(decaying(2.0, dimension), rotated=True, interrupt_at=len(calls) - 2)
    found = diagnosed(objective, samples=2000)
    assert 0 < found.draws < 2000
    assert found.partial == f"sampling was interrupted after {found.draws} of 2000 draws"
    assert str(found).startswith("PARTIAL: sampling was interrupted")
    assert found.blocks[0].stable_rank is not None
    assert found.basis is not None


def test_ctrl_c_before_anything_was_sampled_is_passed_on_and_what_was_known_has_been_shown():
    objective, _ = quadratic(decaying(), rotated=True, interrupt_at=1)
    shown = []
    with pytest.raises(KeyboardInterrupt):
        diagnosed(objective, show=shown.append)
    (known,) = shown
    assert known.partial == "no gradients have been sampled yet"
    assert known.blocks[0].structure == "Full"
    assert known.blocks[0].bytes == 8 * DIMENSION**2
    assert known.verdict == "Nothing can be said yet."


def test_ctrl_c_in_a_decomposition_keeps_the_blocks_that_are_finished(monkeypatch):
    so_far, finished = Gathering.so_far, []

    def interrupted(self, block):
        if finished:
            raise KeyboardInterrupt
        finished.append(block)
        return so_far(self, block)

    monkeypatch.setattr(Gathering, "so_far", interrupted)
    found = diagnosed(cases.DEEP.objective(), samples=20)
    assert found.partial.startswith("interrupted after 1 of ")
    assert [block.stable_rank is not None for block in found.blocks if block.structure][:2] == [True, False]
    assert list(found.basis) == [finished[0].name]


# --- as text and as values ---


def test_the_table_has_a_row_and_an_advice_for_each_block():
    found = diagnosed(cases.MLP.objective(), samples=20)
    lines = str(found).splitlines()
    for block in found.blocks:
        assert sum(line.startswith(f"{block.name} ") for line in lines) == 1
        assert sum(line.startswith(f"  {block.name} ") and block.advice in line for line in lines) == 1
    assert len(found.blocks) == 2  # the head is there too, with the reason why it is left
    assert "the output head" in str(found)


def test_it_is_plain_values_for_json():
    found = diagnosed(cases.MLP.objective(), samples=20)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["blocks"][0]["name"] == "0.weight"
    assert again["blocks"][0]["stable_rank"] == found.blocks[0].stable_rank
    assert again["verdict"] == found.verdict
    assert "basis" not in again


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"samples": 0}, ValueError, "Invalid samples value: 0"),
        ({"rho": 1.0}, TypeError, "rho must be a distribution"),
        ({"structure": "dense"}, TypeError, "Invalid structure value: 'dense'"),
        ({"memory": "much"}, ValueError, "Invalid memory value: 'much'"),
        ({"generator": 1}, TypeError, "generator must be a torch.Generator"),
        ({"budget": -1}, ValueError, "Invalid budget value: -1"),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=words):
        diagnosed(cases.MLP.objective(), **options)


def test_a_model_is_not_an_objective():
    with pytest.raises(TypeError, match=r"must be an egop\.Objective, got Linear"):
        diagnosed(nn.Linear(2, 2))


def test_a_loss_without_a_gradient_is_named():
    objective = egop.Objective(nn.Linear(2, 2), lambda model, batch: torch.zeros(()), [None])
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        diagnosed(objective)
