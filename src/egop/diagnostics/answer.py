"""The answer of a diagnosis: which form is advised, the code to paste, and all of it as text."""

from __future__ import annotations

import dataclasses
import fnmatch
import statistics
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from egop.basis import Basis
from egop.diagnostics.curvature import Curvature
from egop.diagnostics.evidence import evidence
from egop.diagnostics.expected import FORM_COLUMNS, TITLES, FormDiagnosis, middle_half, share
from egop.diagnostics.forms import FIXED, written
from egop.diagnostics.off_axes import OffAxes
from egop.diagnostics.rate_search import FoundRate
from egop.diagnostics.values import COLUMNS, BlockDiagnosis, alike, cells, least_promising
from egop.formatting import format_bytes, format_html_table, format_table, mask_layer_numbers, pluralize
from egop.plots import plot_spectra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Diagnosis"]


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What :func:`egop.diagnose` found; ``print(...)`` shows the answer, then what it comes from.

    Attributes:
        blocks: in the model's order, those left in original coordinates included: what the draws say of each.
        basis: the basis itself, ready for :class:`egop.ReparameterizedOptimizer`; only of the blocks that were
            finished, and None before the first one is.
        draws: how many points were drawn; a block that was clear earlier has fewer, see its ``samples``.
        wanted: how many were to be drawn.
        pass_seconds: the time of one forward and backward pass on one batch; the median of several.
        forms: what each form of training is expected to bring, and what it takes.
        curvature: how much of it is on the axes, which the study chose to predict by; None if not known.
        without_curvature: why it is not; empty where it is, or nothing was drawn.
        here: how far the gradients of the training lie off the axes at the current parameters; None if not looked at.
        along: the same along a few steps of AdamW.
        rate: what :func:`egop.find_lr` found for the form that is advised.
        without_rate: why there is none; empty where there is, or nothing is advised.
        partial: what is missing, when it was interrupted; empty when it is complete.

    Example:
        >>> objective = egop.Objective.from_function(lambda theta: theta.square().sum(), {"theta": torch.zeros(8)})
        >>> diagnosis = egop.diagnose(objective, samples=200, progress=False)
        >>> diagnosis.draws, list(diagnosis.basis), diagnosis.advised
        (200, ['theta'], None)
        >>> diagnosis.verdict.startswith("Leave it")
        True
    """

    blocks: tuple[BlockDiagnosis, ...]
    basis: Basis | None
    draws: int
    wanted: int
    pass_seconds: float | None
    forms: tuple[FormDiagnosis, ...] = ()
    curvature: Curvature | None = None
    without_curvature: str = ""
    here: OffAxes | None = None
    along: OffAxes | None = None
    rate: FoundRate | None = None
    without_rate: str = ""
    partial: str = ""

    @property
    def cost(self) -> float | None:
        """The products of all blocks together; blocks of one shape share a product, so it is an upper estimate."""
        costs = [block.cost for block in self.blocks if block.cost is not None]
        return sum(costs) if costs else None

    @property
    def advised(self) -> FormDiagnosis | None:
        """The form to use: of those that are worth their time the one with the least; None where AdamW is kept."""
        return min((form for form in self.forms if form.is_worth_it), key=lambda form: form.time, default=None)

    @property
    def nearest(self) -> str:
        """The form that is advised, or else comes nearest to it: what a race tries."""
        if self.advised is not None:
            return self.advised.name
        timed = [form for form in self.forms if not form.against and form.times]
        if timed:
            return min(timed, key=lambda form: form.time).name
        return FIXED if self.basis is not None else "online two-sided"

    @property
    def verdict(self) -> str:
        """The answer: what to use, what to expect of it, and what it takes."""
        if not self.forms:
            return "Nothing can be said yet."
        if (form := self.advised) is not None:
            lr = f" with lr {self.rate.lr:g}" if self.rate is not None else ""
            return f"Use {TITLES[form.name]}{lr}. {_expected(form)}"
        if unclear := [block for block in self.blocks if block.verdict == "sample more"]:
            told = sum(block.structure is not None for block in self.blocks)
            return f"Not clear yet: there are too few draws for {len(unclear)} of {told} blocks. Sample more."
        timed = [form for form in self.forms if not form.against and form.times]
        if timed:
            best = min(timed, key=lambda form: form.time)
            return f"Leave it, keep AdamW: no form is expected to save time here. The best, {_lower(best)}"
        reasons = list(dict.fromkeys(form.against for form in self.forms if form.against))
        return f"Leave it, keep AdamW: {'; '.join(reasons)}."

    @property
    def code(self) -> str:
        """What to paste for the advice; empty where AdamW is kept."""
        form = self.advised
        if form is None:
            return ""
        lines = []
        if form.name == FIXED:
            lines.append(f"basis = egop.estimate(objective, {self._structures()})")
        lr = f"{self.rate.lr:g}" if self.rate is not None else "1e-3"
        lines.append(written(form.name, lr))
        if self.rate is None:
            lines[-1] += "  # no rate was looked for: try 4e-3 too, or egop.find_lr"
        return "\n".join(lines)

    def _structures(self) -> str:
        """The structures of the blocks that are promising, and how many draws."""
        good = [(mask_layer_numbers(block.name), block) for block in self.blocks if block.verdict == "promising"]
        others = [block.name for block in self.blocks if block.verdict != "promising"]
        structures = {}
        for where, block in good:
            same = {each.structure for other, each in good if fnmatch.fnmatchcase(each.name, where)}
            alone = len(same) == 1 and not fnmatch.filter(others, where)
            structures[where if alone else block.name] = self._structure(block)
        listed = ", ".join(f'"{name}": {structure}' for name, structure in structures.items())
        return f"structure={{{listed}}}, samples={max((block.samples for _, block in good), default=0)}"

    def _structure(self, block: BlockDiagnosis) -> str:
        """The structure of a block, as it is written in code."""
        if self.basis is None or block.name not in self.basis:
            return f"egop.{block.structure}()"
        structure = self.basis[block.name].structure()
        given = [(field.name, getattr(structure, field.name), field.default) for field in dataclasses.fields(structure)]
        options = [f"{name}={value!r}" for name, value, usual in given if value != usual]
        return f"egop.{type(structure).__name__}({', '.join(options)})"

    def __repr__(self) -> str:
        """In a line: how many blocks, and what is advised."""
        said = "nothing said yet" if not self.forms else "leave it" if self.advised is None else self.advised.name
        partial = ", partial" if self.partial else ""
        return f"Diagnosis({pluralize(len(self.blocks), 'block')}, {pluralize(self.draws, 'draw')}: {said}{partial})"

    def _repr_html_(self) -> str:
        """The answer, the code, the forms and the blocks, for a notebook."""
        words = [*([f"PARTIAL: {self.partial}"] if self.partial else []), self.verdict]
        code = f"<pre>{escape(self.code)}</pre>" if self.code else ""
        forms = format_html_table(list(FORM_COLUMNS), [form.cells() for form in self.forms]) if self.forms else ""
        groups = alike(self.blocks)
        blocks = format_html_table(list(COLUMNS), [cells(name, group) for name, group in groups])
        advice = [f"<strong>{escape(name)}</strong> {escape(least_promising(group).advice)}" for name, group in groups]
        said, remarks = ("".join(f"<p>{escape(line)}</p>" for line in lines) for lines in (words, self.remarks))
        return f"{said}{code}{forms}{remarks}{blocks}<ul>{''.join(f'<li>{line}</li>' for line in advice)}</ul>"

    def plot(self) -> Figure:
        """Plot the spectra of the blocks."""
        return plot_spectra({block.name: block.eigenvalues for block in self.blocks})

    def __str__(self) -> str:
        """The answer and the code, then the forms, the blocks and what the draws say of each."""
        groups = alike(self.blocks)
        width = max(len(name) for name, _ in groups)
        said = [f"  {name:<{width}}  {least_promising(group).advice}" for name, group in groups]
        parts = [
            [f"PARTIAL: {self.partial}"] if self.partial else [],
            [self.verdict],
            [f"    {line}" for line in self.code.splitlines()],
            [format_table(list(FORM_COLUMNS), [form.cells() for form in self.forms])] if self.forms else [],
            [f"  {words}" for words in self.remarks],
            [format_table(list(COLUMNS), [cells(name, group) for name, group in groups])],
            ["A basis estimated before training", *said],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    @property
    def remarks(self) -> list[str]:
        """What else is to be known of the answer, in sentences."""
        words = [f"{TITLES[form.name]}: {form.against}." for form in self.forms if form.against]
        if self.curvature is not None and self.forms:
            words.append(_compared(self.curvature))
        if self.without_curvature:
            words.append(f"The curvature is not known, so all problems of the study count: {self.without_curvature}.")
        if self.here is not None:
            words.append(_seen("At the current parameters", self.here))
        if self.along is not None:
            words.append(_seen(f"Along {pluralize(self.along.draws, 'step')} of AdamW", self.along))
        if self.rate is not None:
            words.append(f"Learning rate: {self.rate.said}")
        if self.without_rate:
            words.append(f"No learning rate: {self.without_rate}.")
        return words

    def to_dict(self) -> dict[str, Any]:
        """Everything but the basis itself, as plain values for JSON."""
        values = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        values |= {"cost": self.cost, "advised": self.advised.name if self.advised is not None else None}
        return {name: value for name, value in values.items() if name != "basis"} | {
            "verdict": self.verdict,
            "code": self.code,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value) if isinstance(value, _VALUES) else value


_VALUES = (BlockDiagnosis, FormDiagnosis, Curvature, OffAxes, FoundRate)


def _expected(form: FormDiagnosis) -> str:
    """What a form brings and takes, in sentences."""
    low, high = middle_half(form.times)
    reach = f"about {share(form.time)} of AdamW's time to AdamW's loss"
    span = f"{share(low)} to {share(high)} for the middle half of {len(form.times)} similar problems of the study"
    sure = f"faster than AdamW in {form.faster} of them"
    takes = f"A step takes {form.step:.2f} times as long as AdamW's here, and {format_bytes(form.bytes)} more memory."
    steps = f"{share(statistics.median_high(form.steps))} of the steps"
    return f"Expect {reach} ({span}; {sure}): {steps}. {takes}"


def _lower(form: FormDiagnosis) -> str:
    steps = share(statistics.median_high(form.steps))
    return (
        f"{TITLES[form.name]}, needed {steps} of AdamW's steps on similar problems of the study, but a step takes "
        f"{form.step:.2f} times as long here: {share(form.time)} of AdamW's time (faster in {form.faster} of "
        f"{len(form.times)})."
    )


def _compared(found: Curvature) -> str:
    study = evidence()
    chosen, held_out = study.correlations
    names = ", ".join(problem.name for problem in study.similar(found.promise))
    return (
        f"Of the curvature {found.original:.0%} is on the original axes, {found.rotated:.0%} on those of the draws' "
        f"basis. The problems of the study that are most similar in this: {names}. It is a weak guide: the rank "
        f"correlation with what was gained is {chosen:.2f} on the problems that it was chosen on and {held_out:.2f} on "
        "others. Only a race on the problem itself shows more: egop diagnose MODULE:FACTORY --probe."
    )


def _seen(where: str, off: OffAxes) -> str:
    told = f"{off.value:.2f}" if off.is_seen else f"{off.value:.2f}, which is not told from noise"
    return f"{where} gradients are off the axes by {told} ({pluralize(off.draws, 'draw')})."
