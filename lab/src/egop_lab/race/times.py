"""Step times by method, with the renewals of EGOP's bases where they fall."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


def is_due(step: int, every: int) -> bool:
    """Return True if EGOP renews its bases after a step: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..., then every ``every``."""
    return step % every == 0 or (step < every and step % 2 ** max(0, step.bit_length() - 2) == 0)


def count_renewals(steps: int, every: int = 200) -> int:
    """Return the number of renewals in the first steps of a run; a renewal is part of the next step."""
    return sum(is_due(step, every) for step in range(1, steps))


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step and of a renewal, round by round.

    Records before 2026-11-20 have no renewals; their steps of EGOP contain a 200th of one.
    """

    steps: Sequence[float]
    renewals: Sequence[float]

    def until(self, step: float) -> list[float]:
        """Return the seconds of a run up to a step, for each round."""
        count = count_renewals(round(step))
        return [step * seconds + count * more for seconds, more in zip(self.steps, self.renewals, strict=True)]


Times = Mapping[tuple[str, str, str], StepTimes]


def load_times(path: Path) -> dict[tuple[str, str, str], StepTimes]:
    """Load step times by task, network and method; the last record of several counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {}
    for record in map(json.loads, lines):
        steps = record["step seconds"]
        times = StepTimes(steps, record.get("renewal seconds", [0.0] * len(steps)))
        found[record["task"], record["network"], record["method"]] = times
    return found
