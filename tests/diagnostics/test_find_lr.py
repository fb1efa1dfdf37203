import math
import re
from typing import ClassVar

import pytest
import torch
from torch import nn

import cases
import egop
from egop.diagnostics import rate_search
from egop.diagnostics.rate_search import proposed

LADDER = (1e-3, 1e-2, 1e-1)


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def objective(loss=squares):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))
    return egop.Objective(model, loss, list(zip(inputs.split(16), targets.split(16), strict=True)))


def found(given=None, make=torch.optim.AdamW, **options):
    return egop.find_lr(given or objective(), make, **{"steps": 20, "rates": LADDER, "progress": False} | options)


def quadratic(scales=(1.0, 0.02)):
    curvatures = torch.tensor(scales, dtype=torch.float64)
    theta = torch.ones(len(scales), dtype=torch.float64)
    return egop.Objective.from_function(lambda theta: (curvatures * theta.square()).sum() / 2, {"theta": theta})


def by_hand(rate, steps, scales=(1.0, 0.02)):
    """Gradient descent on the quadratic, each curvature by itself, with the rate written out."""
    values = [1.0] * len(scales)
    for step in range(steps):
        now = rate * min(1.0, (step + 1) / (0.1 * steps), (steps - step) / (0.4 * steps))
        values = [value * (1 - now * scale) for value, scale in zip(values, scales, strict=True)]
    return sum(scale * value**2 for value, scale in zip(values, scales, strict=True)) / 2


# --- what it finds ---


def test_on_a_quadratic_it_finds_the_best_rate_of_the_closed_form():
    rates = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
    result = found(quadratic(), torch.optim.SGD, rates=rates)
    expected = {rate: by_hand(rate, 20) for rate in rates}
    for rate, loss in zip(result.rates, result.losses, strict=True):
        assert loss == (pytest.approx(expected[rate], rel=1e-9) if math.isfinite(loss) else math.inf)
    best = min(expected, key=expected.get)
    assert best == result.rates[result.losses.index(min(result.losses))]
    assert result.lr == min(rate for rate in rates if expected[rate] <= 1.25 * expected[best])
    assert rates[0] < result.lr <= best < rates[-1]
    assert "end of the rates" not in result.said


def test_same_seed_same_answer_and_another_seed_other_losses():
    first, again = found(), found()
    assert first == again
    assert found(generator=torch.Generator().manual_seed(1)).losses != first.losses


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)),
        egop.EGOP,
        (egop.EGOP, {"every": 5}),
        lambda model: egop.EGOP(model),
        lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=1e-3, refresh=egop.Online()),
        lambda model: egop.ReparameterizedOptimizer(model, torch.optim.AdamW, estimated(), lr=1e-3),
    ],
    ids=["SGD", "AdamW-options", "tensor-rate", "EGOP-class", "EGOP-options", "EGOP", "Online", "estimated"],
)
def test_plain_optimizers_and_all_forms_of_egop(make):
    result = found(make=make)
    assert LADDER[0] <= result.lr <= LADDER[-1]
    assert len(set(result.losses)) == len(result.rates) > 1


def estimated():
    return egop.estimate(objective(), samples=20, progress=False)


class ScheduleFree(torch.optim.SGD):
    """Notes the rates of its steps, and in which mode they are."""

    steps: ClassVar = []
    mode = "eval"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"

    def step(self, closure=None):
        self.steps.append((self.mode, self.param_groups[0]["lr"]))
        return super().step(closure)


def test_a_schedule_free_optimizer_keeps_its_rate_and_is_in_its_modes(monkeypatch):
    monkeypatch.setattr(ScheduleFree, "steps", [])
    modes = []

    def loss(model, batch):
        modes.append(model.training)
        return squares(model, batch)

    found(objective(loss), ScheduleFree, rates=(1e-2,))
    assert ScheduleFree.steps == [("train", 1e-2)] * 20
    assert True in modes


def test_an_optimizer_that_is_schedule_free_in_truth():
    optimizers = pytest.importorskip("pytorch_optimizer")
    plain = found(make=optimizers.ScheduleFreeAdamW)
    assert min(plain.losses) < 1


class Noted(torch.optim.SGD):
    """Notes the rates of its steps; torch's hooks run twice in a step of such a class."""

    rates: ClassVar = []

    def step(self, closure=None):
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_the_rate_rises_at_the_start_and_falls_at_the_end(monkeypatch):
    monkeypatch.setattr(Noted, "rates", [])
    found(make=Noted, rates=(1e-2,))
    assert len(Noted.rates) == 20
    assert Noted.rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert Noted.rates[-3:] == pytest.approx([0.00375, 0.0025, 0.00125])


