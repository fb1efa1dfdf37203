"""The examples run, and are short enough to read; each can be diagnosed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import egop
from egop.cli import load_objective

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "train_distributed.py"})  # tests/distributed has that one


def load(path):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_of_each_kind():
    assert [path.stem for path in EXAMPLES] == ["convnet", "mlp", "transformer"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_is_short_and_says_how_it_is_run(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert f"python examples/{path.name}" in text
    assert f"egop diagnose examples/{path.name}:factory" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_trains_with_and_without_egop(path, capsys):
    module = load(path)
    estimate, egop.estimate = egop.estimate, lambda *given, **options: estimate(*given, samples=10, progress=False)
    try:
        module.main(steps=3)
    finally:
        egop.estimate = estimate
    original, changed = capsys.readouterr().out.splitlines()
    assert original.startswith(("original coordinates: ", "AdamW: "))
    assert changed.startswith(("EGOP coordinates: ", "EGOP: "))
    assert all(line.endswith("after 3 steps") for line in (original, changed))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_can_be_diagnosed(path):
    found = egop.diagnose(load_objective(f"{path}:factory"), steps=20, seeds=(0,), progress=False)
    assert sorted(found.comparisons) == ["AdamW", "AdamW with Online", "EGOP", "EGOP without rotation"]
    assert all(comparison.slowdown > 0 for comparison in found.comparisons.values())
    assert found.lr > 0


def test_the_digits_are_what_the_paper_says_they_are():
    """The first layer of the digits network has a fast spectrum and dense leading directions."""
    basis = egop.estimate(load_objective(f"{EXAMPLES[1]}:factory"), samples=400, progress=False)
    spectrum = basis.spectrum["0.weight"]
    assert spectrum.stable_rank < len(spectrum.eigenvalues) / 10
    assert spectrum.density[0] > 0.3
    assert spectrum.is_supported
    assert basis.unrotated == {"2.weight": "the output head"}


@pytest.mark.slow
def test_few_draws_of_the_transformer_are_marked_as_too_few():
    objective = load_objective(f"{FOLDER / 'transformer.py'}:factory")
    basis = egop.estimate(objective, structure=egop.Shared(), samples=16, progress=False)
    assert "16 draws: lower bound" in str(basis)
