"""What trainings gained elsewhere: the problems of the lab's study of prediction that its predictor was chosen on.

``evidence.json`` is written by the lab (``egop_lab.experiments.prediction_evidence``) from the records of the study.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["SIMILAR", "Evidence", "Problem", "evidence"]

# How many problems of the study one is compared with.
SIMILAR = 8


@dataclass(frozen=True)
class Problem:
    """A problem of the study.

    Attributes:
        name: its id there.
        value: of the predictor.
        steps: by form, the share of AdamW's steps until the loss was as low as AdamW's last one, each at its own tuned
            rate; infinite where it never was.
    """

    name: str
    value: float
    steps: Mapping[str, float]


@dataclass(frozen=True)
class Evidence:
    """The study's first half, and how its predictor did.

    Attributes:
        predictor: its name there.
        threshold: below it no problem gained more than a tenth.
        correlations: of the predictor's ranks with the gain's, on the half that it was chosen on and on the other.
        problems: those of the first half.
    """

    predictor: str
    threshold: float
    correlations: tuple[float, float]
    problems: tuple[Problem, ...]

    def similar(self, value: float | None) -> list[Problem]:
        """The problems whose values are nearest; all of them where the value is not known."""
        if value is None:
            return list(self.problems)
        return sorted(self.problems, key=lambda problem: abs(problem.value - value))[:SIMILAR]


@functools.cache
def evidence() -> Evidence:
    """What ships with the library."""
    read: dict[str, Any] = json.loads(resources.files(__package__).joinpath("evidence.json").read_text("utf-8"))
    problems = []
    for name, row in read["problems"].items():
        steps = {form: math.inf if share is None else share for form, share in row["steps"].items()}
        problems.append(Problem(name, row["value"], steps))
    chosen, held_out = read["correlations"]
    return Evidence(read["predictor"], read["threshold"], (chosen, held_out), tuple(problems))
