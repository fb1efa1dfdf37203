"""The runs of the residual-network experiment, short and long, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from egop_lab.builders import import_pytorch_optimizer
from egop_lab.data import images
from egop_lab.experiments.base import Experiment, Judgement, Table, count_decades, make_alternative, to_verdict
from egop_lab.experiments.curves import bar_panel, first_below, median, quartiles
from egop_lab.experiments.resnet_claims import ADAMW, AROUND, PAPER, SOAP_10, SOAP_100, SOAP_OURS, Claim, claims
from egop_lab.formatting import pluralize
from egop_lab.gpu import describe_precision, fast_math
from egop_lab.methods import RESNET
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store
from egop_lab.training.resnet import Run
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials, shared_config
from egop_lab.training.tuning import best_rate, is_tuning

_NEAR = 1.05  # the paper's target, relative to the lowest validation loss of SOAP with frequent refreshes

OPTIONAL = ("EGOP online, two-sided", "Random rotation")  # run last, if there is time; left out if runs are missing
_NEW = (SOAP_100, SOAP_OURS, AROUND)  # methods without short runs, except those for tuning

Runs = dict[str, list[Record]]  # the reported runs by method
Measures = Mapping[str, tuple[str, Callable[[Record], float]]]  # description of a measure, and its number for a run


class ShortRuns(Experiment):
    """Runs of ten epochs, with online bases, SOAP every 10 steps and Muon too."""

    id: ClassVar[str] = "resnet"
    title: ClassVar[str] = "A residual network on Imagenette, ten classes of ImageNet"
    figures: ClassVar[str] = "the figure and table on residual networks; supplementary: validation loss, accuracy"
    training = Run
    soap: ClassVar[str] = SOAP_10  # the SOAP with frequent refreshes
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_10))
    picture_name: ClassVar[str] = "resnet"  # prefix of its pictures' names

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": [method for method in RESNET if method not in _NEW],
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
        best = {method: self.find_rate(settings, trials.done, method) for method in methods}
        reported = [(seed, method) for seed in range(settings["trials"]) for method in methods]
        epochs = settings["epochs"]
        return all(trials.do(method=method, lr=best[method], epochs=epochs, seed=seed) for seed, method in reported)

    def required_methods(self) -> set[str]:
        """Return the methods whose runs must all be there; others are shown with those they have."""
        return {method for claim in self.claims for method in (claim.method, claim.other)}

    def finished_runs(self, store: Store, preset: Preset) -> list[Record]:
        """Return the runs on the same data and with the same settings as the last one."""
        runs = self.records(store, preset)
        return [run for run in runs if shared_config(run) == shared_config(runs[-1])]

    def reported_runs(self, store: Store, preset: Preset) -> Runs:
        """Return each method's runs at its chosen rate."""
        settings, done, required = self.settings(preset), self.finished_runs(store, preset), self.required_methods()
        by_method: Runs = {}
        for method in settings["methods"]:
            try:
                wanted = (method, self.find_rate(settings, done, method), settings["epochs"])
                runs = [run for run in done if not is_tuning(run) and run_key(run) == wanted]
                if len(runs) < (settings["trials"] if method in required else 1):
                    raise LookupError(f"{method} has {len(runs)} of {settings['trials']} runs")
            except LookupError:
                if method in required:
                    raise
            else:
                by_method[method] = runs
        return by_method

    def choose_rate(self, store: Store, preset: Preset, method: str) -> float:
        """Return a method's learning rate."""
        return self.find_rate(self.settings(preset), self.finished_runs(store, preset), method)

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
        """Return the compared quantities by name; the goal is a validation loss."""
        where = f"to a validation loss of {goal:.3f}"
        return {
            "epochs": (f"Epochs {where}", lambda run: epochs_to(run, goal)),
            "seconds": (f"Seconds {where}", lambda run: _seconds_to(run, goal)),
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
        """Return the validation losses to reach, by rule; the first one judges, the others are alternatives."""
        own = median([lowest_loss(run.result) for run in runs[self.soap]])
        return {
            f"to {_NEAR:g} times the lowest of {self.soap}'s medians": _NEAR * _lowest_median(runs[self.soap]),
            "to the lowest of AdamW's medians": _lowest_median(runs[ADAMW]),
            f"to {_NEAR:g} times the median of {self.soap}'s lowest ones": _NEAR * own,
        }

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        return self.judge_claims(self.reported_runs(store, preset), preset, self.claims)

    def judge_claims(self, runs: Runs, preset: Preset, claims: Sequence[Claim]) -> list[Judgement]:
        """Judge some claims by these runs, for every goal."""
        (_, goal), *others = self.goals(runs).items()
        judged = [self._judge_claim(claim, runs, goal, preset) for claim in claims]
        for rule, goal in others:
            pairs = zip(judged, [self._judge_claim(claim, runs, goal, preset) for claim in claims], strict=True)
            judged = [
                one
                if _adds_nothing(other, one)
                else replace(one, alternatives=(*one.alternatives, make_alternative(rule, other)))
                for one, other in pairs
            ]
        return judged

    def _judge_claim(self, claim: Claim, runs: Runs, goal: float, preset: Preset) -> Judgement:
        if claim.measure == "training error" and not _has_training_accuracy(runs, claim.method, claim.other):
            found = "Accuracy on training images was not recorded; the training loss was."
            return Judgement(f"{self.id}/{claim.name}", claim.statement, "cannot be judged", found)
        judged = self._compare(claim, runs, goal, preset)
        if claim.measure != "validation":
            return judged
        ten = self._compare(replace(claim, measure="ten-crop loss"), runs, goal, preset)
        beside = make_alternative("ten crops, as the paper evaluates, but at the end only", ten)
        return replace(judged, alternatives=(beside,))

    def _compare(self, claim: Claim, runs: Runs, goal: float, preset: Preset) -> Judgement:
        what, number = self.measures(goal)[claim.measure]
        both = [runs[method] for method in (claim.method, claim.other)]
        one, other = (median([number(run) for run in own]) for own in both)
        judged = preset == "full" and min(one, other) < math.inf  # nothing to compare if neither gets there
        whole = [median([_total(claim.measure, run) for run in own]) for own in both]
        numbers = f"{claim.method}: {format_number(one, 3)}; {claim.other}: {format_number(other, 3)}"
        return Judgement(
            f"{self.id}/{claim.name}",
            claim.statement,
            to_verdict(claim.holds(one, other)) if judged else "cannot be judged",
            f"{what}: {numbers}.{'' if preset == 'full' else ' This preset is too small to judge by.'}",
            claim.kind,
            claim.paper,
            claim.threshold,
            margin=count_decades(min(one, whole[0]), min(other, whole[1])) if judged else None,
        )

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
            (method, *(", ".join(format_number(epochs_to(run, goal), 3) for run in records) for goal in goals.values()))
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
            f"{median([find_lowest_epoch(run.result) for run in runs]):g}",
            f"{middle('ten-crop loss'):.3f}",
            f"{middle('ten-crop accuracy'):.1%}",
            f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})" if seconds else "",
            f"{median(seconds) / median(adamws):.1f}" if seconds and adamws else "",
            there,
        )

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported_runs(store, preset)
        goal = _lowest_median(runs[ADAMW])
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


