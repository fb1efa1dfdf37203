"""The paper's claims about residual networks, and its table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from egop_lab.experiments.base import Kind

# Labels of the methods.
ADAMW, UPFRONT, PERIODIC, AROUND = "AdamW", "EGOP up-front", "EGOP each epoch", "EGOP each epoch, scale 0.01"
SOAP_ONCE, SOAP_100, SOAP_OURS, SOAP_EPOCH, SOAP_10 = (
    f"SOAP {name}" for name in ("once", "100", "100, ours", "each epoch", "every 10")
)


@dataclass(frozen=True)
class Claim:
    """The claim that a method has a smaller number than another one."""

    name: str  # the last part of the claim's id
    statement: str
    measure: str  # the compared quantity
    method: str
    other: str
    part: float | None = None  # the largest allowed ratio of the two; strictly less than one by default
    paper: str = ""  # both numbers in the paper
    threshold: str = ""  # says that the ratio is our choice
    kind: Kind = "claim"

    def holds(self, one: float, other: float) -> bool:
        return one < other if self.part is None else one <= self.part * other


# The paper's table: epochs and hours to its target.
PAPER = {
    ADAMW: (24, 5.66),
    UPFRONT: (15, 4.14),
    PERIODIC: (13, 3.62),
    SOAP_ONCE: (20, 7.06),
    SOAP_100: (13, 4.82),
    SOAP_OURS: (13, 4.82),
    SOAP_EPOCH: (14, 4.63),
}
_HOURS = {method: f"{hours:g} h" for method, (_, hours) in PAPER.items()}
_EPOCHS = {method: f"{epochs}" for method, (epochs, _) in PAPER.items()}

_FEWER, _FASTER = "EGOP each epoch needs no more epochs", "EGOP each epoch is faster"
_COMPETITIVE = 1.1

# Name, claim, compared quantity, and the methods with the smaller and the larger number; SOAP_100 stands for
# whichever SOAP is compared with.
_COMPARED = (
    ("upfront-epochs", "EGOP up-front needs fewer epochs than AdamW.", "epochs", UPFRONT, ADAMW),
    ("periodic-fewer", "EGOP each epoch needs fewer epochs than AdamW.", "epochs", PERIODIC, ADAMW),
    ("periodic-epochs", "EGOP each epoch needs no more epochs than up-front.", "epochs", PERIODIC, UPFRONT),
    ("upfront-time", "EGOP up-front needs less time than AdamW.", "seconds", UPFRONT, ADAMW),
    ("periodic-time", "EGOP each epoch needs less time than AdamW.", "seconds", PERIODIC, ADAMW),
    ("upfront-soap", "EGOP up-front needs fewer epochs than SOAP once.", "epochs", UPFRONT, SOAP_ONCE),
    ("upfront-soap-time", "EGOP up-front is faster than SOAP once.", "seconds", UPFRONT, SOAP_ONCE),
    ("upfront-often-time", "EGOP up-front is faster than {soap}.", "seconds", UPFRONT, SOAP_100),
    ("upfront-period-time", "EGOP up-front is faster than SOAP each epoch.", "seconds", UPFRONT, SOAP_EPOCH),
    ("periodic-once-time", f"{_FASTER} than SOAP once.", "seconds", PERIODIC, SOAP_ONCE),
    ("periodic-soap", f"{_FEWER} than SOAP, both each epoch.", "epochs", PERIODIC, SOAP_EPOCH),
    ("periodic-soap-time", f"{_FASTER} than SOAP each epoch.", "seconds", PERIODIC, SOAP_EPOCH),
    ("periodic-often", "EGOP each epoch needs about as many epochs as {soap}.", "epochs", PERIODIC, SOAP_100),
    ("often-time", _FASTER + " than {soap}.", "seconds", PERIODIC, SOAP_100),
    ("soap-often", "{soap} needs fewer epochs than SOAP once.", "epochs", SOAP_100, SOAP_ONCE),
    ("upfront-training", "EGOP up-front trains to a lower loss than AdamW.", "training", UPFRONT, ADAMW),
    ("periodic-training", "EGOP each epoch trains to a lower loss than up-front.", "training", PERIODIC, UPFRONT),
    ("upfront-validation", "EGOP up-front validates lower than AdamW.", "validation", UPFRONT, ADAMW),
    ("validation-often", "EGOP each epoch validates lower than {soap}.", "validation", PERIODIC, SOAP_100),
    ("upfront-accuracy", "EGOP up-front is more accurate than AdamW.", "error", UPFRONT, ADAMW),
    ("periodic-accuracy", "EGOP each epoch is more accurate than AdamW.", "error", PERIODIC, ADAMW),
    ("training-accuracy", "EGOP is more accurate than AdamW on training images.", "training error", UPFRONT, ADAMW),
    (
        "soap-training",
        "EGOP each epoch is competitive with {soap} on the training loss.",
        "training",
        PERIODIC,
        SOAP_100,
    ),
    ("soap-accuracy", "The accuracy of EGOP each epoch is competitive with {soap}'s.", "error", PERIODIC, SOAP_100),
)


def _paper_numbers(measure: str, method: str, other: str) -> str:
    if measure == "validation" and other == SOAP_100:
        return "1.19 and 1.22"
    numbers = {"epochs": _EPOCHS, "seconds": _HOURS}.get(measure)
    return f"{numbers[method]} and {numbers[other]}" if numbers else ""


# Largest allowed ratio by claim; strictly less than one by default.
_PARTS = {"periodic-epochs": 1.0, "periodic-soap": 1.0} | dict.fromkeys(
    ("periodic-often", "soap-training", "soap-accuracy"), _COMPETITIVE
)
# Descriptions of the ratios that are our choice, by measure.
_NEARLY = {
    "epochs": f"about: at most {_COMPETITIVE:g} times as many",
    "training": f"competitive: at most {_COMPETITIVE:g} times its loss",
    "error": f"competitive: at most {_COMPETITIVE:g} times its wrong answers",
}


def claims(soap: str) -> Iterator[Claim]:
    """Return all claims, with the SOAP that stands for SOAP 100."""
    for name, words, measure, method, other in _COMPARED:
        one, two = (soap if each == SOAP_100 else each for each in (method, other))
        part, paper = _PARTS.get(name), _paper_numbers(measure, method, other)
        threshold = _NEARLY[measure] if part == _COMPETITIVE else ""
        yield Claim(name, words.format(soap=soap), measure, one, two, part, paper, threshold)
    words = "EGOP each epoch validates lower than SOAP each epoch."
    yield Claim("validation", words, "validation", PERIODIC, SOAP_EPOCH, kind="reading")