def test_groups_keep_the_ratio_of_their_rates():
    rates = []

    def make(model):
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.02}])
        optimizer.register_step_pre_hook(lambda own, *_: rates.append([group["lr"] for group in own.param_groups]))
        return optimizer

    found(make=make, rates=(1e-2,))
    assert rates[5] == pytest.approx([0.01, 0.002])


# --- what it leaves alone ---


@pytest.mark.parametrize("make", [torch.optim.AdamW, egop.EGOP])
def test_the_model_and_the_random_state_are_left_as_they_were(make):
    given = objective()
    squares(given.module, given._batches[0]).backward()
    given.module.eval()
    before = cases.state_of(given.module)
    found(given, make)
    assert cases.state_of(given.module) == before


def test_an_interrupt_leaves_the_model_as_it_was():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 40:
            raise KeyboardInterrupt
        return squares(model, batch)

    given = objective(loss)
    before = cases.state_of(given.module)
    with pytest.raises(KeyboardInterrupt):
        found(given)
    assert cases.state_of(given.module) == before


# --- the search ---


def searched(losses, start=3.0):
    """Which rates a search tries, in their order, where these are the losses of their runs (None: it diverged)."""
    tried = []

    def end(rate):
        tried.append(rate)
        return None if losses[rate] is None else (losses[rate],)

    rate_search.searched(list(losses), end, (start,))
    return tried


def test_it_goes_up_and_down_until_two_in_a_row_are_worse():
    losses = {1: 2.9, 2: 2.5, 3: 2.0, 4: 1.5, 5: 1.0, 6: 1.2, 7: 1.1, 8: 2.0}
    assert searched(losses) == [5, 6, 7, 4, 3]
    assert searched(losses | {4: 1.05, 3: 1.06}) == [5, 6, 7, 4, 3, 2, 1]  # both about as good
    assert searched({1: 2.9, 2: 2.8, 3: 2.7, 4: 2.6, 5: 1.2, 6: 1.0}) == [4, 5, 6, 3, 2]


def test_above_a_rate_that_diverges_nothing_is_tried_and_below_it_goes_on_until_one_is_of_use():
    assert searched({1: 1.0, 2: None, 3: None, 4: None, 5: None, 6: None}) == [4, 3, 2, 1]
    assert searched({1: 1.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: None, 6: None}) == [4, 5, 3, 2, 1]


def test_diverging_runs_end_early():
    calls = []

    def loss(model, batch):
        calls.append(torch.is_grad_enabled())
        return squares(model, batch)

    result = found(objective(loss), torch.optim.SGD, rates=(1e-2, 1e3), steps=50)
    assert result.losses[1] == math.inf
    assert result.lr == 1e-2
    assert sum(calls) < 50 + 50 / 2
    assert "Runs diverged at 1000." in result.said


# --- the words ---


def test_a_best_rate_at_an_end_is_said():
    assert "0.0001 is at the end of the rates to try: larger ones may be better" in found(rates=(1e-5, 1e-4)).said
    losses = {1.0: (0.5,), 2.0: (1.0,)}
    assert "1 is at the end of the rates to try: smaller ones" in proposed([1.0, 2.0], losses, (3.0,), 50).said


def test_the_smallest_rate_that_is_about_as_good_isproposed():
    ends = {1e-3: (1.2,), 1e-2: (1.04,), 1e-1: (1.0,), 1.0: (1.01,)}
    result = proposed([1e-4, *ends, 2.0], ends, (3.0,), 50)  # 5 % of what was gained is 0.1
    assert result.lr == 1e-2
    assert result.said.startswith("lr 0.01. The lowest loss after 50 steps is 1, with 0.1, of 4 rates from 0.001 to 1.")
    assert "0.01 is about as good: of such rates the smallest is proposed." in result.said
    small = {1e-3: (0.02,), 1e-2: (0.012,), 1e-1: (0.01,)}  # 25 % of the loss is less than 5 % of the gain
    assert proposed(list(small), small, (3.0,), 50).lr == 1e-2


def test_a_rate_as_good_beyond_a_worse_one_does_not_count():
    ends = {1e-3: (1.0,), 1e-2: None, 1e-1: (1.0,), 1.0: (0.99,)}
    assert proposed(list(ends), ends, (3.0,), 50).lr == 1e-1


