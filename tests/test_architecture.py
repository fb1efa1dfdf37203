"""Imports go one way, the public names are there and documented, and importing the library stays light."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch

import egop

PACKAGE = Path(egop.__file__).parent
TESTS = Path(__file__).parent

# The packages, from the ground up: each may import from those before it. Some are single files.
PACKAGES = [
    "distributed",
    "formatting",
    "plots",
    "numerics",
    "optim",
    "basis",
    "estimation",
    "optimizer",
    "refresh",
    "recipes",
    "reference",
    "extras",
    "diagnose",
    "cli",
]

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_names(path):
    """Yield the dotted names that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def list_exports(package):
    """Return the names that others may import: the public ones, and those imported ``as`` themselves.

    A package that is not public has no ``__all__`` and exports everything.
    """
    file = PACKAGE / f"{package}.py"
    file = file if file.exists() else PACKAGE / package / "__init__.py"
    if "__all__ =" not in file.read_text():
        return [name for name in vars(importlib.import_module(f"egop.{package}")) if not name.startswith("_")]
    return names_in_all(file) + internal_names(file)


def internal_names(file):
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.asname == alias.name]


@cache
def names_in_all(file):
    tree = ast.parse(file.read_text())
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return ast.literal_eval(names)


def find_package(path):
    """Return the package that a file is in."""
    return path.parts[0].removesuffix(".py")


def test_every_file_is_in_a_package():
    assert {find_package(path) for path in FILES} == set(PACKAGES)


def test_tests_mirror_the_packages():
    """Besides the packages' folders: ``clients``, the frameworks that the optimizer runs in, and several processes."""
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert folders == {*(package for package in PACKAGES if (PACKAGE / package).is_dir()), "clients", "distributed"}
    assert (TESTS / "test_reference.py").exists()


def test_imports_go_one_way_and_use_exported_names():
    for path in FILES:
        check_imports(path)


def check_imports(path):
    own = find_package(path)
    for name in imported_names(path):
        if name.partition(".")[0] != "egop" or name == "egop.__version__":
            continue
        package, *rest = name.split(".")[1:] or [""]
        assert package in PACKAGES, f"{path} imports {name}: import from a package, not from egop itself"
        assert PACKAGES.index(package) <= PACKAGES.index(own), f"{path} imports {name}, which comes later"
        if package != own:
            assert len(rest) == 1, f"{path} imports {name}, from inside another package"
            assert rest[0] in list_exports(package), f"{path} imports {name}, which that package does not export"


