"""Linear networks of three layers: all parameters in one basis, a basis for each layer, the first layer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from egop.runs import Panel, Picture
from egop_lab.experiments.base import Beside, Judged, Verdict, compare, decades, verdict
from egop_lab.experiments.curves import (
    by_rate,
    curve_series,
    first_below,
    median,
    quartiles,
    rate_series,
    same_in_both,
)
from egop_lab.experiments.swept import SweptExperiment, by_both
from egop_lab.training import batched
from egop_lab.training.context import Context, Preset
from egop_lab.training.linear import BATCH, BLOCK, FIRST, SIZE, LinearProblem
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import EGOP, ORIGINAL, TUNING, Sweep, run_sweep
from egop_lab.training.tuning import doublings

Score = Callable[[Mapping[str, Any]], float]

KINDS = {EGOP: "all parameters in one basis", BLOCK: "a basis for each layer", FIRST: "the first layer alone"}

_ADAPTIVE = ("Adam", "Adagrad")
_EQUIVARIANT = ("SGD", "SGD+momentum")
_POINTS = 50  # of a curve that is kept
_FAR = 10.0
_COMPARABLE = 0.5  # the share of a gain, in decades, from which on another gain is comparable
_FLOOR = 1e-30  # of losses in float64: what is below is rounding
_LEVELS = (1e-5, 1e-10, 1e-15, 1e-20, 1e-25)  # of the training loss, for counting epochs: down to the floor


class LinearNetworksExperiment(SweptExperiment):
    """Adam and Adagrad in three kinds of EGOP coordinates against original ones, and SGD."""

    id: ClassVar[str] = "linear-networks"
    title: ClassVar[str] = "Multilayer linear networks"
    figures: ClassVar[str] = (
        "Linear networks: loss by epoch, by learning rate, validation; supplementary: three variants"
    )
    labels: ClassVar[tuple[str, ...]] = (
        "fig:global-reparam-linear-layers",
        "fig:linear-layers-global-reparam-loss-vs-epochs",
        "fig:linear-layers-global-reparam-loss-vs-LR",
        "fig:linear-layers-global-reparam-valloss-vs-LR",
        "fig:sup-linear-networks",
        "fig:global-sup",
        "fig:block-sup",
        "fig:first-layer-only-sup",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "trials": "10",
        "tuning trials": "none: rates are chosen on the reported trials",
        "epochs": "1000",
        "samples": "20000",
        "batch": "500",
        "gradients": "4600",
        "layers": "10-50-30-10 (text), 10-30-50-10 (appendix)",
    }

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        rates = {
            "Adam": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "Adagrad": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "SGD": doublings(10, 1e4) if full else [400.0, 1000.0, 2000.0, 4000.0],
            "SGD+momentum": doublings(1, 1e3) if full else [100.0, 200.0, 400.0, 800.0],
        }
        return {
            "trials": 10 if full else 3,
            "tuning trials": 5 if full else 2,
            "epochs": 1000 if full else 30,
            "samples": 20_000,  # half to train, a fifth to validate, the rest is the paper's test set
            "batch": BATCH,
            "gradients": 2 * SIZE,
            "layers": "10-50-30-10",
            "precision": "float64" if full else "float32",
            "rates": rates,
        }

    def run(self, store: Store, context: Context) -> None:
        settings = self.settings(context.preset)
        epochs, steps_per_epoch = settings["epochs"], settings["samples"] // 2 // BATCH
        common: dict[str, Any] = {
            "steps": epochs * steps_per_epoch,
            "record_every": steps_per_epoch,
            "at_once": 10 if context.device.type == "cuda" else 3,
            "extra": {name: settings[name] for name in ("samples", "gradients", "precision")},
        }
        rates, reported = settings["rates"], range(settings["trials"])
        adaptive = {name: rates[name] for name in _ADAPTIVE}
        tuning = range(TUNING, TUNING + settings["tuning trials"])

        def go(sweep: Sweep) -> None:
            run_sweep(
                self.config,
                sweep,
                store,
                context,
                problem=lambda seeds: LinearProblem(
                    seeds,
                    settings["samples"],
                    settings["gradients"],
                    getattr(torch, settings["precision"]),
                    context.device,
                    context.workers if context.device.type == "cuda" else 1,
                ),
                basis=lambda problem, kind: problem.basis(kind),
                schedule=batched.cosine(epochs),
                compact=_compact,
            )

        go(Sweep(rates=rates, seeds=tuning, coordinates=[ORIGINAL], **common))
        # Curves are kept at these rates only, so a record must not outlive a change of them.
        common["extra"] |= {"chosen": {name: self.chosen(store, context.preset, name) for name in rates}}
        go(Sweep(rates=rates, seeds=reported, coordinates=[ORIGINAL, EGOP], **common))
        go(Sweep(rates=adaptive, seeds=reported, coordinates=[BLOCK, FIRST], **common))

    def score(self, result: Mapping[str, Any]) -> float:
        """The best validation loss."""
        return _validation(result)

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        judged = []
        for optimizer in _ADAPTIVE:
            judged.append(by_both(partial(self._lower, store, preset, optimizer)))
            judged.append(self._faster(store, preset, optimizer))
            judged.append(self._robust(store, preset, optimizer))
            judged.append(by_both(partial(self._validated, store, preset, optimizer)))
            judged.append(self._block_lower(store, preset, optimizer))
            judged.append(self._share(store, preset, optimizer, BLOCK, wanted=True))
            judged.append(self._share(store, preset, optimizer, FIRST, wanted=optimizer == "Adagrad"))
        judged.append(by_both(partial(self._adaptive, store, preset)))
        for optimizer in _EQUIVARIANT:
            judged.append(self._same(store, preset, optimizer))
        return judged

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        curves = []
        for optimizer in self.settings(preset)["rates"]:
            for kind in (ORIGINAL, EGOP):
                runs = self.reported(store, preset, optimizer, kind)
                curves.append(curve_series(runs, "loss", optimizer, kind, runs[0].result["epoch"]))

        def over_rates(title: str, score: Score, kind: str) -> Panel:
            series = [
                rate_series(runs, score, name, coordinates, self.chosen(store, preset, name))
                for name in self.settings(preset)["rates"]
                for coordinates in (ORIGINAL, kind)
                if (runs := self.fresh(store, preset, name, coordinates))
            ]
            return Panel(title, "learning rate", "loss", series, xscale="log")

        return [
            Picture(
                "linear-networks",
                "Training loss by epoch at the learning rate chosen for original coordinates; final training loss and "
                "least validation loss by learning rate. Medians and quartiles over trials.",
                [
                    Panel("Training loss", "epoch", "loss", curves),
                    over_rates("Final training loss", _final, EGOP),
                    over_rates("Least validation loss", _validation, EGOP),
                ],
            ),
            Picture(
                "linear-networks-variants",
                "Final training loss by learning rate for three ways to reparameterise.",
                [over_rates(words.capitalize(), _final, kind) for kind, words in KINDS.items()],
            ),
        ]

    def _median(
        self, store: Store, preset: Preset, optimizer: str, coordinates: str, score: Score, apart: bool = True
    ) -> float:
        return median([score(run.result) for run in self.reported(store, preset, optimizer, coordinates, apart=apart)])

    def _medians(self, store: Store, preset: Preset, optimizer: str, coordinates: str) -> dict[float, float]:
        """The final loss by learning rate, no lower than the floor; infinite where it diverged."""
        bands = by_rate(self.fresh(store, preset, optimizer, coordinates), _final)
        return {rate: max(middle, _FLOOR) for rate, (_, middle, _) in bands.items()}

    def _lower(self, store: Store, preset: Preset, optimizer: str, apart: bool) -> Judged:
        turned, original = (
            self._median(store, preset, optimizer, kind, _final, apart=apart) for kind in (EGOP, ORIGINAL)
        )
        rate = self.chosen(store, preset, optimizer, apart=apart)
        return Judged(
            f"linear-networks/{optimizer}-lower",
            f"EGOP {optimizer} ends at a significantly lower training loss than {optimizer}.",
            verdict(max(turned, _FLOOR) * _FAR <= original),
            f"EGOP: {turned:.3g}; original: {original:.3g}, learning rate {rate:g}{_floors(turned, original)}.",
            threshold=f"significantly: by a factor of {_FAR:g}",
            margin=decades(turned, original, _FLOOR),
        )

    def _validated(self, store: Store, preset: Preset, optimizer: str, apart: bool) -> Judged:
        turned, original = (
            self._median(store, preset, optimizer, kind, _validation, apart=apart) for kind in (EGOP, ORIGINAL)
        )
        return Judged(
            f"linear-networks/{optimizer}-validation",
            f"EGOP {optimizer} reaches a lower validation loss than {optimizer}.",
            verdict(max(turned, _FLOOR) < original),
            f"EGOP: {turned:.3g}; original: {original:.3g}{_floors(turned, original)}.",
            margin=decades(turned, original, _FLOOR),
        )

    def _faster(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        """Curves are kept at the rate of the tuning trials only; what happens at the floor is said, not counted."""
        needed: list[list[float]] = []
        for kind in (EGOP, ORIGINAL):
            runs = self.reported(store, preset, optimizer, kind)
            middle, epochs = quartiles([run.result["loss"] for run in runs])[1], runs[0].result["epoch"]
            places = [first_below(middle, level) for level in (*_LEVELS, _FLOOR)]
            needed.append([math.inf if place is None else float(epochs[place]) for place in places])
        pairs = list(zip(*needed, strict=True))
        shown = [
            f"{level:g}: {_epochs(a)} and {_epochs(b)}" for level, (a, b) in zip((*_LEVELS, _FLOOR), pairs, strict=True)
        ]
        reached = [(a, b) for a, b in pairs[:-1] if min(a, b) < math.inf]
        ratios = [math.log10(b / max(a, 1)) for a, b in reached if max(a, b) < math.inf and b > 0]
        holds = verdict(any(a < b for a, b in reached) and all(a <= b for a, b in reached))
        return Judged(
            f"linear-networks/{optimizer}-faster",
            f"EGOP {optimizer} converges faster than {optimizer}.",
            holds if reached else "cannot be judged",
            f"Epochs to a training loss of so much, EGOP and original, by {epochs[1]}: {'; '.join(shown[:-1])}. "
            f"Not counted, the rounding floor, {shown[-1]}.",
            threshold="fewer epochs to one of these losses, more to none",
            margin=max(ratios, default=None),
        )

    def _robust(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        original, turned = (by_rate(self.fresh(store, preset, optimizer, kind), _final) for kind in (ORIGINAL, EGOP))
        better = [turned[rate][1] < original[rate][1] for rate in turned]
        return _mostly(f"{optimizer}-robust", f"EGOP {optimizer} is lower over a range of learning rates.", better)

    def _block_lower(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        original, turned = (self._medians(store, preset, optimizer, kind) for kind in (ORIGINAL, BLOCK))
        words = f"EGOP {optimizer} with {KINDS[BLOCK]} ends at a lower training loss than {optimizer}, rate by rate."
        return _mostly(f"{optimizer}-block-lower", words, [turned[rate] < original[rate] for rate in turned])

    def _share(self, store: Store, preset: Preset, optimizer: str, kind: str, *, wanted: bool) -> Judged:
        """Gains in decades, as the figure shows them: rate by rate, and the mean over rates."""
        original, whole, part = (
            self._medians(store, preset, optimizer, coordinates) for coordinates in (ORIGINAL, EGOP, kind)
        )
        rates = [rate for rate in part if max(original[rate], whole[rate], part[rate]) < math.inf]
        gain, part_gain = (
            sum(math.log10(original[rate] / losses[rate]) for rate in rates) / max(len(rates), 1)
            for losses in (whole, part)
        )
        like = "comparable to" if wanted else "much smaller than"
        ends = [self._median(store, preset, optimizer, each, _final) for each in (ORIGINAL, EGOP, kind)]
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
        rate = self.chosen(store, preset, optimizer)
        return replace(judged, beside=(Beside(f"at the chosen rate alone, {rate:g}", other, at_one),))

    def _same(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        """Compared by the final losses over all rates: the chosen one may be so large that some trials diverge."""
        finals: dict[tuple[int, float], dict[str, float]] = {}
        for kind in (ORIGINAL, EGOP):
            for run in self.fresh(store, preset, optimizer, kind):
                finals.setdefault((run.config["seed"], run.config["lr"]), {})[kind] = _final(run.result)
        kept = {place: pair for place, pair in finals.items() if any(map(math.isfinite, pair.values()))}
        original, turned = (
            [
                Record({"seed": seed}, {"final": [pair[kind] for (own, _), pair in kept.items() if own == seed]})
                for seed in sorted({own for own, _ in kept})
            ]
            for kind in (ORIGINAL, EGOP)
        )
        return same_in_both(f"linear-networks/{optimizer}-same", optimizer, original, turned, "final", 0.05)

    def _adaptive(self, store: Store, preset: Preset, apart: bool) -> Judged:
        pairs = [(name, kind) for name in _ADAPTIVE for kind in (ORIGINAL, EGOP)]
        finals = {f"{kind} {name}": self._median(store, preset, name, kind, _final, apart) for name, kind in pairs}
        worst = max(finals, key=lambda name: finals[name])
        rivals = {name: self._median(store, preset, name, ORIGINAL, _final, apart) for name in _EQUIVARIANT}
        best = min(rivals, key=lambda name: rivals[name])
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinates."
        judged = compare("linear-networks/adaptive", words, (worst, finals[worst]), (best, rivals[best]))
        rate = self.chosen(store, preset, best, apart=apart)
        larger = [tried for tried in self._medians(store, preset, best, ORIGINAL) if tried > rate]
        end = (
            f" Its rate is {rate:g}; from {min(larger):g} on it diverges."
            if larger and not math.isfinite(self._medians(store, preset, best, ORIGINAL)[min(larger)])
            else f" Its rate is {rate:g}{', the end of its grid' if not larger else ''}."
        )
        return replace(judged, found=judged.found + end)


def _mostly(name: str, words: str, better: Sequence[bool]) -> Judged:
    """A claim that holds rate by rate."""
    return Judged(
        f"linear-networks/{name}",
        words,
        verdict(sum(better) > 0.75 * len(better)),
        f"Lower at {sum(better)} of {len(better)} learning rates.",
        threshold="at more than three quarters of them",
    )


def _final(result: Mapping[str, Any]) -> float:
    return float(result["final"])


def _validation(result: Mapping[str, Any]) -> float:
    return float(result["best validation"])


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _compact(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Single numbers always; curves only of reported trials at the chosen rate, and only some of their points."""
    numbers = {"final": result["loss"][-1], "best validation": _least(result["validation loss"])}
    if config.get("chosen", {}).get(config["optimizer"]) != config["lr"]:
        return numbers
    epochs = len(result["loss"]) - 1
    kept = sorted({round(place * epochs / _POINTS) for place in range(_POINTS + 1)})
    return numbers | {"epoch": kept} | {name: [values[k] for k in kept] for name, values in result.items()}


def _epochs(count: float) -> str:
    return f"{count:.0f}" if math.isfinite(count) else "never"


def _floors(*losses: float) -> str:
    """What is to be said of losses that are rounding."""
    if max(losses) <= _FLOOR:
        return "; both at the rounding floor" if len(losses) == 2 else "; all at the rounding floor"
    return ""
