"""Single runs, the search for a learning rate, and the race as a whole."""

import math
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

import cases
import egop
from egop.diagnose import race
from egop.diagnose.race import Candidate, Race, run_race, search_rates
from egop.diagnose.training import Run, Trainer, build_optimizer, warm_up_and_decay
from racing import make_objective, make_quadratic, squares

ADAMW = Candidate("AdamW", torch.optim.AdamW)
SGD = Candidate("SGD", torch.optim.SGD)


def race_candidates(objective=None, candidates=(ADAMW, SGD), **options):
    settings = {"steps": 20, "budget": 60.0, "seeds": (0,), "keep": 2, "rates": (1e-3, 1e-2, 1e-1), "progress": False}
    return run_race(objective or make_objective(), candidates, **settings | options)


# --- one run ---


class Recorder(torch.optim.SGD):
    """Records the learning rates of its steps."""

    rates: ClassVar = []

    def step(self, closure=None):
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_the_learning_rate_warms_up_and_decays(monkeypatch):
    monkeypatch.setattr(Recorder, "rates", [])
    Trainer(make_objective(), 20, 0).train(Recorder, 1e-2, 20, 0, 5)
    assert len(Recorder.rates) == 20
    assert Recorder.rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert Recorder.rates[-3:] == pytest.approx([0.00375, 0.0025, 0.00125])


def test_a_run_is_plain_training_with_that_schedule():
    objective = make_objective(dropout=0.0, batches=1)
    run = Trainer(objective, 20, 0).train(torch.optim.AdamW, 1e-2, 20, 0, 4)
    model, (batch,) = objective.module, objective._batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = warm_up_and_decay(optimizer, 20)
    losses = [squares(model, batch).item()]
    for step in range(1, 21):
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            losses.append(squares(model, batch).item())
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert run.every == 5


def test_parameter_groups_keep_the_ratio_of_their_rates():
    rates = []

    def build(model):
        first, *rest = model.parameters()
        optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": torch.tensor(0.02)}])
        optimizer.register_step_pre_hook(
            lambda own, *_: rates.append([float(group["lr"]) for group in own.param_groups])
        )
        return optimizer

    Trainer(make_objective(), 20, 0).train(build, 1e-2, 20, 0, 5)
    assert rates[5] == pytest.approx([0.01, 0.002])


class ScheduleFree(torch.optim.SGD):
    """Records its mode and learning rate at each step."""

    steps: ClassVar = []
    mode = "eval"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"

    def step(self, closure=None):
        self.steps.append((self.mode, self.param_groups[0]["lr"]))
        return super().step(closure)


def test_a_schedule_free_optimizer_keeps_a_constant_rate_and_is_switched_between_its_modes(monkeypatch):
    monkeypatch.setattr(ScheduleFree, "steps", [])
    Trainer(make_objective(), 20, 0).train(ScheduleFree, 1e-2, 20, 0, 5)
    assert ScheduleFree.steps == [("train", 1e-2)] * 20


def test_a_diverging_run_ends_early():
    steps = []
    run = Trainer(make_objective(), 50, 0).train(torch.optim.SGD, 1e3, 50, 0, 10, lambda: steps.append(1))
    assert run.final == math.inf
    assert len(steps) < 25


def test_copies_train_in_the_modes_of_the_model():
    modes = set()

    def loss(model, batch):
        modes.add((torch.is_grad_enabled(), *(part.training for part in model)))
        return squares(model, batch)

    objective = make_objective(loss)
    objective.module.train()
    objective.module[1].eval()  # a frozen batch norm
    Trainer(objective, 10, 0).train(torch.optim.AdamW, 1e-2, 10, 0, 2)
    assert modes == {(True, True, False, True, True), (False, *[False] * 4)}

    modes.clear()
    objective.module[1].train()
    Trainer(objective, 10, 0).train(torch.optim.AdamW, 1e-2, 10, 0, 2)
    statistics = (False, False, True, False, False)  # with the dropout of an evaluation
    assert modes == {(True, *[True] * 4), statistics, (False, *[False] * 4)}