def test_structures_do_not_import_their_package():
    files = [path for path in FILES if "structures" in path.parts and path.name != "__init__.py"]
    assert files
    for path in files:
        assert "egop.basis.structures" not in {name.rpartition(".")[0] for name in imported_names(path)}, path


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("numerics/linalg.py", "def f():\n    from egop.estimation import estimate", "which comes later"),
        ("numerics/units.py", "import egop", "not from egop itself"),
        ("numerics/units.py", "from egop import estimate", "not from egop itself"),
        ("refresh/online.py", "from egop.optimizer.engine import Engine", "from inside another package"),
        ("refresh/online.py", "from egop.optimizer import named_groups", "does not export"),
    ],
)
def test_a_wrong_import_is_found(monkeypatch, tmp_path, file, line, complaint):
    for package in ("estimation", "optimizer"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('__all__ = ["estimate"]\n')
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    with pytest.raises(AssertionError, match=complaint):
        check_imports(Path(file))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_documented(package):
    module = importlib.import_module(f"egop.{package}")
    assert 2 <= len(module.__doc__.strip().splitlines()) <= 6
    names = getattr(module, "__all__", [])
    assert sorted(names) == sorted(set(names))
    plan = (TESTS.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"`{package}/`" in plan or f"`{package}.py`" in plan


def test_no_exported_name_hides_a_module():
    packages = {path.parent for path in FILES if path.name == "__init__.py"} | {Path()}
    for package in packages:
        module = importlib.import_module(".".join(["egop", *package.parts]))
        files = {path.stem for path in (PACKAGE / package).glob("*.py")} | {
            path.name for path in (PACKAGE / package).iterdir() if path.is_dir()
        }
        # An exported module may not have been imported yet.
        hidden = {
            name
            for name in getattr(module, "__all__", vars(module))
            if name in files and not inspect.ismodule(getattr(module, name, inspect))
        }
        # The function egop.diagnose hides its package, which nobody needs by name.
        assert hidden - ({"diagnose"} if package == Path() else set()) == set(), package


def test_the_library_and_its_tests_do_not_import_the_lab():
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    names = {(path.name, name) for path in files for name in imported_names(path)}
    assert ("test_architecture.py", "egop") in names
    assert {(file, name) for file, name in names if name.partition(".")[0] == "egop_lab"} == set()


def test_the_wheel_has_no_experiment_data_set_or_bench(tmp_path):
    pytest.importorskip("hatchling", reason="what the wheel is built with is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=TESTS.parent, capture_output=True, check=True, timeout=120)
    (wheel,) = tmp_path.glob("egop-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    own = {Path(*Path(name).parts[1:]) for name in names if name.startswith("egop/")}
    others = ("__init__.py", "py.typed")
    assert set(FILES) | set(map(Path, others)) == own
    assert {Path(name).parts[0].partition("-")[0] for name in names} == {"egop", "egop_entry.py"}


def test_there_is_nothing_but_code():
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py", ".typed"}
    assert {"experiments", "bench", "data"} & {path.parts[0] for path in FILES} == set()


# In a new process: what is imported with the library, then with a plot.
IMPORTED = """
import sys, egop, torch
assert "egop" in sys.modules
assert not {"matplotlib", "typer", "rich", "pytest", "pytorch_optimizer", "egop_lab"} & set(sys.modules)
values = torch.ones(2).double()
egop.Spectrum(values, values, 1).plot()
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""


def test_importing_the_library_is_silent_and_imports_neither_matplotlib_nor_what_the_lab_needs():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_exists_and_is_documented():
    for name in egop.__all__:
        public = getattr(egop, name)
        assert inspect.getdoc(public), name
        if inspect.isclass(public):
            assert public.__doc__, f"{name}: a docstring of its own, not an inherited one"
            for method, function in vars(public).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(public, method)), f"{name}.{method}"


def test_the_public_names_are_in_order_and_complete():
    assert sorted(egop.__all__, key=lambda name: (not name.isupper(), name)) == egop.__all__  # as ruff wants them
    shown = {name for name in vars(egop) if not name.startswith("_") and not inspect.ismodule(getattr(egop, name))}
    assert shown | {"extras", "optim"} == set(egop.__all__)  # modules that are public names themselves


def public_objects():
    """Return every public class and function of ``egop`` and its public modules, by name."""
    modules = [egop, *(importlib.import_module(f"egop.{name}") for name in ("extras",))]
    named = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    return {name: public for name, public in named.items() if not inspect.ismodule(public)}


@pytest.mark.parametrize("name", public_objects())
def test_every_public_name_has_an_example_that_runs(name, tmp_path):
    public = public_objects()[name]
    globals_given = {"torch": torch, "egop": egop, "folder": tmp_path}
    tests = doctest.DocTestFinder().find(public, name, globs=globals_given)
    (own,) = [test for test in tests if test.name == name]
    assert own.examples, "no example in its docstring"
    assert not any(doctest.SKIP in example.options for example in own.examples), "an example that is never run"
    runner = doctest.DocTestRunner()
    said = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for test in tests:
            runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_the_files_that_contributors_are_sent_to_are_there():
    root = Path(__file__).parent.parent
    named = re.findall(r"`((?:src|docs|tests|lab)/[^`]*)`", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [path for path in named if not (root / path).exists()] == []


TYPED_USE = """
import torch
import egop

model = torch.nn.Linear(4, 2)
objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), [torch.ones(8, 4)])
basis: egop.Basis = egop.estimate(objective, rho=egop.Initialization(), structure=egop.Shared())
change: egop.ChangeOfBasis = basis["weight"]
optimizer: torch.optim.Optimizer = egop.ReparameterizedOptimizer(
    model.named_parameters(), torch.optim.AdamW, basis, refresh=egop.Online(every=10), lr=1e-3
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
one_line: torch.optim.Optimizer = egop.EGOP(model, lr=1e-3, weight_decay=0.1)
verdict: str = egop.diagnose(objective).verdict
egop.Online(every="ten")
"""


@pytest.mark.slow
def test_a_program_that_uses_the_library_is_checked_by_mypy(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "use.py").write_text(TYPED_USE)
    # With the project's settings, which are strict, and so with what `make lint` has in its cache: else it takes long.
    check = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path / "use.py")]
    root = Path(__file__).parent.parent
    said = subprocess.run(check, cwd=root, capture_output=True, text=True, timeout=600).stdout
    assert said.count("error:") == 1, said
    assert 'Argument "every" to "Online" has incompatible type "str"; expected "int"' in said
