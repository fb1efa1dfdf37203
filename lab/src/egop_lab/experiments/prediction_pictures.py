"""Picture and tables of the study of prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from egop_lab.experiments.base import Table
from egop_lab.experiments.prediction_found import HALVES, Found, Gain, half
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.prediction import FORMS, ORIGINAL


def pictures(found: Found) -> list[Picture]:
    """Predicted against measured gain."""
    chosen = found.chosen
    values = {problem: chosen.sign * chosen.candidate.values[problem] for problem in found.complete}
    series = []
    for part in HALVES:
        known = [problem for problem in found.of(part) if math.isfinite(values[problem])]
        label = f"{part}: rank correlation {chosen.correlations[part]:.2f}"
        series.append(Series(label, [values[each] for each in known], [found.best_gain(each) for each in known]))
    name = chosen.candidate.name if chosen.sign > 0 else f"minus {chosen.candidate.name}"
    panel = Panel("Predicted and measured", name, "part of the steps saved", series, yscale="linear", kind="points")
    caption = (
        "A point for each problem: what was known before the training, and the part of the original's steps that the "
        f"best form saves. Leave it: left of {chosen.threshold:.3g}."
    )
    return [Picture("prediction", caption, [panel])]


def tables(found: Found) -> list[Table]:
    """Every problem, and every candidate."""
    return [_problems(found), _candidates(found)]


def _problems(found: Found) -> Table:
    forms = [form for form in FORMS if form != ORIGINAL]
    chosen = found.chosen
    rows = []
    for problem in sorted(found.complete, key=lambda problem: -found.best_gain(problem)):
        gains = [found.gain(problem, form) for form in forms]
        value = chosen.sign * chosen.candidate.values[problem]
        advice = "leave it" if value < chosen.threshold else "try it"
        kind = found.settings["problems"][problem]["kind"]
        rows.append((problem, kind, half(problem), *map(_words, gains), found.best(problem), f"{value:.2g}", advice))
    title = (
        "What each form gains: the share of the original's steps, and of its time, to the original's last loss; the "
        "original's last loss by the form's"
    )
    return Table(title, ("problem", "kind", "half", *forms, "best", "predictor", "advice"), tuple(rows))


def _words(gain: Gain) -> str:
    return f"{_share(gain.share)}, {_share(gain.time)}; {math.exp(min(gain.ratio, 99)):.3g}"


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "never"


def _candidates(found: Found) -> Table:
    rows = []
    for candidate in sorted(found.candidates, key=lambda each: -_size(found.correlation(each, HALVES[0]))):
        correlations: Sequence[str] = [f"{found.correlation(candidate, part):.2f}" for part in HALVES]
        mark = "chosen" if candidate.name == found.chosen.candidate.name else ""
        rows.append((candidate.name, *correlations, f"{candidate.budget:.0%}", mark))
    header = ("candidate", *HALVES, "trial steps, of a training", "")
    return Table("Rank correlations with the measured gain of the best form", header, tuple(rows))


def _size(correlation: float) -> float:
    return abs(correlation) if correlation == correlation else -1.0