def test_losses_do_not_depend_on_how_slowly_batch_norm_keeps_its_statistics():
    losses = []
    for momentum in (1e-6, 0.5):
        objective = make_objective()
        objective.module.train()
        objective.module[1].momentum = momentum
        losses.append(Trainer(objective, 10, 0).train(torch.optim.AdamW, 1e-2, 10, 0, 2).losses)
    assert losses[0] == losses[1]


def test_steps_to_a_loss_are_interpolated():
    run = Run(1e-2, 0, 20, 10, (4.0, 2.0, 1.0), 1.0)
    assert [run.steps_to(target) for target in (5.0, 3.0, 2.0, 1.5, 0.5)] == [0.0, 5.0, 10.0, 15.0, math.inf]


CAPTURED = nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda model: None, TypeError, "must return a torch.optim.Optimizer, got NoneType"),
        (lambda model: torch.optim.SGD(CAPTURED.parameters()), ValueError, "an optimizer of other parameters"),
        ((torch.optim.SGD, {"lr": 0.0}), ValueError, "has lr 0. It must be positive"),
    ],
)
def test_what_builds_no_optimizer_is_refused(build, error, words):
    with pytest.raises(error, match=words):
        Trainer(make_objective(), 5, 0).train(build, 1e-2, 5, 0, 1)


def test_egops_own_optimizers_get_the_module():
    model = cases.MLP.build()
    assert build_optimizer((egop.EGOP, {"every": 5}), model).plan.chosen


# --- the search ---


def search(losses, start, initial=3.0):
    """Return the rates that a search tries, in order, if runs end with these losses."""
    tried = []

    def train(rate):
        tried.append(rate)
        return Run(rate, 0, 10, 10, (initial, losses[rate]), 1.0)

    search_rates(list(losses), start, train, initial)
    return tried


def test_the_search_goes_up_and_down_until_two_rates_in_a_row_are_worse():
    losses = {1: 2.9, 2: 2.5, 3: 2.0, 4: 1.5, 5: 1.0, 6: 1.2, 7: 1.1, 8: 2.0}
    assert search(losses, start=5) == [5, 6, 7, 4, 3]
    assert search(losses, start=3) == [3, 4, 5, 6, 7, 2, 1]


def test_the_search_skips_rates_above_one_that_diverges():
    assert search({1: 1.0, 2: math.inf, 3: math.inf, 4: math.inf, 5: math.inf}, start=4) == [4, 3, 2, 1]
    assert search({1: 1.0, 2: 9.0, 3: 8.0, 4: 7.0, 5: math.inf, 6: math.inf}, start=4) == [4, 5, 3, 2, 1]


# --- the race ---


def test_every_candidate_is_searched_and_its_best_rates_are_repeated():
    found = race_candidates(steps=200)
    assert found.lengths == (20, 50)
    assert found.ended == ""
    for name in ("AdamW", "SGD"):
        first, second = found.runs[0][name], found.runs[1][name]
        assert [run.lr for run in sorted(first, key=lambda run: run.final)][:2] == [run.lr for run in second]
        assert {run.steps for run in first} == {20}
        assert {run.steps for run in second} == {50}
    assert found.compare("AdamW", 1).steps == 1
    assert len({run.losses[0] for stage in found.runs for runs in stage.values() for run in runs}) == 1


@pytest.mark.parametrize(
    ("steps", "lengths"), [(None, (60, 150)), (1000, (80, 200)), (300, (24, 60)), (100, (20, 50)), (10, (10, 10))]
)
def test_runs_are_a_fraction_of_the_planned_training(steps, lengths):
    assert race._choose_lengths(steps) == lengths


def test_the_same_seed_gives_the_same_losses():
    def losses(**options):
        found = race_candidates(**options)
        return [[run.losses for run in runs] for stage in found.runs for runs in stage.values()]

    assert losses() == losses() != losses(seeds=(1,))


