"""Wording of settings and verdicts in the report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from egop_lab.experiments.base import Experiment, Judgement
from egop_lab.formatting import pluralize
from egop_lab.report.failures import find_cause

RULE = (
    "Selected automatically: of the paper's claims that compare two numbers and get the same verdict under every "
    "criterion, those with the largest ratio between the numbers, at most one per experiment. A target that is never "
    "reached counts as taking the whole run."
)


def format_settings(experiment: Experiment) -> list[tuple[str, str]]:
    """Return names and values; nested settings have one row per part."""
    rows: list[tuple[str, str]] = []
    for name, value in experiment.settings.items():
        parts = value if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()) else None
        rows += (
            [(f"{name}: {part}", format_value(own)) for part, own in parts.items()]
            if parts
            else [(name, format_value(value))]
        )
    return rows


def describe_deviations(experiment: Experiment) -> str:
    """Say in a sentence where the settings differ from the paper's; return "" if the paper names none."""
    ours = {name: format_value(value) for name, value in experiment.settings.items()}
    if not experiment.paper:
        return ""
    differing = [f"{name}: {ours[name]} (paper: {there})" for name, there in experiment.paper.items()
                 if ours[name] != there]  # fmt: skip
    return f"Differs from the paper in {'; '.join(differing)}." if differing else "All settings are the paper's."


def format_value(value: Any) -> str:
    """Format a setting."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple, range)):
        entries = [format_value(entry) for entry in value]
        return f"[{('; ' if any(', ' in entry for entry in entries) else ', ').join(entries)}]"
    return str(value)


def count_holding(judged: Sequence[Judgement]) -> str:
    """Count the judged claims that hold; without claims, the targets or the controls."""
    kind = next((kind for kind in ("claim", "target") if any(item.kind == kind for item in judged)), "control")
    decided = [item for item in judged if item.kind == kind and item.verdict != "cannot be judged"]
    good = sum(item.verdict == "holds" for item in decided)
    return f"{good} / {len(decided)}{'' if kind == 'claim' else f' {kind}s'}" if decided else "–"


def summarize_verdicts(judged: Sequence[Judgement]) -> str:
    """Say in a line why not all claims hold."""
    own = [item for item in judged if item.kind in ("claim", "target", "control")]
    failed = [item for item in own if item.verdict == "does not hold"]
    unknown = sum(item.verdict == "cannot be judged" for item in own)
    flipped = sum(map(_has_opposite, own))
    if failed:
        worst = min(failed, key=lambda item: 0.0 if item.margin is None else item.margin)
        more = f" and {pluralize(len(failed) - 1, 'other')}" if len(failed) > 1 else ""
        words = worst.statement.removesuffix(".").removeprefix("Target: ").removeprefix("Control: ")
        parts = [f"{'a control ' if worst.kind == 'control' else ''}does not hold: “{words}”{more}"]
    else:
        some = "all that could be judged hold" if len(own) > unknown else "nothing could be judged"
        parts = [some if unknown else "all hold"]
    parts += [f"{unknown} cannot be judged"] if 0 < unknown < len(own) else []
    parts += [f"another criterion reverses {flipped}"] if flipped else []
    line = "; ".join(parts)
    return f"{line[0].upper()}{line[1:]}."


def _has_opposite(item: Judgement) -> bool:
    """Return True if an alternative rule decides otherwise."""
    opposite = {"holds": "does not hold", "does not hold": "holds"}.get(item.verdict)
    return any(other.verdict == opposite for other in item.alternatives)


def select_furthest(judged: Iterable[Judgement], verdict: str, count: int = 3) -> list[Judgement]:
    """Return the paper's claims with a verdict whose numbers are furthest apart, one per experiment."""
    sign = 1 if verdict == "holds" else -1
    margins = [
        (sign * item.margin, item)
        for item in judged
        if item.kind == "claim"
        and item.verdict == verdict
        and item.margin is not None
        and sign * item.margin > 0
        and not _has_opposite(item)
    ]
    best: dict[str, Judgement] = {}
    for _, item in sorted(margins, key=lambda pair: -pair[0]):
        best.setdefault(item.id.partition("/")[0], item)
    return list(best.values())[:count]


def format_distance(item: Judgement) -> str:
    """Say how much the two numbers differ, or at least differ if one of them was never reached."""
    assert item.margin is not None
    factor = abs(item.margin)
    least = "at least " if ": never" in item.finding else ""
    return least + (f"{factor:.0f} orders of magnitude" if factor >= 4 else f"a factor of {_format_factor(10**factor)}")


def _format_factor(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{float(f'{number:.2g}'):.0f}"


def list_findings(item: Judgement) -> list[str]:
    """Return the finding, our threshold, the results of alternative rules, and why the claim fails if it does."""
    lines = [item.finding]
    lines += [f"Our threshold: {item.threshold}."] if item.threshold else []
    lines += [f"Alternative criterion ({other.rule}): {other.verdict}. {other.finding}" for other in item.alternatives]
    cause = find_cause(item)
    return lines if cause is None else [*lines, f"Cause: {cause.reason}. {cause.words}"]


def merge_unjudged(judged: Iterable[Judgement]) -> list[Judgement]:
    """Merge the claims that cannot be judged for the same reason."""
    kept: dict[object, Judgement] = {}
    for item in judged:
        alike = item.verdict == "cannot be judged" and not (item.alternatives or item.paper)
        key = (item.kind, item.finding) if alike else item.id
        first = kept.get(key)
        more = item.statement.removeprefix("Target: ")
        kept[key] = item if first is None else replace(first, statement=f"{first.statement.removesuffix('.')}; {more}")
    return list(kept.values())


def format_claim(item: Judgement) -> str:
    """Return the claim, marked if it is not the paper's."""
    return f"Our reading: {item.statement}" if item.kind == "reading" else item.statement


def describe_changes(judged: Sequence[Judgement]) -> str:
    """Say how many claims alternative rules would change in each direction; return "" if none."""
    claims = [item for item in judged if item.kind == "claim"]
    gained, lost = (
        sum(item.verdict == verdict and _has_opposite(item) for item in claims)
        for verdict in ("does not hold", "holds")
    )
    if not gained + lost:
        return ""
    return (
        f"Under alternative criteria, {gained} of the claims that fail would hold, and {lost} of those that hold would "
        "fail; claims that the paper's own criterion cannot judge are not counted."
    )
