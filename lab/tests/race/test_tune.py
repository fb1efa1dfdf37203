from __future__ import annotations

import math
from collections import Counter

import pytest

from egop_lab.race.tasks import TASKS, TUNING_SEEDS
from egop_lab.race.tune import plan, plan_tuning

TASK = TASKS["gpt-6x384-400"]
METHODS = ("AdamW", "Muon", "NorMuon", "SOAP")


def finish(task, methods, race):
    """Make all runs of a task, by a function that returns the loss of a run."""
    losses = {}
    while runs := plan(task, methods, losses):
        losses.update({run: race(run) for run in runs})
    return losses


def tuned(losses, method):
    """Return the rate, beta, warm-up and clipping that the rules choose."""
    runs, choices = plan_tuning(TASK, [method], losses)
    assert runs == []
    return tuple(getattr(choices[method], name) for name in ("rate", "beta", "warmup", "clip"))


def bowl(best, *, beta=0.0, warmup=0.0, clip=0.0, edge=math.inf):
    """Return a loss that is lowest at the given rates, plus the given amount for each changed hyper-parameter."""

    def loss(run):
        if run.rate > edge:
            return math.inf
        task = TASKS[run.task]
        value = 1 + 0.01 * abs(run.rate - best[run.method]) + 0.001 * (run.seed % 10)
        value += beta * (run.beta != task.betas[run.method][0])
        return value + warmup * (run.warmup != task.warmups[run.method][0]) + clip * (run.clip is not None)

    return loss


def tuned_rates(losses, method, steps=TASK.steps):
    task_values = (TASK.betas[method][0], TASK.warmups[method][0], TASK.clips[0])
    return sorted(
        {
            run.rate
            for run in losses
            if run.method == method and run.steps == steps and run.seed in TUNING_SEEDS
            if (run.beta, run.warmup, run.clip) == task_values
        }
    )


def test_the_first_runs_are_the_guess_and_two_rates_on_either_side_with_three_seeds():
    runs = plan(TASK, ["AdamW"], {})
    assert Counter(run.rate for run in runs) == dict.fromkeys(range(5), 3)
    assert {run.seed for run in runs} == set(TUNING_SEEDS)
    assert runs[0].rate == TASK.guesses["AdamW"]
    assert runs[0].lr == pytest.approx(2e-3)


def test_rates_are_added_until_the_best_has_two_on_both_sides():
    guess = TASK.guesses["AdamW"]
    losses = finish(TASK, ["AdamW"], bowl({"AdamW": guess + 5}))
    assert tuned_rates(losses, "AdamW") == list(range(guess - 2, guess + 8))


def test_all_methods_try_as_many_rates_and_make_as_many_tuning_runs():
    best = TASK.guesses | {"Muon": TASK.guesses["Muon"] + 3}
    losses = finish(TASK, METHODS, bowl(best))
    assert {method: len(tuned_rates(losses, method)) for method in METHODS} == dict.fromkeys(METHODS, 8)
    tuning = Counter(run.method for run in losses if run.is_tuning and run.steps == TASK.steps)
    assert tuning == dict.fromkeys(METHODS, 3 * (8 + 3))
    middle = best["SOAP"]
    assert tuned_rates(losses, "SOAP") == list(range(middle - 3, middle + 5))


def test_what_lowers_the_median_wins_and_winners_are_combined():
    losses = finish(TASK, ["AdamW"], bowl(TASK.guesses, beta=-0.1, warmup=0.1, clip=-0.1))
    assert tuned(losses, "AdamW") == (2, 0.99, 50, 1.0)
    finals = [run for run in losses if not run.is_tuning and run.steps == TASK.steps]
    assert [run.seed for run in finals] == list(range(8))
    assert {(run.beta, run.warmup, run.clip) for run in finals} == {(0.99, 50, 1.0)}


def test_the_rate_is_tuned_again_for_the_combination():
    before = bowl(TASK.guesses, clip=-0.1)

    def loss(run):  # clipping moves the best rate up by three places
        return before(run) if run.clip is None else bowl({"Muon": 8}, clip=-0.1)(run)

    losses = finish(TASK, ["Muon"], loss)
    assert tuned(losses, "Muon") == (8, 0.95, 50, 1.0)
    assert sorted({run.rate for run in losses if run.clip and run.is_tuning}) == [4, 5, 6, 7, 8, 9]
    assert {run.rate for run in losses if not run.is_tuning} == {8}


def test_the_best_single_variant_is_taken_if_the_combination_is_worse_at_every_rate():
    plain = bowl(TASK.guesses, beta=-0.1, clip=-0.2)
    losses = finish(TASK, ["AdamW"], lambda run: plain(run) + 0.2 * (run.beta == 0.99 and run.clip is not None))
    assert tuned(losses, "AdamW") == (2, 0.95, 50, 1.0)


def test_all_methods_get_the_same_second_tuning():
    losses = finish(TASK, METHODS, bowl(TASK.guesses, beta=-0.1, warmup=-0.1, clip=-0.1))
    tuning = Counter(run.method for run in losses if run.is_tuning and run.steps == TASK.steps)
    assert tuning == dict.fromkeys(METHODS, 3 * (5 + 3 + 3))


def test_the_base_value_wins_a_tie():
    losses = finish(TASK, ["Muon"], bowl(TASK.guesses))
    assert tuned(losses, "Muon") == (5, 0.95, 50, None)


def test_a_run_that_diverges_is_the_worst():
    losses = finish(TASK, ["SOAP"], bowl({"SOAP": 9}, edge=4))
    assert tuned(losses, "SOAP")[0] == 4
    assert max(tuned_rates(losses, "SOAP")) == 6