def test_other_seeds_repeat_the_baseline_and_the_closest_candidate():
    found = race_candidates(seeds=(0, 5, 6), keep=1)
    assert [run.seed for run in found.runs[1]["AdamW"]] == [0, 5, 6]
    assert [run.seed for run in found.runs[1]["SGD"]] == [0, 5, 6]
    assert found.compare("SGD", 1, 5) is not None


@pytest.mark.parametrize("candidate", [ADAMW, Candidate("EGOP", egop.EGOP)], ids=lambda each: each.name)
def test_the_model_and_the_random_state_stay_as_they_were(candidate):
    objective = make_objective()
    squares(objective.module, objective._batches[0]).backward()
    objective.module.eval()
    before = cases.state_of(objective.module)
    race_candidates(objective, [candidate])
    assert cases.state_of(objective.module) == before


@pytest.mark.parametrize("call", [1, 5, 40])
def test_the_model_stays_as_it_was_after_an_error(call):
    objective = make_objective(interrupt_at(call, RuntimeError("broken")))
    before = cases.state_of(objective.module)
    with pytest.raises(RuntimeError, match="broken"):
        race_candidates(objective)
    assert cases.state_of(objective.module) == before


def interrupt_at(call, error):
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return squares(model, batch)

    return loss


def test_ctrl_c_before_the_first_run_is_passed_on_and_leaves_the_model_as_it_was():
    objective = make_objective(interrupt_at(30, KeyboardInterrupt()))
    before = cases.state_of(objective.module)
    with pytest.raises(KeyboardInterrupt):
        race_candidates(objective)
    assert cases.state_of(objective.module) == before


def test_ctrl_c_later_returns_what_is_known_and_leaves_the_model_as_it_was():
    objective = make_objective(interrupt_at(400, KeyboardInterrupt()))
    before = cases.state_of(objective.module)
    found = race_candidates(objective)
    assert found.ended == "it was interrupted"
    assert found.ranked("AdamW")
    assert cases.state_of(objective.module) == before


def test_a_used_up_budget_ends_the_race_with_what_is_known(monkeypatch):
    now = iter(range(10**9))
    monkeypatch.setattr(race.time, "monotonic", lambda: next(now) * 0.01)
    found = race_candidates(make_objective(), budget=0.6, seeds=(0, 1))
    assert found.ended == "the budget of 0.6 s was used up: allow more (budget=)"
    assert found.ranked("AdamW")


def test_a_budget_too_small_for_one_run_is_an_error():
    with pytest.raises(TimeoutError, match=r"budget of 1e-06 s was used up before AdamW lowered the loss"):
        race_candidates(budget=1e-6)


def test_candidates_with_very_slow_steps_are_left_out_if_the_budget_is_small():
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
            return super().step(closure)

    def step_slowly(model):
        return Slow(model.parameters())

    candidates = (ADAMW, Candidate("slow", step_slowly))
    found = race_candidates(candidates=candidates, budget=2.0)
    assert list(found.runs[0]) == ["AdamW"]
    assert found.ended == "the budget of 2 s was too small for slow"
    assert found.left_out["slow"].startswith("six steps took longer than")


def test_a_small_budget_shortens_the_runs(monkeypatch, capsys):
    slow = race._Racer._estimate
    monkeypatch.setattr(race._Racer, "_estimate", lambda self, lengths: 1000 * slow(self, lengths))
    found = race_candidates(steps=2000, budget=30.0, rates=(1e-2, 1e-1), progress=True)
    assert found.lengths[0] < 160
    assert "shortened from 160 and 400" in capsys.readouterr().err


def test_the_cost_is_said_before_the_race_and_a_bar_shows_the_time_left(capsys):
    race_candidates(progress=True)
    shown = capsys.readouterr().err
    assert shown.startswith("Race of 2 candidates: about 12 runs of 20 steps and 4 of 20; 320 steps, about")
    assert "elapsed" in shown
    assert "left" in shown


