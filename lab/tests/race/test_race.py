from __future__ import annotations

import dataclasses
import json
import lzma
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import egop
from egop.optim import RotatedPolarAdam
from egop_lab.data.missing import MissingDataError
from egop_lab.race import run as command
from egop_lab.race import timing
from egop_lab.race.data import load_text
from egop_lab.race.problems import make_problem
from egop_lab.race.results import interval, load_records
from egop_lab.race.tasks import ADAMW_OUTSIDE, METHOD_NAMES, MUON_SIZED, TASKS, Run
from egop_lab.race.times import count_renewals, is_due
from egop_lab.race.train import make_optimizer, schedule, take_step, train
from egop_lab.race.tune import plan, read_losses

TINY = TASKS["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem():
    return make_problem(TINY, None, CPU)


def tiny_run(method="AdamW", **changes):
    beta = TINY.betas[method][0]
    base = Run(task="tiny", method=method, steps=12, seed=0, rate=14, beta=beta, warmup=2, clip=None)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_learns_and_repeats_itself(problem, method):
    first, second = (train(problem, TINY, tiny_run(method)) for _ in range(2))
    assert first["validation"] < 5.4
    drop = {"seconds"}
    assert {key: first[key] for key in first.keys() - drop} == {key: second[key] for key in second.keys() - drop}
    assert [step for step, _ in first["curve"]] == [4, 8, 12]
    assert first["test"] is not None


def test_methods_start_from_the_same_point_with_the_same_batches(problem):
    results = [train(problem, TINY, tiny_run(method)) for method in METHOD_NAMES]
    assert len({result["first losses"][0] for result in results}) == 1
    # Renewals every 20 steps make no difference to the first three.
    assert len({result["first digest"]["norm"] for result in results}) == len(METHOD_NAMES) - 1
    other = train(problem, TINY, tiny_run(seed=1))
    assert other["first losses"][0] != results[0]["first losses"][0]


@pytest.mark.parametrize("change", [{"beta": 0.9}, {"warmup": 4}, {"clip": 0.1}, {"rate": 13}, {"steps": 18}])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_hyper_parameter_changes_the_result(problem, method, change):
    change = {"beta": TINY.betas[method][1]} if "beta" in change else change
    first, second = (train(problem, TINY, tiny_run(method, **changes)) for changes in ({}, change))
    assert first["validation"] != second["validation"]


@pytest.mark.parametrize("name", ["tiny", "tiny-resnet"])
def test_egop_is_what_users_get_and_its_control_is_not(name):
    task = TASKS[name]
    problem = make_problem(task, None, CPU)

    def step_three_times(build):
        problem.reset(0)
        optimizer = build()
        for inputs, targets in problem.batches(0, 3):
            optimizer.zero_grad()
            problem.loss(inputs, targets).backward()
            optimizer.step()
        return torch.cat([weight.detach().flatten() for weight in problem.model.parameters()])

    settings = {"lr": tiny_run().lr, "betas": (0.9, task.beta2), "weight_decay": task.weight_decay}
    ours = step_three_times(lambda: make_optimizer(problem, task, tiny_run("EGOP", beta=task.beta2)))
    theirs = step_three_times(lambda: egop.EGOP(problem.model, **settings))
    control = step_three_times(lambda: make_optimizer(problem, task, tiny_run("EGOP, random rotation")))
    assert torch.equal(ours, theirs)
    assert not torch.allclose(ours, control, atol=1e-3)


def test_muon_may_have_updates_of_egops_sizes(problem):
    """Updates of an m x n weight grow by the root of m / n if that is above one."""
    updates = {}
    for method in ("Muon", MUON_SIZED):
        problem.reset(0)
        optimizer = make_optimizer(problem, dataclasses.replace(TINY, weight_decay=0.0), tiny_run(method))
        before = {name: weight.detach().clone() for name, weight in problem.model.named_parameters()}
        take_step(problem, next(iter(problem.batches(0, 1))), optimizer, None)
        updates[method] = {name: weight.detach() - before[name] for name, weight in problem.model.named_parameters()}
    ratios = {name: float(updates[MUON_SIZED][name].norm() / update.norm()) for name, update in updates["Muon"].items()}
    gains = {"qkv": 3**0.5, "wider": 2.0}
    assert ratios == pytest.approx({name: gains.get(name.split(".")[-2], 1.0) for name in ratios}, rel=1e-5)


def test_adamw_may_have_a_higher_rate_outside_hidden_weights(problem):
    optimizer = make_optimizer(problem, TINY, tiny_run(ADAMW_OUTSIDE))
    inside, outside = optimizer.param_groups
    assert len(inside["params"]) == len(problem.hidden)
    assert (inside.get("scale", 1.0), outside["scale"]) == (1.0, 4.0)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}


