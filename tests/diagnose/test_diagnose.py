"""What diagnose advises, how certain it says it is, and how it shows that."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cases
import egop
from egop.diagnose import diagnosis as module
from egop.diagnose import race, training
from egop.diagnose.race import Race
from egop.diagnose.training import Run
from racing import make_objective, make_quadratic, squares


@pytest.fixture
def equal_steps(monkeypatch):
    """Let all steps take the same time."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(training, "clock", lambda: 1e-3 * next(ticks))


def diagnose(objective, **options):
    return egop.diagnose(objective, **{"steps": 100, "seeds": (0,), "progress": False} | options)


# --- problems whose answer is known ---


def test_adamw_is_kept_where_its_steps_are_several_times_faster():
    found = diagnose(make_objective(dropout=0.0))
    assert found.advised == "AdamW"
    assert found.code.startswith("torch.optim.AdamW(model.parameters(), lr=")
    assert ", the closest, reaches the same loss in" in found.verdict
    assert sorted(found.comparisons) == ["AdamW", "AdamW with Online", "EGOP", "EGOP without rotation"]


def test_adamw_is_kept_where_the_axes_are_the_right_basis(equal_steps, monkeypatch):
    """Every entry of the weights has its own curvature, so a rotation only mixes what is separate."""
    monkeypatch.setattr(module, "CANDIDATES", (module.CANDIDATES[0], module.CANDIDATES[2]))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    scales = torch.logspace(0, -4, 64)[order].reshape(8, 8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        targets = torch.randn(8, 8)

    def loss(model, batch):
        return sum((scales * (layer.weight - targets).square()).sum() for layer in model)

    found = diagnose(egop.Objective(model, loss, [0]))
    assert found.advised == "AdamW"
    assert found.closest == "AdamW with Online"


class Transformer(nn.Module):
    def __init__(self, vocabulary=16, width=32, length=12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens) + self.position, src_mask=self.mask, is_causal=True))


def make_sums(length=13, vocabulary=16):
    """Make sequences in which every token is the sum of the two before it."""
    tokens = [*torch.randint(vocabulary, (2, 60, 16), generator=torch.Generator().manual_seed(0))]
    while len(tokens) < length:
        tokens.append((tokens[-1] + tokens[-2]) % vocabulary)
    return list(torch.stack(tokens, -1))


def test_a_rotation_is_advised_for_a_small_transformer(equal_steps, monkeypatch):
    """Assume that all steps take the same time, which is nearly true for larger networks."""
    monkeypatch.setattr(module, "CANDIDATES", module.CANDIDATES[:2])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer()

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    found = diagnose(egop.Objective(model, loss, make_sums()))
    assert found.advised == "EGOP"
    assert found.comparisons["EGOP"].time < 0.95
    assert found.verdict.startswith(f"Use EGOP: egop.EGOP(model, lr={found.lr:g})\n")


def test_a_function_of_a_vector_leaves_nothing_to_rotate():
    found = diagnose(make_quadratic())
    assert found.advised == "AdamW"
    assert "AdamW ran alone" in found.verdict
    assert "EGOP was left out: it would leave every weight of this model to AdamW." in str(found)
    assert not found.doubts


def test_the_answer_is_uncertain_if_the_budget_left_no_time_for_a_candidate():
    found = made_up()
    found.race.ended = "the budget of 5 s was too small for EGOP"
    assert "Uncertain: the race is incomplete (the budget of 5 s was too small for EGOP)" in found.verdict


def test_without_progress_there_is_no_answer():
    noise = egop.Objective(cases.MLP.build(), lambda model, batch: model(batch[0]).sum() * 0, cases.MLP.batches())
    with pytest.raises(ValueError, match=r"No learning rate of AdamW from 1e-06 to 0\.01 lowered the loss from 0"):
        diagnose(noise)


def test_the_model_stays_as_it_was_and_the_same_seed_gives_the_same_answer(monkeypatch):
    monkeypatch.setattr(module, "CANDIDATES", module.CANDIDATES[:2])
    objective = make_objective()
    before = cases.state_of(objective.module)
    first, again = diagnose(objective), diagnose(objective)
    assert cases.state_of(objective.module) == before
    assert [run.losses for run in first.race.ranked("EGOP")] == [run.losses for run in again.race.ranked("EGOP")]
    assert first.rates == again.rates


def test_ctrl_c_returns_an_uncertain_answer():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 1000:
            raise KeyboardInterrupt
        return squares(model, batch)

    found = diagnose(make_objective(loss, dropout=0.0))
    assert "Uncertain: the race is incomplete (it was interrupted)" in found.verdict


def test_the_budget_is_kept(monkeypatch):
    """On a clock that only the loss advances."""
    now = 0.0

    def loss(model, batch):
        nonlocal now
        now += 1e-3
        return squares(model, batch)

    monkeypatch.setattr(training, "clock", lambda: now)
    monkeypatch.setattr(race, "time", SimpleNamespace(monotonic=lambda: now))
    found = diagnose(make_objective(loss), steps=100_000, budget=2.0)
    assert 1.0 < now < 2.1
    assert found.race.lengths[1] < 20_000


# --- the words, from made-up races ---


