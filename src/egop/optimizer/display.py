"""Show an optimizer: as a line, as text, as a plan, and as a plot of its spectra."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from egop.basis import BlockInfo, Plan, format_blocks
from egop.formatting import pluralize
from egop.optimizer.engine import Engine
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    blocks, unrotated, note = _list_blocks(engine)
    table = [format_blocks(blocks, unrotated)] if blocks or unrotated else []
    return "\n".join([format_line(name, engine), *_list_facts(engine), *([note] if note else []), *table])


def plot_engine(engine: Engine) -> Figure:
    """Plot the spectra of all blocks that have one."""
    spectra = _find_spectra(engine)
    known: dict[str, list[float]] = {}
    for block in engine.blocks:
        sides = spectra.get(block.name, {})
        for key, values in sides.items():
            label = block.name if len(sides) == 1 else f"{block.name}, {key}"
            known[label] = values.flatten().sort(descending=True).values.tolist()
        if not sides and block.spectrum is not None:
            known[block.name] = block.spectrum.eigenvalues.tolist()
    if not known:
        raise ValueError(
            "There are no spectra yet. They come with a basis from egop.estimate, and with the first step under "
            "refresh=egop.Online()."
        )
    return plot_spectra(known, "Eigenvalues of the gradients' Gram matrices" if spectra else "Eigenvalues")


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
    for index, group in enumerate(engine.param_groups):
        settings = [
            f"{key} {_format_value(value)}"
            for key, value in group.items()
            if key not in _NOT_SETTINGS and value is not None and value is not False
        ]
        yield f"group {index}: {pluralize(len(group['params']), 'tensor')}, {', '.join(settings)}"


def _list_blocks(engine: Engine) -> tuple[list[BlockInfo], Mapping[str, str], str]:
    """Return a row for each block, the reasons why weights have none, and a note if the blocks are only planned."""
    if not engine.blocks and engine.refresher is not None and engine.refresher.steps == 0:
        try:
            plan = engine.refresher.plan(engine)
        except (MemoryError, ValueError) as error:
            return [], {}, f"the first step will fail: {error}"
        if plan is not None:
            return plan.block_info(), plan.unrotated, "planned for the first step:"
    spectra = _find_spectra(engine)
    shown = []
    for block in engine.blocks:
        row = BlockInfo.from_change(block.whole_change(), block.spectrum)
        shown.append(_add_stable_rank(row, spectra[block.name]) if block.name in spectra else row)
    return shown, engine.unrotated, ""


def _find_spectra(engine: Engine) -> dict[str, dict[str, Tensor]]:
    return {} if engine.refresher is None else engine.refresher.spectra(engine)


def _add_stable_rank(shown: BlockInfo, sides: Mapping[str, Tensor]) -> BlockInfo:
    """Add the stable rank of the Gram matrices that a refresh follows, or of the Kronecker product of two sides."""
    roots = [values.sqrt() for values in sides.values()]
    sums = tops = torch.ones((), dtype=torch.float64, device="cpu")
    for root in roots:
        sums, tops = sums * root.sum(-1).cpu(), tops * root.amax(-1).cpu()
    if len(roots) > 1:  # each side has the trace of the whole, expert by expert
        trace = roots[0].square().sum(-1).cpu().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        sums, tops = sums / trace, tops / trace
    top = float(tops.max())
    dimension = 1
    for root in roots:
        dimension *= root.shape[-1]
    dimension *= sums.numel()
    rank = float(sums.sum()) / top if top > 0 else 0.0
    return dataclasses.replace(shown, stable_rank=rank, dimension=dimension, draws=None)


def make_plan(engine: Engine) -> Plan:
    """Return the current blocks (or those after the first step), their structures and the reasons."""
    planned = None if engine.refresher is None else engine.refresher.plan(engine)
    if not engine.blocks:
        return planned if planned is not None else Plan({}, {}, {})
    why = {} if planned is None else planned.why
    chosen = {block.whole_change().block: block.change.structure() for block in engine.blocks}
    reasons = {block.name: why.get(block.name, "given") for block in chosen}
    return Plan(chosen, reasons, engine.unrotated)


def _format_value(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else tuple(value.tolist())
    return f"{value:g}" if isinstance(value, float) else str(value)
