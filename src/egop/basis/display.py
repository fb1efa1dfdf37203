"""The table of blocks that bases, plans and optimizers print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis
from egop.formatting import format_bytes, format_percent, format_table, mask_layer_numbers, pluralize

# Costs are given for a step with this many rows: tokens, examples, or positions of a convolution.
_ROWS = 1024
_COST_NOTE = (
    f"cost: the basis products of a step relative to the weights' own forward and backward products on {_ROWS:,} rows "
    "(tokens, examples, positions of a convolution); ten times as many rows, a tenth of the cost"
)
_FORWARD_AND_BACKWARD = 6  # floating-point operations per weight and row
_HEADER = ["block", "structure", "size", "bytes", f"cost at {_ROWS:,} rows", "stable rank", "why"]
# With more blocks than this, similar blocks of several layers share a row.
_MANY = 12


@dataclass(frozen=True)
class BlockInfo:
    """One block in the table; None for unknown values."""

    name: str
    structure: str
    shapes: tuple[Sequence[int], ...]
    size: int
    bytes: int
    flops: int
    stable_rank: float | None = None
    dimension: int | None = None
    draws: int | None = None  # set if there are too few for the stable rank
    why: str = ""

    @classmethod
    def from_change(cls, change: ChangeOfBasis, spectrum: Spectrum | None = None) -> BlockInfo:
        """Describe a block that has a basis."""
        block = change.block
        known = (block.name, change.kind, block.shapes, block.size, change.nbytes, change.cost_per_step)
        if spectrum is None:
            return cls(*known)
        draws = None if spectrum.is_supported else spectrum.samples
        return cls(*known, spectrum.stable_rank, len(spectrum.eigenvalues), draws)


def format_blocks(blocks: Sequence[BlockInfo], unrotated: Mapping[str, str]) -> str:
    """Format blocks, and the weights left in original coordinates with the reason, as plain text."""
    rows = [_format_row(name, group) for name, group in _group(blocks)]
    rows += [[name, "-", "", "", "", "", reason] for name, reason in unrotated.items()]
    size, flops = sum(block.size for block in blocks), sum(block.flops for block in blocks)
    total = format_bytes(sum(block.bytes for block in blocks))
    rows.append(["total", "", "", total, _format_cost(flops, size), "", ""])
    width = len(_HEADER) - (1 if any(row[5] for row in rows) else 2)  # without an empty column of stable ranks
    lines = format_table(_HEADER[:width], [row[:width] for row in rows]).splitlines()
    if any(row[-1] for row in rows):  # reasons are aligned left, unlike numbers
        reasons, longest = ["why", "---", *(row[-1] for row in rows)], max(map(len, lines))
        lines = [f"{line:<{longest}}  {reason}".rstrip() for line, reason in zip(lines, reasons, strict=True)]
    return "\n".join([*lines, _COST_NOTE])


def _group(blocks: Sequence[BlockInfo]) -> list[tuple[str, list[BlockInfo]]]:
    if len(blocks) <= _MANY:
        return [(block.name, [block]) for block in blocks]
    groups: dict[tuple[object, ...], list[BlockInfo]] = {}
    for block in blocks:
        key = mask_layer_numbers(block.name), block.structure, tuple(map(tuple, block.shapes)), block.why
        groups.setdefault(key, []).append(block)
    return [
        (f"{mask_layer_numbers(group[0].name)} ({len(group)} similar)" if len(group) > 1 else group[0].name, group)
        for group in groups.values()
    ]


def _format_row(name: str, group: Sequence[BlockInfo]) -> list[str]:
    first = group[0]
    return [
        name,
        first.structure,
        " + ".join(" x ".join(map(str, shape)) or "1" for shape in first.shapes),
        format_bytes(sum(block.bytes for block in group)),
        _format_cost(first.flops, first.size),
        _format_rank(group),
        first.why,
    ]


def _format_cost(flops: int, size: int) -> str:
    return format_percent(flops / (_FORWARD_AND_BACKWARD * size * _ROWS) if size else 0.0)


def _format_rank(group: Sequence[BlockInfo]) -> str:
    """Format the stable rank. With too few draws it is a lower bound: chance makes spectra look steeper."""
    ranks = sorted(block.stable_rank for block in group if block.stable_rank is not None)
    if not ranks:
        return ""
    text = "–".join(dict.fromkeys(f"{rank:.1f}" for rank in (ranks[0], ranks[-1]))) + f" of {group[0].dimension}"
    few = [block.draws for block in group if block.draws is not None]
    return f"{text} ({pluralize(min(few), 'draw')}: lower bound)" if few else text