def made_up(*, early=(1.0,), late=(1.0,), seeds=(), slowdown=1.0):
    """Make up a diagnosis in which EGOP needs these fractions of AdamW's steps in each stage and for each seed."""

    def run(seed, fraction=1.0, seconds=1.0):
        steps = range(0, 101, 10)
        return Run(0.01, seed, 100, 10, tuple(4 - 0.02 * min(step / fraction, 150) for step in steps), seconds)

    def pair(fractions, seed=0):
        return {"AdamW": [run(seed)], "EGOP": [run(seed, fraction, slowdown) for fraction in fractions]}

    first, second = pair(early), pair(late)
    for seed, fraction in enumerate(seeds, start=1):
        second["AdamW"].append(run(seed))
        second["EGOP"].append(run(seed, fraction, slowdown))
    race = Race(None, tuple(range(1 + len(seeds))), start=4.0, runs=(first, second))
    return module.Diagnosis(module.CANDIDATES[:2], race)


def test_the_answer_has_four_lines_and_a_table():
    found = made_up(early=(0.5,), late=(0.5,), seeds=(0.6,), slowdown=1.2)
    assert str(found) == (
        "Use EGOP: egop.EGOP(model, lr=0.01)\n"
        "Learning rate: try 0.01 (for warm-up over the first 10 % and decay over the last 40 % of training; for a "
        "constant rate, divide by three).\n"
        "Gain: EGOP reaches the same loss in 50 % of AdamW's steps and 60 % of its time (a step takes 1.20 x as long)."
        "\n"
        "Consistent: both stages of the race and 2 seeds agree.\n"
        "\n"
        "candidate  learning rate  loss  steps  step time  time\n"
        "---------  -------------  ----  -----  ---------  ----\n"
        "AdamW               0.01     2   1.00       1.00  1.00\n"
        "EGOP                0.01     1   0.50       1.20  0.60\n"
        "Loss after runs of 150 steps. Steps and time to the same loss, and step time, are multiples of AdamW's."
    )
    assert repr(found) == "Diagnosis(EGOP, lr=0.01, consistent)"
    assert found.code == "egop.EGOP(model, lr=0.01)"


def test_rates_that_differ_from_the_table_are_explained():
    found = made_up()
    assert "scaled" not in str(found)
    found.race.planned = 10_000
    assert str(found).endswith("Longer training usually needs lower rates: those to try are scaled to its length.")


def test_short_runs_leave_the_answer_uncertain():
    found = made_up(early=(0.5,), late=(0.5,))
    assert not found.doubts
    found.race.lengths = (8, 20)
    assert found.doubts == ["runs of 20 steps say little"]


def test_runs_of_one_length_are_compared_if_the_race_ended_early():
    found = made_up(early=(0.5,), late=(0.5,))
    second = found.race.runs[1]
    found.race.lengths = (40, 100)
    assert "Loss after runs of 100 steps." in str(found)
    del second["EGOP"]
    assert found.comparisons["EGOP"].steps == 0.5
    assert "Loss after runs of 40 steps." in str(found)
    second["AdamW"] = [replace(run, losses=(4.0, 1.0)) for run in second["AdamW"]]
    assert str(found).splitlines()[7].split() == ["AdamW", "0.01", "2", "1.00", "1.00", "1.00"]
    found.race.runs[0]["slow"] = []  # out of time before its first run was finished
    second["EGOP"] = second["AdamW"]
    assert found.race.stage == 1


def test_time_decides_and_not_steps():
    found = made_up(early=(0.5,), late=(0.5,), slowdown=3.0)
    assert found.advised == "AdamW"
    assert "Gain: no time saved. EGOP, the closest, reaches" in found.verdict
    assert "reaches the same loss in 50 % of AdamW's steps and 150 % of its time" in found.verdict


def test_a_candidate_that_ends_above_adamw_is_not_advised():
    found = made_up(early=(2.0,), late=(2.0,))
    assert found.advised == "AdamW"
    assert "EGOP, the closest, reaches the same loss in 200 % of AdamW's steps" in found.verdict


def test_a_candidate_that_never_lowers_the_loss_is_not_advised():
    found = made_up(early=(-1.0,), late=(-1.0,))
    assert found.advised == "AdamW"
    assert "EGOP, the closest, did not lower the loss" in found.verdict


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"early": (2.0,), "late": (0.5,)}, "the search (60 steps) disagrees: EGOP takes 200 % of AdamW's time"),
        ({"early": (0.5,), "late": (0.5,), "seeds": (0.5, 1.2)}, "seed 2 disagrees: EGOP takes 120 %"),
        ({"early": (0.5,), "late": (1.3,)}, "the search (60 steps) disagrees: EGOP takes 50 % of AdamW's time"),
        ({"early": (0.9,), "late": (0.93,)}, "the times are close"),
    ],
)
def test_the_answer_is_uncertain_where_stages_or_seeds_disagree(options, words):
    found = made_up(**options)
    assert found.verdict.startswith("Perhaps ")
    assert "\nUncertain: " in found.verdict
    assert words in found.verdict
    assert repr(found).endswith("uncertain)")


def test_the_race_is_plotted():
    pytest.importorskip("matplotlib")
    (axes,) = made_up(late=(0.5,)).plot().axes
    assert [line.get_label() for line in axes.lines] == ["AdamW, lr 0.01", "EGOP, lr 0.01"]
    assert list(axes.lines[0].get_xdata()) == list(range(0, 101, 10))
    assert all(math.isfinite(value) for value in axes.lines[1].get_ydata())
