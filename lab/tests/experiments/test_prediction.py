"""The study of prediction: planted records decide what is measured, chosen and judged; slices of time add up."""

from __future__ import annotations

import math

import pytest

from egop_lab.experiments import prediction
from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_found import HALVES, Found, half, reached, spearman
from egop_lab.training.context import Context
from egop_lab.training.prediction import EGOP, FIXED, FORMS, ONE_SIDED, ORIGINAL, TWO_SIDED
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING

EXPERIMENT = PredictionExperiment()
FULL = EXPERIMENT.settings("full")
COMMON = {key: FULL[key] for key in ("looks", "warm-up", "decay")}


def planted(problem, result, **entries):
    return Record(EXPERIMENT.config("full", problem=problem, **COMMON, **entries), result)


def falling(share):
    """A curve that falls to 1 after a share of the training, on a line, and then goes on; the original's share is 1."""
    return [3 - 2 * look / (25 * share) for look in range(26)]


def records(problem, saved, numbers, *, probes=None, best=TWO_SIDED, steps=None):
    """A problem of which one form saves so many of the steps, and the numbers that are known before."""
    middle, steps = FULL["problems"][problem]["rate"], steps or FULL["problems"][problem]["steps"]
    for form in FORMS:
        curve = falling(1 - saved if form == best else 1.0)
        for rate in (middle / 2, middle, 2 * middle):
            tuning = {"loss": [3.0, 1.0 if rate == middle else 2.0]}
            yield planted(problem, tuning, method=form, lr=rate, steps=steps, seed=TUNING)
        for seed in range(3):
            yield planted(problem, {"loss": curve}, method=form, lr=middle, steps=steps, seed=seed)
    times = {form: {"step": 0.001 if form == ORIGINAL else 0.002, "before": 0.0} for form in FORMS}
    times[FIXED]["before"] = 1.0
    yield planted(problem, times, what="times", seed=TUNING)
    yield planted(problem, numbers, what="predictors", seed=TUNING)
    losses = {form: [[3.0, 2.0, 2.0]] * 3 for form in FORMS} | (probes or {})
    yield planted(problem, losses, what="probes", seed=TUNING)


def study(tmp_path, saved, numbers, **options):
    store = Store(tmp_path / "prediction.jsonl")
    for place, problem in enumerate(PROBLEMS):
        store.add(*records(problem, saved(place, problem), numbers(place, problem), **options))
    return store


def verdicts(store):
    return {judged.id.partition("/")[2]: judged for judged in EXPERIMENT.judge(store, "full")}


def test_ranks_are_compared():
    assert spearman([1, 2, 3], [2, 4, 9]) == 1
    assert spearman([1, 2, 3], [9, 4, 2]) == -1
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([-math.inf, 0, math.inf], [1, 2, 3]) == 1
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1], [1]))


def test_the_first_time_at_a_loss_is_found_between_looks():
    assert reached([3, 2, 1], 1.5) == 0.75
    assert reached([3, 2, 1], 1) == 1
    assert reached([3, math.nan, 1], 2) == 1  # of what is not finite no line is drawn
    assert math.isinf(reached([3, 2, 1.5], 1))
    assert 0 < reached([1, 2, 3], 1) < 0.5


def test_there_are_problems_of_many_kinds_in_both_halves():
    assert len(PROBLEMS) >= 24
    assert len({problem.kind for problem in PROBLEMS.values()}) >= 12
    counts = [sum(half(problem) == part for problem in PROBLEMS) for part in HALVES]
    assert min(counts) >= 12
    assert all(problem.steps % FULL["looks"] == 0 for problem in PROBLEMS.values())
    assert all(problem.rate in FULL["ladder"] for problem in PROBLEMS.values())
    # As decided before anything was run.
    assert (half("white-noise"), half("quadratic-axes")) == HALVES