def test_a_candidate_that_cannot_take_part_is_left_out_with_the_reason():
    def build(model):
        raise MemoryError("All bases together need 3 GiB.")

    found = race_candidates(candidates=(ADAMW, Candidate("large", build), Candidate("EGOP", egop.EGOP)), keep=1)
    assert found.left_out == {"large": "All bases together need 3 GiB."}
    vector = race_candidates(make_quadratic(), (ADAMW, Candidate("EGOP", egop.EGOP)), keep=1)
    assert vector.left_out == {"EGOP": "it would leave every weight of this model to AdamW"}


def test_rates_are_scaled_to_the_planned_length():
    """With five times as many steps, rates may stay or shrink, at most by the ratio of the lengths."""
    runs = [Run(rate, 0, 20, 10, (4.0, 3.0, loss), 1.0) for rate, loss in ((0.1, 2.0), (0.05, 1.0), (0.02, 3.0))]
    for planned, expected in ((100, (0.02, 0.01, 0.05)), (20, (0.05, 0.1)), (None, (0.05, 0.1))):
        assert Race(planned, (0,), start=4.0, runs=({"AdamW": runs}, {})).propose_rates("AdamW") == expected
    few = Race(100, (0,), rates=(0.05, 0.1), start=4.0, runs=({"AdamW": runs[:2]}, {}))
    assert few.propose_rates("AdamW") == (0.05, 0.1)


def test_steps_and_time_are_compared_with_the_baseline():
    base = Run(0.1, 0, 20, 10, (4.0, 3.0, 2.0), 1.0)
    fast = Run(0.2, 0, 20, 10, (4.0, 2.0, 1.0), 1.5)
    slow = Run(0.2, 0, 20, 10, (4.0, 3.5, 3.0), 3.0)
    found = Race(None, (0,), start=4.0, runs=({"AdamW": [base], "fast": [slow, fast], "slow": [slow]}, {}))
    comparison = found.compare("fast", 0)
    assert (comparison.steps, comparison.slowdown, comparison.time) == (0.5, 1.5, 0.75)
    assert found.compare("slow", 0).time == 2 * 3
    assert found.compare("fast", 1) is None


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "Invalid steps value: 0"),
        ({"budget": 0}, "Invalid budget value: 0"),
        ({"rates": ()}, "Invalid rates value"),
        ({"rates": (0.1, -1.0)}, "Invalid rates value"),
        ({"seeds": ()}, "Invalid seeds value"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        race_candidates(**options)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda loss: loss.repeat(3), ValueError, r"must return a scalar, got a tensor of shape \(3,\)"),
        (lambda loss: (loss, 1), TypeError, "must return a scalar tensor, got tuple"),
        (float, TypeError, "must return a scalar tensor, got float"),
        (lambda loss: None, TypeError, "must return a scalar tensor, got NoneType"),
        (lambda loss: loss.detach(), ValueError, "The loss does not depend on the model"),
        (lambda loss: loss * math.nan, ValueError, "The loss is nan before the first step"),
    ],
)
def test_a_loss_that_is_not_a_finite_scalar_of_the_model_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        race_candidates(make_objective(lambda model, batch: change(squares(model, batch))))


def test_a_loss_that_reads_another_model_is_refused():
    objective = make_objective()
    captured = objective.module
    with pytest.raises(ValueError, match="does not depend on the model that it is given"):
        race_candidates(egop.Objective(captured, lambda model, batch: squares(captured, batch), objective._batches))


def test_no_batches_is_an_error():
    with pytest.raises(ValueError, match="The batches are empty"):
        race_candidates(egop.Objective(nn.Linear(2, 1), squares, []))


def test_only_an_objective_can_be_raced():
    with pytest.raises(TypeError, match=r"objective must be an egop\.Objective, got Linear"):
        race_candidates(nn.Linear(2, 1))
