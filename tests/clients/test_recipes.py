"""The recipes of docs/recipes: whole scripts, run as a reader would run them."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runs

RECIPES = sorted((Path(__file__).parents[2] / "docs" / "recipes").glob("with_*.py"))
NEEDS = {
    "with_accelerate": ["accelerate"],
    "with_fsdp2": [],
    "with_lightning": ["lightning"],
    "with_peft": ["peft", "transformers"],
    "with_trainer": ["accelerate", "transformers"],
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_every_recipe_is_on_a_page_of_its_own():
    assert [path.stem for path in RECIPES] == sorted(NEEDS)
    for path in RECIPES:
        page = path.with_name(f"{path.stem.removeprefix('with_')}.md").read_text(encoding="utf-8")
        assert f"{{literalinclude}} {path.name}\n" in page


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(path):
    if missing := [name for name in NEEDS[path.stem] if importlib.util.find_spec(name) is None]:
        pytest.skip(f"no {missing[0]} here: {runs.MISSING}")
    started = TORCHRUN if path.stem == "with_fsdp2" else []
    done = subprocess.run([sys.executable, *started, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"\bloss (\d\S*)$", done.stdout, flags=re.MULTILINE)
    assert math.isfinite(float(loss))
