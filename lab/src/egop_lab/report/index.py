"""The paper's index: where each of its figures, tables, algorithms and statements is, with its verdict."""

from collections.abc import Sequence
from pathlib import Path

from egop_lab.experiments.registry import IDS
from egop_lab.files import replace_atomically
from egop_lab.formatting import pluralize
from egop_lab.report import reproduction
from egop_lab.report.statements import STATEMENTS, Statement

_INTRODUCTION = (
    "Made by egop-lab report. Each figure, table, algorithm and statement of the paper has a row, by its label in the "
    "LaTeX source: {} in all. A single word such as `digits` is an experiment with a page of its own in the report; "
    "its verdicts cover all of its claims, not one figure alone. Functions are from `egop` and `egop_lab.theory`. "
    "What is missing, or differs from the paper, is listed at the end."
)


def write_markdown(sections: Sequence[reproduction.Section], path: Path) -> None:
    """Write the index as Markdown, with the verdicts of the report's sections."""
    about = {section.experiment.id: section for section in sections}
    missing: dict[str, list[str]] = {}
    for each in STATEMENTS:
        for reason in each.missing:
            missing.setdefault(reason, []).append(f"`{each.label}`")
    lines = ["# Index of the paper's statements", "", _INTRODUCTION.format(pluralize(len(STATEMENTS), "label")), ""]
    lines += ["| label | what it is | where | verdict |", "|---|---|---|---|"]
    lines += [f"| {statement_cells(each)} | {_verdict(each, about)} |" for each in STATEMENTS]
    lines += ["", "## What is not here, or not as the paper has it", ""]
    lines += [f"- {', '.join(named)}: {reason}" for reason, named in missing.items()]
    with replace_atomically(path) as temporary:
        temporary.write_text("\n".join([*lines, ""]), encoding="utf-8")


def statement_cells(statement: Statement) -> str:
    """Return the cells of a row that no run changes: label, kind and place."""
    places = ", ".join(f"`{each}`" for each in statement.where)
    return f"`{statement.label}` | {statement.kind}: {statement.about} | {places or 'nowhere, see below'}"


def _verdict(statement: Statement, about: dict[str, reproduction.Section]) -> str:
    parts = [statement.verdict] if statement.verdict else []
    for id in (each for each in statement.where if each in IDS):
        found = (about[id].problem or reproduction.format_counts([about[id]])) if id in about else "Not in this report."
        parts.append(f"{id}: {found[0].lower()}{found[1:]}")
    return "<br>".join(parts)