def test_gains_are_shares_of_steps_and_of_time(tmp_path):
    found = Found(FULL, {"mlp-digits": list(records("mlp-digits", 0.4, {"density": 1.0}))})
    gain = found.gain("mlp-digits", TWO_SIDED)
    assert gain.share == pytest.approx(0.6)
    assert gain.time == pytest.approx(1.2)  # steps take twice as long
    assert gain.steps == pytest.approx(0.4)
    assert found.gain("mlp-digits", FIXED).time == pytest.approx(2 + 1 / 0.3)
    assert found.gain("mlp-digits", EGOP).steps == 0
    assert found.best("mlp-digits") == TWO_SIDED


def test_a_form_that_never_gets_there_gains_nothing():
    runs = list(records("mlp-digits", 0.4, {"density": 1.0}))
    reported = [run for run in runs if run.config.get("method") == ONE_SIDED and run.config["seed"] < TUNING]
    worse = [run for run in runs if run not in reported]
    worse += [Record(run.config, {"loss": [3.0, 2.0]}) for run in reported]
    gain = Found(FULL, {"mlp-digits": worse}).gain("mlp-digits", ONE_SIDED)
    assert math.isinf(gain.share)
    assert gain.steps == 0
    assert gain.ratio == pytest.approx(-math.log(2))


def test_forms_begin_around_the_rate_of_the_original():
    middle = FULL["problems"]["mlp-digits"]["rate"]
    found = Found(FULL, {})
    assert found.search("mlp-digits", ORIGINAL)[1] == [middle / 2, middle, 2 * middle]
    with pytest.raises(LookupError, match="original has no tuning run"):
        found.search("mlp-digits", EGOP)
    runs = [
        planted("mlp-digits", {"loss": [3.0, loss]}, method=ORIGINAL, lr=middle * rate, steps=300, seed=TUNING)
        for rate, loss in ((0.5, 3.0), (1, 2.0), (2, 1.0), (4, math.nan))
    ]
    assert Found(FULL, {"mlp-digits": runs}).search("mlp-digits", EGOP)[1] == [middle, 2 * middle, 4 * middle]


def gains(place, problem):
    return 0.02 * place if place >= 10 else 0.0


def test_the_best_on_the_first_half_is_chosen_and_judged_on_the_other(tmp_path):
    def numbers(place, problem):
        known = {"right": -gains(place, problem), "lucky": gains(place, problem) ** 2}
        if half(problem) == HALVES[1]:
            known["lucky"] *= -1
        else:
            known["right"] += 0.05 * (place % 3)  # a little worse where it is chosen
        return known

    store = study(tmp_path, gains, numbers)
    found = EXPERIMENT.found(store, "full")
    assert found.chosen.candidate.name == "lucky"
    assert found.chosen.correlations[HALVES[0]] == pytest.approx(1)
    judged = verdicts(store)
    assert all(each.kind == "target" for each in judged.values())
    assert judged["correlation"].verdict == "does not hold"
    assert judged["leave-it"].verdict == "does not hold"
    assert judged["budget"].verdict == "holds"


def test_a_predictor_may_be_small_where_gains_are_large(tmp_path):
    store = study(tmp_path, gains, lambda place, problem: {"right": -gains(place, problem)})
    chosen = EXPERIMENT.found(store, "full").chosen
    assert (chosen.candidate.name, chosen.sign) == ("right", -1)
    judged = verdicts(store)
    assert {each.verdict for each in judged.values()} == {"holds"}
    assert "Leave it above -0.2" in judged["leave-it"].finding
    left = [problem for place, problem in enumerate(PROBLEMS) if place < 10 and half(problem) == HALVES[1]]
    assert list(chosen.left) == left


def test_advice_that_is_never_given_is_not_judged(tmp_path):
    def gain(place, problem):
        return 0.2 + 0.01 * max(place, 1)

    store = study(tmp_path, gain, lambda place, problem: {"right": gain(place, problem)})
    assert verdicts(store)["correlation"].verdict == "holds"
    assert verdicts(store)["leave-it"].verdict == "cannot be judged"


