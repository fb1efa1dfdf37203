"""Diagnoses and races made up for the tests of pages, and what a page consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import egop
from egop.diagnostics.racing import Race
from egop.runs.records import Curve, Run

VOID = {"meta", "link", "br", "img", "hr", "input"}


def block(name="0.weight", **numbers):
    usual = {
        "shapes": ((32, 64),), "size": 2048, "structure": "Full", "bytes": 16 * 2**20, "seconds": 1e-3, "cost": 0.5,
        "dimension": 2048, "samples": 2048, "eigenvalues": tuple(k**-1.5 for k in range(1, 2049)), "stable_rank": 52.0,
        "density": 0.57, "ratio": 0.045, "effective_dimension": 40, "one_norm": 0.4, "stability": 0.91,
        "chance": 0.02, "surprise": 900.0, "verdict": "use", "advice": "Use egop.Full().",
    }  # fmt: skip
    return egop.BlockDiagnosis(name, **usual | numbers)


def left(name="2.weight"):
    return egop.BlockDiagnosis(name, ((10, 32),), 320, verdict="leave", advice="Leave it: the output head.")


def diagnosis(*blocks, partial=""):
    blocks = blocks or (block(), left())
    return egop.Diagnosis(blocks, None, 2048, 2048, 2e-3, "estimate once before training.", False, partial)


def curve(start, factor):
    return Curve(tuple(start * factor**k for k in range(31)), seconds=1.0)


def race(runs=4):
    made = [
        Run("AdamW", "original", 1e-3, curve(2.0, 0.97)),
        Run("AdamW", "EGOP", 1e-3, curve(2.0, 0.93)),
        Run("AdamW", "original", 1e-2, curve(2.0, 0.9)),
        Run("AdamW", "EGOP", 1e-2, curve(2.0, 0.8)),
    ]
    return Race("AdamW", "the estimated basis", 300, 10, (1e-3, 1e-2), 0, tuple(made[:runs]))


@dataclass
class Page(HTMLParser):
    """A page taken apart; a tag that is not closed, or closed twice, is an error."""

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
