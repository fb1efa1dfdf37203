"""What a diagnosis found, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from egop.basis import Reparameterization
from egop.runs import format_bytes, format_table

Verdict = Literal["use", "online", "sample more", "leave", "unknown"]


@dataclass(frozen=True)
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
        samples: how many gradients the spectrum comes from.
        eigenvalues: λ₁ ≥ λ₂ ≥ ….
        stable_rank: Σ √λ_k / √λ₁.
        noise_rank: the stable rank that as many gradients without any preferred direction would show.
        density: β₁, of the leading eigenvector.
        axes: the number of axes that the leading eigenvectors share: d β_k, averaged over those that hold 90 % of the
            trace with their eigenvalues as weights; about 1 means that they are coordinate axes already.
        ratio: sr / (d β₁), the theory's leading term; near or above 1 it promises nothing.
        effective_dimension: how many directions hold 90 % of the trace.
        stability: how far two bases from half of the draws agree, see :attr:`egop.Spectrum.stability`.
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
    noise_rank: float | None = None
    density: float | None = None
    axes: float | None = None
    ratio: float | None = None
    effective_dimension: int | None = None
    stability: float | None = None
    verdict: Verdict = "unknown"
    advice: str = ""

    @property
    def chance(self) -> float | None:
        """What the stability of two unrelated bases would be, k/d."""
        if self.effective_dimension is None or not self.dimension:
            return None
        return self.effective_dimension / self.dimension

    def cells(self) -> list[str]:
        """Its row in a table, in the order of :data:`COLUMNS`."""
        return [
            self.name,
            " + ".join(" × ".join(map(str, shape)) or "1" for shape in self.shapes),
            self.structure or "-",
            format_bytes(self.bytes) if self.structure else "",
            "" if self.cost is None else f"{self.cost:.2g} ×",
            "" if self.stable_rank is None else f"{self.stable_rank:.1f} of {self.dimension}",
            "" if self.density is None else f"{self.density:.2g}",
            "" if self.ratio is None else f"{self.ratio:.2g}",
            "" if self.effective_dimension is None else str(self.effective_dimension),
            "" if self.stability is None else f"{self.stability:.2f} ({self.chance:.2f})",
        ]


# The headings of a table of blocks, and what each column means.
COLUMNS = {
    "block": "a weight, or several that share one basis",
    "shape": "of its tensors",
    "structure": "how its basis is built; - for original coordinates",
    "bytes": "what the basis takes",
    "cost": "the two basis products of a step, as a multiple of one forward and backward pass, both measured here",
    "stable rank": "about how many directions matter, of how many there are",
    "β₁": "how dense the leading eigenvector is, from 1/d (an axis) to 1",
    "sr/(dβ₁)": "the theory's leading term: well below 1 is promising, near or above 1 promises nothing",
    "90 % in": "how many directions hold 90 % of the squared gradients",
    "stability": "how far two bases from half of the draws each agree, from 0 to 1 (unrelated ones: this much)",
}


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`egop.diagnose` found; ``print(...)`` shows a table and the advice.

    Attributes:
        blocks: in the model's order, those left in original coordinates included.
        basis: the basis itself, ready for :class:`egop.ReparameterizedOptimizer`; only of the blocks that were
            finished, and None before the first one is.
        draws: how many points were drawn.
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
        if not good and not unclear:
            said = "Nothing here suggests that a change of basis would help."
        if any(block.verdict == "online" for block in tried):
            said = "For a model of this kind the basis should be learnt in training, not estimated up front."
        if unclear:
            said += f" For {len(unclear)} there are too few samples to tell."
        if self.cost is not None:
            said += f" With the bases in the table a training step takes about {1 + self.cost:.3g} times as long."
        return said

    def __str__(self) -> str:
        """The table of the blocks, the advice for each, and for the whole."""
        table = format_table(list(COLUMNS), [block.cells() for block in self.blocks])
        width = max(len(block.name) for block in self.blocks)
        advice = [f"  {block.name:<{width}}  {block.advice}" for block in self.blocks]
        closing = [self.verdict, f"Refresh: {self.refresh}"]
        opening = [f"PARTIAL: {self.partial}", ""] if self.partial else []
        return "\n".join([*opening, table, "", "Advice", *advice, "", *closing])

    def to_dict(self) -> dict[str, Any]:
        """Everything but the basis itself, as plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "basis"}
        blocks = [dataclasses.asdict(block) | {"chance": block.chance} for block in self.blocks]
        return values | {"blocks": blocks, "cost": self.cost, "verdict": self.verdict}
