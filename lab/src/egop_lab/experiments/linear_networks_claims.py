"""The paper's claims about linear networks, judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from egop_lab.experiments.base import Beside, Judged, Verdict, compare, decades, verdict
from egop_lab.experiments.curves import by_rate, first_below, median, quartiles, same_in_both
from egop_lab.experiments.swept import SweptExperiment, by_both
from egop_lab.training.context import Preset
from egop_lab.training.linear import BLOCK, FIRST
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import EGOP, ORIGINAL

Score = Callable[[Mapping[str, Any]], float]

KINDS = {EGOP: "all parameters in one basis", BLOCK: "a basis for each layer", FIRST: "the first layer alone"}
ADAPTIVE = ("Adam", "Adagrad")

_EQUIVARIANT = ("SGD", "SGD+momentum")
_FAR = 10.0
_COMPARABLE = 0.5  # the share of a gain, in decades, from which on another gain is comparable
_FLOOR = 1e-30  # of losses in float64: what is below is rounding
_LEVELS = (1e-5, 1e-10, 1e-15, 1e-20, 1e-25)  # of the training loss, for counting epochs: down to the floor


@dataclass(frozen=True)
class Found:
    """The records of a preset.

    Attributes:
        experiment: whose they are.
        store: where they are.
        preset: which of them.
    """

    experiment: SweptExperiment
    store: Store
    preset: Preset

    def judged(self) -> list[Judged]:
        """Judge each claim."""
        judged = []
        for optimizer in ADAPTIVE:
            judged.append(by_both(partial(self._lower, optimizer)))
            judged.append(self._faster(optimizer))
            judged.append(self._robust(optimizer))
            judged.append(by_both(partial(self._validated, optimizer)))
            judged.append(self._block_lower(optimizer))
            judged.append(self._share(optimizer, BLOCK, wanted=True))
            judged.append(self._share(optimizer, FIRST, wanted=optimizer == "Adagrad"))
        judged.append(by_both(self._adaptive))
        judged += [self._same(optimizer) for optimizer in _EQUIVARIANT]
        return judged

    def _median(self, optimizer: str, coordinates: str, score: Score, apart: bool = True) -> float:
        runs = self.experiment.reported(self.store, self.preset, optimizer, coordinates, apart=apart)
        return median([score(run.result) for run in runs])

    def _medians(self, optimizer: str, coordinates: str) -> dict[float, float]:
        """Return the final loss by learning rate, no lower than the floor; infinite if it diverged."""
        bands = by_rate(self.experiment.fresh(self.store, self.preset, optimizer, coordinates), final)
        return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in bands.items()}

    def _lower(self, optimizer: str, apart: bool) -> Judged:
        turned, original = (self._median(optimizer, kind, final, apart=apart) for kind in (EGOP, ORIGINAL))
        rate = self.experiment.chosen(self.store, self.preset, optimizer, apart=apart)
        return Judged(
            f"linear-networks/{optimizer}-lower",
            f"EGOP {optimizer} ends at a significantly lower training loss than {optimizer}.",
            verdict(max(turned, _FLOOR) * _FAR <= original),
            f"EGOP: {turned:.3g}; original: {original:.3g}, learning rate {rate:g}{_floors(turned, original)}.",
            threshold=f"significantly: by a factor of {_FAR:g}",
            margin=decades(turned, original, _FLOOR),
        )

    def _validated(self, optimizer: str, apart: bool) -> Judged:
        turned, original = (self._median(optimizer, kind, validation, apart=apart) for kind in (EGOP, ORIGINAL))
        return Judged(
            f"linear-networks/{optimizer}-validation",
            f"EGOP {optimizer} reaches a lower validation loss than {optimizer}.",
            verdict(max(turned, _FLOOR) < original),
            f"EGOP: {turned:.3g}; original: {original:.3g}{_floors(turned, original)}.",
            margin=decades(turned, original, _FLOOR),
        )

    def _faster(self, optimizer: str) -> Judged:
        """Compare epoch by epoch, as in the figure; curves are recorded at the rate of the tuning trials only."""
        runs = {kind: self.experiment.reported(self.store, self.preset, optimizer, kind) for kind in (EGOP, ORIGINAL)}
        curves = [quartiles([run.result["loss"] for run in own])[1] for own in runs.values()]
        epochs = runs[EGOP][0].result["epoch"]
        # Both have the same start; where both are at the floor there is nothing to compare.
        pairs = [(epoch, a, b) for epoch, a, b in zip(epochs, *curves, strict=True) if epoch and max(a, b) > _FLOOR]
        better = [a < b for _, a, b in pairs]
        judged = _mostly(f"{optimizer}-faster", f"EGOP {optimizer} converges faster than {optimizer}.", better)
        last = next((epoch for epoch, a, b in reversed(pairs) if a >= b), None)
        finding = f"Lower at {sum(better)} of {len(better)} recorded epochs until both are at the rounding floor"
        finding += "." if last is None else f", the last time that it is not at epoch {last}."
        levels = _to_levels(epochs, *curves)
        differs = () if levels.verdict == judged.verdict else (levels,)
        return replace(judged, found=finding, beside=differs)

    def _robust(self, optimizer: str) -> Judged:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, EGOP))
        better = [turned[rate] < original[rate] for rate in turned]
        return _mostly(f"{optimizer}-robust", f"EGOP {optimizer} is lower over a range of learning rates.", better)

    def _block_lower(self, optimizer: str) -> Judged:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, BLOCK))
        words = f"EGOP {optimizer} with {KINDS[BLOCK]} ends at a lower training loss than {optimizer}, rate by rate."
        return _mostly(f"{optimizer}-block-lower", words, [turned[rate] < original[rate] for rate in turned])

    def _share(self, optimizer: str, kind: str, *, wanted: bool) -> Judged:
        """Compare gains in decades, as in the figure: rate by rate, and their mean over rates."""
        original, whole, part = (self._medians(optimizer, coordinates) for coordinates in (ORIGINAL, EGOP, kind))
        rates = [rate for rate in part if max(original[rate], whole[rate], part[rate]) < math.inf]
        gain, part_gain = (
            sum(math.log10(original[rate] / losses[rate]) for rate in rates) / max(len(rates), 1)
            for losses in (whole, part)
        )
        like = "comparable to" if wanted else "much smaller than"
        ends = [self._median(optimizer, each, final) for each in (ORIGINAL, EGOP, kind)]
        at_one = (
            f"Final losses of original coordinates, {KINDS[EGOP]}, {KINDS[kind]}: "
            f"{ends[0]:.3g}, {ends[1]:.3g}, {ends[2]:.3g}{_floors(*ends)}."
        )
        one_gain, one_part = (
            math.log10(max(ends[0], _FLOOR) / max(end, _FLOOR)) if max(ends) < math.inf else math.nan
            for end in ends[1:]
        )
        judged = Judged(
            f"linear-networks/{optimizer}-{'block' if kind == BLOCK else 'first-layer'}",
            f"EGOP {optimizer}, {KINDS[kind]}: a gain {like} that of {KINDS[EGOP]}.",
            verdict(bool(rates) and gain > 0 and (part_gain >= _COMPARABLE * gain) == wanted),
            f"Mean over {len(rates)} learning rates: {part_gain:.1f} decades below original coordinates, against "
            f"{gain:.1f} for {KINDS[EGOP]}.",
            threshold=f"comparable: from {_COMPARABLE:.0%} of it",
        )
        other: Verdict = "cannot be judged"
        if one_gain > 0:
            other = verdict((one_part >= _COMPARABLE * one_gain) == wanted)
        if other == judged.verdict:
            return judged
        rate = self.experiment.chosen(self.store, self.preset, optimizer)
        return replace(judged, beside=(Beside(f"at the chosen rate alone, {rate:g}", other, at_one),))

    def _same(self, optimizer: str) -> Judged:
        """Compare the final losses over all rates: the chosen one may be so large that some trials diverge."""
        finals: dict[tuple[int, float], dict[str, float]] = {}
        for kind in (ORIGINAL, EGOP):
            for run in self.experiment.fresh(self.store, self.preset, optimizer, kind):
                finals.setdefault((run.config["seed"], run.config["lr"]), {})[kind] = final(run.result)
        kept = {place: pair for place, pair in finals.items() if any(map(math.isfinite, pair.values()))}
        original, turned = (
            [
                Record({"seed": seed}, {"final": [pair[kind] for (own, _), pair in kept.items() if own == seed]})
                for seed in sorted({own for own, _ in kept})
            ]
            for kind in (ORIGINAL, EGOP)
        )
        return same_in_both(f"linear-networks/{optimizer}-same", optimizer, original, turned, "final", 0.05)

    def _adaptive(self, apart: bool) -> Judged:
        pairs = [(name, kind) for name in ADAPTIVE for kind in (ORIGINAL, EGOP)]
        finals = {f"{kind} {name}": self._median(name, kind, final, apart) for name, kind in pairs}
        worst = max(finals, key=lambda name: finals[name])
        rivals = {name: self._median(name, ORIGINAL, final, apart) for name in _EQUIVARIANT}
        best = min(rivals, key=lambda name: rivals[name])
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinates."
        judged = compare("linear-networks/adaptive", words, (worst, finals[worst]), (best, rivals[best]))
        rate = self.experiment.chosen(self.store, self.preset, best, apart=apart)
        larger = [tried for tried in self._medians(best, ORIGINAL) if tried > rate]
        end = (
            f" Its rate is {rate:g}; from {min(larger):g} on it diverges."
            if larger and not math.isfinite(self._medians(best, ORIGINAL)[min(larger)])
            else f" Its rate is {rate:g}{', the end of its grid' if not larger else ''}."
        )
        return replace(judged, found=judged.found + end)


def _mostly(name: str, words: str, better: Sequence[bool]) -> Judged:
    """Judge a claim that is to hold rate by rate, or epoch by epoch."""
    return Judged(
        f"linear-networks/{name}",
        words,
        verdict(sum(better) > 0.75 * len(better)),
        f"Lower at {sum(better)} of {len(better)} learning rates.",
        threshold="at more than three quarters of them",
    )


def _to_levels(epochs: Sequence[int], turned: Sequence[float], original: Sequence[float]) -> Beside:
    """Compare the epochs to several losses; those to the rounding floor are named but not counted."""
    levels = (*_LEVELS, _FLOOR)
    places = [[first_below(curve, level) for level in levels] for curve in (turned, original)]
    needed = [[math.inf if place is None else epochs[place] for place in own] for own in places]
    pairs = list(zip(*needed, strict=True))
    shown = [f"{level:g}: {_epochs(a)} and {_epochs(b)}" for level, (a, b) in zip(levels, pairs, strict=True)]
    reached = [(a, b) for a, b in pairs[:-1] if min(a, b) < math.inf]
    return Beside(
        "epochs to some losses: fewer to one, more to none",
        verdict(any(a < b for a, b in reached) and all(a <= b for a, b in reached)),
        f"EGOP and original, by {epochs[1]}: {'; '.join(shown[:-1])}. Not counted, the rounding floor, {shown[-1]}.",
    )


def final(result: Mapping[str, Any]) -> float:
    """Return the final training loss."""
    return float(result["final"])


def validation(result: Mapping[str, Any]) -> float:
    """Return the best validation loss."""
    return float(result["best validation"])


def _epochs(count: float) -> str:
    return f"{count:.0f}" if math.isfinite(count) else "never"


def _floors(*losses: float) -> str:
    """Return a remark if the losses are at the rounding floor."""
    if max(losses) <= _FLOOR:
        return "; both at the rounding floor" if len(losses) == 2 else "; all at the rounding floor"
    return ""
