import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import egop_lab
from egop_lab import cli
from egop_lab.experiments import demo, demo_language
from egop_lab.models.small import perceptron
from signals import heed_ctrl_c, interrupted_import


def test_a_short_demo_prints_a_table_and_saves_picture_and_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "digits_network", lambda: perceptron(64, 4, 10))  # whose basis takes no time
    result = CliRunner().invoke(cli.app, ["demo", "--epochs", "1", "--steps", "3", "--out", str(tmp_path / "made")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "seed 0, six runs of 1 epoch" in lines[0]
    for heading in ("optimizer", "coordinates", "final loss", "accuracy", "same loss", "seconds"):
        assert any(heading in line for line in lines), heading
    for name in ("Adam", "Adagrad", "SGD"):
        assert sum(bool(re.match(rf"{name}, (original|EGOP) +0?[.1]", line)) for line in lines) == 2
    assert "0.weight" in result.output
    assert "SGD is the same in both coordinate systems" in " ".join(result.output.split())
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["demo.json", "demo.svg"]
    numbers = json.loads((tmp_path / "made" / "demo.json").read_text())
    assert [len(run["curve"]["loss"]) for run in numbers["runs"]] == [2] * 6
    assert numbers["summary"].endswith("not how often.")
    assert [run["optimizer"] for run in numbers["language model"]["runs"]] == ["AdamW", "EGOP"]
    for heading in ("validation", "steps to", "seconds to"):
        assert any(heading in line for line in lines), heading


@pytest.mark.slow
def test_the_language_model_can_be_left_out(tmp_path):
    result = CliRunner().invoke(cli.app, ["demo", "--epochs", "1", "--steps", "0", "--out", str(tmp_path / "made")])
    assert result.exit_code == 0, result.output
    assert "A language model" not in result.output
    assert "language model" not in json.loads((tmp_path / "made" / "demo.json").read_text())


def test_the_default_number_of_epochs_is_the_one_the_learning_rates_were_chosen_for():
    assert inspect.signature(cli.demo).parameters["epochs"].default == demo.EPOCHS
    assert inspect.signature(cli.demo).parameters["steps"].default == demo_language.STEPS


def test_help_lists_the_commands():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert [word for word in ("demo", "reproduce", "report", "bench") if word not in result.stdout] == []


def test_the_version_is_the_one_of_the_lab():
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"egop-lab {egop_lab.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--nothing"], "--nothing"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", str(10**30)], "--seed"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_options_exit_with_2_and_name_the_option(arguments, expected, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert expected in result.output


def test_an_out_that_is_a_file_exits_with_2(tmp_path):
    (tmp_path / "taken").write_text("")
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 2


def failing(error):
    def run(**options):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (PermissionError(13, "Permission denied", "/nowhere"), 1, "Permission denied: '/nowhere'"),
    ],
)
def test_what_a_user_can_repair_is_one_line(monkeypatch, error, status, line):
    monkeypatch.setattr(demo, "run", failing(error))
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == status
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_exits_with_130_and_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "egop_lab.cli", "demo", "--out", str(tmp_path / "made")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=heed_ctrl_c,
    )
    assert "seed 0" in process.stdout.readline()
    assert process.stderr.read(1)  # of a progress bar: it is running
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # Python ends by the signal if it came while some torch builds were being imported; a shell says 130 to both.
    assert process.returncode in (130, -signal.SIGINT)
    assert errors.rstrip().splitlines()[-1] == "Interrupted."
    assert "Traceback" not in errors
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_torch_is_imported_exits_with_130_and_one_line(tmp_path):
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert interrupted_import(project, tmp_path) == (130, "Interrupted.\n")


def test_where_nothing_can_be_kept_nothing_is_trained(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.app, ["reproduce", "trajectories", "--records", str(tmp_path / "file" / "records")])
    assert result.exit_code == 1
    assert "Not a directory" in result.stderr
    assert "trajectories" not in result.stdout


def test_without_records_they_are_not_named(tmp_path):
    result = CliRunner().invoke(
        cli.app, ["reproduce", "resnet", "--data", str(tmp_path), "--records", str(tmp_path / "records")]
    )
    assert result.exit_code == 1
    assert "left out: There are no images" in result.output
    assert "Records are in" not in result.output
