"""Digits: the paper's opening figure, a small ReLU network in both coordinate systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from egop_lab.experiments.base import Judgement, compare, count_decades, to_verdict
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
from egop_lab.training.digits import STEPS_PER_EPOCH, DigitsProblem
from egop_lab.training.tuning import TUNING

# Epochs between two recorded losses.
_STRIDE = {"quick": 1, "full": 5}


class DigitsExperiment(SweepExperiment):
    """EGOP Adam and Adagrad against their originals, SGD and SGD with momentum."""

    id: ClassVar[str] = "digits"
    version: ClassVar[int] = 2

    def run(self, context: Context) -> None:
        settings = self.settings
        tuning = range(TUNING, TUNING + settings["tuning trials"])
        for seeds, coordinates in ((tuning, [ORIGINAL]), (range(settings["trials"]), [ORIGINAL, EGOP])):
            self.sweep(
                context,
                lambda seeds: DigitsProblem(seeds, context.device),
                lambda problem, kind: batched.Basis.stack(problem.bases()) if kind == EGOP else None,
                rates=settings["rates"],
                seeds=seeds,
                coordinates=coordinates,
                steps=settings["epochs"] * STEPS_PER_EPOCH,
                record_every=STEPS_PER_EPOCH,
                at_once=50 if context.device.type == "cuda" else 5,
                compact=_compact,
            )

    def score(self, result: Mapping[str, Any]) -> float:
        return -float(result["best validation accuracy"])

    def judge(self) -> list[Judgement]:
        judged = []
        for optimizer in ("Adam", "Adagrad"):
            judged.append(judge_by_both_rules(partial(self._judge_lower, optimizer)))
            judged.append(judge_by_both_rules(partial(self._judge_below_sgd, optimizer)))
            judged.append(judge_by_both_rules(partial(self._judge_faster, optimizer, [optimizer])))
            judged.append(judge_by_both_rules(partial(self._judge_faster, optimizer, ["SGD", "SGD+momentum"])))
            judged.append(self._judge_robust(optimizer))
            judged.append(judge_by_both_rules(partial(self._judge_accuracy, optimizer)))
        for optimizer in ("SGD", "SGD+momentum"):
            one, other = (self.reported_runs(optimizer, kind) for kind in (ORIGINAL, EGOP))
            judged.append(check_same_in_both(f"digits/{optimizer}-same", optimizer, one, other, "loss", 0.05))
        return judged

    def pictures(self) -> list[Picture]:
        methods = [(name, kind) for name in self.settings["rates"] for kind in (ORIGINAL, EGOP)]
        epochs = range(0, self.settings["epochs"] + 1, _STRIDE[self.preset])
        losses = [curve_series(self.reported_runs(*method), "loss", *method, epochs) for method in methods]
        sweeps, accuracies = [], []
        for optimizer, kind in methods:
            runs = self.fresh_runs(optimizer, kind)
            chosen = self.choose_rate(optimizer)
            sweeps.append(rate_series(runs, lambda result: result["loss"][-1], optimizer, kind, chosen))
            accuracies.append(rate_series(runs, lambda result: result["test accuracy"], optimizer, kind, chosen))
        return [
            Picture(
                "digits",
                "Training loss by epoch at the learning rate chosen for the original coordinates; final training loss "
                "and test accuracy by learning rate. Medians and quartiles over trials.",
                [
                    Panel("Training loss", "epoch", "loss", losses),
                    Panel("Final training loss", "learning rate", "loss", sweeps, xscale="log"),
                    Panel("Final test accuracy", "learning rate", "accuracy", accuracies, "log", "linear"),
                ],
            )
        ]

    def _final(self, optimizer: str, coordinates: str, separate: bool) -> float:
        runs = self.reported_runs(optimizer, coordinates, separate=separate)
        return median([run.result["loss"][-1] for run in runs])

    def _judge_lower(self, optimizer: str, separate: bool) -> Judgement:
        original, turned = (self._final(optimizer, kind, separate) for kind in (ORIGINAL, EGOP))
        words = f"EGOP {optimizer} ends at a lower training loss than {optimizer}."
        return compare(f"digits/{optimizer}-lower", words, ("EGOP", turned), (optimizer, original))

    def _judge_below_sgd(self, optimizer: str, separate: bool) -> Judgement:
        rivals = {name: self._final(name, ORIGINAL, separate) for name in ("SGD", "SGD+momentum")}
        best = min(rivals, key=lambda name: rivals[name])
        turned = self._final(optimizer, EGOP, separate)
        words = f"EGOP {optimizer} ends lower than SGD and SGD with momentum."
        return compare(f"digits/{optimizer}-below-sgd", words, ("EGOP", turned), (f"{best}, the better", rivals[best]))

    def _judge_faster(self, optimizer: str, rivals: Sequence[str], separate: bool) -> Judgement:
        """Compare the epochs to the lowest loss of the rival's median."""
        turned = self._curve(optimizer, EGOP, separate)
        curves = {name: self._curve(name, ORIGINAL, separate) for name in rivals}
        best = min(curves, key=lambda name: min(curves[name]))
        goal, every = min(curves[best]), _STRIDE[self.preset]
        needed, epochs = first_below(turned, goal), curves[best].index(goal)
        against = optimizer if rivals == [optimizer] else "SGD and SGD with momentum"
        name = "faster" if rivals == [optimizer] else "faster-than-sgd"
        shown = "never" if needed is None else str(every * needed)
        return Judgement(
            f"digits/{optimizer}-{name}",
            f"EGOP {optimizer} needs fewer epochs than {against}.",
            to_verdict(needed is not None and needed < epochs),
            f"Epochs to {best}'s lowest training loss, {goal:.3g}: EGOP {shown}, {best} {every * epochs}.",
            margin=count_decades(max(needed, 1), epochs) if needed is not None else None,
        )

    def _curve(self, optimizer: str, coordinates: str, separate: bool) -> list[float]:
        runs = self.reported_runs(optimizer, coordinates, separate=separate)
        return quartiles([run.result["loss"] for run in runs])[1]

    def _judge_robust(self, optimizer: str) -> Judgement:
        runs = (self.fresh_runs(optimizer, kind) for kind in (ORIGINAL, EGOP))
        original, turned = (quartiles_by_rate(own, lambda result: result["loss"][-1]) for own in runs)
        words = f"The gain of EGOP {optimizer} is robust to the learning rate."
        better = [turned[rate][1] < original[rate][1] for rate in turned]
        return judge_mostly(f"digits/{optimizer}-robust", words, better)

    def _judge_accuracy(self, optimizer: str, separate: bool) -> Judgement:
        runs = [self.reported_runs(optimizer, kind, separate=separate) for kind in (ORIGINAL, EGOP)]
        original, turned = (median([run.result["test accuracy"] for run in own]) for own in runs)
        words = f"Test accuracy of EGOP {optimizer} is as good or better."
        finding = f"EGOP: {turned:.2%}; original: {original:.2%}."
        return Judgement(f"digits/{optimizer}-accuracy", words, to_verdict(turned >= original), finding)


def _compact(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Keep what figures and claims need: whole curves of thousands of runs would take tens of megabytes."""
    return {
        "loss": result["loss"][:: _STRIDE[config["preset"]]],
        "best validation accuracy": max(result["validation accuracy"]),
        "test accuracy": result["test accuracy"][-1],
    }
