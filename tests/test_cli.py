"""The command line: egop diagnose and egop plan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import egop
from egop import cli
from signals import heed_ctrl_c, interrupted_import

FACTORIES = """
import torch, egop
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2))

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def batches():
    return [(torch.randn(8, 8), torch.randint(2, (8,))) for _ in range(3)]

def objective():
    return egop.Objective(model(), loss_fn, batches())

def triple():
    return model(), loss_fn, batches()

def large():
    return nn.Sequential(nn.Linear(60_000, 60_000), nn.Linear(60_000, 60_000))  # 28 GB

number = 3

def wrong():
    return 3

def pair():
    return model(), loss_fn

def reversed_triple():
    return loss_fn, model(), batches()

def raising():
    raise RuntimeError("no data today\\nsecond line")

def leaving():
    raise SystemExit(3)

def needy(path):
    pass

def constant():
    return egop.Objective(model(), lambda model, batch: torch.zeros(()), batches())

def broken_loss():
    return egop.Objective(model(), lambda model, batch: model(batch[0][:, :4]).sum(), batches())

def without_batches():
    return egop.Objective(model(), loss_fn, [])

def empty():
    return nn.Sequential(nn.Tanh())

def reading():
    assert float(torch.ones(1)) == 1  # which the meta device does not know
    return model()

def interrupting():
    calls = []
    def loss(model, batch):
        calls.append(1)
        if len(calls) == 500:
            raise KeyboardInterrupt
        return loss_fn(model, batch)
    return model(), loss, batches()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs a command in a folder with factories."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "failing.py").write_text("import no_such_thing_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("NO_COLOR", "1")
    yield lambda *arguments: CliRunner().invoke(cli.app, arguments)
    for name in ("factories", "failing"):
        sys.modules.pop(name, None)


def test_help_lists_the_commands(run):
    result = run("--help")
    assert result.exit_code == 0
    assert "diagnose" in result.stdout
    assert "plan" in result.stdout


def test_the_version_is_the_same_everywhere(run):
    assert run("--version").output == f"egop {version('egop')}\n"
    assert version("egop") == egop.__version__


# --- diagnose ---


@pytest.mark.parametrize("target", ["factories:objective", "./factories.py:triple"])
def test_diagnose_prints_the_answer_and_a_table(run, target, tmp_path):
    plot = tmp_path / "race.png"
    result = run("diagnose", target, "--steps", "20", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(("Perhaps keep AdamW", "Perhaps use "))
    assert lines[5].split() == ["candidate", "learning", "rate", "loss", "steps", "step", "time", "time"]
    assert "Race of 4 candidates" in result.stderr
    assert plot.stat().st_size > 0


def test_ctrl_c_prints_what_is_known_and_exits_with_130(run):
    result = run("diagnose", "factories:interrupting", "--steps", "20")
    assert result.exit_code == 130
    assert "Uncertain: the race is incomplete (it was interrupted)" in result.stdout


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("factories", "Invalid target 'factories'. Must be MODULE:FACTORY"),
        (":objective", "Invalid target"),
        ("factories:", "Invalid target"),
        ("nowhere:objective", "No module named 'nowhere'"),
        ("nowhere.py:objective", "No such file or directory: 'nowhere.py'"),
        ("failing:objective", "ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
        ("failing.py:objective", "ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
        ("factories:objektive", "'factories' has no function 'objektive'. It has: model, loss_fn, batches, objective"),
        ("factories:number", "'factories' has no function 'number'"),
        ("factories:raising", "RuntimeError: no data today (--debug shows the traceback)\n"),
        ("factories:leaving", "SystemExit: 3"),
        ("factories:needy", "TypeError: needy() missing 1 required positional argument: 'path'"),
        ("factories:wrong", "must return an egop.Objective or a tuple (model, loss_fn, batches), got int."),
        ("factories:pair", "got a tuple of 2."),
        ("factories:reversed_triple", "TypeError: model must be a torch.nn.Module, got function."),
        ("factories:constant", "The loss does not depend on the model"),
        ("factories:broken_loss", "RuntimeError: mat1 and mat2 shapes"),
        ("factories:without_batches", "The batches are empty"),
    ],
)
def test_an_error_is_one_line_and_exit_status_2(run, target, words):
    result = run("diagnose", target)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_with_debug_the_error_comes_through(run):
    assert "mat1 and mat2" in str(run("diagnose", "factories:broken_loss", "--debug").exception)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["diagnose", "a:b", "--steps", "0"], "--steps"),
        (["diagnose", "a:b", "--steps", "many"], "--steps"),
        (["diagnose", "a:b", "--nothing"], "--nothing"),
        (["diagnose", "a:b", "--seed", "-1"], "--seed"),
        (["diagnose", "a:b", "--budget", "0"], "--budget"),
        (["diagnose", "factories:objective", "--device", "abacus"], "abacus"),
        (["demo"], "demo"),
    ],
)
def test_bad_options_exit_with_2_and_are_named(run, arguments, expected):
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in result.output


# --- plan ---


@pytest.mark.parametrize("target", ["model", "objective", "triple", "reading"])
def test_plan_accepts_what_a_factory_may_return(run, target):
    result = run("plan", f"factories.py:{target}")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "92 parameters in 6 tensors, 78% of them rotated."
    assert [line.split()[:2] for line in lines[4:6]] == [["0.weight", "Shared"], ["1.weight", "Shared"]]
    assert "2.weight is not rotated: the output head" in lines
    assert lines[-1] == "Extra memory over AdamW: 208 B of bases."


def test_plan_allocates_no_weights(run):
    result = run("plan", "factories.py:large")
    assert result.exit_code == 0
    assert "0% of them rotated" in result.stdout  # too wide: AdamW steps everything


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("wrong", "must return a model, an egop.Objective or a tuple that starts with a model, got int."),
        ("empty", "The model has no parameters (Sequential): there is nothing to plan."),
    ],
)
def test_errors_of_plan_are_one_line(run, target, words):
    result = run("plan", f"factories.py:{target}")
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# --- processes ---


def test_without_typer_one_line_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = [sys.executable, "-m", "egop.cli", "plan"]
    result = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 1
    assert result.stderr == (
        "This command needs the package 'typer', which is not installed. Run: pip install 'egop[cli]'\n"
    )


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_torch_is_imported_exits_with_130_and_one_line(tmp_path):
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert interrupted_import(project, tmp_path) == (130, "Interrupted.\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_real_ctrl_c_during_the_race_exits_with_130_and_prints_what_is_known(run, tmp_path):
    counting = "calls = []\ndef loss_fn(model, batch):\n    calls.append(1)\n"
    counting += "    if len(calls) == 500: open('racing', 'w').close()\n    if len(calls) > 500: time.sleep(0.05)"
    (tmp_path / "slow.py").write_text("import time\n" + FACTORIES.replace("def loss_fn(model, batch):", counting))
    process = subprocess.Popen(
        [sys.executable, "-m", "egop.cli", "diagnose", "slow.py:objective", "--steps", "20"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c,
        env={**os.environ, "PYTHONPATH": str(Path(egop.__file__).parent.parent)},
    )  # fmt: skip
    for _ in range(600):
        time.sleep(0.1)
        if (tmp_path / "racing").exists() or process.poll() is not None:
            break
    process.send_signal(signal.SIGINT)
    answer, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "it was interrupted" in answer
