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
from egop.basis.spectrum import Spectrum, _make_descending
from egop.diagnostics import following, forms, rules
from egop.diagnostics.expected import FormDiagnosis
from egop.diagnostics.measure import Gathering
from egop.estimation import sampling
from egop.numerics import random_orthonormal

DIMENSION = 30
RATE = egop.diagnostics.FoundRate(0.02, (0.02,), (1.0,), "lr 0.02.")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Steps that take as long as AdamW's, so that gradients alone decide; nothing is timed, no rate is looked for."""
    monkeypatch.setattr(following.Following, "timed", lambda self, form, *arguments: replace(form, step=1.0))
    monkeypatch.setattr(following, "rate_of", lambda *arguments, **options: RATE)


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
    assert found.verdict.startswith("Leave it, keep AdamW: no block is promising")
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

    def block_of(samples):
        return diagnosed(planted(), samples=samples, generator=torch.Generator().manual_seed(seed)).blocks[0]

    few, many = block_of(8), block_of(400)
    assert few.verdict == "sample more"
    assert "samples=32 or so" in few.advice
    assert "enough" not in few.advice
    assert block_of(160).verdict == many.verdict == "promising"
    assert many.stable_rank == pytest.approx(4 + 36 * 0.2, rel=0.1)


@pytest.mark.parametrize("structure", [egop.Shared(), egop.Kronecker()], ids=str)
def test_rows_of_one_draw_are_one_draw(structure):
    """As in a small GPT: each gradient has many rows, which span little."""
    (block,) = diagnosed(noise("alike"), structure=structure, samples=16).blocks
    assert block.samples == 16
    assert "enough" not in block.advice
    assert block.stable_rank > 0.5 * block.dimension, "the spectrum of few draws is steep by chance"


def test_draws_are_added_until_the_answer_is_clear(monkeypatch):
    monkeypatch.setattr(egop.Full, "samples", lambda self, block: 6)
    found = diagnosed(planted())
    assert found.blocks[0].verdict == "promising"
    assert found.draws == found.wanted == found.blocks[0].samples
    assert found.draws in (12, 24, 48, 96)
    assert diagnosed(noise("independent")).draws >= 60, "more draws may show what few do not"
    short = diagnosed(planted(), budget=0)
    assert (short.draws, short.blocks[0].verdict) == (6, "sample more")


def test_the_budget_ends_the_first_draws_too_but_not_those_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK_POINTS", 8)
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
    left, advised = (
        diagnosed(eigenbasis_network(rotated), structure={"0.*": egop.Shared()}).blocks[0] for rotated in (False, True)
    )
    assert left.verdict == "leave"
    assert "the axes are already as good" in left.advice
    assert left.one_norm > 0.95
    assert advised.verdict == "promising"
    assert advised.one_norm < 0.8


def diagonal_network(scales, rotated=False):
    """A layer whose gradients have independent entries of some scales, or the same in other bases of both sides."""
    generator = torch.Generator().manual_seed(0)
    left, right = (random_orthonormal(size, size, generator) for size in scales.shape)
    noise = [torch.randn(scales.shape, generator=generator).double() for _ in range(40)]

    def loss(model, batch):
        weight = left @ model[0].weight @ right if rotated else model[0].weight
        return (scales * (weight.square() / 2 + batch * weight)).sum() + model[1].weight.square().sum()

    model = nn.Sequential(
        nn.Linear(scales.shape[1], scales.shape[0], bias=False), nn.Linear(scales.shape[0], 2)
    ).double()
    return egop.Objective(model, loss, noise)


@pytest.mark.parametrize("samples", [2, 16, 200])
def test_a_network_whose_gradients_are_white_noise_is_left_in_every_form(samples):
    found = diagnosed(diagonal_network(torch.ones(12, 16).double()), samples=samples)
    assert found.advised is None
    assert found.code == ""
    assert found.verdict.startswith("Leave it, keep AdamW: gradients do not lie off the axes more than noise")


