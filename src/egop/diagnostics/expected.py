"""What a form of training is expected to bring, and what it takes: as plain values and as a row of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from egop.diagnostics.forms import FIXED
from egop.formatting import format_bytes

__all__ = ["FORM_COLUMNS", "TITLES", "FormDiagnosis", "middle_half", "share"]

# What a form is called where people read.
TITLES = {
    FIXED: "AdamW in an estimated basis",
    "online one-sided": "AdamW with Online, input side",
    "online two-sided": "AdamW with Online, both sides",
    "EGOP": "egop.EGOP",
}
# The headings of a table of forms, and what each column means.
FORM_COLUMNS = {
    "form": "what takes the place of AdamW",
    "steps": "the part of AdamW's steps until a loss as low as AdamW's last one: the median of similar problems of a "
    "study, and the middle half of them",
    "step time": "how long a training step takes, as a multiple of one with AdamW, measured here",
    "predicted": "the same from shapes and the speed of products on this machine",
    "whole time": "the two multiplied: the part of AdamW's time",
    "faster": "for how many of the similar problems that is less than all of AdamW's time",
    "memory": "what the optimizer holds more than AdamW",
}
# A form is advised when its expected time is at most this part of AdamW's.
WORTH = 0.95


@dataclass(frozen=True)
class FormDiagnosis:
    """What one form of training is expected to bring, and what it takes here.

    Attributes:
        name: ``"fixed"``, ``"online one-sided"``, ``"online two-sided"`` or ``"EGOP"``.
        steps: of similar problems, the part of AdamW's steps that it needed; infinite where it never was as good.
        step: how long a training step takes, as a multiple of one with AdamW, measured here in turn.
        predicted: the same by the cost model.
        bytes: what the optimizer holds more than AdamW.
        before: seconds before the first step, of AdamW's training time: the share that draws take; 0 if not known.
        against: why it cannot be advised, whatever it takes; empty where it can.
    """

    name: str
    steps: tuple[float, ...] = ()
    step: float | None = None
    predicted: float | None = None
    bytes: int = 0
    before: float = 0.0
    against: str = ""

    @property
    def times(self) -> tuple[float, ...]:
        """Of similar problems, the part of AdamW's time that it would have needed with steps as long as here."""
        return tuple(self.before + share * self.step for share in self.steps) if self.step is not None else ()

    @property
    def time(self) -> float:
        """The median of these, of two the longer one; infinite where nothing is known."""
        return statistics.median_high(self.times) if self.times else math.inf

    @property
    def faster(self) -> int:
        """For how many of them that is less than AdamW's time."""
        return sum(time < 1 for time in self.times)

    @property
    def is_worth_it(self) -> bool:
        """Whether it can be advised."""
        return not self.against and self.time <= WORTH

    def cells(self) -> list[str]:
        """Its row in a table, in the order of :data:`FORM_COLUMNS`."""
        known = self.step is not None
        return [
            TITLES[self.name],
            _quartiles(self.steps),
            f"{self.step:.2f} ×" if known else "",
            f"{self.predicted:.2f} ×" if self.predicted is not None else "",
            _quartiles(self.times),
            f"{self.faster} of {len(self.times)}" if self.times else "",
            format_bytes(self.bytes) if known else "",
        ]


def share(value: float) -> str:
    """A part in words: two digits, or never."""
    return f"{value:.2f}" if math.isfinite(value) else "never"


def _quartiles(values: Sequence[float]) -> str:
    """The median and the middle half."""
    if not values:
        return ""
    low, high = middle_half(values)
    return f"{share(statistics.median_high(values))} ({share(low)} to {share(high)})"


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Where the middle half of them begins and ends."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