def test_renewals_are_counted_as_egop_makes_them(problem, monkeypatch):
    renewals, real = [], RotatedPolarAdam._install

    def install(self, due):
        renewals.extend({int(states[0]["step"]) for _, states in due})
        real(self, due)

    monkeypatch.setattr(RotatedPolarAdam, "_install", install)
    train(problem, TINY, tiny_run("EGOP", steps=30))
    assert len(renewals) == count_renewals(30)
    assert renewals == [step for step in range(1, 30) if is_due(step, 200)]


@pytest.mark.parametrize("method", ["AdamW", "SGD", "Muon", "SOAP", "EGOP"])
@pytest.mark.parametrize("name", ["tiny-resnet", "tiny-vit"])
def test_image_models_learn(name, method):
    task = TASKS[name]
    run = tiny_run(method, task=name, steps=20, rate=9)
    result = train(make_problem(task, None, CPU), task, run)
    assert result["test accuracy"] > 0.5
    assert result["curve"][-1][1] < 1.0


def test_the_halves_of_the_validation_images_are_disjoint_and_complete():
    parts = make_problem(TASKS["tiny-resnet"], None, CPU).data.parts
    images = torch.cat([inputs for part in ("validation", "test") for inputs, _ in parts[part]])
    assert len(images) == len(images.flatten(1).unique(dim=0)) == 32
    counts = [torch.cat([labels for _, labels in parts[part]]).bincount() for part in ("validation", "test")]
    assert torch.equal(*counts)


@pytest.fixture
def code(tmp_path):
    files = [f"def double_{number}(value):\n    return {number} * value\n" for number in range(120)]
    for name, some in (("train", files[:100]), ("val", files[100:])):
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress("".join(f"{file}\0" for file in some).encode()))
    return tmp_path


def test_a_gpt_learns_tokens_of_code(code):
    pytest.importorskip("tokenizers")
    task = TASKS["tiny-code"]
    problem = make_problem(task, str(code), CPU)
    result = train(problem, task, tiny_run(task="tiny-code", steps=30))
    assert result["test"] < 0.8 * math.log(task.model["vocabulary"])
    tokens = {part: np.load(code / f"{part}.300.npy") for part in ("train", "validation", "test")}
    assert {part: int((some == 0).sum()) for part, some in tokens.items()} == {
        "train": 100,
        "validation": 10,
        "test": 10,
    }
    assert tokens["train"].dtype == np.uint16
    again = make_problem(task, str(code), CPU)  # from the cache
    assert again.data.digest == problem.data.digest


def test_a_pass_shows_every_window_once(code):
    pytest.importorskip("tokenizers")
    problem = make_problem(TASKS["tiny-code"], str(code), CPU)
    count = len(np.load(code / "train.300.npy")) // 9 // 8
    first, second = ([inputs for inputs, _ in problem.batches(seed, count)] for seed in (0, 1))
    assert len(torch.cat(first)) == 8 * count
    assert not torch.equal(first[0], second[0])


def test_times_are_taken_in_turns(tmp_path, capsys):
    out = tmp_path / "times.jsonl"
    common = ["--device", "cpu", "--rounds", "2", "--warm", "1", "--steps", "1", "--out", str(out)]
    assert timing.main(["--tasks", "tiny", "--methods", "AdamW", "SOAP", "SOAP, package", *common]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["method"] for record in records] == ["AdamW", "SOAP", "SOAP, package"]
    assert all(len(record["step seconds"]) == 2 for record in records)
    assert capsys.readouterr().out.count(" ms (") == 3


def test_egop_is_timed_late_in_a_training_once_without_and_once_with_a_renewal(problem, monkeypatch):
    renewals, real = [], RotatedPolarAdam._install

    def install(self, due):
        renewals.extend(int(states[0]["step"]) for _, states in due)
        real(self, due)

    monkeypatch.setattr(RotatedPolarAdam, "_install", install)
    timing.time_steps(problem, TINY, "EGOP", 3, 4)
    # Of the three steps before the timed ones, two come after a renewal.
    assert sorted(set(renewals)) == [1, 2, 2200]


def test_tuning_runs_never_see_the_test_part(problem):
    assert train(problem, TINY, tiny_run(seed=10000))["test"] is None


