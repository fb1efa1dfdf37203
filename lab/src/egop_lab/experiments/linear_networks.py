"""Linear networks of three layers: all parameters in one basis, a basis for each layer, the first layer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from egop_lab.experiments.base import Alternative, Judgement, Verdict, compare, count_decades, to_verdict
from egop_lab.experiments.curves import (
    check_same_in_both,
    curve_series,
    first_below,
    median,
    quartiles,
    quartiles_by_rate,
    rate_series,
)
from egop_lab.experiments.sweep_experiment import SweepExperiment, judge_by_both_rules, judge_mostly
from egop_lab.plots.picture import Panel, Picture
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.linear import BATCH, BLOCK, FIRST, LinearProblem
from egop_lab.training.records import Record
from egop_lab.training.tuning import TUNING

Score = Callable[[Mapping[str, Any]], float]

KINDS = {EGOP: "all parameters in one basis", BLOCK: "a basis for each layer", FIRST: "the first layer alone"}
ADAPTIVE = ("Adam", "Adagrad")

_EQUIVARIANT = ("SGD", "SGD+momentum")
_FAR = 10.0
_COMPARABLE = 0.5  # gains in decades are comparable from this ratio on
_FLOOR = 1e-30  # float64 losses below this are rounding
_LEVELS = (1e-5, 1e-10, 1e-15, 1e-20, 1e-25)  # training losses for counting epochs, down to the floor
_POINTS = 50  # recorded points of a curve


class LinearNetworksExperiment(SweepExperiment):
    """Adam and Adagrad in three kinds of EGOP coordinates against original ones, and SGD."""

    id: ClassVar[str] = "linear-networks"

    def run(self, context: Context) -> None:
        settings = self.settings
        epochs, steps_per_epoch = settings["epochs"], settings["samples"] // 2 // BATCH
        extra = {name: settings[name] for name in ("samples", "gradients", "precision")}
        rates, reported = settings["rates"], range(settings["trials"])
        adaptive = {name: rates[name] for name in ADAPTIVE}
        tuning = range(TUNING, TUNING + settings["tuning trials"])

        def go(**sweep: Any) -> None:
            self.sweep(
                context,
                lambda seeds: LinearProblem(
                    seeds,
                    settings["samples"],
                    settings["gradients"],
                    getattr(torch, settings["precision"]),
                    context.device,
                ),
                lambda problem, kind: problem.basis(kind),
                steps=epochs * steps_per_epoch,
                record_every=steps_per_epoch,
                at_once=10 if context.device.type == "cuda" else 3,
                schedule=batched.cosine(epochs),
                compact=_compact,
                **sweep,
            )

        go(rates=rates, seeds=tuning, coordinates=[ORIGINAL], extra=extra)
        # Curves are recorded at these rates only, so that the rates are part of the configuration.
        extra["chosen"] = {name: self.choose_rate(name) for name in rates}
        go(rates=rates, seeds=reported, coordinates=[ORIGINAL, EGOP], extra=extra)
        go(rates=adaptive, seeds=reported, coordinates=[BLOCK, FIRST], extra=extra)

    def score(self, result: Mapping[str, Any]) -> float:
        return best_validation_loss(result)

    def pictures(self) -> list[Picture]:
        curves = []
        for optimizer in self.settings["rates"]:
            for kind in (ORIGINAL, EGOP):
                runs = self.reported_runs(optimizer, kind)
                curves.append(curve_series(runs, "loss", optimizer, kind, runs[0].result["epoch"]))

        def over_rates(title: str, score: Score, kind: str) -> Panel:
            series = [
                rate_series(runs, score, name, coordinates, self.choose_rate(name))
                for name in self.settings["rates"]
                for coordinates in (ORIGINAL, kind)
                if (runs := self.fresh_runs(name, coordinates))
            ]
            return Panel(title, "learning rate", "loss", series, xscale="log")

        return [
            Picture(
                "linear-networks",
                "Training loss by epoch at the learning rate chosen for original coordinates; final training loss and "
                "least validation loss by learning rate. Medians and quartiles over trials.",
                [
                    Panel("Training loss", "epoch", "loss", curves),
                    over_rates("Final training loss", final_loss, EGOP),
                    over_rates("Least validation loss", best_validation_loss, EGOP),
                ],
            ),
            Picture(
                "linear-networks-variants",
                "Final training loss by learning rate for three ways to reparameterise.",
                [over_rates(words.capitalize(), final_loss, kind) for kind, words in KINDS.items()],
            ),
        ]

    def judge(self) -> list[Judgement]:
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
        runs = self.reported_runs(optimizer, coordinates, separate=separate)
        return median([score(run.result) for run in runs])

    def _medians(self, optimizer: str, coordinates: str) -> dict[float, float]:
        """Return the final loss by learning rate, no lower than the floor; infinite if it diverged."""
        bands = quartiles_by_rate(self.fresh_runs(optimizer, coordinates), final_loss)
        return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in bands.items()}

    def _judge_lower(self, optimizer: str, separate: bool) -> Judgement:
        turned, original = (self._median(optimizer, kind, final_loss, separate=separate) for kind in (EGOP, ORIGINAL))
        rate = self.choose_rate(optimizer, separate=separate)
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
        runs = {kind: self.reported_runs(optimizer, kind) for kind in (EGOP, ORIGINAL)}
        curves = [quartiles([run.result["loss"] for run in own])[1] for own in runs.values()]
        epochs = runs[EGOP][0].result["epoch"]
        # Skip the common start and epochs with both losses at the floor.
        pairs = [(epoch, a, b) for epoch, a, b in zip(epochs, *curves, strict=True) if epoch and max(a, b) > _FLOOR]
        better = [a < b for _, a, b in pairs]
        judged = judge_mostly(
            f"linear-networks/{optimizer}-faster", f"EGOP {optimizer} converges faster than {optimizer}.", better
        )
        last = next((epoch for epoch, a, b in reversed(pairs) if a >= b), None)
        finding = f"Lower at {sum(better)} of {len(better)} recorded epochs until both are at the rounding floor"
        finding += "." if last is None else f"; last not lower at epoch {last}."
        levels = _compare_levels(epochs, *curves)
        differs = () if levels.verdict == judged.verdict else (levels,)
        return replace(judged, finding=finding, alternatives=differs)

    def _judge_robust(self, optimizer: str) -> Judgement:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, EGOP))
        better = [turned[rate] < original[rate] for rate in turned]
        return judge_mostly(
            f"linear-networks/{optimizer}-robust", f"EGOP {optimizer} is lower over a range of learning rates.", better
        )

    def _judge_block(self, optimizer: str) -> Judgement:
        original, turned = (self._medians(optimizer, kind) for kind in (ORIGINAL, BLOCK))
        words = f"EGOP {optimizer} with {KINDS[BLOCK]} ends at a lower training loss than {optimizer}, rate by rate."
        return judge_mostly(
            f"linear-networks/{optimizer}-block-lower", words, [turned[rate] < original[rate] for rate in turned]
        )

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
            threshold=f"at least {_COMPARABLE:.0%} of it is comparable",
        )
        other: Verdict = "cannot be judged"
        if one_gain > 0:
            other = to_verdict((one_part >= _COMPARABLE * one_gain) == wanted)
        if other == judged.verdict:
            return judged
        rate = self.choose_rate(optimizer)
        return replace(judged, alternatives=(Alternative(f"at the chosen rate alone, {rate:g}", other, at_one),))

    def _check_same(self, optimizer: str) -> Judgement:
        """Compare the final losses over all rates: the chosen one may be so large that some trials diverge."""
        finals: dict[tuple[int, float], dict[str, float]] = {}
        for kind in (ORIGINAL, EGOP):
            for run in self.fresh_runs(optimizer, kind):
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
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinate systems."
        judged = compare("linear-networks/adaptive", words, (worst, finals[worst]), (best, rivals[best]))
        rate = self.choose_rate(best, separate=separate)
        larger = [tried for tried in self._medians(best, ORIGINAL) if tried > rate]
        end = (
            f" The rate of {best} is {rate:g}; from {min(larger):g} on it diverges."
            if larger and not math.isfinite(self._medians(best, ORIGINAL)[min(larger)])
            else f" The rate of {best} is {rate:g}{', the end of its grid' if not larger else ''}."
        )
        return replace(judged, finding=judged.finding + end)


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _compact(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Keep single numbers; keep some points of the curves for reported trials at the chosen rate."""
    numbers = {"final": result["loss"][-1], "best validation": _least(result["validation loss"])}
    if config.get("chosen", {}).get(config["optimizer"]) != config["lr"]:
        return numbers
    epochs = len(result["loss"]) - 1
    kept = sorted({round(place * epochs / _POINTS) for place in range(_POINTS + 1)})
    return numbers | {"epoch": kept} | {name: [values[k] for k in kept] for name, values in result.items()}


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
