"""A diagnosis as one self-contained page, and as numbers: written whole, beside the old ones, after every stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from egop import __version__
from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.expected import FORM_COLUMNS
from egop.diagnostics.racing import Race, end
from egop.diagnostics.values import COLUMNS, BlockDiagnosis, alike, cells, least_promising
from egop.runs import Panel, Run, Series, counted, document, plotting, replacing, text, write_json

__all__ = ["page", "write"]

# Told apart by colour-blind readers, and visible on white and on black.
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d")
_OTHERS = "#8a8a8a"
_SIDES = {"original": "#8a8a8a", "EGOP": "#d55e00"}
# Eigenvalues below this, relative to the largest, are rounding; more points than this to a line show nothing more.
_ROUNDING = 1e-10
_POINTS = 200


def write(
    folder: Path, diagnosis: Diagnosis, race: Race | None = None, *, title: str, settings: Mapping[str, Any]
) -> Path:
    """Write ``diagnosis.html`` and ``diagnosis.json`` into a folder, each of them whole or not at all.

    Args:
        folder: made when it is not there.
        diagnosis: complete or partial.
        race: finished or still running; None where there is none.
        title: what was diagnosed.
        settings: what it was made with, as plain values.

    Returns:
        The path of the page.
    """
    numbers = {"title": title, "egop": __version__, "settings": dict(settings), "diagnosis": diagnosis.to_dict()}
    write_json(folder / "diagnosis.json", numbers | {"race": race.to_dict() if race is not None else None})
    path = folder / "diagnosis.html"
    with replacing(path) as beside:
        beside.write_text(page(diagnosis, race, title=title, settings=settings), encoding="utf-8")
    return path


def page(diagnosis: Diagnosis, race: Race | None = None, *, title: str, settings: Mapping[str, Any]) -> str:
    """The page as HTML: no scripts, nothing loaded from anywhere, readable on a phone, light and dark."""
    missing = [words for words in (diagnosis.partial, race.partial if race is not None else "") if words]
    banner = f'<p class="partial"><strong>This page is partial:</strong> {text("; ".join(missing))}.</p>'
    speed = (
        f"; one forward and backward pass takes {1000 * diagnosis.pass_seconds:.3g} ms here"
        if diagnosis.pass_seconds is not None
        else ""
    )
    body = [
        f"<h1>{text(title)}</h1>",
        banner if missing else "",
        f'<p class="verdict">{text(diagnosis.verdict)}</p>',
        f"<pre>{text(diagnosis.code)}</pre>" if diagnosis.code else "",
        _forms(diagnosis),
        f'<p class="small">{diagnosis.draws} of {diagnosis.wanted} points drawn{speed}.</p>',
        "<h2>A basis estimated before training</h2>",
        _advice(diagnosis.blocks),
        '<div class="plots">',
        _spectra(diagnosis.blocks),
        _curves(race) if race is not None else "",
        "</div>",
        "<h2>Blocks</h2>",
        _table(diagnosis.blocks),
        _race_table(race) if race is not None else "",
        _reading(settings),
    ]
    return document(f"{title} · egop diagnosis", body)


def _forms(diagnosis: Diagnosis) -> str:
    if not diagnosis.forms:
        return ""
    remarks = "".join(f"<li>{text(words)}</li>" for words in diagnosis.remarks)
    rows = [form.cells() for form in diagnosis.forms]
    return f"<h2>What to expect, beside AdamW</h2>{_rows(FORM_COLUMNS, rows)}<ul>{remarks}</ul>"


def _table(blocks: Sequence[BlockDiagnosis]) -> str:
    return _rows(COLUMNS, [cells(name, group) for name, group in alike(blocks)])


def _rows(columns: Mapping[str, str], lines: Sequence[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col" title="{text(meaning)}">{text(name)}</th>' for name, meaning in columns.items())
    rows = []
    for first, *others in lines:
        labelled = zip(list(columns)[1:], others, strict=True)
        numbers = "".join(f'<td data-label="{text(label)}">{text(cell)}</td>' for label, cell in labelled)
        rows.append(f'<tr><th scope="row">{text(first)}</th>{numbers}</tr>')
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _advice(blocks: Sequence[BlockDiagnosis]) -> str:
    shown = [(name, least_promising(group)) for name, group in alike(blocks)]
    items = [
        f'<li><span class="badge {block.verdict.replace(" ", "-")}">{block.verdict}</span> '
        f"<strong>{text(name)}</strong> {text(block.advice)}</li>"
        for name, block in shown
    ]
    return f'<ul class="advice">{"".join(items)}</ul>'


def _spectra(blocks: Sequence[BlockDiagnosis]) -> str:
    known = [block for block in blocks if block.eigenvalues and block.eigenvalues[0] > 0]
    if not known:
        return ""
    # The most promising ones in colour; the others behind them, so that many blocks can still be read.
    ranked = sorted(known, key=lambda block: block.ratio or 0)
    colors = {block.name: color for block, color in zip(ranked, _LINES, strict=False)}
    ordered = sorted(known, key=lambda block: block.name in colors)
    panel = Panel("Eigenvalues of each block", "k", "λₖ / λ₁", [_decay(block) for block in ordered], xscale="log")
    drawn = [colors.get(block.name, _OTHERS) for block in ordered]
    svg = plotting.inline(panel, drawn, "spectra", faint=len(known) - len(colors))
    shown = [block for block in known if block.name in colors]
    legend = [(colors[block.name], False, f"{block.name} ({block.dimension})") for block in shown]
    if len(known) > len(colors):
        legend.append((_OTHERS, False, f"{len(known) - len(colors)} others"))
    return _figure(svg, "Eigenvalues", legend, "Each block's eigenvalues, relative to its largest one; in brackets d.")


def _decay(block: BlockDiagnosis) -> Series:
    relative = [value / block.eigenvalues[0] for value in block.eigenvalues]
    last = sum(value > _ROUNDING for value in relative)
    places = sorted({round(last ** (step / (_POINTS - 1))) for step in range(_POINTS)})
    return Series(block.name, places, [relative[k - 1] for k in places])


def _curves(race: Race) -> str:
    best = race.best() or ()
    ordered = [run for run in race.runs if run not in best] + list(best)
    series = [_curve(run, race.every) for run in ordered]
    if not any(curve.x for curve in series):
        return ""
    positive = all(value > 0 for curve in series for value in curve.median)
    panel = Panel("Training loss by step", "step", "loss", series, yscale="log" if positive else "linear")
    colors = [_SIDES[run.coordinates] for run in ordered]
    svg = plotting.inline(panel, colors, "race", faint=len(ordered) - len(best))
    legend = [
        (_SIDES[run.coordinates], run.coordinates == "EGOP", f"{run.coordinates} coordinates, lr {run.lr:g}")
        for run in best
    ]
    return _figure(svg, "Race", legend, f"{race.summary()} Faint: the other learning rates. EGOP side: {race.basis}.")


def _curve(run: Run, every: int) -> Series:
    finite = [(every * index, loss) for index, loss in enumerate(run.curve.loss) if math.isfinite(loss)]
    return Series(run.coordinates, [x for x, _ in finite], [loss for _, loss in finite], egop=run.coordinates == "EGOP")


def _figure(svg: str, heading: str, legend: Sequence[tuple[str, bool, str]], caption: str) -> str:
    entries = "".join(
        f'<li><span class="line{" dashed" if dashed else ""}" style="border-color:{color}"></span>{text(label)}</li>'
        for color, dashed, label in legend
    )
    return (
        f'<figure><h2>{text(heading)}</h2>{svg}<ul class="legend">{entries}</ul>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def _race_table(race: Race) -> str:
    finished = {(run.coordinates, run.lr): run for run in race.runs}

    def cell(side: str, lr: float) -> str:
        run = finished.get((side, lr))
        words = "not run" if run is None else "diverged" if run.curve.diverged else f"{end(run):.3g}"
        return f"<td>{words}</td>"

    rows = "".join(
        f'<tr><th scope="row">{lr:g}</th>{"".join(cell(side, lr) for side in _SIDES)}</tr>'
        for lr in race.learning_rates
    )
    heads = "".join(f'<th scope="col">{side}</th>' for side in ("lr", *_SIDES))
    return (
        "<h2>Losses at the end of the race</h2>"
        f"<p>{text(race.optimizer)}, {counted(race.steps, 'step')}; the median of the last looks.</p>"
        f'<table class="narrow"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _reading(settings: Mapping[str, Any]) -> str:
    meanings = [*FORM_COLUMNS.items(), *COLUMNS.items()]
    columns = "".join(f"<dt>{text(name)}</dt><dd>{text(meaning)}</dd>" for name, meaning in meanings)
    options = ", ".join(f"{text(name)} {text(value)}" for name, value in settings.items())
    return (
        f"<details open><summary>How to read this</summary><dl>{columns}</dl></details>"
        f'<p class="small">Made by egop {text(__version__)}{": " if options else ""}{options}. How the answer comes '
        "about is in docs/diagnostics.md; every number it looks at is shown above.</p>"
    )
