"""The study of advice: its problems, one small run of everything, and results from made-up records."""

import functools
import math
from pathlib import Path

import pytest
import torch

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.advice import AdviceExperiment, build_optimizer, train
from egop_lab.experiments.advice_results import CANDIDATES, Results
from egop_lab.training.context import Context
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Record, Store

# Problems whose data ship with the lab.
OWN = [name for name in PROBLEMS if not name.endswith(("imagenette", "shakespeare", "wikitext", "gpt", "photograph"))]


def test_both_halves_have_every_important_kind_of_model():
    for half in ("open", "frozen"):
        kinds = [each.kind for each in PROBLEMS.values() if each.half == half]
        assert len(kinds) == 14
        assert {"MLP", "CNN", "transformer", "recurrent network", "autoencoder", "factors"} <= set(kinds)


@pytest.mark.parametrize("name", OWN)
def test_a_task_depends_on_its_seed_alone_and_has_gradients(name):
    first, again, other = (PROBLEMS[name].make(seed, None) for seed in (1, 1, 2))
    losses = [task.loss(task.model.eval(), next(iter(task.batches))).item() for task in (first, again, other)]
    assert losses[0] == losses[1] != losses[2]
    first.loss(first.model.train(), next(iter(first.batches))).backward()
    assert all(each.grad is not None for each in first.model.parameters() if each.requires_grad)
    assert math.isfinite(sum(first.loss(first.model, batch).item() for batch in first.held_out))


@pytest.mark.parametrize("name", sorted(set(PROBLEMS) - set(OWN)))
def test_missing_data_are_named(name):
    with pytest.raises(MissingDataError):
        PROBLEMS[name].make(0, None)


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_training_lowers_the_loss_and_the_same_seed_repeats_it(candidate):
    task = PROBLEMS["table"].make(0, None)
    build = functools.partial(build_optimizer, candidate)
    first, again = (train(task, build, 5e-3, 40, 4, 0)["losses"] for _ in range(2))
    assert len(first) == 5
    assert first[-1] < 0.7 * first[0]
    assert first == again


def test_a_training_that_diverges_ends_early():
    build = functools.partial(build_optimizer, "AdamW")
    losses = train(PROBLEMS["linear-network"].make(0, None), build, 1e3, 40, 4, 0)["losses"]
    assert math.isnan(losses[-1])
    assert len(losses) == 2


@pytest.mark.slow
def test_the_quick_preset_runs_once_and_is_not_judged(tmp_path, monkeypatch):
    monkeypatch.setattr("egop_lab.experiments.advice._QUICK", ("table", "table-mixed"))
    store = Store(tmp_path / "advice.jsonl")
    experiment = AdviceExperiment("quick", store)
    torch.set_num_threads(1)
    experiment.run(Context())
    count = len(store)
    experiment.run(Context())
    assert len(store) == count
    assert experiment.results().complete == ["table", "table-mixed"]
    assert {each.verdict for each in experiment.judge()} == {"cannot be judged"}
    assert [len(table.rows) for table in experiment.tables()] == [2, 1]
    assert len(experiment.pictures()[0].panels[0].series) == 2


# --- made-up records ---

STEPS, EVALUATIONS = 100, 10
SETTINGS = {
    "problems": {name: {"kind": "MLP", "half": "frozen", "steps": STEPS} for name in "abcd"},
    "seeds": 1,
    "evaluations": EVALUATIONS,
}


def descend(fraction, count=EVALUATIONS):
    """Return losses that fall from 10 to 7 within a fraction of the run, and further after it."""
    return [10 - 3 * step / count / fraction for step in range(count + 1)]


def plant(problem, race, truth, slowdown=1.0, lr=0.5):
    """Return the records of a problem on which EGOP takes these fractions of AdamW's steps."""
    records = []
    for name in CANDIDATES:
        fraction, seconds = (truth, slowdown) if name == "EGOP" else (1.0, 1.0)
        config = {"problem": problem, "what": "training", "candidate": name, "seed": 0, "steps": STEPS}
        for rate, factor in ((0.1, 1.0), (1.0, 0.5)):
            losses = [10 - factor * (10 - loss) for loss in descend(fraction)]
            records.append(Record({**config, "lr": rate}, {"losses": losses, "step_seconds": seconds}))
    config = {"problem": problem, "seed": 0, "steps": STEPS}
    runs = {
        name: [
            {"lr": lr, "seed": seed, "steps": 20, "every": 2, "losses": descend(race if name == "EGOP" else 1.0),
             "step_seconds": slowdown if name == "EGOP" else 1.0}
            for seed in (0, 1)
        ]
        for name in CANDIDATES
    }  # fmt: skip
    result = {"runs": [runs, runs], "lengths": [20, 20], "start": 10.0, "left_out": {}}
    records.append(Record({**config, "what": "race"}, result))
    return records


def summarize(*problems):
    records = [record for planted in problems for record in planted]
    results = Results(SETTINGS, records)
    return results, {each.id.removeprefix("advice/"): each for each in results.summarize()}


def test_right_advice_meets_all_targets():
    results, targets = summarize(
        *(plant(name, value, value) for name, value in {"a": 0.5, "b": 0.7, "c": 1.2, "d": 1.5}.items())
    )
    assert [each.verdict for each in targets.values()] == ["holds"] * 4
    assert results.correlate("frozen")[0] == pytest.approx(1.0)
    assert results.compare("c", "EGOP").steps == pytest.approx(1.2)


def test_wrong_advice_is_counted():
    wrong = (plant("a", 1.2, 0.5), plant("b", 0.5, 1.3), plant("c", 1.3, 0.4), plant("d", 0.6, 1.2))
    results, targets = summarize(*wrong)
    assert {targets[name].verdict for name in ("correlation", "missed", "reversed")} == {"does not hold"}
    assert results.mistakes("frozen", equal_steps=False) == (["a", "c"], ["b", "d"])
    assert "frozen: 2 of 4 by time (a, c), 2 by steps (a, c)" in targets["missed"].finding


def test_time_and_steps_are_judged_separately():
    results, _ = summarize(plant("a", 1.0, 0.5, slowdown=3.0))
    assert results.mistakes("frozen", equal_steps=False) == ([], [])
    assert results.mistakes("frozen", equal_steps=True) == (["a"], [])


def test_rates_are_good_if_one_is_close_to_the_tuned_loss():
    results, targets = summarize(plant("a", 1.0, 1.0, lr=0.01), plant("b", 1.0, 1.0, lr=0.2))
    assert results.check_rates("frozen") == {(name, each): name == "b" for name in "ab" for each in CANDIDATES}
    assert targets["rates"].verdict == "does not hold"
    assert "frozen: 4 of 8 (50%, 95 %: 22% to 78%)" in targets["rates"].finding


def test_the_page_of_learning_rates_shows_the_records():
    docs = Path(__file__).parents[3] / "docs"
    table = AdviceExperiment("full", Store(docs / "records" / "advice.jsonl")).results().rate_table()
    lines = [f"| {' | '.join(row)} |" for row in (table.header, *table.rows)]
    lines.insert(1, "|---" * len(table.header) + "|")
    shown = (docs / "howto" / "learning-rate.md").read_text().split("<!-- records -->\n")[1]
    assert shown == "\n".join(lines) + "\n", "\n".join(lines)
