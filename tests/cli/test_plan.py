"""The command egop plan."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from egop.cli import app

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
    """Return a function that runs ``egop plan`` on one of the factories."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return lambda target, *options: CliRunner().invoke(app.app, ["plan", f"factories.py:{target}", *options])


@pytest.mark.parametrize("target", ["model", "objective", "triple"])
def test_plan_accepts_what_a_factory_may_return(shown, target):
    found = shown(target)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "92 parameters in 6 tensors, 78% of them rotated."
    assert [line.split()[:2] for line in lines[4:6]] == [["0.weight", "Shared"], ["1.weight", "Shared"]]
    assert "the output head" in lines[6]
    assert lines[-1] == "Memory beyond AdamW's: 208 B for bases, 208 B for Gram matrices, 288 B for coordinates."


def test_plan_of_a_structure_is_that_of_online(shown):
    found = shown("model", "--structure", "kronecker")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("Kronecker") == 3
    assert "Memory beyond AdamW's: 688 B for bases" in found.stdout


def test_no_weights_are_allocated(shown):
    found = shown("large")
    assert found.exit_code == 0
    assert "0% of them rotated" in found.stdout  # too wide: AdamW steps everything


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("number", [], "must return a torch.nn.Module"),
        ("reading", [], "called on the meta device"),
        ("missing", [], "It has: Small, large, model, objective, triple, number, empty, reading.\n"),
        ("empty", [], "The model has no parameters (Sequential): there is nothing to plan."),
        ("model", ["--structure", "square"], "Invalid structure 'square'"),
        ("model", ["--structure", "auxiliary:2"], "Online cannot renew the structure auxiliary:2"),
        ("model", ["--memory", "lots"], "Invalid memory value"),
        ("model", ["--memory", "150"], "All bases together need 208 B"),
    ],
)
def test_errors_are_one_line(shown, target, options, words):
    found = shown(target, *options)
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