def test_long_probes_are_shown_but_not_chosen(tmp_path):
    store = Store(tmp_path / "prediction.jsonl")
    for place, problem in enumerate(PROBLEMS):
        gain = gains(place, problem)
        ended = [[3.0, 2.0, 2.0 * math.exp(-gain)]] * 3  # the difference is seen at the end only
        probes = {TWO_SIDED: ended}
        store.add(*records(problem, gain, {"poor": float(place % 5)}, probes=probes))
    found = EXPERIMENT.found(store, "full")
    long = {each.name: each for each in found.candidates}["probe: all forms, three rates"]
    assert long.budget == pytest.approx(0.75)
    assert found.correlation(long, HALVES[1]) == pytest.approx(1)
    assert found.chosen.candidate.name == "poor"


def test_a_short_probe_is_within_the_budget(tmp_path):
    store = Store(tmp_path / "prediction.jsonl")
    for place, problem in enumerate(PROBLEMS):
        gain = gains(place, problem)
        middle = [[3.0, 2.0, 2.0], [3.0, 2.0 * math.exp(-gain), 2.0], [3.0, math.nan, math.nan]]
        store.add(*records(problem, gain, {"poor": float(place % 5)}, probes={EGOP: middle}))
    judged = verdicts(store)
    assert "Chosen: probe: EGOP" in judged["correlation"].finding
    assert {each.verdict for each in judged.values()} == {"holds"}
    assert judged["budget"].finding == "5%."


def test_what_is_not_complete_is_left_out_and_not_judged(tmp_path):
    store = Store(tmp_path / "prediction.jsonl")
    with pytest.raises(LookupError, match="0 problems are complete"):
        EXPERIMENT.judge(store, "full")
    for place, problem in enumerate(list(PROBLEMS)[:20]):
        store.add(*records(problem, gains(place, problem), {"right": gains(place, problem)}))
    runs = list(records(list(PROBLEMS)[20], 0.5, {"right": 0.0}))
    store.add(*[run for run in runs if run.config.get("seed") != 2])
    assert len(EXPERIMENT.found(store, "full").complete) == 20
    assert {each.verdict for each in verdicts(store).values()} == {"cannot be judged"}


def test_pictures_and_tables_show_every_problem(tmp_path):
    store = study(tmp_path, gains, lambda place, problem: {"right": gains(place, problem), "empty": math.nan})
    (picture,) = EXPERIMENT.pictures(store, "full")
    marks = [len(series.x) for series in picture.panels[0].series]
    assert marks == [sum(half(problem) == part for problem in PROBLEMS) for part in HALVES]
    problems, candidates = EXPERIMENT.tables(store, "full")
    assert {row[0] for row in problems.rows} == set(PROBLEMS)
    assert all(len(row) == len(table.header) for table in (problems, candidates) for row in table.rows)
    assert candidates.rows[0][0] == "right"


def test_slices_of_time_add_up_to_the_whole(tmp_path, monkeypatch):
    done = []

    def made(config):
        def run(progress):
            done.append(config)
            if config.get("what") == "times":
                return {form: {"step": 0.001, "before": 0.0} for form in FORMS}
            if config.get("what") == "probes":
                return {form: [[3.0, 2.0, 2.0]] * 3 for form in FORMS}
            if "what" in config:
                return {"right": float(len(config["problem"]))}
            return {"loss": [3.0, 1 + abs(math.log(config["lr"] / 8e-3))]}

        return run

    monkeypatch.setattr(prediction, "_made", made)
    said = []
    context = Context(preset="quick", progress=False, time_budget=0.0, say=said.append)
    store = Store(tmp_path / "prediction.jsonl")
    for _ in range(400):
        before = len(done)
        EXPERIMENT.run(store, context)
        if len(done) == before:
            break
    EXPERIMENT.run(store, Context(preset="quick", progress=False, say=said.append))
    assert len(done) == len(store) == len({record.key for record in store})
    assert len(EXPERIMENT.found(store, "quick").complete) == 4
    assert said[-1].endswith("0 to go")
    assert any("minutes on one core" in line for line in said)
    assert {each.verdict for each in EXPERIMENT.judge(store, "quick")} == {"cannot be judged"}
