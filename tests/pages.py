"""Made-up diagnoses and races, and a parser for HTML."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html.parser import HTMLParser

import egop
from egop.diagnostics.curvature import Curvature
from egop.diagnostics.expected import FormDiagnosis
from egop.diagnostics.off_axes import OffAxes
from egop.diagnostics.racing import Race, Run
from egop.diagnostics.short_runs import Curve

VOID = {"meta", "link", "br", "img", "hr", "input"}


def block(name="0.weight", **numbers):
    usual = {
        "shapes": ((32, 64),), "size": 2048, "structure": "Full", "bytes": 16 * 2**20, "seconds": 1e-3, "cost": 0.5,
        "dimension": 2048, "samples": 2048, "eigenvalues": tuple(k**-1.5 for k in range(1, 2049)), "stable_rank": 52.0,
        "density": 0.57, "ratio": 0.045, "effective_dimension": 40, "one_norm": 0.4, "stability": 0.91,
        "chance": 0.02, "surprise": 900.0, "verdict": "promising", "advice": "Promising: egop.Full().",
    }  # fmt: skip
    return egop.diagnostics.BlockDiagnosis(name, **usual | numbers)


def left(name="2.weight"):
    return egop.diagnostics.BlockDiagnosis(name, ((10, 32),), 320, verdict="leave", advice="Leave it: the output head.")


def diagnosis(*blocks, partial=""):
    blocks = blocks or (block(), left())
    return egop.diagnostics.Diagnosis(
        blocks,
        None,
        2048,
        2048,
        2e-3,
        forms=(
            FormDiagnosis("fixed", (0.8, 0.9, 1.0, math.inf), step=1.2, predicted=1.25, bytes=2**20),
            FormDiagnosis("EGOP", (0.4, 0.5, 0.6, 0.9), step=1.4, predicted=1.3, bytes=2**20),
            FormDiagnosis("online two-sided", against="it leaves every weight of this model as it is"),
        ),
        curvature=Curvature(0.1, 0.2),
        here=OffAxes(0.8, 0.01, 32),
        along=OffAxes(0.01, 0.01, 15),
        rate=egop.diagnostics.FoundRate(0.02, (0.01, 0.02), (1.0, 0.5), "lr 0.02."),
        partial=partial,
    )


def curve(start, factor):
    return Curve(tuple(start * factor**k for k in range(31)), seconds=1.0)


def race(runs=4):
    made = [
        Run("AdamW", "original", 1e-3, curve(2.0, 0.97)),
        Run("AdamW", "EGOP", 1e-3, curve(2.0, 0.93)),
        Run("AdamW", "original", 1e-2, curve(2.0, 0.9)),
        Run("AdamW", "EGOP", 1e-2, curve(2.0, 0.8)),
    ]
    return Race("AdamW", "egop.EGOP", 300, 10, (1e-3, 1e-2), 0, tuple(made[:runs]))


@dataclass
class Page(HTMLParser):
    """A parsed page. A tag that is not closed, or closed twice, is an error."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self.open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} is closed where {self.open} are open"

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)
