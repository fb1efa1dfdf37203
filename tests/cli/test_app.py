"""The command line as a whole; test_diagnose.py and test_plan.py have the commands."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import egop
from egop.cli import app
from egop.diagnostics import stages
from signals import interrupted_import


def test_help_lists_the_commands():
    result = CliRunner().invoke(app.app, ["--help"])
    assert result.exit_code == 0
    assert "diagnose" in result.stdout
    assert "plan" in result.stdout


def test_the_version_is_the_same_everywhere():
    assert CliRunner().invoke(app.app, ["--version"]).output == f"egop {version('egop')}\n"
    assert version("egop") == egop.__version__


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["diagnose", "a:b", "--steps", "0"], "--steps"),
        (["diagnose", "a:b", "--steps", "many"], "--steps"),
        (["diagnose", "a:b", "--nothing"], "--nothing"),
        (["diagnose", "a:b", "--seed", "-1"], "--seed"),
        (["diagnose", "a:b", "--seed", str(10**30)], "--seed"),
        (["diagnose", "a:b", "--threads", "1000000"], "--threads"),
        (["demo"], "demo"),
    ],
)
def test_bad_options_exit_with_2_and_name_the_option(arguments, expected, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(app.app, arguments)
    assert result.exit_code == 2
    assert expected in result.output


def failing(error):
    def run(*given, **options):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (ModuleNotFoundError("no", name="matplotlib.figure"), 1, "pip install 'egop[cli]'"),
        (PermissionError(13, "Permission denied", "/nowhere"), 1, "Permission denied: '/nowhere'"),
    ],
)
def test_what_a_user_can_repair_is_one_line(monkeypatch, error, status, line):
    monkeypatch.setattr(stages, "run", failing(error))
    result = CliRunner().invoke(app.app, ["diagnose", "a:b"])
    assert result.exit_code == status
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("no", name="torch"), ValueError("a mistake of ours")])
def test_what_no_user_can_repair_is_not_hidden(monkeypatch, error):
    monkeypatch.setattr(stages, "run", failing(error))
    assert CliRunner().invoke(app.app, ["diagnose", "a:b"]).exception is error


def test_without_the_extras_one_line_says_what_to_install(tmp_path):
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
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert interrupted_import(project, tmp_path) == (130, "Interrupted.\n")