def run_key(run: Record) -> tuple[str, float, int]:
    """Return method, learning rate and length."""
    return run.config["method"], run.config["lr"], run.config["epochs"]


def epochs_to(run: Record, goal: float) -> float:
    """Return the epochs after which the validation loss is at most the goal; infinite if never."""
    place = first_below(run.result["validation loss"], goal)
    return math.inf if place is None else place


def _seconds_to(run: Record, goal: float) -> float:
    place = first_below(run.result["validation loss"], goal)
    return math.inf if place is None else run.result["seconds"][place]


def _total(measure: str, run: Record) -> float:
    """Return the total of a run: a lower bound on what it takes to a goal that it does not reach."""
    if measure == "epochs":
        return float(run.config["epochs"])
    return float(run.result["seconds"][-1]) if measure == "seconds" else math.inf


def lowest_loss(result: Mapping[str, Any]) -> float:
    """Return the lowest validation loss of a run."""
    return min((value for value in result["validation loss"] if value == value), default=math.inf)


def find_lowest_epoch(result: Mapping[str, Any]) -> int:
    """Return the number of epochs after which the validation loss is lowest."""
    losses: list[float] = result["validation loss"]
    return losses.index(lowest_loss(result)) if math.isfinite(lowest_loss(result)) else 0


def _lowest_median(runs: Sequence[Record]) -> float:
    """Return the lowest median validation loss after any epoch."""
    return min(quartiles([run.result["validation loss"] for run in runs])[1])


def _adds_nothing(other: Judgement, one: Judgement) -> bool:
    """Return True if an alternative rule sees the same numbers, or has nothing to compare where this one has."""
    return other.finding == one.finding or (other.verdict == "cannot be judged" != one.verdict)


def format_number(value: float, digits: int) -> str:
    """Format a number of epochs or seconds."""
    return f"{value:.{digits}g}" if math.isfinite(value) else "never"


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

    Extra time in the first epoch, such as for a first basis, counts as time before it.
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
