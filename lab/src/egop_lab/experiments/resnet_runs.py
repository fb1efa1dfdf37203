"""The runs of the residual-network experiment, short and long, and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from egop_lab.builders import import_pytorch_optimizer
from egop_lab.data import images
from egop_lab.experiments.base import Judgement, Table, make_alternative
from egop_lab.experiments.curves import bar_panel, best_rate, median, quartiles
from egop_lab.experiments.resnet_claims import (
    ADAMW,
    AROUND,
    BOTH_SIDES,
    PAPER,
    SOAP_10,
    SOAP_100,
    SOAP_OURS,
    claims,
)
from egop_lab.experiments.timed_experiment import (
    Claim,
    Measures,
    Runs,
    TimedExperiment,
    find_lowest_pass,
    format_number,
    is_tuning,
    length_to,
    lowest_loss,
)
from egop_lab.formatting import pluralize
from egop_lab.methods import RESNET, get_methods
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.classifiers import Run
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials, describe_precision, fast_math

_NEAR = 1.05  # the paper's target, relative to the lowest validation loss of SOAP with frequent refreshes

OPTIONAL = (BOTH_SIDES,)  # run last, if there is time; left out if its runs are missing

_NEW = (SOAP_100, SOAP_OURS, AROUND)  # methods without short runs, except those for tuning


class ShortRuns(TimedExperiment):
    """Runs of ten epochs, with online bases, SOAP every 10 steps and Muon too."""

    id: ClassVar[str] = "resnet"
    title: ClassVar[str] = "A residual network on Imagenette, ten classes of ImageNet"
    figures: ClassVar[str] = "the figure and table on residual networks; supplementary: validation loss, accuracy"
    comparison: ClassVar[str] = RESNET
    training = Run
    length: ClassVar[str] = "epochs"
    soap: ClassVar[str] = SOAP_10  # the SOAP with frequent refreshes
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_10))
    picture_name: ClassVar[str] = "resnet"  # prefix of its pictures' names

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": [method for method in get_methods(RESNET) if method not in _NEW],
            "rates": [3e-4, 1e-3, 3e-3] if full else [1e-3],
            "trials": 3 if full else 2,
            "tuning trials": 1,
            "epochs": 10 if full else 2,
            "tuning epochs": 3 if full else 1,
            "rate": "the highest accuracy of ten crops after the tuning epochs",
            "batch": 128 if full else 32,
            "weight decay": 1e-4,
            "side": 112 if full else 40,
            "crop": 96 if full else 32,
            "depths": [3, 4, 6, 3] if full else [1, 1, 1, 1],
            "width": 64 if full else 8,
            "seconds": "training and bases, no evaluation; on a GPU the network is replayed as a CUDA graph",
            "data": "Imagenette, ten classes of ImageNet",
            "precision": "on a GPU the network computes in bfloat16, with weights in float32",
            "validation": "the central crop after every epoch, ten crops at the end",
            "target": f"{_NEAR:g} times the lowest median validation loss of {self.soap} after any epoch; beside it "
            "AdamW's lowest median, and the same part of the median of each trial's lowest",
            "SOAP": "renewed never, each epoch and every 100 or 10 steps; 100 are more than an epoch here, "
            "a hundredth of one in the paper; its own betas (0.95, 0.95), a basis for every dimension of a kernel; "
            "ours has one for inputs and kernel together",
            "rho": "of a basis that is renewed each epoch: the point itself, with other batches; with scale 0.01 a "
            "normal distribution around it with that standard deviation",
            "images": ["all", "all"] if full else [320, 160],
            **({} if full else {"samples": 32}),  # in the full preset, enough for a thousand gradients per kernel
        }

    def run(self, store: Store, context: Context) -> None:
        trials = self.trials(store, context)
        methods = self.settings(context.preset)["methods"]
        with fast_math(context.device):
            first = [method for method in methods if method not in OPTIONAL]
            self._tune_and_run(trials, first) and self._tune_and_run(trials, OPTIONAL)

    def source(self, context: Context) -> dict[str, Any]:
        """Return the arguments for loading the images."""
        settings = self.settings(context.preset)
        limits = [None if count == "all" else count for count in settings["images"]]
        return {
            "folder": context.data,
            "side": settings["side"],
            "crop": settings["crop"],
            "device": context.device,
            "limits": (limits[0], limits[1]),
            "workers": context.workers,
        }

    def trials(self, store: Store, context: Context) -> Trials:
        settings, device = self.settings(context.preset), context.device
        data = images.load(**self.source(context))
        names = ("batch", "weight decay", "side", "crop", "depths", "width", "samples")
        common = {key: settings[key] for key in names if key in settings}
        common |= {"data": data.counts, "precision": describe_precision(device)}
        warm = False

        def warm_up(config: dict[str, Any]) -> None:
            """Run an epoch and decompositions untimed on a GPU, so that no timed run pays for their setup."""
            nonlocal warm
            if warm:
                return
            import_pytorch_optimizer(SOAP_10)  # takes seconds to import
            if device.type == "cuda":
                self.training(data, config | {"method": ADAMW, "epochs": 1}, device)(progress=False)
                torch.linalg.eigh(torch.eye(64, dtype=torch.float64, device=device))
                torch.linalg.qr(torch.eye(64, device=device))
            warm = True

        return Trials(
            store,
            context,
            lambda **entries: self.config(context.preset, **entries, **common),
            lambda config: self.training(data, config, device),
            warm_up,
        )

    def _tune_and_run(self, trials: Trials, methods: Sequence[str]) -> bool:
        """Tune some methods and do their runs; return False when the time is over."""
        settings = self.settings(trials.context.preset)
        seeds = range(TUNING, TUNING + settings["tuning trials"])
        tuning = [(method, lr, seed) for method in methods for lr in settings["rates"] for seed in seeds]
        epochs = settings["tuning epochs"]
        if not all(trials.do(method=method, lr=lr, epochs=epochs, seed=seed) for method, lr, seed in tuning):
            return False
        return self.run_reported(trials, methods)

    def required_methods(self, preset: Preset) -> set[str]:
        return {method for claim in self.claims for method in (claim.method, claim.other)}

    def find_rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        """Return the rate of the highest median ten-crop accuracy on the tuning trials: the paper's rule."""
        runs = [run for run in self.tuning_runs(settings, done, method) if run.config["lr"] in settings["rates"]]
        if missing := set(settings["rates"]) - {run.config["lr"] for run in runs}:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, sorted(missing)))}")
        return best_rate(runs, inaccuracy)

    def tuning_runs(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> list[Record]:
        """Return the runs that choose a method's learning rate."""
        own = [run for run in done if is_tuning(run) and run.config["method"] == method]
        return [run for run in own if run.config["epochs"] == settings["tuning epochs"]]

    def measures(self, goal: float) -> Measures:
        return {
            **super().measures(goal),
            "training": ("Last training loss", lambda run: run.result["training loss"][-1]),
            "training error": (
                "Share of wrong answers in the last epoch's batches",
                lambda run: 1 - run.result["training accuracy"][-1],
            ),
            "validation": ("Lowest validation loss", lambda run: lowest_loss(run.result)),
            "ten-crop loss": ("Loss of ten crops at the end", lambda run: run.result["ten-crop loss"]),
            "error": ("Share of wrong answers, ten crops", lambda run: 1 - run.result["ten-crop accuracy"]),
        }

    def goals(self, runs: Runs) -> Mapping[str, float]:
        curves = [run.result["validation loss"] for run in runs[self.soap]]
        own = median([lowest_loss(run.result) for run in runs[self.soap]])
        return {
            f"to {_NEAR:g} times the lowest of {self.soap}'s medians": _NEAR * min(quartiles(curves)[1]),
            "to the lowest of AdamW's medians": self.goal(runs),
            f"to {_NEAR:g} times the median of {self.soap}'s lowest ones": _NEAR * own,
        }

    def _judge_claim(self, claim: Claim, runs: Runs, goal: float, preset: Preset) -> Judgement:
        if claim.measure == "training error" and not _has_training_accuracy(runs, claim.method, claim.other):
            found = "Accuracy on training images was not recorded; the training loss was."
            return Judgement(f"{self.id}/{claim.name}", claim.statement, "cannot be judged", found)
        judged = super()._judge_claim(claim, runs, goal, preset)
        if claim.measure != "validation":
            return judged
        ten = super()._judge_claim(replace(claim, measure="ten-crop loss"), runs, goal, preset)
        return replace(
            judged, alternatives=(make_alternative("ten crops, as the paper evaluates, but at the end only", ten),)
        )

    def format_numbers(self, claim: Claim, one: float, other: float) -> str:
        return f"{claim.method}: {format_number(one, 3)}; {claim.other}: {format_number(other, 3)}"

    def timed_runs(self, store: Store, preset: Preset) -> Runs:
        """Return the runs that the time of an epoch is read from."""
        return self.reported_runs(store, preset)

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        """Compare what an epoch costs here and in the paper, the results, and the epochs that each trial needs."""
        runs, timed = self.reported_runs(store, preset), self.timed_runs(store, preset)
        epochs = self.settings(preset)["epochs"]
        header = ("method", "rate", "trials", "lowest validation loss", "at epoch", "ten crops: loss", "accuracy")
        cost = ("seconds an epoch", "times AdamW's", "in the paper")
        rows = [self.row(method, records, timed) for method, records in runs.items()]
        goals = {f"{goal:.3f}": goal for goal in sorted(self.goals(runs).values())}
        reached = [
            (method, *(", ".join(format_number(length_to(run, goal), 3) for run in records) for goal in goals.values()))
            for method, records in runs.items()
        ]
        cost_is = "with renewals, without a first basis; lowest to highest"
        title = f"{epochs} epochs: medians of the trials, and what an epoch costs ({cost_is})"
        return [
            Table(title, (*header, *cost), tuple(rows)),
            Table(
                f"{epochs} epochs: how many each trial needs to a validation loss; claims compare the medians",
                ("method", *goals),
                tuple(reached),
            ),
        ]

    def row(self, method: str, runs: Sequence[Record], timed: Runs) -> tuple[str, ...]:
        """Return a method's row in the table."""

        def middle(name: str) -> float:
            return median([run.result[name] for run in runs])

        hours = {name: taken / epochs for name, (epochs, taken) in PAPER.items()}
        there = f"{hours[method] / hours[ADAMW]:.2f}" if method in hours else ""
        seconds, adamws = (_epoch_seconds(timed[each]) for each in (method, ADAMW))
        return (
            method,
            f"{runs[0].config['lr']:g}",
            str(len(runs)),
            f"{median([lowest_loss(run.result) for run in runs]):.3f}",
            f"{median([find_lowest_pass(run.result) for run in runs]):g}",
            f"{middle('ten-crop loss'):.3f}",
            f"{middle('ten-crop accuracy'):.1%}",
            f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})" if seconds else "",
            f"{median(seconds) / median(adamws):.1f}" if seconds and adamws else "",
            there,
        )

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported_runs(store, preset)
        goal = self.goal(runs)
        measures = self.measures(goal)
        horizontal = {f"target {value:.3f}": value for value in self.goals(runs).values()}

        def lines(name: str) -> list[Series]:
            return [_line(method, [run.result[name] for run in records]) for method, records in runs.items()]

        def accuracy(title: str, name: str) -> Panel:
            return Panel(title, "epoch", "accuracy", lines(name), yscale="linear")

        count = self.settings(preset)["trials"]
        fewer = "".join(f", {method}: {len(records)}" for method, records in runs.items() if len(records) < count)
        panels = [
            Panel("Training loss", "epoch", "loss", lines("training loss")),
            Panel("Validation loss", "epoch", "loss", lines("validation loss"), horizontal=horizontal),
            accuracy("Validation accuracy", "accuracy"),
        ]
        if _has_training_accuracy(runs, *runs):
            panels.append(accuracy("Training accuracy", "training accuracy"))
        return [
            Picture(
                self.picture_name,
                f"By epoch, each method at its own learning rate; medians and quartiles over "
                f"{pluralize(count, 'trial')}{fewer}. Of training it is the mean over an epoch's batches; "
                "validation sees the central crop. "
                f"Targets: AdamW's lowest median, {_NEAR:g} times that of {self.soap}, and {_NEAR:g} times the median "
                "of its trials' lowest.",
                panels,
            ),
            Picture(
                f"{self.picture_name}-time",
                f"Epochs and seconds of training (bases included) until the validation loss is at most {goal:.3f}, "
                "AdamW's lowest median; no bar: not reached. Accuracy of the mean output over ten crops at the end.",
                [
                    bar_panel("Epochs to the target", "epochs", runs, measures["epochs"][1]),
                    bar_panel("Seconds to the target", "seconds", runs, measures["seconds"][1]),
                    bar_panel("At the end", "ten-crop accuracy", runs, lambda run: run.result["ten-crop accuracy"]),
                ],
            ),
        ]


