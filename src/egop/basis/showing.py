"""The table of blocks, in plain text and for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis, Structure
from egop.formatting import (
    format_bytes,
    format_html_table,
    format_percent,
    format_table,
    mask_layer_numbers,
    pluralize,
)

# A step of unknown size is taken to see so many rows: tokens, examples, or places of a convolution.
ROWS = 1024
COST = f"cost at {ROWS:,} rows"
COST_MEANS = (
    f"cost: the basis products of a step, beside the weights' own forward and backward products on {ROWS:,} rows "
    "(tokens, examples, places of a convolution); a tenth of it on ten times as many"
)
_FORWARD_AND_BACKWARD = 6  # floating-point operations for each weight and row
# With more blocks than this, those of one place in several layers share a row of the table.
_MANY = 12


@dataclass(frozen=True)
class Shown:
    """What a table says of one block; None for what is not known."""

    name: str
    structure: str
    shapes: tuple[Sequence[int], ...]
    size: int
    bytes: int
    flops: int
    stable_rank: float | None = None
    dimension: int | None = None
    draws: int | None = None  # where they are too few for the stable rank
    stability: tuple[float, float] | None = None  # and that of chance

    def with_spectrum(self, spectrum: Spectrum | None) -> Shown:
        """The same with what a spectrum says."""
        if spectrum is None:
            return self
        known = spectrum.stability is not None and spectrum.chance is not None
        return replace(
            self,
            stable_rank=spectrum.stable_rank,
            dimension=len(spectrum.eigenvalues),
            draws=None if spectrum.is_supported else spectrum.samples,
            stability=(spectrum.stability, spectrum.chance) if known else None,  # type: ignore[arg-type]
        )


def of_change(change: ChangeOfBasis, spectrum: Spectrum | None = None) -> Shown:
    """What is said of a block in a basis."""
    block = change.block
    shown = Shown(block.name, change.kind, block.shapes, block.size, change.nbytes, change.cost_per_step)
    return shown.with_spectrum(spectrum)


def of_plan(block: Block, structure: Structure) -> Shown:
    """What is said of a block that is to have a basis."""
    cost = structure.cost(block)
    return Shown(block.name, type(structure).__name__, block.shapes, block.size, cost.bytes, cost.flops)


def cost_of(flops: int, size: int, rows: int = ROWS) -> float:
    """The work of basis products over that of a forward and backward pass of the weights, on so many rows."""
    return flops / (_FORWARD_AND_BACKWARD * size * rows) if size else 0.0


def grouped(blocks: Sequence[Shown]) -> list[tuple[str, list[Shown]]]:
    """Blocks with the names of their rows; where there are many, those alike in several layers share one."""
    if len(blocks) <= _MANY:
        return [(block.name, [block]) for block in blocks]
    groups: dict[tuple[object, ...], list[Shown]] = {}
    for block in blocks:
        groups.setdefault(
            (mask_layer_numbers(block.name), block.structure, tuple(map(tuple, block.shapes))), []
        ).append(block)
    return [
        (f"{mask_layer_numbers(group[0].name)} ({len(group)} alike)" if len(group) > 1 else group[0].name, group)
        for group in groups.values()
    ]


def as_text(blocks: Sequence[Shown], unrotated: Mapping[str, str]) -> str:
    """Format the table as plain text."""
    return f"{format_table(*_table(blocks, unrotated))}\n{COST_MEANS}"


def as_html(blocks: Sequence[Shown], unrotated: Mapping[str, str]) -> str:
    """Format the table for a notebook."""
    return f"{format_html_table(*_table(blocks, unrotated))}<p><small>{escape(COST_MEANS)}</small></p>"


def _table(blocks: Sequence[Shown], unrotated: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the blocks, what was left and why, and the sum; columns that would be empty are left out."""
    rows = [_row(name, group) for name, group in grouped(blocks)]
    rows += [[name, reason, "", "", "", "", ""] for name, reason in unrotated.items()]
    size, flops = sum(block.size for block in blocks), sum(block.flops for block in blocks)
    total = format_bytes(sum(block.bytes for block in blocks))
    rows.append(["total", "", "", total, format_percent(cost_of(flops, size)), "", ""])
    header = ["block", "structure", "size", "bytes", COST, "stable rank", "stability"]
    kept = [index for index in range(len(header)) if index < 5 or any(row[index] for row in rows)]
    return [header[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _row(name: str, group: Sequence[Shown]) -> list[str]:
    first = group[0]
    return [
        name,
        first.structure,
        " + ".join(" x ".join(map(str, shape)) or "1" for shape in first.shapes),
        format_bytes(sum(block.bytes for block in group)),
        format_percent(cost_of(first.flops, first.size)),
        _ranks(group),
        _span(group, lambda block: block.stability and f"{block.stability[0]:.2f} ({block.stability[1]:.2f})"),
    ]


def _ranks(group: Sequence[Shown]) -> str:
    """The stable rank, marked where the draws do not support it: chance makes spectra steeper than they are."""
    known = sorted(block.stable_rank for block in group if block.stable_rank is not None)
    if not known:
        return ""
    ends = dict.fromkeys(f"{value:.1f}" for value in (known[0], known[-1]))
    said = f"{'–'.join(ends)} of {group[0].dimension}"
    few = [block.draws for block in group if block.draws is not None]
    return f"{said} ({pluralize(min(few), 'draw')}: lower bound)" if few else said


def _span(group: Sequence[Shown], words: Callable[[Shown], str | None]) -> str:
    """The words of the first and the last of a group, if they differ."""
    said = sorted({written for block in group if (written := words(block))})
    return "–".join(dict.fromkeys([said[0], said[-1]])) if said else ""