SCALES = torch.outer(torch.logspace(0, -2, 12), torch.logspace(0, -2, 16)).double()


def test_a_network_in_its_own_eigenbasis_is_left_in_every_form_and_the_same_rotated_is_not():
    left = diagnosed(diagonal_network(SCALES))
    assert left.advised is None
    assert left.verdict.startswith("Leave it, keep AdamW: gradients do not lie off the axes more than noise")
    other = diagnosed(diagonal_network(SCALES, rotated=True))
    assert not any(form.against for form in other.forms)
    assert other.here.is_seen
    assert other.curvature.rotated > 2 * other.curvature.original
    assert other.advised is not None
    assert f"lr {RATE.lr:g}" in other.verdict


def test_a_planted_spectrum_of_few_draws_is_not_clear_yet():
    few = diagnosed(planted(), samples=8)
    assert few.verdict == "Not clear yet: there are too few draws for 1 of 1 blocks. Sample more."
    assert diagnosed(planted(), samples=400).forms[0].against == ""


def test_without_second_derivatives_all_problems_of_the_study_count():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, outputs):
            ctx.save_for_backward(outputs)
            return outputs.square().sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6)).double()
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).double() for seed in range(9)]
    found = diagnosed(egop.Objective(model, lambda model, batch: Once.apply(model(batch)), batches))
    assert found.curvature is None
    assert "The curvature is not known, so all problems of the study count: RuntimeError: the second" in str(found)
    assert {len(form.steps) for form in found.forms} == {20}


def test_decay_along_the_axes_is_called_aligned():
    objective, _ = quadratic(decaying(), rotated=False)
    (block,) = diagnosed(objective).blocks
    assert block.verdict == "leave"
    assert "the axes are already as good" in block.advice
    assert block.density == pytest.approx(1 / DIMENSION, rel=0.5)
    assert block.ratio > 1


def test_decay_in_dense_directions_gets_a_recommendation(monkeypatch):

    objective, _ = quadratic(decaying(), rotated=True)
    found = diagnosed(objective)
    (block,) = found.blocks
    assert block.verdict == "promising"
    assert "egop.Full()" in block.advice
    assert f"samples={DIMENSION}" in block.advice
    assert block.ratio < 0.2
    assert block.stability > 0.9


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
    basis = egop.estimate(objective, rho=egop.Gaussian(), samples=60, progress=False)
    (block,), spectrum = found.blocks, basis.spectrum["theta"]
    assert block.density == pytest.approx(spectrum.density[0].item())
    assert block.surprise == pytest.approx(spectrum.surprise)
    gradients = cases.sample(objective, egop.Gaussian(), 60)["theta"]
    halves = [half.mT @ half for half in (gradients[::2], gradients[1::2])]
    vectors = [torch.linalg.eigh(half).eigenvectors.flip(1) for half in halves]
    held = [(V.mT @ half @ V).diagonal() / half.trace() for V, half in zip(vectors, halves[::-1], strict=True)]
    held_out = Spectrum(_make_descending((held[0] + held[1]) / 2 * spectrum.eigenvalues.sum()), spectrum.density, 60)
    assert block.eigenvalues == pytest.approx(held_out.eigenvalues.tolist())
    assert block.stable_rank == pytest.approx(held_out.stable_rank)
    assert block.ratio == pytest.approx(held_out.stable_rank / (30 * float(held_out.density[0])))
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
    return egop.diagnostics.BlockDiagnosis(**usual | numbers)


