"""The paper's claims about linear networks, judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from egop_lab.experiments.base import Alternative, Judgement, Verdict, compare, count_decades, to_verdict
from egop_lab.experiments.curves import check_same_in_both, first_below, median, quartiles, quartiles_by_rate
from egop_lab.experiments.sweep_experiment import SweepExperiment, judge_by_both_rules
from egop_lab.training.context import Preset
from egop_lab.training.linear import BLOCK, FIRST
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import EGOP, ORIGINAL

Score = Callable[[Mapping[str, Any]], float]

KINDS = {EGOP: "all parameters in one basis", BLOCK: "a basis for each layer", FIRST: "the first layer alone"}
ADAPTIVE = ("Adam", "Adagrad")

_EQUIVARIANT = ("SGD", "SGD+momentum")
_FAR = 10.0
_COMPARABLE = 0.5  # gains in decades are comparable from this ratio on
_FLOOR = 1e-30  # float64 losses below this are rounding
_LEVELS = (1e-5, 1e-10, 1e-15, 1e-20, 1e-25)  # training losses for counting epochs, down to the floor


@dataclass(frozen=True)
class Claims:
    """The records of a preset."""

    experiment: SweepExperiment
    store: Store
    preset: Preset

    def judge_all(self) -> list[Judgement]:
        """Judge each claim."""
        judged = []
        for optimizer in ADAPTIVE:
            judged.append(judge_by_both_rules(partial(self._judge_lower, optimizer)))
            judged.append(self._judge_faster(optimizer))
            judged.append(self._judge_robust(optimizer))
            judged.append(judge_by_both_rules(partial(self._judge_validation, optimizer)))
            judged.append(self._judge_block(optimizer))
            judged.append(self._judge_share(optimizer, BLOCK, wanted=True))
            judged.append(self._judge_share(optimizer, FIRST, wanted=optimizer == "Adagrad"))
        judged.append(judge_by_both_rules(self._judge_adaptive))
        judged += [self._check_same(optimizer) for optimizer in _EQUIVARIANT]
        return judged

    def _median(self, optimizer: str, coordinates: str, score: Score, separate: bool = True) -> float:
        runs = self.experiment.reported_runs(self.store, self.preset, optimizer, coordinates, separate=separate)
        return median([score(run.result) for run in runs])

    def _medians(self, optimizer: str, coordinates: str) -> dict[float, float]:
        """Return the final loss by learning rate, no lower than the floor; infinite if it diverged."""
        bands = quartiles_by_rate(
            self.experiment.fresh_runs(self.store, self.preset, optimizer, coordinates), final_loss
        )
        return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in bands.items()}

    def _judge_lower(self, optimizer: str, separate: bool) -> Judgement:
        turned, original = (self._median(optimizer, kind, final_loss, separate=separate) for kind in (EGOP, ORIGINAL))
        rate = self.experiment.choose_rate(self.store, self.preset, optimizer, separate=separate)
        return Judgement(
            f"linear-networks/{optimizer}-lower",
            f"EGOP {optimizer} ends at a significantly lower training loss than {optimizer}.",
            to_verdict(max(turned, _FLOOR) * _FAR <= original),
            f"EGOP: {turned:.3g}; original: {original:.3g}, learning rate {rate:g}{_describe_floor(turned, original)}.",
            threshold=f"significantly: by a factor of {_FAR:g}",
            margin=count_decades(turned, original, _FLOOR),
        )

    def _judge_validation(self, optimizer: str, separate: bool) -> Judgement:
        turned, original = (
            self._median(optimizer, kind, best_validation_loss, separate=separate) for kind in (EGOP, ORIGINAL)
        )
        return Judgement(
            f"linear-networks/{optimizer}-validation",
            f"EGOP {optimizer} reaches a lower validation loss than {optimizer}.",
            to_verdict(max(turned, _FLOOR) < original),
            f"EGOP: {turned:.3g}; original: {original:.3g}{_describe_floor(turned, original)}.",
            margin=count_decades(turned, original, _FLOOR),
        )

    def _judge_faster(self, optimizer: str) -> Judgement:
        """Compare epoch by epoch, as in the figure; curves are recorded at the rate of the tuning trials only."""
        runs = {
            kind: self.experiment.reported_runs(self.store, self.preset, optimizer, kind) for kind in (EGOP, ORIGINAL)
        }
        curves = [quartiles([run.result["loss"] for run in own])[1] for own in runs.values()]
        epochs = runs[EGOP][0].result["epoch"]
        # Skip the common start and epochs with both losses at the floor.
        pairs = [(epoch, a, b) for epoch, a, b in zip(epochs, *curves, strict=True) if epoch and max(a, b) > _FLOOR]
        better = [a < b for _, a, b in pairs]
        judged = _judge_mostly(f"{optimizer}-faster", f"EGOP {optimizer} converges faster than {optimizer}.", better)
        last = next((epoch for epoch, a, b in reversed(pairs) if a >= b), None)
        finding = f"Lower at {sum(better)} of {len(better)} recorded epochs until both are at the rounding floor"
        finding += "." if last is None else f", the last time that it is not at epoch {last}."
        levels = _compare_levels(epochs, *curves)
        differs = () if levels.verdict == judged.verdict else (levels,)
        return replace(judged, finding=finding, alternatives=differs)

    def _judge_robust(self, optimizer: str) -> Judgement:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, EGOP))
        better = [turned[rate] < original[rate] for rate in turned]
        return _judge_mostly(
            f"{optimizer}-robust", f"EGOP {optimizer} is lower over a range of learning rates.", better
        )

    def _judge_block(self, optimizer: str) -> Judgement:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, BLOCK))
        words = f"EGOP {optimizer} with {KINDS[BLOCK]} ends at a lower training loss than {optimizer}, rate by rate."
        return _judge_mostly(f"{optimizer}-block-lower", words, [turned[rate] < original[rate] for rate in turned])

    def _judge_share(self, optimizer: str, kind: str, *, wanted: bool) -> Judgement:
        """Compare gains in decades, as in the figure: rate by rate, and their mean over rates."""
        original, whole, part = (self._medians(optimizer, coordinates) for coordinates in (ORIGINAL, EGOP, kind))
        rates = [rate for rate in part if max(original[rate], whole[rate], part[rate]) < math.inf]
        gain, part_gain = (
            sum(math.log10(original[rate] / losses[rate]) for rate in rates) / max(len(rates), 1)
            for losses in (whole, part)
        )
        like = "comparable to" if wanted else "much smaller than"
        ends = [self._median(optimizer, each, final_loss) for each in (ORIGINAL, EGOP, kind)]
        at_one = (
            f"Final losses of original coordinates, {KINDS[EGOP]}, {KINDS[kind]}: "
            f"{ends[0]:.3g}, {ends[1]:.3g}, {ends[2]:.3g}{_describe_floor(*ends)}."
        )
        one_gain, one_part = (
            math.log10(max(ends[0], _FLOOR) / max(end, _FLOOR)) if max(ends) < math.inf else math.nan
            for end in ends[1:]
        )
        judged = Judgement(
            f"linear-networks/{optimizer}-{'block' if kind == BLOCK else 'first-layer'}",
            f"EGOP {optimizer}, {KINDS[kind]}: a gain {like} that of {KINDS[EGOP]}.",
            to_verdict(bool(rates) and gain > 0 and (part_gain >= _COMPARABLE * gain) == wanted),
            f"Mean over {len(rates)} learning rates: {part_gain:.1f} decades below original coordinates, against "
            f"{gain:.1f} for {KINDS[EGOP]}.",
            threshold=f"comparable: from {_COMPARABLE:.0%} of it",
        )
        other: Verdict = "cannot be judged"
        if one_gain > 0:
            other = to_verdict((one_part >= _COMPARABLE * one_gain) == wanted)
        if other == judged.verdict:
            return judged
        rate = self.experiment.choose_rate(self.store, self.preset, optimizer)
        return replace(judged, alternatives=(Alternative(f"at the chosen rate alone, {rate:g}", other, at_one),))

    def _check_same(self, optimizer: str) -> Judgement:
        """Compare the final losses over all rates: the chosen one may be so large that some trials diverge."""
        finals: dict[tuple[int, float], dict[str, float]] = {}
        for kind in (ORIGINAL, EGOP):
            for run in self.experiment.fresh_runs(self.store, self.preset, optimizer, kind):
                finals.setdefault((run.config["seed"], run.config["lr"]), {})[kind] = final_loss(run.result)
        kept = {place: pair for place, pair in finals.items() if any(map(math.isfinite, pair.values()))}
        original, turned = (
            [
                Record({"seed": seed}, {"final": [pair[kind] for (own, _), pair in kept.items() if own == seed]})
                for seed in sorted({own for own, _ in kept})
            ]
            for kind in (ORIGINAL, EGOP)
        )
        return check_same_in_both(f"linear-networks/{optimizer}-same", optimizer, original, turned, "final", 0.05)

    def _judge_adaptive(self, separate: bool) -> Judgement:
        pairs = [(name, kind) for name in ADAPTIVE for kind in (ORIGINAL, EGOP)]
        finals = {f"{kind} {name}": self._median(name, kind, final_loss, separate) for name, kind in pairs}
        worst = max(finals, key=lambda name: finals[name])
        rivals = {name: self._median(name, ORIGINAL, final_loss, separate) for name in _EQUIVARIANT}
        best = min(rivals, key=lambda name: rivals[name])
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinates."
        judged = compare("linear-networks/adaptive", words, (worst, finals[worst]), (best, rivals[best]))
        rate = self.experiment.choose_rate(self.store, self.preset, best, separate=separate)
        larger = [tried for tried in self._medians(best, ORIGINAL) if tried > rate]
        end = (
            f" Its rate is {rate:g}; from {min(larger):g} on it diverges."
            if larger and not math.isfinite(self._medians(best, ORIGINAL)[min(larger)])
            else f" Its rate is {rate:g}{', the end of its grid' if not larger else ''}."
        )
        return replace(judged, finding=judged.finding + end)


def _judge_mostly(name: str, words: str, better: Sequence[bool]) -> Judgement:
    """Judge a claim that is to hold rate by rate, or epoch by epoch."""
    return Judgement(
        f"linear-networks/{name}",
        words,
        to_verdict(sum(better) > 0.75 * len(better)),
        f"Lower at {sum(better)} of {len(better)} learning rates.",
        threshold="at more than three quarters of them",
    )


def _compare_levels(epochs: Sequence[int], turned: Sequence[float], original: Sequence[float]) -> Alternative:
    """Compare the epochs to several losses; those to the rounding floor are named but not counted."""
    levels = (*_LEVELS, _FLOOR)
    places = [[first_below(curve, level) for level in levels] for curve in (turned, original)]
    needed = [[math.inf if place is None else epochs[place] for place in own] for own in places]
    pairs = list(zip(*needed, strict=True))
    shown = [f"{level:g}: {_epochs(a)} and {_epochs(b)}" for level, (a, b) in zip(levels, pairs, strict=True)]
    reached = [(a, b) for a, b in pairs[:-1] if min(a, b) < math.inf]
    return Alternative(
        "epochs to some losses: fewer to one, more to none",
        to_verdict(any(a < b for a, b in reached) and all(a <= b for a, b in reached)),
        f"EGOP and original, by {epochs[1]}: {'; '.join(shown[:-1])}. Not counted, the rounding floor, {shown[-1]}.",
    )


def final_loss(result: Mapping[str, Any]) -> float:
    """Return the final training loss."""
    return float(result["final"])


def best_validation_loss(result: Mapping[str, Any]) -> float:
    """Return the best validation loss."""
    return float(result["best validation"])


def _epochs(count: float) -> str:
    return f"{count:.0f}" if math.isfinite(count) else "never"


def _describe_floor(*losses: float) -> str:
    """Return a remark if the losses are at the rounding floor."""
    if max(losses) <= _FLOOR:
        return "; both at the rounding floor" if len(losses) == 2 else "; all at the rounding floor"
    return ""