def test_rates_that_are_all_as_good_are_said_to_be():
    ends = {1e-3: (1.0,), 1e-2: (1.001,)}
    assert "All of them are about as good" in proposed(list(ends), ends, (3.0,), 50).said


def test_a_gain_that_chance_could_bring_is_none():
    start = (1.0, 1.0, 1.0, 1.0)
    assert proposed([0.1], {0.1: (0.9, 0.91, 0.9, 0.91)}, start, 50).lr == 0.1
    with pytest.raises(ValueError, match=r"by more than chance could: the lowest loss is 0\.95, at 0\.1"):
        proposed([0.1], {0.1: (0.5, 1.6, 0.4, 1.3)}, start, 50)


def test_it_is_short_and_prints_words():
    result = found()
    assert repr(result) == f"FoundRate(lr={result.lr:g}, {len(result.rates)} rates tried)"
    assert str(result) == result.said
    assert result.said.startswith(f"lr {result.lr:g}. ")


def test_it_draws_the_rates_that_did_not_diverge():
    pytest.importorskip("matplotlib")
    (axes,) = egop.diagnostics.FoundRate(0.1, (0.1, 0.2, 0.5), (1.0, 2.0, math.inf), "").plot().axes
    assert list(axes.lines[0].get_xdata()) == [0.1, 0.2]


def test_the_progress_bar_counts_steps(capsys):
    found(rates=(1e-3,), progress=True)
    assert re.search(r"lr 0.001.* 20/20 ", capsys.readouterr().err)


# --- errors ---


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


CAPTURED = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (WithoutRate, ValueError, "WithoutRate has no learning rate"),
        (lambda model: None, TypeError, "it returned NoneType"),
        ("AdamW", TypeError, "make must be a function of the model"),
        (lambda model: torch.optim.SGD(CAPTURED.parameters()), ValueError, "of the model that it is called with"),
        ((torch.optim.SGD, {"lr": 0.0}), ValueError, "has lr 0. It must be positive"),
    ],
)
def test_what_makes_no_optimizer_is_said(make, error, words):
    with pytest.raises(error, match=words):
        found(make=make)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "Invalid steps value: 0"),
        ({"rates": ()}, "Invalid rates value"),
        ({"rates": (0.1, -1.0)}, "Invalid rates value"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        found(**options)


def test_no_batches_is_an_error():
    with pytest.raises(ValueError, match="The batches are empty"):
        found(egop.Objective(nn.Linear(2, 1), squares, []))


def test_a_loss_that_is_not_finite_at_the_start_is_an_error():
    with pytest.raises(ValueError, match="not finite before the first step: nan"):
        found(objective(lambda model, batch: squares(model, batch) * math.nan))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda loss: loss.repeat(3), ValueError, r"must return a scalar, got a tensor of shape \(3,\)"),
        (lambda loss: (loss, 1), TypeError, "must return a scalar tensor, got tuple"),
        (float, TypeError, "must return a scalar tensor, got float"),
        (lambda loss: None, TypeError, "must return a scalar tensor, got NoneType"),
    ],
)
def test_a_loss_that_is_not_a_scalar_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        found(objective(lambda model, batch: change(squares(model, batch))))


def test_a_loss_of_one_entry_will_do():
    assert found(objective(lambda model, batch: squares(model, batch).reshape(1))).lr == found().lr


def test_the_runs_train_in_the_modes_that_the_model_is_in():
    modes = set()

    def loss(model, batch):
        modes.add((torch.is_grad_enabled(), *(part.training for part in model)))
        return squares(model, batch)

    given = objective(loss)
    given.module.train()
    given.module[1].eval()  # a batch norm that is not to be trained
    found(given, rates=(1e-2,))
    assert modes == {(True, True, False, True, True), (False, True, False, True, True), (False, *[False] * 4)}


def test_a_loss_that_reads_another_model_is_refused():
    given = objective()
    captured = given.module
    with pytest.raises(ValueError, match="does not depend on the model that it is given"):
        found(egop.Objective(captured, lambda model, batch: squares(captured, batch), given._batches))


def test_where_no_rate_helps_there_is_none_to_propose():
    with pytest.raises(ValueError, match=r"None of 1 rate from 1000 to 1000 .* all runs diverged"):
        found(make=torch.optim.SGD, rates=(1e3,))


def test_not_an_objective():
    with pytest.raises(TypeError, match=r"objective must be an egop\.Objective"):
        egop.find_lr(nn.Linear(2, 1), torch.optim.AdamW)