@pytest.mark.parametrize(
    ("numbers", "verdict", "words"),
    [
        ({}, "promising", "egop.Full()"),
        ({"structure": None, "why": "an embedding"}, "leave", "an embedding"),
        ({}, "promising", "samples=200 were enough"),
        ({"surprise": 3.0}, "leave", "in 200 draws no direction matters more than in white noise"),
        ({"samples": 3}, "leave", "in 3 draws no direction matters more than in white noise"),
        ({"samples": 1, "stability": None, "surprise": None}, "sample more", "one draw cannot be compared"),
        ({"stable_rank": 90.0, "one_norm": 0.97}, "leave", "flat"),
        ({"one_norm": 0.97}, "leave", "the axes are already as good"),
        ({"stability": 0.06, "chance": 0.12}, "sample more", "agree to 0.06 (chance: 0.12) only"),
        ({"stability": 0.54}, "sample more", "agree to 0.54 (chance: 0.10) only"),
        ({"stability": 0.56}, "promising", "about 5.0 of 100 directions matter"),
        ({"stability": 0.3, "samples": 1000}, "promising", "egop.Full()"),
        ({"ratio": 1.4}, "leave", "promises nothing"),
        ({"cost": None, "stability": None}, "promising", "egop.Full()"),
    ],
)
def test_the_rules(numbers, verdict, words):
    found, said = rules.decide(block_with(**numbers))
    assert found == verdict
    assert words in said


def diagnosis_of(*blocks, **options):
    return egop.diagnostics.Diagnosis(blocks, None, 200, 200, 0.01, **options)


def form(name="fixed", *steps, step=1.0, **options):
    return FormDiagnosis(name, steps or (0.5, 0.6, 0.7, 0.8), step=step, bytes=2048, **options)


def test_what_saves_no_time_is_not_advised_however_few_steps_it_takes():
    found = diagnosis_of(block_with(), forms=(form(step=1.2), form("EGOP", 0.3, 0.4, 0.4, 0.5, step=3.0)))
    assert found.advised.name == "fixed"
    dear = diagnosis_of(block_with(), forms=(form(step=2.0), form("EGOP", 0.3, 0.4, 0.4, 0.5, step=3.0)))
    assert dear.advised is None
    assert dear.code == ""
    assert dear.verdict.startswith("Leave it, keep AdamW: no form is expected to save time here. The best, egop.")
    assert "a step takes 3.00 times as long here: 1.20 of AdamW's time (faster in 1 of 4)" in dear.verdict


def test_what_there_is_a_reason_against_is_not_advised():
    found = diagnosis_of(block_with(), forms=(form(against="no block is promising"), form("EGOP", step=1.1)))
    assert found.advised.name == "EGOP"
    assert "no block is promising" in str(found)
    alone = replace(found, forms=(form(against="no block is promising"),))
    assert alone.verdict == "Leave it, keep AdamW: no block is promising."


def test_draws_before_the_training_are_counted():
    assert diagnosis_of(block_with(), forms=(form(before=0.1),)).advised is not None
    assert diagnosis_of(block_with(), forms=(form(before=0.5),)).advised is None


def test_the_answer_names_form_rate_gain_range_time_and_memory():
    found = diagnosis_of(block_with(), forms=(form("EGOP", 0.5, 0.6, 0.7, math.inf, step=1.25),), rate=RATE)
    assert found.verdict == (
        "Use egop.EGOP with lr 0.02. Expect about 0.88 of AdamW's time to AdamW's loss (0.75 to 0.88 for the middle "
        "half of 4 similar problems of the study; faster than AdamW in 3 of them): 0.70 of the steps. A step takes "
        "1.25 times as long as AdamW's here, and 2.0 KiB more memory."
    )
    assert found.code == "optimizer = egop.EGOP(model, lr=0.02)"
    assert str(found).startswith(found.verdict)


@pytest.mark.parametrize("name", forms.FORMS)
def test_the_code_names_what_is_advised_and_runs(name):
    objective = eigenbasis_network(rotated=True)
    found = diagnosed(objective, structure=egop.Shared(side="output"))
    good = tuple(replace(block, verdict="promising") for block in found.blocks)
    advised = replace(found, blocks=good, forms=(form(name),), rate=None)
    names = {"egop": egop, "torch": torch, "objective": objective, "model": objective.module}
    exec(advised.code.replace("samples=", "progress=False, samples="), names)
    optimizer = names["optimizer"]
    assert type(optimizer) is type(forms.maker(name, found.basis)(objective.module))
    assert optimizer.param_groups[0]["lr"] == 1e-3
    if name == "fixed":
        assert {change.structure() for change in names["basis"].values()} == {egop.Shared(side="output")}


