"""Why claims fail: those with one cause are one finding, and each finding is one of four kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from egop_lab.experiments.base import Judgement

Reason = Literal["not reproducible here", "another setting", "our tuning", "a strict rule", "unexplained"]

HEADER = ("finding", "which it is", "claims and margins")


@dataclass(frozen=True)
class Finding:
    """A cause, and the claims that fail because of it."""

    words: str
    reason: Reason
    claims: tuple[str, ...]


def _name(experiment: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{experiment}/{name}" for name in names)


FINDINGS = (
    Finding(
        "With fine grids of learning rates every method finds the optimum of the matrix factorisation, so that none "
        "can end lower.",
        "our tuning",
        _name("matrix-factorization", *(f"{optimizer}-{what}" for optimizer in ("Adam", "Adagrad")
                                        for what in ("lower", "closer", "without-schedule"))),
    ),
    Finding(
        "In float64, and annealed, Adam reaches the rounding floor of the linear network in either coordinates; the "
        "paper does not name its precision.",
        "another setting",
        _name("linear-networks", "Adam-lower", "Adam-faster", "Adam-validation"),
    ),
    Finding(
        "A basis for the first layer alone already gives Adam most of the gain.",
        "not reproducible here",
        _name("linear-networks", "Adam-first-layer"),
    ),
    Finding(
        "SGD with momentum is better than Adagrad once its learning rate is tuned as finely, up to where it diverges.",
        "our tuning",
        _name("linear-networks", "adaptive"),
    ),
    Finding(
        "Which learning rate Adagrad has decides: the one that is best on the reported trials is not the one that is "
        "best on tuning trials, with which both claims hold.",
        "our tuning",
        _name("digits", "Adagrad-below-sgd", "Adagrad-faster-than-sgd"),
    ),
    Finding(
        "The spectra of the two first layers are far apart, whichever way the weights are drawn.",
        "not reproducible here",
        _name("layer-spectra", "similar"),
    ),
    Finding(
        "Adam gains about as much with a quarter of d gradients as with d or 2 d, and more with 4 d only; four trials "
        "at one learning rate.",
        "a strict rule",
        _name("sample-size", "Adam-suffices"),
    ),
    Finding(
        "EGOP helps Adam a little where the paper sees no change; no figure would show it.",
        "a strict rule",
        _name("convex", "logistic-Adam-unchanged"),
    ),
    Finding(
        "The gain saturates from the second smallest rank on, and the largest one is no better.",
        "not reproducible here",
        _name("fashion-mnist", "grows"),
    ),
    Finding(
        "The smallest rank is a few validation images behind original coordinates.",
        "a strict rule",
        _name("fashion-mnist", "r50-accuracy"),
    ),
    Finding(
        "On a faster GPU and with our settings original coordinates are about as fast by the clock as the best rank.",
        "another setting",
        _name("fashion-mnist", "wall-clock", "sooner"),
    ),
    Finding(
        "EGOP each epoch falls behind SOAP towards the end of the training. An epoch of Imagenette has a hundredth of "
        "the steps of one of ImageNet, so its basis is renewed far more often, and central crops make losses jump.",
        "another setting",
        _name("resnet", "periodic-epochs", "periodic-once-time", "periodic-soap", "periodic-soap-time",
              "periodic-often", "often-time", "validation-often", "soap-training"),
    ),
    Finding(
        "EGOP up-front and SOAP once are close to each other, in the opposite order.",
        "another setting",
        _name("resnet", "upfront-soap"),
    ),
)  # fmt: skip


def find_cause(item: Judgement) -> Finding | None:
    """Return the finding that a claim of the paper belongs to if it fails; None if it does not fail."""
    if item.kind != "claim" or item.verdict != "does not hold":
        return None
    unknown = Finding(item.statement, "unexplained", (item.id,))
    return next((finding for finding in FINDINGS if item.id in finding.claims), unknown)


def group_failures(judged: Sequence[Judgement]) -> list[tuple[str, str, str]]:
    """Return a row for each finding: the cause, which of the four it is, and its claims with their margins."""
    rows: dict[Finding, list[Judgement]] = {}
    for item in judged:
        if (finding := find_cause(item)) is not None:
            rows.setdefault(finding, []).append(item)
    return [
        (finding.words, finding.reason, "; ".join(f"{item.id} ({_format_margin(item)})" for item in items))
        for finding, items in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]


def _format_margin(item: Judgement) -> str:
    """Say by how much a claim fails, or what was measured where no two numbers are compared."""
    if item.margin is None:
        return item.finding.removesuffix(".")
    factor = 10 ** abs(item.margin)
    return "equal" if factor < 1.001 else f"a factor of {factor:.3g} the other way"