def test_a_run_that_diverges_has_no_loss(problem):
    result = train(problem, TINY, tiny_run(rate=120))
    assert result["diverged"]
    assert result["validation"] is None
    assert result["test"] is None


def test_the_schedule():
    factors = [schedule(step, 100, 10) for step in range(1, 101)]
    assert factors[:2] == [0.1, 0.2]
    assert factors[9:60] == [1.0] * 51
    assert factors[-1] == pytest.approx(1 / 40)


def test_parts_do_not_overlap_and_missing_data_are_named(tmp_path):
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_bytes(name.encode())
    parts = load_text("wikitext-2", str(tmp_path), CPU)
    assert bytes(parts.test.tolist()) == b"test.txt"
    assert bytes(parts.validation.tolist()) == b"valid.txt"
    with pytest.raises(MissingDataError, match="There is no text/wikitext-2 in"):
        load_text("wikitext-2", str(tmp_path / "none"), CPU)


def test_the_interval_of_a_mean():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / 3**0.5)


def test_a_record_that_was_cut_off_is_run_again(tmp_path, capsys):
    path = tmp_path / "race.jsonl"
    record = {**dataclasses.asdict(tiny_run()), "validation": 1.0, "diverged": False}
    path.write_text(json.dumps(record) + "\n" + json.dumps(record)[:50])
    command.append_record(path, record | {"seed": 1, "train": [float("nan")]})
    assert [run.seed for run in load_records(path)] == [0, 1]
    assert "line 2: not a whole record" in capsys.readouterr().out


def test_code_is_named_by_its_source_and_by_its_commit_where_there_is_git(monkeypatch):
    with_git = command.describe_code()
    assert len(with_git["source"]) == 16
    monkeypatch.setenv("PATH", "")
    assert command.describe_code() == {"source": with_git["source"]}


def test_races_are_planned_in_order_and_no_run_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Worker", lambda *arguments: None)
    races = [
        command.read_race("tiny", "AdamW"),
        command.read_race("tiny-vit"),
        command.read_race("tiny", "AdamW", "EGOP"),
    ]
    race = command.Race(races=races, paths=[], out=tmp_path / "race.jsonl", workers=1, budget=1.0, settings=())
    places = list(dict.fromkeys((run.task, run.method) for run in race.queue()))
    rivals = [("tiny-vit", name) for name in ("AdamW", "Muon", "NorMuon", "SOAP", "SGD")]
    assert places == [("tiny", "AdamW"), *rivals, ("tiny", "EGOP")]
    assert len(set(race.queue())) == len(race.queue())


@pytest.mark.parametrize(
    ("words", "message"), [("gpt", "Invalid task: 'gpt'"), ("vit-6x384 SGD", "Invalid method for vit-6x384: 'SGD'")]
)
def test_a_task_or_method_that_is_not_there_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["--show", "--race", *words.split()])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_race_that_is_killed_goes_on_where_it_was(tmp_path):
    out, methods = tmp_path / "race.jsonl", ["AdamW"]
    arguments = ["--race", "tiny", *methods, "--device", "cpu", "--workers", "2", "--out", str(out)]
    line = [sys.executable, "-m", "egop_lab.race.run", *arguments]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, env=dict(os.environ))
    while not out.exists() or len(out.read_text().splitlines()) < 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    kept = out.read_text()
    assert command.main([*arguments, "--budget", "300"]) == 0
    assert out.read_text().startswith(kept)
    records = load_records(out)
    assert len(records) == len(out.read_text().splitlines())
    assert plan(TINY, methods, read_losses(records.values())) == []
    assert all((record["test"] is None) == run.is_tuning for run, record in records.items())


@pytest.mark.slow
def test_a_budget_is_kept_and_a_failure_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_START_SECONDS", 0)
    monkeypatch.setattr(command, "_MOST_FAILURES", 1)
    out = tmp_path / "race.jsonl"
    started = time.monotonic()
    common = ["--race", "tiny", "--device", "cpu", "--workers", "1", "--out", str(out)]
    assert command.main([*common, "--budget", "8"]) == 0
    assert time.monotonic() - started < 20
    assert "wanted next" in capsys.readouterr().out
    code = command.main(
        ["--race", "gpt-6x384-400", "--device", "cpu", "--workers", "1", "--out", str(out), "--data", str(tmp_path)]
    )
    assert code == 1
    assert "There is no text/wikitext-2 in" in capsys.readouterr().out
