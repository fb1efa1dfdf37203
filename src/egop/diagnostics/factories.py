"""Find the objective or the model that a user names as ``MODULE:FACTORY``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from egop.basis import Auxiliary, Full, Kronecker, Reduced, Shared, StructureChoice
from egop.estimation import Distribution, Gaussian, Initialization, Objective, Recentered

__all__ = ["FactoryError", "first_line", "load_model", "load_objective", "parse_rho", "parse_structure"]

T = TypeVar("T")
_WANTED = "an egop.Objective or a tuple (model, loss_fn, loader)"


class FactoryError(Exception):
    """What is wrong with a factory, in one line."""


def load_objective(target: str) -> Objective:
    """Import a module, call its factory and take the objective.

    Args:
        target: ``MODULE:FACTORY``. MODULE is dotted, or the path of a ``.py`` file; modules in the current directory
            are found. FACTORY takes no arguments and returns an ``Objective``, or a model, its loss and its batches.

    Raises:
        FactoryError: with one line that says what was found and what was expected.
    """
    result = guarded(_find_factory(target), f"{target} raised")
    if isinstance(result, Objective):
        return result
    if not isinstance(result, tuple) or len(result) != 3:
        kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise FactoryError(f"{target} must return {_WANTED}, it returned {kind}.")
    return guarded(lambda: Objective(*result), f"{target} returned a tuple that makes no objective:")


def load_model(target: str) -> nn.Module:
    """Import a module, call its factory on the meta device and return the model.

    Args:
        target: as for :func:`load_objective`; the factory may also return the model alone.

    Raises:
        FactoryError: with one line that says what was found and what was expected.
    """
    factory = _find_factory(target)
    with torch.device("meta"):
        result = guarded(factory, f"{target}, called on the meta device (where tensors have no values), raised")
    if isinstance(result, tuple) and result:
        result = result[0]
    model = result.module if isinstance(result, Objective) else result
    if not isinstance(model, nn.Module):
        raise FactoryError(
            f"{target} must return a torch.nn.Module, an egop.Objective of one, or a tuple (model, loss_fn, loader); "
            f"it returned {type(result).__name__}."
        )
    return model


def _find_factory(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise FactoryError(f"Invalid target {target!r}. Must be MODULE:FACTORY, such as examples/mlp.py:factory.")
    return factory_in(module_of(where), where, name)


def parse_structure(text: str) -> StructureChoice:
    """``auto``, ``full``, ``shared``, ``shared:SIDE``, ``kronecker``, ``auxiliary:RANK`` or ``reduced:RANK``."""
    name, _, rank = text.lower().partition(":")
    plain: dict[str, StructureChoice] = {
        "auto": "auto",
        "full": Full(),
        "shared": Shared(),
        "shared:output": Shared(side="output"),
        "shared:smaller": Shared(side="smaller"),
        "kronecker": Kronecker(),
    }
    if text.lower() in plain:
        return plain[text.lower()]
    if name in ("auxiliary", "reduced") and rank.isdigit() and int(rank) > 0:
        return (Auxiliary if name == "auxiliary" else Reduced)(rank=int(rank))
    raise FactoryError(
        f"Invalid structure {text!r}. Must be {', '.join(plain)}, auxiliary:RANK or reduced:RANK, such as auxiliary:50."
    )


def parse_rho(text: str | None) -> Distribution | None:
    """``initialization``, ``gaussian:SCALE`` or ``recentered:SCALE``; nothing leaves the choice to the diagnosis."""
    if text is None:
        return None
    name, _, scale = text.lower().partition(":")
    if name == "initialization" and not scale:
        return Initialization()
    kinds: dict[str, Callable[[float], Distribution]] = {"gaussian": Gaussian, "recentered": Recentered}
    if name in kinds:
        try:
            return kinds[name](float(scale)) if scale else kinds[name](1.0 if name == "gaussian" else 0.0)
        except ValueError:  # no number, or not one for a scale
            pass
    raise FactoryError(f"Invalid rho {text!r}. Must be initialization, gaussian:SCALE or recentered:SCALE.")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    words = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}{': ' if words else ''}{words}"


def module_of(where: str) -> ModuleType:
    """The module of a name or of a file."""
    if where.endswith(".py") or "/" in where:
        path = Path(where).resolve()
        if not path.is_file():
            raise FactoryError(f"There is no file {where!r}.")
        return guarded(lambda: _from_file(path), f"Importing {where!r} failed:")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return guarded(lambda: importlib.import_module(where), f"Importing {where!r} failed:")
    except FactoryError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{where}.".startswith(f"{missing.name}."):
            raise FactoryError(
                f"There is no module {missing.name!r}, neither in the current directory nor among the installed ones."
            ) from None
        raise


def _from_file(path: Path) -> ModuleType:
    name = f"egop_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:  # as for a script: what lies beside it can be imported
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    spec.loader.exec_module(module)
    return module


def factory_in(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    """The function of a name in a module."""
    if not hasattr(module, name):
        names = _factories(module)
        there = f" It has: {', '.join(names[:10])}." if names else ""
        raise FactoryError(f"{where!r} has no {name!r}.{there}")
    factory: Callable[[], Any] = getattr(module, name)
    if not callable(factory):
        raise FactoryError(f"{where}:{name} must be a function without arguments, it is {type(factory).__name__}.")
    return factory


def _factories(module: ModuleType) -> list[str]:
    """What a module offers as a factory: its own functions and models that need no arguments."""
    offered = getattr(module, "__all__", [])
    return [
        name
        for name, value in vars(module).items()
        if name in offered or (not name.startswith("_") and getattr(value, "__module__", "") == module.__name__)
        if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module))
        if _needs_nothing(value)
    ]


def _needs_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it needs arguments, or its signature is not known
        return False
    return True


def guarded(function: Callable[[], T], opening: str) -> T:
    """Call what a user wrote: whatever it raises, also ``sys.exit``, becomes one line."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{opening} {first_line(error)}") from error
