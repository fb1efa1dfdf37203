"""egop.diagnose: does my loss have spectral decay, what would a basis cost, and was that enough samples?"""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import cases
import egop
from egop.diagnostics import rules
from egop.diagnostics.measure import Gathering
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
def test_no_decay_is_called_flat(rotated, samples):
    objective, _ = quadratic(torch.ones(DIMENSION).double(), rotated=rotated)
    found = diagnosed(objective, samples=samples)
    (block,) = found.blocks
    assert block.verdict == "leave"
    assert block.advice.startswith("Leave it: the spectrum is flat")
    assert "Nothing here suggests" in str(found)


def test_few_samples_of_no_decay_are_not_taken_for_a_flat_spectrum():
    objective, _ = quadratic(torch.ones(DIMENSION).double(), rotated=True)
    (block,) = diagnosed(objective, samples=10).blocks
    assert block.verdict == "sample more"
    assert "samples=120 or so" in block.advice


def test_decay_along_the_axes_is_called_aligned():
    objective, _ = quadratic(decaying(), rotated=False)
    (block,) = diagnosed(objective).blocks
    assert block.verdict == "leave"
    assert "axes are already aligned" in block.advice
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
    assert block.stable_rank == pytest.approx(spectrum.stable_rank)
    assert block.density == pytest.approx(spectrum.density[0].item())
    assert block.ratio == pytest.approx(egop.theory.leading_ratio(spectrum))
    assert block.effective_dimension == spectrum.effective_dimension(0.9)
    assert block.stability == pytest.approx(spectrum.stability)
    assert block.eigenvalues == pytest.approx(spectrum.eigenvalues.tolist())
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


def test_white_noise_shows_the_stable_rank_that_the_law_predicts():
    generator = torch.Generator().manual_seed(0)
    for dimension, samples in [(200, 200), (100, 1000), (300, 60), (40, 40)]:
        noise = torch.randn(samples, dimension, generator=generator, dtype=torch.float64)
        values = torch.linalg.svdvals(noise)
        found = float(values.sum() / values[0])
        assert rules.noise_stable_rank(dimension, samples) == pytest.approx(found, rel=0.08)


# --- rules, on numbers made up for them ---


def block_with(**numbers):
    usual = {
        "name": "w", "shapes": ((10, 10),), "size": 100, "structure": "Full", "dimension": 100, "samples": 200,
        "stable_rank": 5.0, "noise_rank": 60.0, "axes": 50.0, "density": 0.5, "ratio": 0.1,
        "effective_dimension": 8, "stability": 0.9, "cost": 0.1,
    }  # fmt: skip
    return egop.BlockDiagnosis(**usual | numbers)


@pytest.mark.parametrize(
    ("numbers", "verdict", "words"),
    [
        ({}, "use", "Use egop.Full()"),
        ({"structure": None, "why": "an embedding"}, "leave", "an embedding"),
        ({"stable_rank": 50.0}, "leave", "flat"),
        ({"stable_rank": 50.0, "samples": 50}, "sample more", "looks flat"),
        ({"axes": 1.3}, "leave", "already aligned"),
        ({"stability": 0.3}, "sample more", "agree to 0.30 only"),
        ({"stability": 0.3, "effective_dimension": 80}, "use", "Use egop.Full()"),
        ({"stability": 0.3, "samples": 2000}, "use", "Use egop.Full()"),
        ({"ratio": 1.4}, "leave", "promises nothing"),
        ({"cost": 3.0}, "leave", "costs 3 times a forward and backward pass"),
        ({"cost": 3.0, "leaner": ("Shared", 0.2)}, "use", "Use egop.Shared()"),
        ({"cost": 3.0, "leaner": ("Shared", 0.2)}, "use", "with structure=egop.Shared(), or --structure shared."),
        ({"cost": 3.0, "leaner": ("Shared", 2.0)}, "leave", "costs 3 times"),
        ({"cost": None, "stability": None}, "use", "Use egop.Full()"),
    ],
)
def test_the_rules(numbers, verdict, words):
    found, said = rules.decide(block_with(**numbers), draws=200, online=False)
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
    finish, finished = Gathering.finish, []

    def interrupted(self, block):
        if finished:
            raise KeyboardInterrupt
        finished.append(block)
        return finish(self, block)

    monkeypatch.setattr(Gathering, "finish", interrupted)
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
