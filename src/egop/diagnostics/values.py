"""What a diagnosis found of each block, as plain values and as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from egop.formatting import format_bytes, format_percent, mask_layer_numbers

Verdict = Literal["promising", "sample more", "leave", "unknown"]


@dataclass(frozen=True, repr=False)
class BlockDiagnosis:
    """What is known of one block; None for what was not measured.

    Attributes:
        name: of the block.
        shapes: of its tensors.
        size: the number of its entries.
        structure: the structure chosen, such as ``"Full"``; None for a block left in original coordinates.
        why: why it has that structure, or why it was left.
        bytes: what its basis takes.
        seconds: the time of one encode and one decode, which every step needs; the median of several.
        cost: that, as a fraction of one forward and backward pass of the model.
        predicted: the same by the cost model, see :mod:`egop.diagnostics.costs`.
        dimension: the number d of directions that its spectrum is about: of all entries, or of one row or kernel.
        samples: how many draws the spectrum comes from: gradients, not their rows.
        eigenvalues: λ₁ ≥ λ₂ ≥ …: the squared gradients of one half of the draws along the eigenvectors of the other.
        stable_rank: Σ √λ_k / √λ₁.
        density: β₁, of the leading eigenvector.
        ratio: sr / (d β₁), the theory's leading term; near or above 1 it promises nothing.
        effective_dimension: how many directions hold 90 % of the trace.
        one_norm: the 1-norm of the root-mean-square gradient in the new coordinates over that in the original ones;
            1 for white noise, and where the axes are eigenvectors already.
        stability: how far two bases from half of the draws agree, see :attr:`egop.Spectrum.stability`.
        chance: what the stability of two unrelated bases would be.
        surprise: how far the spectrum is from that of white noise, see :attr:`egop.Spectrum.surprise`.
        verdict: in a word.
        advice: in a sentence.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.sum().square(), {"theta": torch.zeros(8)})
        >>> block = egop.diagnose(objective, samples=200, progress=False).blocks[0]
        >>> block.name, block.structure, round(block.stable_rank, 3), round(block.ratio, 3)
        ('theta', 'Full', 1.0, 0.125)
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    structure: str | None = None
    why: str = ""
    bytes: int = 0
    seconds: float | None = None
    cost: float | None = None
    predicted: float | None = None
    dimension: int | None = None
    samples: int = 0
    eigenvalues: tuple[float, ...] = ()
    stable_rank: float | None = None
    density: float | None = None
    ratio: float | None = None
    effective_dimension: int | None = None
    one_norm: float | None = None
    stability: float | None = None
    chance: float | None = None
    surprise: float | None = None
    verdict: Verdict = "unknown"
    advice: str = ""

    def __repr__(self) -> str:
        """In a line, without the eigenvalues."""
        rank = "" if self.stable_rank is None else f", stable rank {self.stable_rank:.1f} of {self.dimension}"
        return f"BlockDiagnosis({self.name!r}, {self.structure or 'left'}{rank}, {self.verdict!r})"


def alike(blocks: Sequence[BlockDiagnosis]) -> list[tuple[str, list[BlockDiagnosis]]]:
    """Blocks in groups, each with its name: those of one place in several layers, with one shape and one advice.

    Advice that differs in its numbers only is one advice.
    """
    groups: dict[tuple[object, ...], list[BlockDiagnosis]] = {}
    for block in blocks:
        words = re.sub(r"[\d.]*\d", "#", block.advice)
        groups.setdefault(
            (mask_layer_numbers(block.name), block.shapes, block.structure, block.verdict, words), []
        ).append(block)
    return [
        (f"{mask_layer_numbers(group[0].name)} ({len(group)} alike)" if len(group) > 1 else group[0].name, group)
        for group in groups.values()
    ]


def least_promising(group: Sequence[BlockDiagnosis]) -> BlockDiagnosis:
    """The one whose words are shown for all."""
    return max(group, key=lambda block: block.one_norm or block.ratio or 0)


def cells(name: str, group: Sequence[BlockDiagnosis]) -> list[str]:
    """The row of one group in a table, in the order of :data:`COLUMNS`."""
    first = group[0]
    return [
        name,
        " + ".join(" × ".join(map(str, shape)) or "1" for shape in first.shapes),
        first.structure or "-",
        format_bytes(first.bytes) if first.structure else "",
        _percent(group, "cost"),
        _percent(group, "predicted"),
        _span(group, "stable_rank", "{:.1f}", f" of {first.dimension}"),
        _span(group, "density", "{:.2g}"),
        _span(group, "ratio", "{:.2g}"),
        _span(group, "one_norm", "{:.2f}"),
        _span(group, "effective_dimension", "{}"),
        _span(group, "samples", "{}") if first.stable_rank is not None else "",
        _span(group, "stability", "{:.2f}", f" ({_span(group, 'chance', '{:.2f}')})"),
    ]


def _span(group: Sequence[BlockDiagnosis], name: str, form: str, unit: str = "") -> str:
    """A number of all blocks: one, or from the smallest to the largest; nothing where it was not measured."""
    ends = [form.format(end) for end in _ends(group, name)]
    return f"{'–'.join(dict.fromkeys(ends))}{unit}" if ends else ""


def _percent(group: Sequence[BlockDiagnosis], name: str) -> str:
    """The same of a part of a pass."""
    return "–".join(dict.fromkeys(format_percent(cost) for cost in _ends(group, name)))


def _ends(group: Sequence[BlockDiagnosis], name: str) -> list[float]:
    """The smallest and the largest of a number, where it was measured."""
    values = [value for block in group if (value := getattr(block, name)) is not None]
    return [min(values), max(values)] if values else []


# The headings of a table of blocks, and what each column means.
COLUMNS = {
    "block": "a weight, or several that share one basis",
    "shape": "of its tensors",
    "structure": "how its basis is built; - for original coordinates",
    "bytes": "what the basis takes",
    "cost": "the two basis products of a step, in percent of one forward and backward pass, both measured here",
    "predicted": "the same from shapes and the speed of products on this machine",
    "stable rank": "about how many directions matter, of how many there are",
    "β₁": "how dense the leading eigenvector is, from 1/d (an axis) to 1",
    "sr/(dβ₁)": "the theory's leading term: well below 1 is promising, near or above 1 promises nothing",
    "1-norm": "of the gradients in the new coordinates, over that in the original ones: 1 or more changes nothing",
    "90 % in": "how many directions hold 90 % of the squared gradients",
    "draws": "how many gradients it was estimated from",
    "stability": "how far two bases from half of the draws each agree, up to 1 (unrelated ones: this much)",
}
