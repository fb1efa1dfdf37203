"""What a diagnosis found, as plain values."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from egop.basis import Reparameterization, spectra_picture
from egop.runs import counted, format_bytes, format_percent, format_table, html_table, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["use", "online", "sample more", "leave", "unknown"]


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
        leaner: where that is much and a leaner structure exists, its name and its measured cost.
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
    leaner: tuple[str, float] | None = None
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
        groups.setdefault((_place(block.name), block.shapes, block.structure, block.verdict, words), []).append(block)
    return [
        (f"{_place(group[0].name)} ({len(group)} alike)" if len(group) > 1 else group[0].name, group)
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
        "–".join(dict.fromkeys(format_percent(cost) for cost in _ends(group, "cost"))),
        _span(group, "stable_rank", "{:.1f}", f" of {first.dimension}"),
        _span(group, "density", "{:.2g}"),
        _span(group, "ratio", "{:.2g}"),
        _span(group, "one_norm", "{:.2f}"),
        _span(group, "effective_dimension", "{}"),
        _span(group, "samples", "{}") if first.stable_rank is not None else "",
        _span(group, "stability", "{:.2f}", f" ({_span(group, 'chance', '{:.2f}')})"),
    ]


def _place(name: str) -> str:
    """The name with a star for the number of a layer."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _span(group: Sequence[BlockDiagnosis], name: str, form: str, unit: str = "") -> str:
    """A number of all blocks: one, or from the smallest to the largest; nothing where it was not measured."""
    ends = [form.format(end) for end in _ends(group, name)]
    return f"{'–'.join(dict.fromkeys(ends))}{unit}" if ends else ""


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
    "stable rank": "about how many directions matter, of how many there are",
    "β₁": "how dense the leading eigenvector is, from 1/d (an axis) to 1",
    "sr/(dβ₁)": "the theory's leading term: well below 1 is promising, near or above 1 promises nothing",
    "1-norm": "of the gradients in the new coordinates, over that in the original ones: 1 or more changes nothing",
    "90 % in": "how many directions hold 90 % of the squared gradients",
    "draws": "how many gradients it was estimated from",
    "stability": "how far two bases from half of the draws each agree, up to 1 (unrelated ones: this much)",
}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What :func:`egop.diagnose` found; ``print(...)`` shows a table and the advice.

    Attributes:
        blocks: in the model's order, those left in original coordinates included.
        basis: the basis itself, ready for :class:`egop.ReparameterizedOptimizer`; only of the blocks that were
            finished, and None before the first one is.
        draws: how many points were drawn; a block that was clear earlier has fewer, see its ``samples``.
        wanted: how many were to be drawn.
        pass_seconds: the time of one forward and backward pass on one batch; the median of several.
        refresh: when to renew the basis, in a sentence.
        online: whether the model is of a kind that needs ``refresh=egop.Online()``.
        partial: what is missing, when it was interrupted; empty when it is complete.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.sum().square(), {"theta": torch.zeros(8)})
        >>> diagnosis = egop.diagnose(objective, samples=200, progress=False)
        >>> diagnosis.draws, list(diagnosis.basis), diagnosis.refresh
        (200, ['theta'], 'estimate once before training.')
    """

    blocks: tuple[BlockDiagnosis, ...]
    basis: Reparameterization | None
    draws: int
    wanted: int
    pass_seconds: float | None
    refresh: str
    online: bool
    partial: str = ""

    @property
    def cost(self) -> float | None:
        """The cost of all blocks together; blocks of one shape share a product, so it is an upper estimate."""
        costs = [block.cost for block in self.blocks if block.cost is not None]
        return sum(costs) if costs else None

    @property
    def verdict(self) -> str:
        """The whole in a sentence or two, made from the blocks."""
        tried = [block for block in self.blocks if block.structure and block.verdict != "unknown"]
        if not tried:
            return "Nothing can be said yet."
        good = [block.name for block in tried if block.verdict == "use"]
        unclear = [block.name for block in tried if block.verdict == "sample more"]
        said = f"A change of basis is promising for {len(good)} of {len(tried)} blocks."
        if not good:
            said = "Nothing here suggests that a change of basis would help."
        if unclear and not good:
            said = "Whether a change of basis would help is not clear yet."
        if any(block.verdict == "online" for block in tried):
            said = "For a model of this kind the basis should be learnt in training, not estimated up front."
        if unclear:
            said += f" For {len(unclear)} of {len(tried)} blocks there are too few draws to tell."
        if self.cost is not None and (good or unclear or self.online):
            said += f" With the bases in the table a training step takes about {1 + self.cost:.3g} times as long."
        return said

    @property
    def is_of_use(self) -> bool:
        """Whether a basis is advised for any block, so that it matters when to renew it."""
        return any(block.verdict in ("use", "online") for block in self.blocks)

    @property
    def code(self) -> str:
        """What to paste for the advice: the blocks and structures that are advised, and no others; empty for none."""
        make = "optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, {}, lr=lr)"
        if any(block.verdict == "online" for block in self.blocks):
            return make.format("refresh=egop.Online()")
        advised = [(_place(block.name), block) for block in self.blocks if block.verdict == "use"]
        if not advised:
            return ""
        others = [block.name for block in self.blocks if block.verdict != "use"]
        structures = {}
        for place, block in advised:
            same = {each.structure for where, each in advised if fnmatch.fnmatchcase(each.name, place)}
            alone = len(same) == 1 and not fnmatch.filter(others, place)
            structures[place if alone else block.name] = self._structure(block)
        listed = ", ".join(f'"{name}": {structure}' for name, structure in structures.items())
        draws = max(block.samples for _, block in advised)
        sample = f"basis = egop.estimate(objective, structure={{{listed}}}, samples={draws})"
        return f"{sample}\n{make.format('basis')}"

    def _structure(self, block: BlockDiagnosis) -> str:
        """The structure that is advised for a block, as it is written in code."""
        if block.cost is not None and block.leaner is not None:
            return f"egop.{block.leaner[0]}()"
        if self.basis is None or block.name not in self.basis:
            return f"egop.{block.structure}()"
        structure = self.basis[block.name].structure()
        given = [(field.name, getattr(structure, field.name), field.default) for field in dataclasses.fields(structure)]
        options = [f"{name}={value!r}" for name, value, usual in given if value != usual]
        return f"egop.{type(structure).__name__}({', '.join(options)})"

    def __repr__(self) -> str:
        """In a line: how many blocks, and what is said of them."""
        verdicts = Counter(block.verdict for block in self.blocks)
        said = ", ".join(f"{count} {verdict!r}" for verdict, count in verdicts.items())
        partial = ", partial" if self.partial else ""
        return f"Diagnosis({counted(len(self.blocks), 'block')}: {said}, {counted(self.draws, 'draw')}{partial})"

    def _repr_html_(self) -> str:
        """The verdict, the table of the blocks and the advice for each, for a notebook."""
        groups = alike(self.blocks)
        words = [f"PARTIAL: {self.partial}"] if self.partial else []
        words += [self.verdict, *([f"Refresh: {self.refresh}"] if self.is_of_use else [])]
        table = html_table(list(COLUMNS), [cells(name, group) for name, group in groups])
        said = [f"<strong>{text(name)}</strong> {text(least_promising(group).advice)}" for name, group in groups]
        table += f"<ul>{''.join(f'<li>{line}</li>' for line in said)}</ul>"
        code = f"<pre>{text(self.code)}</pre>" if self.code else ""
        return f"{''.join(f'<p>{text(line)}</p>' for line in words)}{table}{code}"

    def plot(self) -> Figure:
        """The spectra of the blocks as the table has them, as a figure of matplotlib."""
        picture = spectra_picture({block.name: block.eigenvalues for block in self.blocks})
        from egop.runs import plotting  # needs matplotlib

        return plotting.draw(picture)

    def __str__(self) -> str:
        """The table of the blocks, the advice for each, and for the whole; blocks that are alike in one line."""
        groups = alike(self.blocks)
        table = format_table(list(COLUMNS), [cells(name, group) for name, group in groups])
        width = max(len(name) for name, _ in groups)
        advice = [f"  {name:<{width}}  {least_promising(group).advice}" for name, group in groups]
        closing = [self.verdict, *([f"Refresh: {self.refresh}"] if self.is_of_use else [])]
        code = ["", *(f"    {line}" for line in self.code.splitlines())] if self.code else []
        opening = [f"PARTIAL: {self.partial}", ""] if self.partial else []
        return "\n".join([*opening, table, "", "Advice", *advice, "", *closing, *code])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the basis itself, as plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "basis"}
        blocks = [dataclasses.asdict(block) for block in self.blocks]
        return values | {"blocks": blocks, "cost": self.cost, "verdict": self.verdict, "code": self.code}
