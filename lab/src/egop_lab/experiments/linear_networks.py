"""Linear networks of three layers: all parameters in one basis, a basis for each layer, the first layer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from egop.runs import Panel, Picture
from egop_lab.experiments.base import Judged, compare, verdict
from egop_lab.experiments.curves import by_rate, curve_series, median, rate_series, same_in_both
from egop_lab.experiments.swept import SweptExperiment
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


class LinearNetworksExperiment(SweptExperiment):
    """Adam and Adagrad in three kinds of EGOP coordinates against original ones, and SGD."""

    id: ClassVar[str] = "linear-networks"
    title: ClassVar[str] = "Multilayer linear networks"
    figures: ClassVar[str] = (
        "Linear networks: loss by epoch, by learning rate, validation; supplementary: three variants"
    )

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
            finals = {kind: self._median(store, preset, optimizer, kind, _final) for kind in (ORIGINAL, *KINDS)}
            judged.append(_lower(optimizer, finals))
            judged.append(self._robust(store, preset, optimizer))
            validation = [self._median(store, preset, optimizer, kind, _validation) for kind in (EGOP, ORIGINAL)]
            words = f"EGOP {optimizer} reaches a lower validation loss than {optimizer}."
            sides = ((EGOP, validation[0]), (ORIGINAL, validation[1]))
            judged.append(compare(f"linear-networks/{optimizer}-validation", words, *sides))
            judged.append(_share(optimizer, finals, BLOCK, wanted=True))
            judged.append(_share(optimizer, finals, FIRST, wanted=optimizer == "Adagrad"))
        judged.append(self._adaptive(store, preset))
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

    def _median(self, store: Store, preset: Preset, optimizer: str, coordinates: str, score: Score) -> float:
        return median([score(run.result) for run in self.reported(store, preset, optimizer, coordinates)])

    def _robust(self, store: Store, preset: Preset, optimizer: str) -> Judged:
        original, turned = (by_rate(self.fresh(store, preset, optimizer, kind), _final) for kind in (ORIGINAL, EGOP))
        better = sum(turned[rate][1] < original[rate][1] for rate in turned)
        words = f"EGOP {optimizer} is lower over a range of learning rates."
        finding = f"Lower at {better} of {len(turned)} learning rates (holds above three quarters)."
        return Judged(f"linear-networks/{optimizer}-robust", words, verdict(better > 0.75 * len(turned)), finding)

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

    def _adaptive(self, store: Store, preset: Preset) -> Judged:
        pairs = [(name, kind) for name in _ADAPTIVE for kind in (ORIGINAL, EGOP)]
        finals = {f"{kind} {name}": self._median(store, preset, name, kind, _final) for name, kind in pairs}
        worst = max(finals, key=lambda name: finals[name])
        best = min(self._median(store, preset, name, ORIGINAL, _final) for name in _EQUIVARIANT)
        words = "Adam and Adagrad end lower than SGD and SGD with momentum, in both coordinates."
        sides = (worst, finals[worst]), ("the better of SGD and SGD+momentum", best)
        return compare("linear-networks/adaptive", words, *sides)


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


def _decades(loss: float) -> float:
    return math.log10(loss) if loss > 0 else -math.inf


def _lower(optimizer: str, finals: Mapping[str, float]) -> Judged:
    shown = f"EGOP: {finals[EGOP]:.3g}; original: {finals[ORIGINAL]:.3g} (holds from a factor of {_FAR:g})."
    words = f"EGOP {optimizer} ends at a far lower training loss than {optimizer}."
    return Judged(f"linear-networks/{optimizer}-lower", words, verdict(finals[EGOP] * _FAR <= finals[ORIGINAL]), shown)


def _share(optimizer: str, finals: Mapping[str, float], kind: str, *, wanted: bool) -> Judged:
    """Compare gains in decades of the final loss: a variant's with that of reparameterising everything."""
    gain, part_gain = (_decades(finals[ORIGINAL]) - _decades(finals[coordinates]) for coordinates in (EGOP, kind))
    words = f"EGOP {optimizer}, {KINDS[kind]}: a gain {'comparable to' if wanted else 'much smaller than'} that of "
    finding = (
        f"{part_gain:.2f} decades below original coordinates, against {gain:.2f} for all parameters in one basis "
        f"(comparable from {_COMPARABLE:.0%} of it): {finals[kind]:.3g}, {finals[EGOP]:.3g}, {finals[ORIGINAL]:.3g}."
    )
    name = f"linear-networks/{optimizer}-{'block' if kind == BLOCK else 'first-layer'}"
    judged = verdict((part_gain >= _COMPARABLE * gain) == wanted) if gain > 0 else verdict(False)
    return Judged(name, f"{words}{KINDS[EGOP]}.", judged, finding)
