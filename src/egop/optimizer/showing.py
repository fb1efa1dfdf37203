"""What an optimizer says of itself: in a line, as a text, in a notebook, and as a picture of spectra."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from egop.basis import Plan, Shown, blocks_as_html, blocks_as_text, shown_block, shown_plan
from egop.formatting import pluralize
from egop.optimizer.engine import Engine
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOT_SETTINGS = ("params", "param_names")


def line(name: str, engine: Engine) -> str:
    """The optimizer in a line."""
    base = engine.base
    parts = [base.optimizer_class.__name__, pluralize(len(engine.blocks), "block")]
    parts += [f"{base.outside[0].__name__} outside"] if base.outside is not None else []
    parts += [type(engine.refresher.refresh).__name__] if engine.refresher is not None else []
    rates = dict.fromkeys(_number(group["lr"]) for group in engine.param_groups if "lr" in group)
    parts += [f"lr={' and '.join(rates)}"] if rates else []
    return f"{name}({', '.join(parts)})"


def as_text(name: str, engine: Engine) -> str:
    """The optimizer in several lines: what runs inside, its refresh, its groups and its blocks."""
    blocks, unrotated, note = _blocks(engine)
    table = [blocks_as_text(blocks, unrotated)] if blocks or unrotated else []
    return "\n".join([line(name, engine), *_facts(engine), *([note] if note else []), *table])


def as_html(name: str, engine: Engine) -> str:
    """The same for a notebook."""
    blocks, unrotated, note = _blocks(engine)
    facts = "<br>".join(escape(fact) for fact in [*_facts(engine), *([note] if note else [])])
    table = blocks_as_html(blocks, unrotated) if blocks or unrotated else ""
    return f"<p><strong>{escape(line(name, engine))}</strong><br>{facts}</p>{table}"


def plot(engine: Engine) -> Figure:
    """Plot the spectra of all blocks that have one."""
    followed = _followed(engine)
    known: dict[str, list[float]] = {}
    for block in engine.blocks:
        sides = followed.get(block.name, {})
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
    return plot_spectra(known, "Eigenvalues of the gradients' Gram matrices" if followed else "Eigenvalues")


def _facts(engine: Engine) -> Iterator[str]:
    inside = {id(original) for block in engine.blocks for original in block.originals}
    tensors = [tensor for group in engine.param_groups for tensor in group["params"]]
    others = sum(id(tensor) not in inside for tensor in tensors)
    base = engine.base
    stepped = base.outside[0].__name__ if base.outside is not None else base.optimizer_class.__name__
    blocks = pluralize(len(engine.blocks), "block")
    name = base.optimizer_class.__name__
    if not engine.blocks and engine.refresher is not None and engine.refresher.steps == 0:
        yield f"{name} will step the coordinates, {stepped} what is outside; bases come with the first gradient"
    else:
        yield f"{name} steps the coordinates of {blocks}, {stepped} {pluralize(others, 'tensor')} outside"
    if engine.refresher is None:
        yield "refresh: none, the basis stays"
    else:
        yield f"refresh: {engine.refresher}"
    for index, group in enumerate(engine.param_groups):
        settings = [f"{key} {_number(value)}" for key, value in group.items() if _is_told(key, value)]
        yield f"group {index}: {pluralize(len(group['params']), 'tensor')}, {', '.join(settings)}"


def _is_told(key: str, value: Any) -> bool:
    """Whether a setting is worth a word: not what is off, and not the tensors."""
    return key not in _NOT_SETTINGS and value is not None and value is not False


def _blocks(engine: Engine) -> tuple[list[Shown], Mapping[str, str], str]:
    """What is said of each block, what was left, and a word on blocks that are not there yet."""
    if not engine.blocks and engine.refresher is not None and engine.refresher.steps == 0:
        try:
            plan = engine.refresher.plan(engine)
        except (MemoryError, ValueError) as error:
            return [], {}, f"the first step will fail: {error}"
        if plan is not None:
            return [shown_plan(*pair) for pair in plan.chosen.items()], plan.unrotated, "planned for the first step:"
    followed = _followed(engine)
    shown = []
    for block in engine.blocks:
        one = shown_block(block.whole_change(), block.spectrum)
        shown.append(_with_followed(one, followed[block.name]) if block.name in followed else one)
    return shown, engine.unrotated, ""


def _followed(engine: Engine) -> dict[str, dict[str, Tensor]]:
    return {} if engine.refresher is None else engine.refresher.spectra(engine)


def _with_followed(shown: Shown, sides: Mapping[str, Tensor]) -> Shown:
    """The stable rank of what a refresh follows; of two sides that of their Kronecker product."""
    roots = [values.sqrt() for values in sides.values()]
    sums = tops = torch.ones((), dtype=torch.float64, device="cpu")
    for root in roots:
        sums, tops = sums * root.sum(-1).cpu(), tops * root.amax(-1).cpu()
    if len(roots) > 1:  # each side has the trace of the whole; of experts each its own
        trace = roots[0].square().sum(-1).cpu().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        sums, tops = sums / trace, tops / trace
    top = float(tops.max())
    dimension = 1
    for root in roots:
        dimension *= root.shape[-1]
    dimension *= sums.numel()
    rank = float(sums.sum()) / top if top > 0 else 0.0
    return dataclasses.replace(shown, stable_rank=rank, dimension=dimension, draws=None, stability=None)


def plan_of(engine: Engine) -> Plan:
    """Which blocks there are, or will be with the first step, in which structures, and why."""
    planned = None if engine.refresher is None else engine.refresher.plan(engine)
    if not engine.blocks:
        return planned if planned is not None else Plan({}, {}, {})
    why = {} if planned is None else planned.why
    chosen = {block.whole_change().block: block.change.structure() for block in engine.blocks}
    reasons = {block.name: why.get(block.name, "given") for block in chosen}
    return Plan(chosen, reasons, engine.unrotated)


def _number(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else tuple(value.tolist())
    return f"{value:g}" if isinstance(value, float) else str(value)
