"""What ``egop.diagnose`` knows of the study of prediction: its first half as a small file of the library.

Made anew by ``python -m egop_lab.experiments.prediction_evidence RECORDS src/egop/diagnostics/evidence.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from egop.runs import write_json
from egop_lab.experiments.prediction import PredictionExperiment
from egop_lab.experiments.prediction_found import HALVES, Found
from egop_lab.training.prediction import FORMS, ORIGINAL
from egop_lab.training.records import Store

__all__ = ["evidence"]


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


if __name__ == "__main__":
    records, out = map(Path, sys.argv[1:])
    write_json(out, evidence(PredictionExperiment().found(Store(records), "full")))
