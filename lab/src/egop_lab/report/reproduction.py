"""The reproduction as a page: every figure beside its claims, numbers and verdicts, all read from the records."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from egop_lab.experiments.base import Experiment, Judgement, Table
from egop_lab.experiments.registry import IDS, find_experiment
from egop_lab.files import replace_atomically
from egop_lab.formatting import pluralize
from egop_lab.plots.figures import draw_picture, save_figure
from egop_lab.plots.picture import Picture
from egop_lab.report import wording
from egop_lab.report.failures import HEADER, group_failures
from egop_lab.training.records import Store

_INTRODUCTION = (
    "We repeated the paper's experiments and compared each of its claims with what we measured. A claim is judged by "
    "the paper's own criterion; results under alternative criteria, mostly ours, are listed alongside. If the paper "
    "gives no threshold, we chose one and state it. Claims and thresholds were written down after the records existed, "
    "so nothing is preregistered, except on the pages that say so. `egop-lab reproduce` made the records, "
    "and `egop-lab report` wrote these pages from them."
)
_QUICK = " Pages that name the preset *quick* report small sizes and few trials."
_HEADER = ("experiment", "claims that hold, of those judged", "remarks")

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
    return [_load_section(find_experiment(id), Store(folder / f"{id}.jsonl")) for id in (IDS if ids is None else ids)]


def _load_section(kind: type[Experiment], store: Store) -> Section:
    """Use the full preset if all of its runs are there, else the quick one, else say what is missing."""
    missing = None
    for one in (kind("full", store), kind("quick", store)):
        if not (records := one.records()):
            continue
        section = Section(
            one,
            runs=len(records),
            seconds=sum(record.seconds for record in records),
            devices=tuple(dict.fromkeys(record.device.replace(", 1 threads", ", 1 thread") for record in records)),
            versions=tuple(dict.fromkeys(", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in records)),
        )
        try:
            return replace(
                section,
                judged=tuple(one.judge()),
                pictures=tuple(one.pictures()),
                tables=tuple(one.tables()),
                remarks=tuple(one.remarks()),
            )
        except (LookupError, ValueError) as error:
            missing = missing or replace(section, problem=f"Not all of its runs are there yet ({error}).")
    return missing or Section(kind(), problem="Not run.")


def format_counts(found: Sequence[Section]) -> str:
    """Say in a sentence how many claims hold, how many targets are met, and how many checks passed."""
    judged = [item for section in found for item in section.judged]
    kinds = ("claim", "reading", "target", "control")
    verdicts = {kind: [item.verdict for item in judged if item.kind == kind] for kind in kinds}
    checks = sum(item.kind == "check" for item in judged)
    parts = [
        f"of {whose} {pluralize(len(given), what)}{where}, {_tally(given, words)}"
        for given, whose, what, where, words in (
            (verdicts["claim"], "the paper's", "claim", "", _CLAIMS),
            (verdicts["reading"], "our", "reading", " of its figures", _CLAIMS),
            (verdicts["target"], "this project's", "target", "", _TARGETS),
            (verdicts["control"], "our", "control", "", _CLAIMS),
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
    names = [section.experiment.id for section in found if section.problem and not section.runs]
    lines = [f"Not run: {', '.join(names)}."] if names else []
    return lines + [f"{s.experiment.id}: {s.problem}" for s in found if s.problem and s.runs]


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
        words = f"Claims that share a cause are grouped. {described}."
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
    quick = _QUICK if any(section.experiment.preset == "quick" and not section.problem for section in found) else ""
    changed = wording.describe_changes([item for section in found for item in section.judged])
    return _INTRODUCTION + quick, f"{format_counts(found)} {changed}".strip()


def _count(section: Section) -> tuple[str, str]:
    return wording.count_holding(section.judged), wording.summarize_verdicts(section.judged)


def _get_judged(found: Sequence[Section]) -> list[Judgement]:
    return [item for section in found for item in section.judged]


def _describe_failures(rows: Sequence[tuple[str, str, str]]) -> str:
    reasons = [reason for _, reason, _ in rows]
    counts = ", ".join(f"{reason} ({reasons.count(reason)})" for reason in dict.fromkeys(reasons))
    return f"{pluralize(len(rows), 'cause')}: {counts}"


def _get_experiment_id(item: Judgement) -> str:
    return item.id.partition("/")[0]


def _highlight(item: Judgement) -> str:
    distance = wording.format_distance(item)
    more = "" if distance in item.finding else f" The numbers differ by {distance}."
    return f"“{item.statement}” {item.finding}{more}"


def _markdown(section: Section) -> list[str]:
    one = section.experiment
    lines = [f"# {one.title}", ""]
    lines += [line for remark in section.remarks for line in (f"**{remark}**", "")]
    lines += [_describe_place(one), f"Experiment `{one.id}`, preset **{one.preset}**: {_describe_runs(section)}"]
    if differs := wording.describe_deviations(one):
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
    lines += [*map(_row, wording.format_settings(one)), "", "</details>"]
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
