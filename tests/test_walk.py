"""A newcomer's walk: egop installed in a fresh environment, and the README's line on two networks there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Create an environment with a wheel of this checkout; it borrows torch and the rest from the current one."""
    pytest.importorskip("hatchling", reason="what the wheel is built with is not installed")
    folder = tmp_path_factory.mktemp("newcomer")
    done([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT)
    (wheel,) = folder.glob("egop-*.whl")
    place = folder / "environment"
    venv.create(place, with_pip=True, symlinks=os.name != "nt")
    programs = place / ("Scripts" if os.name == "nt" else "bin")
    done([programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel], cwd=folder)
    packages = done([programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=folder)
    # Folders that a .pth file names come last, and their own .pth files, such as those of a checkout, do not count.
    lent = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (Path(packages.strip()) / "lent.pth").write_text("\n".join(lent))
    return programs


def done(command, cwd):
    """Return what a command prints when nothing in its environment points to this checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    made = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.slow
def test_after_pip_install_the_line_of_the_readme_ends_lower_than_adamw_at_its_best_rate(installed, tmp_path):
    line = re.search(r"^optimizer = egop\.EGOP\(.*\)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)[0]
    program = tmp_path / "newcomer.py"  # outside the checkout: a program's folder is on its path
    program.write_text((ROOT / "tests" / "newcomer.py").read_text(encoding="utf-8"), encoding="utf-8")
    found = json.loads(done([installed / "python", program, line], cwd=tmp_path))
    assert Path(found["egop"]).is_relative_to(installed.parent)
    assert found["version"] == VERSION
    for network, size in (("convolutions", 57e3), ("language", 470e3)):
        assert found[network]["parameters"] == pytest.approx(size, rel=0.05)
        assert found[network]["optimizer"] == "EGOP"
        assert found[network]["egop"] < found[network]["AdamW"]


@pytest.mark.slow
def test_after_pip_install_the_command_is_there(installed, tmp_path):
    pytest.importorskip("typer", reason="the command line's extra is not installed")
    assert done([installed / "egop", "--version"], cwd=tmp_path) == f"egop {VERSION}\n"
    (tmp_path / "models.py").write_text("from torch import nn\ndef make(): return nn.Linear(8, 6), None, None\n")
    assert "54 parameters in 2 tensors" in done([installed / "egop", "plan", "models:make"], cwd=tmp_path)
