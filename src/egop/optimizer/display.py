"""Show an optimizer as a line, as text and as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from egop.basis import Plan, format_blocks
from egop.formatting import pluralize
from egop.optimizer.engine import Engine

_NOT_SETTINGS = ("params", "param_names")


def format_line(name: str, engine: Engine) -> str:
    """Return a summary in one line."""
    base = engine.base
    parts = [base.optimizer_class.__name__, pluralize(len(engine.blocks), "block")]
    parts += [f"{base.outside_class.__name__} outside"] if base.outside_class is not None else []
    parts += [type(engine.refresher.refresh).__name__] if engine.refresher is not None else []
    rates = dict.fromkeys(_format_value(group["lr"]) for group in engine.param_groups if "lr" in group)
    parts += [f"lr={' and '.join(rates)}"] if rates else []
    return f"{name}({', '.join(parts)})"


def format_text(name: str, engine: Engine) -> str:
    """Return several lines: the inner optimizers, the refresh, the groups and a table of the blocks."""
    return "\n".join([format_line(name, engine), *_list_facts(engine), *_format_table(engine)])


def _list_facts(engine: Engine) -> Iterator[str]:
    inside = {id(original) for block in engine.blocks for original in block.originals}
    tensors = [tensor for group in engine.param_groups for tensor in group["params"]]
    others = sum(id(tensor) not in inside for tensor in tensors)
    base = engine.base
    outside = (base.outside_class or base.optimizer_class).__name__
    blocks = pluralize(len(engine.blocks), "block")
    name = base.optimizer_class.__name__
    if not engine.blocks and engine.refresher is not None and engine.refresher.steps == 0:
        yield f"{name} will step the coordinates and {outside} everything else; the first gradient gives the bases"
    else:
        yield f"{name} steps the coordinates of {blocks}, {outside} steps {pluralize(others, 'other tensor')}"
    if engine.refresher is None:
        yield "refresh: none, the basis is fixed"
    else:
        yield f"refresh: {engine.refresher}"
    yield from format_groups(engine.param_groups)


def format_groups(groups: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each group with its settings."""
    for index, group in enumerate(groups):
        settings = [
            f"{key} {_format_value(value)}"
            for key, value in group.items()
            if key not in _NOT_SETTINGS and value is not None and value is not False
        ]
        yield f"group {index}: {pluralize(len(group['params']), 'tensor')}, {', '.join(settings)}"


def _format_table(engine: Engine) -> list[str]:
    """Return the table of the blocks, with a note if they are only planned; nothing without weights."""
    if not engine.blocks and engine.refresher is not None and engine.refresher.steps == 0:
        try:
            plan = engine.refresher.plan(engine)
        except (MemoryError, ValueError) as error:
            return [f"the first step will fail: {error}"]
        if plan is not None:
            return ["planned for the first step:", *([str(plan)] if plan.chosen or plan.unrotated else [])]
    spectra = {block.name: block.spectrum for block in engine.blocks if block.spectrum is not None}
    changes = [block.whole_change() for block in engine.blocks]
    return [format_blocks(changes, spectra, engine.unrotated)] if changes or engine.unrotated else []


def make_plan(engine: Engine) -> Plan:
    """Return the current blocks (or those after the first step) and their structures."""
    if engine.blocks:
        chosen = {block.whole_change().block: block.change.structure() for block in engine.blocks}
        return Plan(chosen, engine.unrotated)
    planned = None if engine.refresher is None else engine.refresher.plan(engine)
    return planned or Plan({}, {})


def _format_value(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else tuple(value.tolist())
    return f"{value:g}" if isinstance(value, float) else str(value)
