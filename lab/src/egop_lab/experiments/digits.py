"""Digits: the paper's opening figure, a small ReLU network in both coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from egop_lab.experiments.base import Judgement, compare, count_decades, to_verdict
from egop_lab.experiments.curves import check_same_in_both, curve_series, first_below, median, quartiles, rate_series
from egop_lab.experiments.sweep_experiment import SweepExperiment, judge_by_both_rules
from egop_lab.plots.picture import Panel, Picture
from egop_lab.training import batched
from egop_lab.training.context import Context, Preset
from egop_lab.training.digits import STEPS_PER_EPOCH, DigitsProblem
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP, ORIGINAL, TUNING, Sweep, run_sweep
from egop_lab.training.tuning import doublings

# Epochs between two recorded losses.
_STRIDE = {"quick": 1, "full": 5}


class DigitsExperiment(SweepExperiment):
    """EGOP Adam and Adagrad against their originals, SGD and SGD with momentum."""

    id: ClassVar[str] = "digits"
    title: ClassVar[str] = "A ReLU network on the UCI digits"
    version: ClassVar[int] = 2
    figures: ClassVar[str] = "Figure 1 (right); supplementary: loss and accuracy by learning rate"
    labels: ClassVar[tuple[str, ...]] = (
        "fig:opener-cartoon",
        "fig:tinyMNIST-sup",
        "fig:tinyMNIST-loss-sup",
        "fig:tinyMNIST-testacc-sup",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "trials": "50",
        "tuning trials": "none: rates are chosen on the reported trials",
        "epochs": "200",
    }

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        rates = {
            "Adam": doublings(1e-3, 1) if full else [0.01, 0.02, 0.04, 0.08],
            "Adagrad": doublings(1e-2, 1) if full else [0.04, 0.08, 0.1, 0.2],
            "SGD": doublings(1e-2, 10) if full else [0.1, 0.4, 1.0],
            "SGD+momentum": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1],
        }
        trials = 50 if full else 3
        return {"trials": trials, "tuning trials": 20 if full else 3, "epochs": 200 if full else 30, "rates": rates}

    def run(self, store: Store, context: Context) -> None:
        settings = self.settings(context.preset)
        on_gpu = context.device.type == "cuda"
        at_once = 50 if on_gpu else 5
        common = {
            "rates": settings["rates"],
            "steps": settings["epochs"] * STEPS_PER_EPOCH,
            "record_every": STEPS_PER_EPOCH,
            "at_once": at_once,
            "extra": {},
        }
        tuning = Sweep(seeds=range(TUNING, TUNING + settings["tuning trials"]), coordinates=[ORIGINAL], **common)
        reported = Sweep(seeds=range(settings["trials"]), coordinates=[ORIGINAL, EGOP], **common)
        for sweep in (tuning, reported):
            run_sweep(
                self.config,
                sweep,
                store,
                context,
                problem=lambda seeds: DigitsProblem(seeds, context.device, context.workers if on_gpu else 1),
                basis=lambda problem, kind: batched.Basis.stack(problem.bases()) if kind == EGOP else None,
                compact=_compact,
            )

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the best validation accuracy, negated."""
        return -float(result["best validation accuracy"])

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        judged = []
        for optimizer in ("Adam", "Adagrad"):
            judged.append(judge_by_both_rules(partial(self._judge_lower, store, preset, optimizer)))
            judged.append(judge_by_both_rules(partial(self._judge_below_sgd, store, preset, optimizer)))
            judged.append(judge_by_both_rules(partial(self._judge_faster, store, preset, optimizer, [optimizer])))
            judged.append(
                judge_by_both_rules(partial(self._judge_faster, store, preset, optimizer, ["SGD", "SGD+momentum"]))
            )
            judged.append(self._judge_robust(store, preset, optimizer))
            judged.append(judge_by_both_rules(partial(self._judge_accuracy, store, preset, optimizer)))
        for optimizer in ("SGD", "SGD+momentum"):
            original_runs, turned_runs = (
                self.reported_runs(store, preset, optimizer, kind) for kind in (ORIGINAL, EGOP)
            )
            judged.append(
                check_same_in_both(f"digits/{optimizer}-same", optimizer, original_runs, turned_runs, "loss", 0.05)
            )
        return judged

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        methods = [(name, kind) for name in self.settings(preset)["rates"] for kind in (ORIGINAL, EGOP)]
        epochs = range(0, self.settings(preset)["epochs"] + 1, _STRIDE[preset])
        losses = [
            curve_series(self.reported_runs(store, preset, *method), "loss", *method, epochs) for method in methods
        ]
        sweeps, accuracies = [], []
        for optimizer, kind in methods:
            runs = self.fresh_runs(store, preset, optimizer, kind)
            chosen = self.choose_rate(store, preset, optimizer)
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

    def _final(self, store: Store, preset: Preset, optimizer: str, coordinates: str, separate: bool) -> float:
        runs = self.reported_runs(store, preset, optimizer, coordinates, separate=separate)
        return median([run.result["loss"][-1] for run in runs])

    def _judge_lower(self, store: Store, preset: Preset, optimizer: str, separate: bool) -> Judgement:
        original, turned = (self._final(store, preset, optimizer, kind, separate) for kind in (ORIGINAL, EGOP))
        words = f"EGOP {optimizer} ends at a lower training loss than {optimizer}."
        return compare(f"digits/{optimizer}-lower", words, ("EGOP", turned), (optimizer, original))

    def _judge_below_sgd(self, store: Store, preset: Preset, optimizer: str, separate: bool) -> Judgement:
        rivals = {name: self._final(store, preset, name, ORIGINAL, separate) for name in ("SGD", "SGD+momentum")}
        best = min(rivals, key=lambda name: rivals[name])
        turned = self._final(store, preset, optimizer, EGOP, separate)
        words = f"EGOP {optimizer} ends lower than SGD and SGD with momentum."
        return compare(f"digits/{optimizer}-below-sgd", words, ("EGOP", turned), (f"{best}, the better", rivals[best]))

    def _judge_faster(
        self, store: Store, preset: Preset, optimizer: str, rivals: Sequence[str], separate: bool
    ) -> Judgement:
        """Compare the epochs to the lowest loss of the rival's median."""
        turned = self._curve(store, preset, optimizer, EGOP, separate)
        curves = {name: self._curve(store, preset, name, ORIGINAL, separate) for name in rivals}
        best = min(curves, key=lambda name: min(curves[name]))
        goal, every = min(curves[best]), _STRIDE[preset]
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

    def _curve(self, store: Store, preset: Preset, optimizer: str, coordinates: str, separate: bool) -> list[float]:
        runs = self.reported_runs(store, preset, optimizer, coordinates, separate=separate)
        return quartiles([run.result["loss"] for run in runs])[1]

    def _judge_robust(self, store: Store, preset: Preset, optimizer: str) -> Judgement:
        finals: dict[str, dict[float, list[float]]] = {ORIGINAL: {}, EGOP: {}}
        for kind, by in finals.items():
            for run in self.fresh_runs(store, preset, optimizer, kind):
                by.setdefault(run.config["lr"], []).append(run.result["loss"][-1])
        better = [rate for rate, values in finals[EGOP].items() if median(values) < median(finals[ORIGINAL][rate])]
        share = len(better) / len(finals[EGOP])
        words = f"The gain of EGOP {optimizer} is robust to the learning rate."
        finding = f"Lower at {len(better)} of {len(finals[EGOP])} learning rates."
        threshold = "at more than three quarters of them"
        return Judgement(f"digits/{optimizer}-robust", words, to_verdict(share > 0.75), finding, threshold=threshold)

    def _judge_accuracy(self, store: Store, preset: Preset, optimizer: str, separate: bool) -> Judgement:
        original, turned = (
            median(
                [
                    run.result["test accuracy"]
                    for run in self.reported_runs(store, preset, optimizer, kind, separate=separate)
                ]
            )
            for kind in (ORIGINAL, EGOP)
        )
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
