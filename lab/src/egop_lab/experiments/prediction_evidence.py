"""What ``egop.diagnose`` knows of the study of prediction, its first half, and how it would have advised on the other.

``python -m egop_lab.experiments.prediction_evidence RECORDS src/egop/diagnostics/evidence.json`` writes the library's
file anew and says the latter.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_found import HALVES, Found, Half
from egop_lab.files import write_json
from egop_lab.training.prediction import FORMS, ORIGINAL
from egop_lab.training.records import Store

__all__ = ["Advice", "advice", "evidence"]

# As in the library: how many problems are called similar, and up to which part of AdamW's time a form is advised.
SIMILAR, WORTH = 8, 0.95


@dataclass(frozen=True)
class Advice:
    """What the rule of ``egop.diagnose`` says of a problem, by the curvature alone: without a look at its gradients.

    Attributes:
        problem: its id.
        form: the one that is advised; the original where none is.
        expected: the part of the original's time that it is expected to take.
        taken: what it took.
        least: what the best form took, or the original.
    """

    problem: str
    form: str
    expected: float
    taken: float
    least: float


def advice(found: Found, part: Half, step: float | None = None) -> list[Advice]:
    """The advice on the problems of a half.

    Args:
        found: the study.
        part: the half.
        step: what a step of any form takes, as a multiple of the original's; by default what it took in the study.
    """
    values, first = found.chosen.candidate.values, found.of(HALVES[0])
    result = []
    for problem in found.of(part):
        times = found.measured(problem, "times")
        similar = sorted(first, key=lambda other: abs(values[other] - values[problem]))[:SIMILAR]
        expected, taken = {ORIGINAL: 1.0}, {ORIGINAL: 1.0}
        for form in FORMS:
            if form == ORIGINAL:
                continue
            ratio = times[form]["step"] / times[ORIGINAL]["step"] if step is None else step
            usual = statistics.median_high(found.gain(other, form).share for other in similar) * ratio
            expected |= {form: usual} if usual <= WORTH else {}
            taken[form] = found.gain(problem, form).share * ratio
        best = min(expected, key=lambda form: expected[form])
        result.append(Advice(problem, best, expected[best], taken[best], min(taken.values())))
    return result


def summary(said: Sequence[Advice]) -> str:
    """How often the advice was right."""
    used = [each for each in said if each.form != ORIGINAL]
    left = [each for each in said if each.form == ORIGINAL]
    faster = sum(each.taken < 1 for each in used)
    missed = sum(each.least < 0.9 for each in left)
    return (
        f"advised for {len(used)} of {len(said)}, faster in {faster} of these; left alone {len(left)}, "
        f"of which {missed} had a form that was faster by more than a tenth"
    )


def evidence(found: Found) -> dict[str, Any]:
    """The predictor, its threshold and correlations, and for each problem of the first half its value and its gains."""
    chosen, (first, second) = found.chosen, HALVES
    problems = {
        problem: {
            "value": _rounded(chosen.candidate.values[problem]),
            "steps": {form: _rounded(found.gain(problem, form).share) for form in FORMS if form != ORIGINAL},
        }
        for problem in found.of(first)
    }
    return {
        "source": "egop-lab reproduce prediction --preset full; docs/records/prediction.jsonl",
        "predictor": chosen.candidate.name,
        "threshold": _rounded(chosen.sign * chosen.threshold),
        "correlations": [_rounded(chosen.correlations[part]) for part in (first, second)],
        "problems": problems,
    }


def _rounded(value: float) -> float:
    """With three digits."""
    return float(f"{value:.3g}")


def _main(records: str, out: str) -> None:
    found = PredictionExperiment().found(Store(Path(records)), "full")
    write_json(Path(out), evidence(found))
    for step in (None, 1.1):
        steps = "as long as in the study" if step is None else f"{step} times as long as the original's"
        print(f"{HALVES[1]}, steps {steps}: {summary(advice(found, HALVES[1], step))}.")


if __name__ == "__main__":
    _main(*sys.argv[1:])