def inaccuracy(result: Mapping[str, Any]) -> float:
    """Return the score that chooses a learning rate: the ten-crop accuracy, negated."""
    return -float(result["ten-crop accuracy"])


def _has_training_accuracy(runs: Runs, *methods: str) -> bool:
    """Return True if accuracy on training images was recorded for all of these methods."""
    return all("training accuracy" in run.result for method in methods for run in runs[method])


def is_timed(run: Record) -> bool:
    """Return True if a run had the device to itself, and did not diverge."""
    return math.isfinite(run.result["seconds"][-1])


def pace(runs: Sequence[Record]) -> tuple[float, float]:
    """Return the median seconds before the first epoch and of an epoch, over timed runs.

    What the first epoch takes more than others, as for a first basis, is before.
    """
    if not (seconds := _epoch_seconds(runs)):
        return math.nan, math.nan
    epoch = median(seconds)
    return median([run.result["seconds"][1] - epoch for run in runs if is_timed(run)]), epoch


def _epoch_seconds(runs: Sequence[Record]) -> list[float]:
    """Return the seconds of an epoch after the first, for every timed run."""
    curves = [run.result["seconds"] for run in runs if is_timed(run)]
    return [(curve[-1] - curve[1]) / max(len(curve) - 2, 1) for curve in curves]


def _line(method: str, curves: Sequence[Sequence[float]]) -> Series:
    """Draw a curve by epoch from the end of the first epoch: the loss of the start would dwarf all others."""
    low, middle, high = quartiles([curve[1:] for curve in curves])
    color = "SOAP" if method in (SOAP_10, SOAP_100) else method
    return Series(method, list(range(1, len(middle) + 1)), middle, low, high, color, "EGOP" in method)
