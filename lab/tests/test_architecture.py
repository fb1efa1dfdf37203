"""The lab stands on public names of egop: those it exports, and those of its public modules."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import egop
import egop_lab

PACKAGE = Path(egop_lab.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Named as public in docs/architecture.md; of each, what its __all__ offers.
MODULES = {f"egop.{name}" for name in ("basis", "diagnose", "estimation", "extras", "optim", "refresh")}
# What else is used, and why.
EXCEPTIONS = {
    ("scaling/costs.py", "egop.basis.Role"): "the type of an argument of make_plan",
    ("scaling/costs.py", "egop.basis.make_plan"): "plans models on the meta device with one candidate structure",
    ("scaling/costs.py", "egop.basis.partition_parameters"): "makes the blocks for make_plan",
    ("scaling/costs.py", "egop.basis.find_roles"): "finds the roles for make_plan",
}


def is_public(name):
    module, _, last = name.rpartition(".")
    if name == "egop" or name in MODULES:
        return True
    if module == "egop":
        return last in egop.__all__ or last in ("__version__", "__file__")
    return module in MODULES and last in importlib.import_module(module).__all__


def used(source):
    """Yield the names of egop that a file imports or looks up by dots, such as ``egop.estimation.sampling.draw``."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "egop")
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "egop":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "egop":
            yield f"egop.{node.attr}"


def test_public_names_only():
    found = {(path.as_posix(), name) for path in FILES for name in used((PACKAGE / path).read_text())}
    assert {(file, name) for file, name in found if not is_public(name)} == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from egop.numerics import counted", "egop.numerics.counted"),
        ("def f():\n    import egop.numerics", "egop.numerics"),
        ("import egop\negop.optimizer.Engine", "egop.optimizer"),
        ("from egop.basis import sys", "egop.basis.sys"),
        ("from egop import numerics", "egop.numerics"),
    ],
)
def test_the_check_sees_what_is_not_public(source, name):
    assert [each for each in used(source) if not is_public(each)] == [name]


def test_the_public_modules_are_described_and_say_what_they_offer():
    described = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    (sentence,) = [each for each in described.split("\n\n") if each.startswith("Public modules")]
    for module in MODULES:
        assert f"`{module}`" in sentence
        assert importlib.import_module(module).__all__


def test_every_package_is_described():
    table = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    packages = {path.parts[0] for path in FILES} - {"__init__.py"}
    assert [
        package for package in sorted(packages) if f"`{package}`" not in table and f"`{package}/`" not in table
    ] == []
    for package in packages:
        if (PACKAGE / package).is_dir():
            assert (
                len((ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or "").split()) > 20
            )


# What each package may use besides itself. Imports go one way; ``bench`` and ``experiments`` do not know of each other.
PACKAGES = {
    "formatting": (),
    "files": (),
    "plots": ("files",),
    "models": (),
    "data": ("files",),
    "gpu": (),
    "muon": (),
    "theory": (),
    "builders": ("data",),
    "methods": ("builders",),
    "race": ("plots", "files", "models", "data", "gpu", "muon", "builders"),
    "training": ("formatting", "files", "models", "data", "gpu", "builders", "methods"),
    "experiments": (
        "formatting",
        "files",
        "plots",
        "models",
        "data",
        "gpu",
        "theory",
        "builders",
        "methods",
        "training",
    ),
    "bench": ("formatting",),
    "scaling": ("formatting", "models"),
    "report": ("formatting", "files", "plots", "training", "experiments"),
    "cli": ("formatting", "files", "plots", "training", "experiments", "bench", "scaling", "report"),
}


def packages_used(source):
    """Yield the packages of the lab that a file imports from, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their package"
            names = [node.module] if node.module != "egop_lab" else [f"egop_lab.{name}" for name in names]
        yield from (name.split(".")[1] for name in names if name.startswith("egop_lab."))


def test_imports_go_one_way():
    for path in FILES:
        if path != Path("__init__.py"):
            package = path.parts[0].removesuffix(".py")
            assert set(packages_used((PACKAGE / path).read_text())) - {package, "__version__"} <= set(
                PACKAGES[package]
            ), path


def test_the_packages_have_an_order():
    order = list(PACKAGES)
    assert all(order.index(used) < order.index(package) for package, all_used in PACKAGES.items() for used in all_used)
    assert list(packages_used("def f():\n    from egop_lab.bench import run")) == ["bench"]
    assert list(packages_used("from egop_lab import data")) == ["data"]