def test_one_bad_seed_does_not_decide():
    plain = bowl(TASK.guesses)
    losses = finish(TASK, ["AdamW"], lambda run: math.inf if run.seed == 10000 and run.rate == 2 else plain(run))
    assert tuned(losses, "AdamW")[0] == 2


def test_a_search_without_any_finite_loss_gives_up():
    with pytest.raises(RuntimeError, match="No best learning rate near the guess for SOAP"):
        finish(TASK, ["SOAP"], lambda run: math.inf)


def test_the_baseline_alone_runs_longer_with_its_rate_tuned_again():
    plain = bowl(TASK.guesses)
    longer = bowl(TASK.guesses | {"AdamW": 0})
    losses = finish(TASK, METHODS, lambda run: (plain if run.steps == TASK.steps else longer)(run))
    assert {(run.method, run.steps) for run in losses if run.steps != 400} == {
        ("AdamW", 600),
        ("AdamW", 800),
        ("AdamW", 1200),
    }
    assert tuned_rates(losses, "AdamW", 800) == [-1, 0, 1, 2, 3]
    assert {run.rate for run in losses if run.steps == 800 and not run.is_tuning} == {0}


def test_final_runs_wait_for_all_methods_and_are_paired():
    losses = finish(TASK, ["AdamW"], bowl(TASK.guesses))
    assert all(run.is_tuning and run.method == "Muon" for run in plan(TASK, ["AdamW", "Muon"], losses))
    finals = [run for run in finish(TASK, METHODS, bowl(TASK.guesses)) if not run.is_tuning and run.steps == 400]
    assert [(run.seed, run.method) for run in finals[:5]] == [(0, method) for method in METHODS] + [(1, "AdamW")]


def test_a_plan_does_not_depend_on_where_it_was_interrupted():
    loss = bowl(TASK.guesses | {"AdamW": 4}, beta=-0.1, clip=-0.1)
    whole = finish(TASK, METHODS, loss)
    part = {}
    while runs := plan(TASK, METHODS, part):
        part[runs[0]] = loss(runs[0])  # one at a time
    assert part == whole


def test_a_control_runs_with_the_tuned_values_of_egop():
    control = "EGOP, random rotation"
    losses = finish(TASK, ("EGOP", control), bowl({"EGOP": 3, control: 9}, clip=-0.1))
    runs = {method: {run for run in losses if run.method == method} for method in ("EGOP", control)}
    assert len(runs[control]) == TASK.seeds  # none of them is for tuning
    finals = {(run.seed, run.rate, run.clip) for run in runs["EGOP"] if not run.is_tuning}
    assert {(run.seed, run.rate, run.clip) for run in runs[control]} == finals
    assert {rate for _, rate, _ in finals} == {3}


def test_egop_also_runs_at_the_best_rate_of_adamw():
    task = TASKS["vit-6x384"]
    losses = finish(task, ("AdamW", "EGOP"), bowl({"AdamW": -6, "EGOP": 2}))
    at_adamws = [run for run in losses if run.method == "EGOP" and run.rate == -6]
    assert [run.seed for run in at_adamws] == list(TUNING_SEEDS)


def test_tasks_know_every_method():
    for task in TASKS.values():
        assert set(task.guesses) <= set(task.betas), task.name
        assert {"AdamW", "PolarAdam", "EGOP", "EGOP, random rotation"} <= set(task.guesses)


def test_a_task_may_tune_the_rate_alone_by_shorter_runs():
    task = TASKS["gpt-12x768-code"]
    losses = finish(task, METHODS, bowl(task.guesses))
    tuning = [run for run in losses if run.is_tuning]
    assert Counter(run.method for run in tuning) == dict.fromkeys(METHODS, 3)
    assert {(run.steps, run.clip, run.warmup) for run in tuning} == {(144, 1.0, 50)}
    assert Counter(run.steps for run in losses if not run.is_tuning) == {573: 12 + 2 + 1}


def test_adamw_is_tuned_again_at_full_length_where_tuning_runs_are_shorter():
    task = TASKS["gpt-12x768-code"]
    guess = task.guesses["AdamW"]
    short, full = bowl(task.guesses), bowl({"AdamW": guess + 1})
    losses = finish(task, ["AdamW"], lambda run: (short if run.steps == 144 else full)(run))
    runs = Counter((run.rate, run.warmup) for run in losses if run.steps == 573)
    assert runs == {(guess - 1, 50): 1, (guess, 50): 1, (guess + 1, 50): 3, (guess + 2, 50): 1, (guess + 1, 100): 1}
    assert plan_tuning(task, ["AdamW"], losses)[1]["AdamW"].rate == guess + 1


def test_on_code_adamw_tries_a_longer_warmup_at_full_length_and_tunes_the_rate_with_it():
    task = TASKS["gpt-12x768-code"]
    guess = task.guesses["AdamW"]
    before, after = bowl(task.guesses), bowl({"AdamW": guess + 2}, warmup=-0.1)
    losses = finish(task, ["AdamW"], lambda run: (before if run.warmup == 50 else after)(run))
    runs = Counter(run.rate for run in losses if run.warmup == 100)
    assert runs == {guess - 1: 1, guess: 1, guess + 1: 1, guess + 2: 3, guess + 3: 1}
    assert {run.steps for run in losses if run.warmup == 100} == {573}


def test_adamws_settings_for_1600_steps_are_those_it_chose_for_400():
    losses = finish(TASKS["gpt-6x384-1600"], ["AdamW", "Muon", "EGOP"], bowl(TASKS["gpt-6x384-1600"].guesses))
    settings = {(run.method, run.beta, run.warmup, run.clip) for run in losses}
    assert settings == {("AdamW", 0.95, 100, 1.0), ("Muon", 0.9, 50, 1.0), ("EGOP", 0.95, 50, 1.0)}
