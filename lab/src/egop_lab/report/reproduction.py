"""The reproduction as a page: every figure beside its claims, numbers and verdicts, all read from the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egop.runs import Picture, counted, document, plotting, replacing, text
from egop_lab.experiments.base import Experiment, Judged, Table
from egop_lab.experiments.registry import IDS, experiment
from egop_lab.experiments.reproduce import store_of
from egop_lab.training.context import Preset
from egop_lab.training.records import Record, Store

_INTRODUCTION = (
    "Made by egop-lab report from the records of egop-lab reproduce; no number here was typed by hand. Each claim of "
    "the paper stands beside what was measured."
)
_QUICK = " Sections of the quick preset ran at small sizes with few trials."
_AGAIN = "Claims that are judged by the runs of more than one search (see the settings) count once in the summary."

# What is said of one and of several; the last where a claim has come out both ways.
_CLAIMS = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "cannot be judged": ("cannot be judged", "cannot be judged"),
    "both": ("depends on how the learning rate was searched for", "depend on how the learning rate was searched for"),
}
_TARGETS = {
    "holds": ("is met", "are met"),
    "does not hold": ("is not", "are not"),
    "cannot be judged": ("cannot be judged", "cannot be judged"),
}


@dataclass(frozen=True)
class Section:
    """What the report says of one experiment.

    Attributes:
        experiment: which one.
        preset: the full one where there are records of it, else the quick one; None where there are none.
        judged: its claims with verdicts.
        pictures: its figures.
        tables: its tables.
        runs: how many records there are.
        seconds: that all of them took together.
        devices: where they ran.
        versions: of the software.
        problem: why there is nothing more to say, in one line.
    """

    experiment: Experiment
    preset: Preset | None = None
    judged: tuple[Judged, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    runs: int = 0
    seconds: float = 0.0
    devices: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    problem: str | None = None


def sections(folder: Path, ids: Iterable[str] | None = None) -> list[Section]:
    """What the records in a folder say, one section an experiment; all of them by default."""
    return [_section(experiment(id), store_of(folder, id)) for id in (IDS if ids is None else ids)]


def _section(one: Experiment, store: Store) -> Section:
    """The full preset where all of its runs are there, else the quick one, else what is still missing."""
    presets: tuple[Preset, ...] = ("full", "quick")
    missing = None
    for preset in presets:
        if records := one.records(store, preset):
            try:
                found = one.judge(store, preset), one.pictures(store, preset), one.tables(store, preset)
                return _about(one, preset, records, *found)
            except (LookupError, ValueError) as error:
                problem = f"Not all of its runs are there yet ({error})."
                missing = missing or _about(one, preset, records, problem=problem)
    return missing or Section(one, problem="It has not been run.")


def _about(
    experiment: Experiment,
    preset: Preset,
    records: Sequence[Record],
    judged: Iterable[Judged] = (),
    pictures: Iterable[Picture] = (),
    tables: Iterable[Table] = (),
    problem: str | None = None,
) -> Section:
    return Section(
        experiment,
        preset,
        tuple(judged),
        tuple(pictures),
        tuple(tables),
        len(records),
        sum(record.seconds for record in records),
        tuple(dict.fromkeys(record.device.replace(", 1 threads", ", 1 thread") for record in records)),
        tuple(dict.fromkeys(", ".join(f"{k} {v}" for k, v in record.versions.items()) for record in records)),
        problem,
    )


def counts(found: Sequence[Section]) -> str:
    """How many claims of the paper hold, how many targets are met, and how many checks passed: in a sentence."""
    judged = [item for section in found for item in section.judged]
    claims: dict[str, set[str]] = {}
    for item in judged:
        if item.kind == "claim":
            claims.setdefault(item.id, set()).add(item.verdict)
    outcomes = [verdicts.pop() if len(verdicts) == 1 else "both" for verdicts in claims.values()]
    targets = [item.verdict for item in judged if item.kind == "target"]
    checks = sum(item.kind == "check" for item in judged)
    parts = [
        f"of {counted(len(outcomes), 'claim')} of the paper {_tally(outcomes, _CLAIMS)}" if outcomes else "",
        f"of {counted(len(targets), 'target')} of this project {_tally(targets, _TARGETS)}" if targets else "",
        f"{counted(checks, 'check')} passed" if checks else "",
    ]
    sentence = "; ".join(filter(None, parts)) or "nothing has been run yet"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _tally(outcomes: Sequence[str], words: Mapping[str, tuple[str, str]]) -> str:
    numbers = {outcome: outcomes.count(outcome) for outcome in words}
    return ", ".join(f"{number} {words[outcome][number > 1]}" for outcome, number in numbers.items() if number)


def _introduction(sections: Sequence[Section]) -> str:
    return _INTRODUCTION + (_QUICK if any(section.preset == "quick" for section in sections) else "")


def _notes(section: Section) -> list[str]:
    """What has to be said of a section's claims."""
    ids = [item.id for item in section.judged]
    return [_AGAIN] if len(set(ids)) < len(ids) else []


