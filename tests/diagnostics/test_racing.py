import json
import math
import re

import pytest
import torch
from torch import nn

import cases
import egop
from egop.diagnostics import forms
from egop.diagnostics.racing import Race, Run, end, race
from egop.diagnostics.short_runs import Curve


def objective(loss=None):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 6, generator=generator)
    targets = inputs @ torch.randn(6, 3, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    batches = list(zip(inputs.split(16), targets.split(16), strict=True))
    return egop.Objective(model, loss or (lambda model, batch: (model(batch[0]) - batch[1]).square().mean()), batches)


def raced(given=None, **options):
    given = given or objective()
    basis = egop.estimate(given, samples=20, progress=False, rho=options.pop("rho", None))
    return race(given, basis, **{"steps": 40, "learning_rates": (1e-3, 1e-2), "progress": False} | options)


def test_both_sides_run_every_learning_rate_from_the_same_start():
    found = raced()
    assert [(run.lr, run.coordinates) for run in found.runs] == [
        (1e-3, "original"), (1e-3, "EGOP"), (1e-2, "original"), (1e-2, "EGOP"),
    ]  # fmt: skip
    assert len({run.curve.loss[0] for run in found.runs}) == 1
    assert all(len(run.curve.loss) == 1 + found.steps // found.every for run in found.runs)
    assert all(end(run) < run.curve.loss[0] for run in found.runs)
    assert not found.partial


def test_sgd_is_the_same_in_both_coordinates():
    original, changed = raced(optimizer=torch.optim.SGD, learning_rates=(1e-2,)).runs
    assert changed.curve.loss == pytest.approx(original.curve.loss, rel=1e-4)


def test_the_original_side_is_plain_training_and_repeats():
    first, again = raced(), raced()
    assert [run.curve.loss for run in first.runs] == [run.curve.loss for run in again.runs]


@pytest.mark.parametrize("form", forms.FORMS)
def test_the_model_and_the_random_state_are_left_as_they_were(form):
    given = objective()
    given.module.eval()
    before = cases.state_of(given.module)
    raced(given, form=form)
    assert cases.state_of(given.module) == before


def test_a_function_of_tensors_races_too():
    theta = torch.ones(4, dtype=torch.float64)
    scales = torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
    given = egop.Objective.from_function(lambda theta: (scales * theta.square()).sum(), {"theta": theta})
    found = raced(given, rho=egop.Gaussian())
    assert all(end(run) < run.curve.loss[0] for run in found.runs)
    assert theta.tolist() == [1.0] * 4


def test_what_is_finished_is_shown_after_every_run():
    shown = []
    found = raced(show=shown.append)
    assert [len(each.runs) for each in shown] == [1, 2, 3, 4]
    assert shown[2].partial == "3 of 4 runs of the race are finished"
    assert shown[-1] == found


def test_a_loss_that_reads_another_model_is_refused():
    given = objective()
    captured = given.module
    given = egop.Objective(captured, lambda model, batch: captured(batch[0]).square().mean(), given._batches)
    with pytest.raises(ValueError, match="does not depend on the model that it is given"):
        raced(given)


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="Invalid steps value: 0"):
        raced(steps=0)


def test_the_progress_bar_counts_steps(capsys):
    raced(steps=60, learning_rates=(1e-3,), progress=True)
    shown = capsys.readouterr().err
    assert " 60/60 " in shown
    assert re.search(r"[\d.]+step/s", shown)
    assert "steps/s" not in shown


# --- the words, from numbers made up for them ---


def run(coordinates, lr, *loss, seconds=1.0):
    return Run("AdamW", coordinates, lr, Curve(loss, seconds=seconds, diverged=not math.isfinite(loss[-1])))


def race_of(*runs, rates=(1e-3, 1e-2, 1e-1)):
    return Race("AdamW", "the estimated basis", 100, 50, rates, 0, runs)


ORIGINAL = run("original", 1e-2, 4.0, 2.0, 2.0)


def test_a_better_egop_side_is_said_to_be_better_and_by_how_many_steps():
    words = race_of(ORIGINAL, run("EGOP", 1e-2, 4.0, 1.0, 0.5, seconds=3.0)).summary()
    assert "EGOP first had the original's loss after 50 steps" in words
    assert "3 times as long" in words
    assert "edge of the grid" not in words
    assert words.endswith("not how often.")


def test_a_worse_egop_side_is_said_to_be_worse():
    assert "EGOP coordinates were worse here." in race_of(ORIGINAL, run("EGOP", 1e-2, 4.0, 3.0, 3.0)).summary()


def test_a_best_rate_at_the_edge_is_confessed():
    assert "edge of the grid" in race_of(ORIGINAL, run("EGOP", 1e-1, 4.0, 1.0, 1.0)).summary()


def test_diverged_runs_never_win():
    bad = run("original", 1e-1, 4.0, 0.1, math.nan)
    best = race_of(bad, run("EGOP", 1e-1, 4.0, math.inf), ORIGINAL, run("EGOP", 1e-2, 4.0, 1.0, 1.0)).best()
    assert [each.lr for each in best] == [1e-2, 1e-2]
    alone = race_of(bad, run("EGOP", 1e-1, 4.0, 1.0, 1.0))
    assert alone.best() is None
    assert alone.summary().startswith("No comparison")
    assert "(1 rate tried on both)" in alone.summary()


def test_a_run_without_its_counterpart_does_not_count():
    unpaired = race_of(ORIGINAL, run("EGOP", 1e-2, 4.0, 1.0, 1.0), run("original", 1e-1, 4.0, 0.0, 0.0))
    assert unpaired.best()[0] is ORIGINAL


def test_it_is_plain_values_for_json():
    again = json.loads(json.dumps(race_of(ORIGINAL).to_dict()))
    assert again["runs"][0]["curve"]["loss"] == [4.0, 2.0, 2.0]
    assert again["partial"]
