"""egop diagnose MODULE:FACTORY."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import egop
import pages
from egop.cli import app
from egop.diagnostics import racing, stages
from signals import heed_ctrl_c

GOOD = """
import torch, egop
from torch import nn

def network(width=5):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]

def objective():
    return egop.Objective(network(), loss_fn, batches)

def triple():
    return network(), loss_fn, batches

number = 3
def wrong():
    return 3
def pair():
    return network(), loss_fn
def reversed_triple():
    return loss_fn, network(), batches
def raising():
    raise RuntimeError("no data today\\nsecond line")
def leaving():
    raise SystemExit(3)
def needy(path):
    pass
def constant():
    return egop.Objective(network(), lambda model, batch: torch.zeros(()), batches)
def broken_loss():
    return egop.Objective(network(), lambda model, batch: model(batch[0][:, :4]).sum(), batches)
def infinite():
    return egop.Objective(network(), lambda model, batch: model(batch[0]).sum() / 0, batches)
def empty():
    return egop.Objective(network(), loss_fn, [])
def stops_at(call, samples=None):
    seen = []
    def loss(model, batch):
        seen.append(1)
        if len(seen) == call:
            raise KeyboardInterrupt
        return loss_fn(model, batch)
    return egop.Objective(network(), loss, batches)
def stops_at_once():
    return stops_at(1)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a module in it."""
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "failing.py").write_text("import no_such_thing_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("good", "failing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("good", "failing"):
        sys.modules.pop(name, None)


def diagnose(*arguments):
    return CliRunner().invoke(app.app, ["diagnose", *arguments])


def saved(here, folder="egop-diagnosis"):
    return json.loads((here / folder / "diagnosis.json").read_text())


@pytest.mark.parametrize("target", ["good:objective", "good:triple", "good.py:objective", "./good.py:triple"])
def test_it_prints_a_table_and_saves_numbers(here, target):
    result = diagnose(target, "--samples", "20")
    assert result.exit_code == 0, result.output
    assert "0.weight" in result.stdout
    assert "sr/(dβ₁)" in result.stdout
    numbers = saved(here)
    assert numbers["title"] == target
    assert numbers["diagnosis"]["draws"] == 20
    assert numbers["diagnosis"]["partial"] == ""
    assert numbers["race"] is None
    assert [each.name for each in (here / "egop-diagnosis").iterdir()] == ["diagnosis.json"]


@pytest.mark.slow
def test_the_probe_runs_a_race(here, monkeypatch):
    monkeypatch.setattr(racing.race, "__kwdefaults__", racing.race.__kwdefaults__ | {"learning_rates": (1e-3, 1e-2)})
    options = ["--samples", "20", "--steps", "1000", "--probe", "--probe-steps", "20", "--out", "there"]
    result = diagnose("good:objective", *options)
    assert result.exit_code == 0, result.output
    assert "not how often." in result.stdout
    assert [run["coordinates"] for run in saved(here, "there")["race"]["runs"]] == ["original", "EGOP"] * 2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(here):
    found = []
    for seed in ("3", "3", "4"):
        diagnose("good:objective", "--samples", "20", "--seed", seed, "--structure", "shared")
        found.append([block["eigenvalues"] for block in saved(here)["diagnosis"]["blocks"]])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("good", "Invalid target 'good'. Must be MODULE:FACTORY"),
        (":objective", "Invalid target"),
        ("good:", "Invalid target"),
        ("nowhere:objective", "There is no module 'nowhere'"),
        ("no.where:objective", "There is no module 'no'"),
        ("nowhere.py:objective", "There is no file 'nowhere.py'"),
        (
            "failing:objective",
            "Importing 'failing' failed: ModuleNotFoundError: No module named 'no_such_thing_at_all'",
        ),
        ("failing.py:objective", "Importing 'failing.py' failed: ModuleNotFoundError"),
        ("good:objektive", "'good' has no 'objektive'. It has: network, objective, triple"),
        ("good:number", "good:number must be a function without arguments, it is int."),
        ("good:raising", "good:raising raised RuntimeError: no data today"),
        ("good:leaving", "good:leaving raised SystemExit: 3"),
        ("good:needy", "good:needy raised TypeError"),
        ("good:wrong", "must return an egop.Objective or a tuple (model, loss_fn, loader), it returned int."),
        ("good:pair", "it returned a tuple of 2."),
        ("good:reversed_triple", "makes no objective: TypeError: model must be a torch.nn.Module, got function."),
        ("good:constant", "good:constant cannot be diagnosed: The loss does not depend on the parameters"),
        ("good:broken_loss", "good:broken_loss cannot be diagnosed: RuntimeError: mat1 and mat2 shapes"),
        ("good:infinite", "is not finite at draw 0"),
        ("good:empty", "The batches are empty"),
    ],
)
def test_a_bad_factory_is_one_clear_line_and_exit_status_2(here, target, words):
    result = diagnose(target)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len([line for line in result.stderr.splitlines() if line and "Sampling gradients: " not in line]) == 1


def test_with_debug_the_error_comes_through(here):
    assert "mat1 and mat2" in str(diagnose("good:broken_loss", "--debug").exception)
    assert "no data today" in str(diagnose("good:raising", "--debug").exception.__cause__)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--structure", "dense"], "Invalid structure 'dense'. Must be auto, full,"),
        (["--structure", "auxiliary"], "Invalid structure 'auxiliary'"),
        (["--structure", "auxiliary:0"], "Invalid structure 'auxiliary:0'"),
        (["--structure", "auxiliary:1000"], "Block '0.weight' has only 30 entries"),
        (["--rho", "uniform"], "Invalid rho 'uniform'"),
        (["--rho", "gaussian:-1"], "Invalid rho 'gaussian:-1'"),
        (["--memory", "much"], "Invalid memory value: 'much'"),
        (["--samples", "0"], "--samples"),
        (["--budget", "-1"], "--budget"),
        (["--device", "abacus"], "Invalid device value: abacus"),
        (["--device", "cuda:77"], "There is no CUDA:77 device here"),
        (["--steps", "0"], "--steps"),
        (["--probe-steps", "0"], "--probe-steps"),
    ],
)
def test_bad_options_exit_with_2_and_are_named(here, monkeypatch, options, words):
    monkeypatch.setenv("NO_COLOR", "1")
    result = diagnose("good:objective", *options)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--structure", "kronecker"],
        ["--structure", "auxiliary:3"],
        ["--structure", "reduced:3"],
        ["--rho", "gaussian"],
        ["--rho", "gaussian:0.5"],
        ["--rho", "recentered"],
        ["--rho", "initialization"],
        ["--device", "cpu"],
        ["--budget", "1"],
    ],
    ids=" ".join,
)
def test_structures_and_distributions_can_be_named(here, options):
    result = diagnose("good:objective", "--samples", "10", *options)
    assert result.exit_code == 0, result.output


# --- Ctrl-C ---


def test_ctrl_c_before_the_first_gradient_leaves_numbers_that_say_so(here):
    result = diagnose("good:stops_at_once")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted. egop-diagnosis/diagnosis.json has what is known so far."
    assert saved(here)["diagnosis"]["partial"] == "no gradients have been sampled yet"


def test_ctrl_c_in_the_race_keeps_the_runs_that_are_finished(here, monkeypatch):
    def interrupted(*arguments, show, **options):
        show(pages.race(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "race", interrupted)
    result = diagnose("good:objective", "--samples", "20", "--probe")
    assert result.exit_code == 130
    assert saved(here)["race"]["partial"] == "3 of 4 runs of the race are finished"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_real_ctrl_c_while_sampling_exits_with_130_and_keeps_what_was_sampled(here):
    # says when it is well into sampling, after the timed passes and the first chunks
    counting = "calls = []\ndef loss_fn(model, batch):\n    calls.append(1)\n    time.sleep(0.01)\n"
    counting += "    if len(calls) == 40: open('sampling', 'w').close()"
    (here / "slow.py").write_text("import time\n" + GOOD.replace("def loss_fn(model, batch):", counting))
    process = subprocess.Popen(
        [sys.executable, "-m", "egop.cli", "diagnose", "slow.py:objective", "--samples", "5000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c,
        env={**os.environ, "PYTHONPATH": str(Path(egop.__file__).parent.parent)},
    )  # fmt: skip
    for _ in range(600):
        time.sleep(0.1)
        if (here / "sampling").exists() or process.poll() is not None:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    partial = saved(here)["diagnosis"]["partial"]
    assert partial.startswith("sampling was interrupted after")
    assert partial.endswith("of 5000000 draws")