def write_markdown(found: Sequence[Section], path: Path) -> None:
    """The report as Markdown, with its figures as SVG files in ``images/reproduction`` beside it."""
    lines = ["# Reproduction of the paper", "", _introduction(found), "", counts(found), ""]
    for section in found:
        for picture in section.pictures:
            place = path.parent / "images" / "reproduction" / f"{picture.name}.svg"
            plotting.save(plotting.draw(picture), place)
        lines += _markdown(section)
    with replacing(path) as beside:
        beside.write_text("\n".join(lines), encoding="utf-8")


def write_html(found: Sequence[Section], path: Path) -> None:
    """The report as one self-contained page."""
    body = ["<h1>Reproduction of the paper</h1>", f"<p>{text(_introduction(found))}</p>"]
    body.append(f'<p class="verdict">{text(counts(found))}</p>')
    for section in found:
        body += _html(section)
    with replacing(path) as beside:
        beside.write_text(document("Reproduction of the paper · egop", body), encoding="utf-8")


def _html(section: Section) -> list[str]:
    experiment = section.experiment
    parts = [f'<h2 id="{text(experiment.id)}">{text(experiment.title)} ({text(experiment.id)})</h2>']
    parts.append(f'<p class="small">In the paper: {text(experiment.figures)}.</p>')
    if section.preset is not None:
        parts.append(f"<p>Preset: <strong>{section.preset}</strong>. {text(_ran(section))}</p>")
        settings = text(_settings(experiment, section.preset))
        parts.append(f'<details><summary>Settings</summary><p class="small">{settings}</p></details>')
    if section.problem:
        return [*parts, f'<p class="partial">{text(section.problem)}</p>']
    items = [
        f'<li><span class="badge {_BADGES[item.verdict]}">{item.verdict}</span> '
        f"{text(item.words)} <strong>{text(item.found)}</strong></li>"
        for item in section.judged
    ]
    parts.append(f'<ul class="advice">{"".join(items)}</ul>')
    parts += [f'<p class="small">{text(note)}</p>' for note in _notes(section)]
    parts += [_html_table(table) for table in section.tables]
    for picture in section.pictures:
        caption = f"<figcaption>{text(picture.caption)}</figcaption>"
        parts.append(f'<figure class="wide">{plotting.inline_picture(picture)}{caption}</figure>')
    return parts


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in table.header)
    rows = []
    for first, *entries in table.rows:
        labelled = zip(table.header[1:], entries, strict=True)
        cells = "".join(f'<td data-label="{text(name)}">{text(entry)}</td>' for name, entry in labelled)
        rows.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<p><strong>{text(table.title)}</strong></p><table>{body}</table>"


_BADGES = {"holds": "use", "does not hold": "sample-more", "cannot be judged": "leave"}


def _markdown(section: Section) -> list[str]:
    one = section.experiment
    lines = [f"## {one.title} (`{one.id}`)", "", f"In the paper: {one.figures}."]
    if section.preset is None:
        return [*lines, "", section.problem or "", ""]
    lines += [f"Preset: **{section.preset}**. {_ran(section)}", "", f"Settings: {_settings(one, section.preset)}.", ""]
    if section.problem:
        return [*lines, section.problem, ""]
    lines += ["| claim | verdict | measured |", "|---|---|---|"]
    lines += [f"| {_cell(item.words)} | {_bold(item.verdict)} | {_cell(item.found)} |" for item in section.judged]
    for note in _notes(section):
        lines += ["", note]
    for table in section.tables:
        lines += ["", f"**{table.title}**", ""]
        lines += [_row(table.header), "|" + "---|" * len(table.header), *map(_row, table.rows)]
    for picture in section.pictures:
        lines += ["", f"![{picture.caption}](images/reproduction/{picture.name}.svg)", "", f"*{picture.caption}*"]
    return [*lines, ""]


def _ran(section: Section) -> str:
    minutes = section.seconds / 60
    spent = f"{minutes:.1f} minutes" if minutes >= 1 else f"{section.seconds:.0f} seconds"
    runs = counted(section.runs, "run")
    return f"{runs}, {spent} in all, on {'; '.join(section.devices)} ({'; '.join(section.versions)})."


def _settings(experiment: Experiment, preset: Preset) -> str:
    return "; ".join(f"{key}: {_value(value)}" for key, value in experiment.settings(preset).items())


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple, range)):
        entries = [_value(entry) for entry in value]
        return f"[{('; ' if any(', ' in entry for entry in entries) else ', ').join(entries)}]"
    return str(value)


def _row(entries: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, entries))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "does not hold" else verdict
