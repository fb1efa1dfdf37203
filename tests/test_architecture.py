"""Imports go one way, the public names are there and documented, and importing the library stays light."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import egop

PACKAGE = Path(egop.__file__).parent

# The rooms of the design, from the ground up: each may use the ones before it.
ROOMS = [
    "precision",
    "randomness",
    "nested",
    "keeping",
    "processes",
    "sharding",
    "objective",
    "initialisers",
    "distributions",
    "gradients",
    "chunks",
    "sampling",
    "roles",
    "partition",
    "units",
    "texts",
    "locks",
    "linalg",
    "replay",
    "sketch",
    "spectrum",
    "structures",
    "plan",
    "basis_files",
    "division",
    "reparameterization",
    "estimate",
    "moments",
    "groups",
    "binding",
    "turning",
    "batches",
    "refresh",
    "trial",
    "inner",
    "engine",
    "states",
    "restoring",
    "optimizer",
    "checkpoint",
    "clients",
    "parametrize",
    "rotate",
    "diagnostics",
    "theory",
    "constrained",
    "records",
    "pictures",
    "training",
    "factories",
    "race",
    "scaling",
    "plotting",
    "pages",
    "report",
    "diagnosis_run",
    "commands",
    "cli",
]

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path):
    return path.parts[0].removesuffix(".py")


def imported_names(path):
    """The dotted names of this package that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path):
    """The rooms a file imports from; "" is the package itself, that is all public names."""
    for name in imported_names(path):
        first, _, rest = name.partition(".")
        if first == "egop":
            room = rest.partition(".")[0]
            yield room if room in ROOMS else ""


def test_every_file_belongs_to_a_room():
    assert {room_of(path) for path in FILES} - set(ROOMS) == set()


def test_every_room_is_described():
    table = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in ROOMS if f"`{room}.py`" not in table and f"`{room}/`" not in table] == []


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_one_way(path):
    public = max(ROOMS.index(room) for room in imported_rooms(Path("__init__.py")) if room)
    own = ROOMS.index(room_of(path))
    for room in imported_rooms(path):
        lowest = ROOMS.index(room) if room else public + 1
        assert lowest <= own, f"{path} imports {room or 'the public names'}, which come later"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "structures"], ids=str)
def test_structures_do_not_lean_on_the_collection_of_them(path):
    if path.name == "__init__.py":
        return
    assert "egop.structures" not in {name.rpartition(".")[0] for name in imported_names(path)}


def test_the_check_sees_an_import_that_goes_the_other_way(monkeypatch, tmp_path):
    (tmp_path / "__init__.py").write_text("from egop.optimizer import ReparameterizedOptimizer\n")
    (tmp_path / "linalg.py").write_text("def f():\n    from egop import estimate\n")
    (tmp_path / "units.py").write_text("import egop\n")
    (tmp_path / "cli.py").write_text("import egop\nfrom egop.units import parse_bytes\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for wrong in ("linalg.py", "units.py"):
        with pytest.raises(AssertionError, match="which come later"):
            test_imports_go_one_way(Path(wrong))
    test_imports_go_one_way(Path("cli.py"))


def test_the_library_and_its_tests_do_not_import_the_lab():
    files = [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    names = {(path.name, name) for path in files for name in imported_names(path)}
    assert ("test_architecture.py", "egop") in names
    assert {(file, name) for file, name in names if name.partition(".")[0] == "egop_lab"} == set()


def test_the_wheel_has_no_experiment_data_set_or_bench(tmp_path):
    pytest.importorskip("hatchling", reason="what the wheel is built with is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=Path(__file__).parent.parent, capture_output=True, check=True, timeout=120)
    (wheel,) = tmp_path.glob("egop-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    own = {Path(*Path(name).parts[1:]) for name in names if name.startswith("egop/")}
    assert set(FILES) | {Path("__init__.py"), Path("py.typed"), Path("report.css")} == own
    assert {Path(name).parts[0].partition("-")[0] for name in names} == {"egop"}


def test_there_is_nothing_but_code_and_a_style_sheet():
    kinds = {path.suffix for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert kinds == {".py", ".css", ".typed"}
    assert {"experiments", "bench", "data"} & {room_of(path) for path in FILES} == set()


def test_importing_the_library_does_not_import_what_only_command_line_and_lab_need():
    script = "import sys, egop; print(*{name.partition('.')[0] for name in sys.modules})"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "egop" in shown.split()
    unwanted = {"matplotlib", "typer", "rich", "pytest", "pytorch_optimizer", "cvxpy", "egop_lab"}
    assert unwanted & set(shown.split()) == set()


def test_importing_the_library_says_nothing():
    done = subprocess.run([sys.executable, "-c", "import egop"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", egop.__all__)
def test_every_public_name_exists_and_is_documented(name):
    public = getattr(egop, name)
    assert inspect.getdoc(public)
    if inspect.isclass(public):
        assert public.__doc__, "a docstring of its own, not an inherited one"
        for method, function in vars(public).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert inspect.getdoc(getattr(public, method)), f"{name}.{method}"


def test_the_public_names_are_in_order_and_complete():
    assert sorted(egop.__all__) == egop.__all__
    shown = {name for name in vars(egop) if not name.startswith("_") and not inspect.ismodule(getattr(egop, name))}
    assert shown | {"checkpoint", "theory"} == set(egop.__all__)  # two modules are public names themselves


@pytest.mark.parametrize("module", ["objective", "estimate", "diagnostics.measure", "clients"])
def test_the_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"egop.{module}"), extraglobs={"torch": torch, "egop": egop})
    assert results.attempted > 0
    assert results.failed == 0
