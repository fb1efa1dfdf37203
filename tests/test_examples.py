"""The examples run, and are short enough to read; each can be diagnosed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import egop
from egop.diagnostics.factories import load_objective

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
def test_each_trains_in_both_coordinates(path, capsys):
    module = load(path)
    estimate, egop.estimate = egop.estimate, lambda *given, **options: estimate(*given, samples=10, progress=False)
    try:
        module.main(steps=3)
    finally:
        egop.estimate = estimate
    original, changed = capsys.readouterr().out.splitlines()
    assert original.startswith("original coordinates: ")
    assert changed.startswith("EGOP coordinates: ")
    assert all(line.endswith("after 3 steps") for line in (original, changed))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_can_be_diagnosed(path):
    objective = load_objective(f"{path}:factory")
    found = egop.diagnose(objective, structure=egop.Shared(), samples=16, progress=False)
    measured = [block for block in found.blocks if block.structure is not None]
    assert len(measured) >= 2
    for block in measured:
        assert block.cost > 0
        assert 1 <= block.stable_rank <= block.dimension
        assert 1 / block.dimension <= block.density <= 1
        assert 0 <= block.stability <= 1
        assert block.verdict != "unknown"
    assert {form.name for form in found.forms} == {"fixed", "online one-sided", "online two-sided", "EGOP"}
    assert all(form.against or (form.step > 0 and form.predicted > 0 and form.bytes > 0) for form in found.forms)
    assert (found.rate is not None) == (found.advised is not None)


def test_the_digits_are_what_the_paper_says_they_are():
    """The first layer of the digits network has a fast spectrum and dense leading directions."""
    objective = load_objective(f"{EXAMPLES[1]}:factory")
    first, head = egop.diagnose(objective, samples=400, progress=False).blocks
    assert first.stable_rank < first.dimension / 10
    assert first.density > 0.3
    assert first.ratio < 0.3
    assert (head.structure, head.verdict) == (None, "leave")


@pytest.mark.slow
def test_few_draws_of_the_transformer_are_called_enough_only_where_halves_agree():
    objective = load_objective(f"{FOLDER / 'transformer.py'}:factory")
    found = egop.diagnose(objective, structure=egop.Shared(), samples=16, progress=False)
    blocks = [block for block in found.blocks if block.stability is not None]
    assert all(block.samples == 16 for block in blocks)
    enough = {block.name for block in blocks if "were enough" in block.advice}
    agreed = {block.name for block in blocks if block.stability - block.chance >= 0.5 * (1 - block.chance)}
    assert enough <= agreed
    assert enough == {"layers.layers.0.linear2.weight", "layers.layers.1.linear2.weight"}
    noise = [block for block in blocks if block.name not in enough]
    assert all(block.stable_rank > 0.6 * block.dimension for block in noise), "not the 16 that 16 draws can have"
    assert "6 draws: lower bound" in str(found.basis)
