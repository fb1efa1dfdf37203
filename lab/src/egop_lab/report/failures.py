"""Why claims fail: those with one cause are one finding, and each finding is one of four kinds."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from egop_lab.experiments.base import Judgement

Reason = Literal["not reproducible here", "other settings", "our tuning", "strict rule", "unexplained"]

HEADER = ("finding", "kind", "claims and margins")


@dataclass(frozen=True)
class Finding:
    """A cause, and the claims that fail because of it."""

    words: str
    reason: Reason
    claims: tuple[str, ...]


_table = (resources.files(__package__) / "failures.toml").read_text(encoding="utf-8")
FINDINGS = [Finding(**{**each, "claims": tuple(each["claims"])}) for each in tomllib.loads(_table)["findings"]]


def find_cause(item: Judgement) -> Finding | None:
    """Return the finding that a claim of the paper belongs to if it fails; None if it does not fail."""
    if item.kind != "claim" or item.verdict != "does not hold":
        return None
    unknown = Finding(item.statement, "unexplained", (item.id,))
    return next((finding for finding in FINDINGS if item.id in finding.claims), unknown)


def group_failures(judged: Sequence[Judgement]) -> list[tuple[str, str, str]]:
    """Return a row for each finding: the cause, which of the four it is, and its claims with their margins."""
    rows: dict[Finding, list[Judgement]] = {}
    for item in judged:
        if (finding := find_cause(item)) is not None:
            rows.setdefault(finding, []).append(item)
    return [
        (finding.words, finding.reason, "; ".join(f"{item.id} ({_format_margin(item)})" for item in items))
        for finding, items in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]


def _format_margin(item: Judgement) -> str:
    """Say by how much a claim fails, or what was measured where no two numbers are compared."""
    if item.margin is None:
        return item.finding.removesuffix(".")
    factor = 10 ** abs(item.margin)
    return "equal" if factor < 1.001 else f"reversed by a factor of {factor:.3g}"
