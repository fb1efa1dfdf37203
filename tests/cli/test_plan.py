"""egop plan MODULE:FACTORY. Run as a program, this file writes the tables of docs/scaling.md anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egop.cli import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
MODELS = ["resnet50", "gpt2", "llama_1b", "llama_8b"]

FACTORIES = """
import torch, egop
from functools import partial
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()

class Small(nn.Module):
    pass

class Settings:
    pass

def _hidden():
    pass

def sized(width):
    return Block(width)

def large():
    return nn.Sequential(nn.Linear(60_000, 60_000), nn.Linear(60_000, 60_000))  # 28 GB

def model():
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2))

def objective():
    return egop.Objective(model(), lambda model, batch: batch, [1])

def triple():
    return model(), None, []

def number():
    return 3

def empty():
    return nn.Sequential(nn.Tanh())

def reading():
    return nn.Linear(2, int(torch.ones(1).sum()))
"""


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What ``egop plan`` prints about one of the factories."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return lambda target, *options: CliRunner().invoke(app.app, ["plan", f"factories.py:{target}", *options])


@pytest.mark.parametrize("target", ["model", "objective", "triple"])
def test_the_command_takes_what_a_factory_may_return(shown, target):
    found = shown(target, "--ranks", "2")
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("92 parameters in 6 tensors; FSDP2 over 2 devices.")
    methods = [line.split("  ")[0] for line in found.stdout.splitlines()[4:16]]
    assert methods[:5] == ["AdamW", "Muon", "SOAP", "EGOP", "Shared, fixed"]
    assert "Full, online" in methods


def test_the_numbers_are_written_as_json(shown, tmp_path):
    assert shown("model", "--json", "plan.json", "--structure", "shared").exit_code == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["parameters"], found["ranks"], found["tokens"]) == (92, 8, None)
    assert [each["method"] for each in found["estimates"]] == [
        "AdamW",
        "Muon",
        "SOAP",
        "EGOP",
        "Shared, fixed",
        "Shared, online",
    ]
    assert found["estimates"][3]["device"]["bases"] == 4 * (6**2 + 4**2)  # of the smaller side
    assert found["estimates"][4]["device"]["bases"] == 4 * (8**2 + 6**2)


def test_a_limit_leaves_what_does_not_fit(shown):
    assert "Shared: No basis fits into memory=10 B" in shown("model", "--memory", "10").stdout
    row = next(
        line for line in shown("model", "--memory", "150").stdout.splitlines() if line.startswith("Shared, fixed")
    )
    assert row.split()[2] == "26%"  # only the second weight: 24 of 92


def test_what_egop_cannot_do_is_said(shown):
    found = shown("model", "--memory", "150")
    assert "EGOP: All bases together need 208 B" in found.stdout
    assert not any(line.startswith("EGOP  ") for line in found.stdout.splitlines())
    row = next(line for line in shown("large").stdout.splitlines() if line.startswith("EGOP"))
    assert row.split()[1:3] == ["0%", "16.00"]  # too wide: AdamW steps everything


def test_products_are_shown_over_the_models_own(shown):
    products = 4 * (6 * 8**2 + 4 * 6**2)
    row = next(line for line in shown("model", "--tokens", "5").stdout.splitlines() if line.startswith("Shared, fixed"))
    assert row.split()[-2] == f"{products / (6 * 92 * 5):.1%}"


def test_no_weights_are_allocated(shown):
    assert shown("large").exit_code == 0


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("number", [], "must return a torch.nn.Module"),
        ("reading", [], "called on the meta device"),
        ("missing", [], "has no 'missing'"),
        ("empty", [], "The model has no parameters (Sequential): there is nothing to plan."),
        ("model", ["--structure", "square"], "Invalid structure 'square'"),
        ("model", ["--memory", "lots"], "Invalid memory value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(shown, target, options, words):
    found = shown(target, *options)
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_only_what_can_be_called_without_arguments_is_offered(shown):
    assert shown("missing").stderr == (
        "'factories.py' has no 'missing'. It has: Small, large, model, objective, triple, number, empty, reading.\n"
    )
    built_in = CliRunner().invoke(app.app, ["plan", "egop.diagnostics.scaling:missing"])
    assert sorted(built_in.stderr.rstrip(".\n").partition("It has: ")[2].split(", ")) == sorted(MODELS)


def test_one_device_is_said_so(shown):
    assert shown("model", "--ranks", "1").stdout.startswith("92 parameters in 6 tensors; FSDP2 over 1 device.")


def commands(text):
    """The blocks of a document that begin with a call of the command: the call, and what is said to come out."""
    return re.findall(r"```\n\$ egop (plan .*)\n((?:.*\n)*?)```", text)


def printed(call):
    found = CliRunner().invoke(app.app, call.split())
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_tables_of_the_document_are_what_the_command_prints():
    found = commands(DOCUMENT.read_text())
    assert [call.split()[1].partition(":")[2] for call, _ in found] == MODELS
    for call, shown in found:
        assert shown == printed(call), "Write the tables anew: PYTHONPATH=src:tests python tests/cli/test_plan.py"


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for call, shown in commands(text):
        text = text.replace(f"$ egop {call}\n{shown}```", f"$ egop {call}\n{printed(call)}```")
    DOCUMENT.write_text(text)
