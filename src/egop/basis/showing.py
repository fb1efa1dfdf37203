"""How blocks are shown to people: a table in plain text and in a notebook, and a picture of their spectra."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from egop.basis.partition import Block
from egop.basis.spectrum import Spectrum
from egop.basis.structures import ChangeOfBasis, Structure
from egop.runs import (
    Panel,
    Picture,
    Series,
    counted,
    format_bytes,
    format_percent,
    format_table,
    html_table,
    sparkline,
    text,
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
# Eigenvalues below this, relative to the largest, are rounding; more points than this to a line show nothing more.
_ROUNDING = 1e-10
_POINTS = 200


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
    eigenvalues: tuple[float, ...] = ()

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
            eigenvalues=thinned(spectrum.eigenvalues.tolist()),
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


def place(name: str) -> str:
    """A name with a star for the number of a layer."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def grouped(blocks: Sequence[Shown]) -> list[tuple[str, list[Shown]]]:
    """Blocks with the names of their rows; where there are many, those alike in several layers share one."""
    if len(blocks) <= _MANY:
        return [(block.name, [block]) for block in blocks]
    groups: dict[tuple[object, ...], list[Shown]] = {}
    for block in blocks:
        groups.setdefault((place(block.name), block.structure, tuple(map(tuple, block.shapes))), []).append(block)
    return [
        (f"{place(group[0].name)} ({len(group)} alike)" if len(group) > 1 else group[0].name, group)
        for group in groups.values()
    ]


def as_text(blocks: Sequence[Shown], unrotated: Mapping[str, str]) -> str:
    """The table in plain text."""
    header, rows = _table(blocks, unrotated)
    return f"{format_table(header, rows)}\n{COST_MEANS}"


def as_html(blocks: Sequence[Shown], unrotated: Mapping[str, str]) -> str:
    """The table for a notebook, with a small picture of each spectrum."""
    header, rows = _table(blocks, unrotated)
    lines = [_line(group) for _, group in grouped(blocks)]
    if any(lines):
        header = [*header, "spectrum"]
        lines += [""] * (len(rows) - len(lines))
        rows = [[*row, line] for row, line in zip(rows, lines, strict=True)]
    table = html_table(header, rows, raw=[len(header) - 1] if any(lines) else [])
    return f"{table}<p><small>{text(COST_MEANS)}</small></p>"


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
    return f"{said} ({counted(min(few), 'draw')}: lower bound)" if few else said


def _span(group: Sequence[Shown], words: Callable[[Shown], str | None]) -> str:
    """The words of the first and the last of a group, if they differ."""
    said = sorted({written for block in group if (written := words(block))})
    return "–".join(dict.fromkeys([said[0], said[-1]])) if said else ""


def _line(group: Sequence[Shown]) -> str:
    known = next((block for block in group if block.eigenvalues), None)
    return sparkline(known.eigenvalues, f"eigenvalues of {known.name}") if known else ""


def thinned(values: Sequence[float]) -> tuple[float, ...]:
    """As many of the eigenvalues as a small picture needs."""
    return tuple(values) if len(values) <= _POINTS else tuple(values[k - 1] for k in _places(len(values)))


def _places(last: int) -> list[int]:
    """Indices from 1 to the last one, at even distances on a logarithmic axis."""
    return sorted({round(last ** (step / (_POINTS - 1))) for step in range(_POINTS)})


def spectra_picture(spectra: Mapping[str, Iterable[float]], title: str = "Eigenvalues") -> Picture:
    """A line for each spectrum, relative to its largest eigenvalue; where there are many, a band for those alike.

    Raises:
        ValueError: if there is nothing to draw.
    """
    relative: dict[str, list[float]] = {}
    for name, eigenvalues in spectra.items():
        values = list(eigenvalues)
        if values and values[0] > 0:
            relative[name] = [value / values[0] for value in values]
    if not relative:
        raise ValueError("There is no spectrum to draw: no block has one that is not zero.")
    groups: dict[tuple[str, int], list[str]] = {}
    for name, values in relative.items():
        groups.setdefault((place(name) if len(relative) > _MANY else name, len(values)), []).append(name)
    series = [_series(label, [relative[name] for name in names]) for (label, _), names in groups.items()]
    caption = "Eigenvalues of each block, relative to its largest; in brackets how many there are."
    return Picture("spectra", caption, [Panel(title, "k", "λₖ / λ₁", series, xscale="log")])


def _series(label: str, spectra: Sequence[Sequence[float]]) -> Series:
    columns = [sorted(column) for column in zip(*spectra, strict=True)]
    middle = [column[len(column) // 2] for column in columns]
    last = max(1, sum(value > _ROUNDING for value in middle))
    places = _places(last)
    count = f"{len(spectra)} alike, " if len(spectra) > 1 else ""
    low, high = ([max(columns[k - 1][end], _ROUNDING) for k in places] if len(spectra) > 1 else None for end in (0, -1))
    return Series(f"{label} ({count}{len(middle)})", places, [middle[k - 1] for k in places], low, high)