def test_the_code_of_a_basis_has_the_promising_blocks_and_no_others():
    blocks = [block_with(name=f"layers.{index}.weight", verdict="promising") for index in range(3)]
    others = [block_with(name="first.weight", verdict="promising", structure="Shared"), block_with(verdict="leave")]
    found = diagnosis_of(*blocks, *others, forms=(form(),))
    sampled, made = found.code.splitlines()
    assert '{"layers.*.weight": egop.Full(), "first.weight": egop.Shared()}, samples=200)' in sampled
    assert made.startswith("optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, basis, lr=1e-3)")
    mixed = replace(found, blocks=(*blocks, block_with(name="layers.7.weight", verdict="leave")))
    assert '"layers.0.weight": egop.Full(), "layers.1.weight"' in mixed.code


def test_what_is_not_clear_is_not_advised():
    unclear = diagnosis_of(block_with(verdict="sample more"), forms=(form(against="no block is promising"),))
    assert unclear.verdict == "Not clear yet: there are too few draws for 1 of 1 blocks. Sample more."
    assert unclear.code == ""


def test_layers_that_are_alike_are_one_row():
    layers = [
        block_with(name=f"layers.{k}.weight", stable_rank=5.0 + k, one_norm=0.5 + 0.1 * k, verdict="promising",
                   advice=f"Use egop.Full(): about {5.0 + k:.1f} of 100 directions matter.")
        for k in range(3)
    ]  # fmt: skip
    other = replace(layers[0], name="layers.3.weight", verdict="leave", advice="Leave it: the spectrum is flat.")
    said = str(diagnosis_of(*layers, other))
    rows = [line for line in said.splitlines() if line.startswith("layers.")]
    assert len(rows) == 2
    assert rows[0].startswith("layers.*.weight (3 alike)")
    assert "5.0–7.0 of 100" in rows[0]
    assert "about 7.0 of 100 directions matter" in said, "the words of the least promising one"


# --- interruptions ---


def test_ctrl_c_while_sampling_gives_a_partial_diagnosis_of_what_was_sampled():
    dimension = 400
    # the plain passes that are timed and compared come first, then one call for each chunk, then the other stages
    objective, calls = quadratic(decaying(2.0, dimension), rotated=True)
    shown = []
    diagnosed(objective, samples=2000, show=lambda found: shown.append((found.draws, len(calls))))
    sampled = next(count for draws, count in shown if draws)
    objective, _ = quadratic(decaying(2.0, dimension), rotated=True, interrupt_at=sampled - 2)
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


@pytest.mark.parametrize(
    ("stage", "missing"),
    [
        ("gradients", "the gradients of the training have not been looked at"),
        ("forms", "the steps of the forms have not been timed"),
        ("rate", "no learning rate has been looked for"),
    ],
)
def test_ctrl_c_in_a_later_stage_keeps_what_is_known(monkeypatch, stage, missing):
    def interrupted(self, diagnosis):
        raise KeyboardInterrupt

    monkeypatch.setattr(following.Following, stage, interrupted)
    shown = []
    found = diagnosed(cases.MLP.objective(), samples=20, show=shown.append)
    assert found.partial == f"interrupted: {missing}"
    assert found.basis is not None
    assert shown[-1].partial == f"{missing} yet"
    assert (found.here is None) == (stage == "gradients")
    assert bool(found.forms) == (stage == "rate")


def test_one_bar_counts_everything(capsys):
    egop.diagnose(cases.MLP.objective(), samples=20, progress=True)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    for words in ("Looking at gradients", "Timing steps", "Trying learning rates"):
        assert words in shown


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
        ({"steps": 0}, ValueError, "Invalid steps value: 0"),
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
