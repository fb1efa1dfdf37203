"""The reproduction as a page: every figure beside its claims, numbers and verdicts, all read from the records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path

from egop_lab.experiments.base import Experiment, Judgement, Table
from egop_lab.experiments.registry import IDS, experiment
from egop_lab.experiments.reproduce import open_store
from egop_lab.files import replace_atomically
from egop_lab.formatting import pluralize
from egop_lab.plots.figures import draw_picture, embed_picture, save_figure
from egop_lab.plots.picture import Picture
from egop_lab.report import wording
from egop_lab.report.failures import HEADER, group_failures
from egop_lab.training.context import Preset
from egop_lab.training.records import Store

_INTRODUCTION = (
    "We repeated the paper's experiments and compared each of its claims with what we measured. A claim is judged by "
    "the paper's own criterion; results under alternative criteria, mostly ours, are listed alongside. If the paper "
    "gives no threshold, we chose one and state it. Claims and thresholds were written down after the records existed, "
    "so none of them is a preregistered test, except on the pages that say so. All numbers come from the records: "
    "egop-lab reproduce made them, and egop-lab report wrote these pages."
)
_QUICK = " Sections of the quick preset ran at small sizes with few trials."
_HEADER = ("experiment", "claims that hold", "remarks")

# Singular and plural.
_CLAIMS = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not hold", "do not hold"),
    "cannot be judged": ("cannot be judged", "cannot be judged"),
}
_TARGETS = {
    "holds": ("is met", "are met"),
    "does not hold": ("is not", "are not"),
    "cannot be judged": ("cannot be judged", "cannot be judged"),
}


@dataclass(frozen=True)
class Section:
    """The report's section on one experiment."""

    experiment: Experiment
    preset: Preset | None = None
    judged: tuple[Judgement, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    runs: int = 0
    seconds: float = 0.0
    devices: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    problem: str | None = None


def load_sections(folder: Path, ids: Iterable[str] | None = None) -> list[Section]:
    """Read the records in a folder into sections, one per experiment; all of them by default."""
    return [_load_section(experiment(id), open_store(folder, id)) for id in (IDS if ids is None else ids)]


def _load_section(one: Experiment, store: Store) -> Section:
    """Use the full preset if all of its runs are there, else the quick one, else say what is missing."""
    presets: tuple[Preset, ...] = ("full", "quick")
    missing = None
    for preset in presets:
        if not (records := one.records(store, preset)):
            continue
        section = Section(
            one,
            preset,
            runs=len(records),
            seconds=sum(record.seconds for record in records),
            devices=tuple(dict.fromkeys(record.device.replace(", 1 threads", ", 1 thread") for record in records)),
            versions=tuple(dict.fromkeys(", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in records)),
        )
        try:
            return replace(
                section,
                judged=tuple(one.judge(store, preset)),
                pictures=tuple(one.pictures(store, preset)),
                tables=tuple(one.tables(store, preset)),
                remarks=tuple(one.remarks(store, preset)),
            )
        except (LookupError, ValueError) as error:
            missing = missing or replace(section, problem=f"Not all of its runs are there yet ({error}).")
    return missing or Section(one, problem="It has not been run.")


def format_counts(found: Sequence[Section]) -> str:
    """Say in a sentence how many claims hold, how many targets are met, and how many checks passed."""
    judged = [item for section in found for item in section.judged]
    kinds = ("claim", "reading", "target", "control")
    verdicts = {kind: [item.verdict for item in judged if item.kind == kind] for kind in kinds}
    checks = sum(item.kind == "check" for item in judged)
    parts = [
        f"of {pluralize(len(given), what)} {whose} {_tally(given, words)}"
        for given, what, whose, words in (
            (verdicts["claim"], "claim", "of the paper", _CLAIMS),
            (verdicts["reading"], "reading", "of its figures by us", _CLAIMS),
            (verdicts["target"], "target", "of this project", _TARGETS),
            (verdicts["control"], "control", "of ours", _CLAIMS),
        )
        if given
    ] + ([f"{pluralize(checks, 'check')} passed"] if checks else [])
    sentence = "; ".join(parts) or "nothing has been run yet"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _tally(outcomes: Sequence[str], words: Mapping[str, tuple[str, str]]) -> str:
    numbers = {outcome: outcomes.count(outcome) for outcome in words}
    return ", ".join(f"{number} {words[outcome][number > 1]}" for outcome, number in numbers.items() if number)


def _get_finished(found: Sequence[Section]) -> list[Section]:
    return [section for section in found if section.problem is None]


def _list_missing(found: Sequence[Section]) -> list[str]:
    """List the experiments without verdicts in a line each; say why if they were run."""
    names = [section.experiment.id for section in found if section.preset is None]
    lines = [f"Not run: {', '.join(names)}."] if names else []
    return lines + [f"{s.experiment.id}: {s.problem}" for s in found if s.problem and s.preset is not None]


def _highlights(found: Sequence[Section]) -> list[tuple[str, list[Judgement]]]:
    judged = _get_judged(found)
    pairs = (("The strongest confirmations", "holds"), ("The clearest failures", "does not hold"))
    return [(title, items) for title, verdict in pairs if (items := wording.select_furthest(judged, verdict))]


def write_markdown(found: Sequence[Section], path: Path) -> None:
    """Write the report as Markdown: a summary, and next to it a folder of the same name with a page per experiment.

    The figures are SVG files in ``images/reproduction`` beside the summary.
    """
    finished, highlights = _get_finished(found), _highlights(found)
    lines = ["# Reproduction of the paper"]
    for paragraph in _introduce(found):
        lines += ["", paragraph]
    if finished:
        lines += ["", _row(_HEADER), "|---|---|---|"]
        for section in finished:
            name = f"[{section.experiment.title}]({path.stem}/{section.experiment.id}.md)"
            lines.append(_row((name, *_count(section))))
    for line in _list_missing(found):
        lines += ["", line]
    if failures := group_failures(_get_judged(found)):
        described = _describe_failures(failures)
        lines += ["", f"[Why claims fail]({path.stem}/failures.md): {described}."]
        words = f"Claims with one cause are one finding: {described}."
        page = ["# Why claims fail", "", words, "", _row(HEADER), "|---|---|---|", *map(_row, failures), ""]
        _write_text("\n".join(page), path.with_suffix("") / "failures.md")
    for title, items in highlights:
        lines += ["", f"**{title}**", ""]
        for item in items:
            id = _get_experiment_id(item)
            lines.append(f"- {_highlight(item)} ([{id}]({path.stem}/{id}.md))")
    lines += ["", wording.RULE] if highlights else []
    _write_text("\n".join([*lines, ""]), path)
    for section in finished:
        for picture in section.pictures:
            save_figure(draw_picture(picture), path.parent / "images" / "reproduction" / f"{picture.name}.svg")
        _write_text("\n".join(_markdown(section)), path.with_suffix("") / f"{section.experiment.id}.md")


def _write_text(text: str, path: Path) -> None:
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _introduce(found: Sequence[Section]) -> tuple[str, str]:
    quick = _QUICK if any(section.preset == "quick" for section in found) else ""
    changed = wording.describe_changes([item for section in found for item in section.judged])
    return _INTRODUCTION + quick, f"{format_counts(found)} {changed}".strip()


def _count(section: Section) -> tuple[str, str]:
    return wording.count_holding(section.judged), wording.summarize_verdicts(section.judged)


def _get_judged(found: Sequence[Section]) -> list[Judgement]:
    return [item for section in found for item in section.judged]


def _describe_failures(rows: Sequence[tuple[str, str, str]]) -> str:
    reasons = [reason for _, reason, _ in rows]
    counts = ", ".join(f"{reason} ({reasons.count(reason)})" for reason in dict.fromkeys(reasons))
    return f"{pluralize(len(rows), 'finding')}, {counts}"


def _get_experiment_id(item: Judgement) -> str:
    return item.id.partition("/")[0]


def _highlight(item: Judgement) -> str:
    return f"{item.statement} {item.finding} Apart: {wording.format_distance(item)}."


def _markdown(section: Section) -> list[str]:
    one = section.experiment
    assert section.preset is not None
    lines = [f"# {one.title} (`{one.id}`)", ""]
    lines += [line for remark in section.remarks for line in (f"**{remark}**", "")]
    lines += [_describe_place(one), f"Preset: **{section.preset}**. {_describe_runs(section)}"]
    if differs := wording.describe_deviations(one, section.preset):
        lines += ["", differs]
    lines += ["", "| claim | verdict | measured | in the paper |", "|---|---|---|---|"]
    lines += [
        _row(
            (
                wording.format_claim(item),
                f"**{item.verdict}**" if item.verdict == "does not hold" else item.verdict,
                "<br>".join(wording.list_findings(item)),
                item.paper,
            )
        )
        for item in wording.merge_unjudged(section.judged)
    ]
    for table in section.tables:
        lines += ["", f"**{table.title}**", ""]
        lines += [_row(table.header), "|" + "---|" * len(table.header), *map(_row, table.rows)]
    lines += ["", "<details><summary>Settings</summary>", "", "| setting | value |", "|---|---|"]
    lines += [*map(_row, wording.format_settings(one, section.preset)), "", "</details>"]
    for picture in section.pictures:
        lines += ["", f"![{picture.caption}](../images/reproduction/{picture.name}.svg)", "", f"*{picture.caption}*"]
    return [*lines, ""]


def _describe_place(one: Experiment) -> str:
    labels = f" ({', '.join(f'`{label}`' for label in one.labels)})" if one.labels else ""
    return f"In the paper: {one.figures}{labels}."


def _describe_runs(section: Section) -> str:
    minutes = section.seconds / 60
    spent = f"{minutes:.1f} minutes" if minutes >= 1 else f"{section.seconds:.0f} seconds"
    runs = pluralize(section.runs, "run")
    return f"{runs}, {spent} in all, on {'; '.join(section.devices)} ({'; '.join(section.versions)})."


def _row(entries: Sequence[str]) -> str:
    cells = [entry.replace("|", "\\|") for entry in entries]
    return f"| {' | '.join(cells)} |"


def write_html(found: Sequence[Section], path: Path) -> None:
    """Write the report as one self-contained page: the summary, and each experiment behind its title."""
    finished, highlights = _get_finished(found), _highlights(found)
    introduction, summary = map(escape, _introduce(found))
    body = ["<h1>Reproduction of the paper</h1>", f"<p>{introduction}</p>", f'<p class="verdict">{summary}</p>']
    if finished:
        names = [f'<a href="#{escape(s.experiment.id)}">{escape(s.experiment.title)}</a>' for s in finished]
        rows = [(name, *map(escape, _count(section))) for name, section in zip(names, finished, strict=True)]
        body.append(_table(_HEADER, rows))
    body += [f"<p>{escape(line)}</p>" for line in _list_missing(found)]
    if failures := group_failures(_get_judged(found)):
        cells = [tuple(map(escape, row)) for row in failures]
        body += ["<h2>Why claims fail</h2>", f"<p>{escape(_describe_failures(failures))}.</p>", _table(HEADER, cells)]
    for title, items in highlights:
        shown = "".join(f"<li>{escape(_highlight(item))} ({escape(_get_experiment_id(item))})</li>" for item in items)
        body += [f"<h2>{escape(title)}</h2>", f"<ul>{shown}</ul>"]
    body += [f'<p class="small">{escape(wording.RULE)}</p>'] if highlights else []
    body += ["<h2>Details</h2>"] if finished else []
    body += [part for section in finished for part in _html(section)]
    style = (resources.files("egop_lab.report") / "style.css").read_text(encoding="utf-8")
    _write_text(_PAGE.format(style=style, body="\n".join(body)), path)


# Self-contained: no scripts, nothing loaded from elsewhere. The icon keeps browsers from requesting one.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Reproduction of the paper · egop</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _html(section: Section) -> list[str]:
    one = section.experiment
    assert section.preset is not None
    title = f"{escape(one.title)} ({escape(one.id)}): {escape(wording.count_holding(section.judged))}"
    # The id is inside the details element, which a browser opens if a link points into it.
    parts = [f'<details class="part"><summary>{title}</summary><div id="{escape(one.id)}">']
    parts += [f'<p class="partial">{escape(remark)}</p>' for remark in section.remarks]
    parts.append(f'<p class="small">{escape(_describe_place(one).replace("`", ""))}</p>')
    parts.append(f"<p>Preset: <strong>{section.preset}</strong>. {escape(_describe_runs(section))}</p>")
    if differs := wording.describe_deviations(one, section.preset):
        parts.append(f"<p>{escape(differs)}</p>")
    items = []
    for item in wording.merge_unjudged(section.judged):
        first, *more = wording.list_findings(item)
        lines = [f"<strong>{escape(first)}</strong>", *map(escape, more)]
        lines += [f"In the paper: {escape(item.paper)}."] if item.paper else []
        badge = f'<span class="badge {_BADGES[item.verdict]}">{item.verdict}</span>'
        items.append(f"<li>{badge} {escape(wording.format_claim(item))} {'<br>'.join(lines)}</li>")
    parts.append(f'<ul class="advice">{"".join(items)}</ul>')
    for table in section.tables:
        rows = [tuple(map(escape, row)) for row in table.rows]
        parts.append(f"<p><strong>{escape(table.title)}</strong></p>{_table(table.header, rows)}")
    settings = [(escape(name), escape(value)) for name, value in wording.format_settings(one, section.preset)]
    parts.append(f"<details><summary>Settings</summary>{_table(('setting', 'value'), settings)}</details>")
    for picture in section.pictures:
        caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
        panels = embed_picture(picture)
        parts.append(f'<figure class="wide"><div class="plots">{panels}</div>{caption}</figure>')
    return [*parts, "</div></details>"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table from cells that are HTML; columns of text are left-aligned."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    kinds = [_WORDS if max(map(len, column)) > _LONG else "" for column in zip(*rows, strict=True)]
    lines = []
    for first, *entries in rows:
        columns = zip(header[1:], kinds[1:], entries, strict=True)
        cells = "".join(f'<td{kind} data-label="{escape(name)}">{entry}</td>' for name, kind, entry in columns)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


_WORDS, _LONG = ' class="words"', 24  # a column with a longer cell is text
_BADGES = {"holds": "use", "does not hold": "sample-more", "cannot be judged": "leave"}
