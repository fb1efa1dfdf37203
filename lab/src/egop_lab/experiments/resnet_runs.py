"""The runs of the residual-network experiment, short and long, and their results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch

from egop_lab.builders import import_pytorch_optimizer
from egop_lab.data import images
from egop_lab.experiments.base import Experiment, Judgement, Table, count_decades, to_verdict
from egop_lab.experiments.curves import bar_panel, first_below, median, quartiles
from egop_lab.experiments.resnet_claims import ADAMW, AROUND, PAPER, SOAP_10, SOAP_100, SOAP_OURS, Claim, claims
from egop_lab.formatting import pluralize
from egop_lab.gpu import describe_precision, fast_math
from egop_lab.methods import RESNET
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context
from egop_lab.training.records import Record
from egop_lab.training.resnet import Run
from egop_lab.training.tuning import TUNING, is_tuning, search_rates

_NEAR = 1.05  # the paper's target, relative to the lowest validation loss of SOAP with frequent refreshes

OPTIONAL = ("EGOP online, two-sided", "Random rotation")  # run last, if there is time; left out if runs are missing
_NEW = (SOAP_100, SOAP_OURS, AROUND)  # methods without short runs, except those for tuning

Runs = dict[str, list[Record]]  # the reported runs by method
Measures = Mapping[str, tuple[str, Callable[[Record], float]]]  # description of a measure, and its number for a run


class ShortRuns(Experiment):
    """Runs of ten epochs, with online bases, SOAP every 10 steps and Muon too."""

    id: ClassVar[str] = "resnet"
    training = Run
    ladder: ClassVar[Sequence[float]] = ()  # where to search beyond the rates of the settings
    soap: ClassVar[str] = SOAP_10  # the SOAP with frequent refreshes
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_10))
    picture_name: ClassVar[str] = "resnet"  # prefix of its pictures' names

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {
            "methods": [method for method in RESNET if method not in _NEW],
            "target": f"{_NEAR:g} times the lowest median validation loss of {self.soap} after any epoch; beside it "
            "AdamW's lowest median, and the same part of the median of each trial's lowest",
        }

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The methods by importance: those of one group are tuned and run before the next one."""
        return [method for method in self.settings["methods"] if method not in OPTIONAL], OPTIONAL

    def run(self, context: Context) -> None:
        settings, device = self.settings, context.device
        limits: Any = tuple(None if count == "all" else count for count in settings["images"])
        data = images.load(
            context.data,
            side=settings["side"],
            crop=settings["crop"],
            device=device,
            limits=limits,
            workers=context.workers,
        )
        names = ("batch", "weight decay", "side", "crop", "depths", "width", "samples")
        common = {key: settings[key] for key in names if key in settings}
        common |= {"data": data.counts, "precision": describe_precision(device)}
        warm_up = cache(self._warm_up)

        def do(**entries: Any) -> None:
            if (config := self.config(**entries, **common)) not in self.store:
                warm_up(data, device)
                self.do_missing([config], lambda config: self.training(data, config, device)(context.progress), device)

        def search(method: str) -> tuple[float, list[float]]:
            return self._search(method, [run for run in self.records() if _shared_config(run) == self.config(**common)])

        with fast_math(device):
            for methods in self.groups:
                for method in methods:
                    while rates := search(method)[1]:
                        for lr, seed in itertools.product(rates, range(TUNING, TUNING + settings["tuning trials"])):
                            do(method=method, lr=lr, epochs=settings["tuning epochs"], seed=seed)
                for seed, method in itertools.product(range(settings["trials"]), methods):
                    do(method=method, lr=search(method)[0], epochs=settings["epochs"], seed=seed)

    def _warm_up(self, data: images.HeldImages, device: torch.device) -> None:
        """Run an epoch and decompositions untimed on a GPU, so that no timed run pays for their setup."""
        import_pytorch_optimizer(SOAP_10)  # takes seconds to import
        if device.type == "cuda":
            first = {"method": ADAMW, "lr": self.settings["rates"][0], "epochs": 1, "seed": TUNING}
            self.training(data, self.settings | first, device)(progress=False)
            torch.linalg.eigh(torch.eye(64, dtype=torch.float64, device=device))
            torch.linalg.qr(torch.eye(64, device=device))

    def required_methods(self) -> set[str]:
        """Return the methods whose runs must all be there; others are shown with those they have."""
        return {method for claim in self.claims for method in (claim.method, claim.other)}

    def finished_runs(self) -> list[Record]:
        """Return the runs on the same data and with the same settings as the last one."""
        runs = self.records()
        return [run for run in runs if _shared_config(run) == _shared_config(runs[-1])]

    def reported_runs(self) -> Runs:
        """Return each method's runs at its chosen rate."""
        settings, done, required = self.settings, self.finished_runs(), self.required_methods()
        by_method: Runs = {}
        for method in settings["methods"]:
            try:
                wanted = (method, self.choose_rate(method), settings["epochs"])
                runs = [run for run in done if not is_tuning(run) and run_key(run) == wanted]
                if len(runs) < (settings["trials"] if method in required else 1):
                    raise LookupError(f"{method} has {len(runs)} of {settings['trials']} runs")
            except LookupError:
                if method in required:
                    raise
            else:
                by_method[method] = runs
        return by_method

    def choose_rate(self, method: str) -> float:
        """Return the rate of the highest median ten-crop accuracy on the tuning trials: the paper's rule."""
        best, left = self._search(method, self.finished_runs())
        if left:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def _search(self, method: str, done: Sequence[Record]) -> tuple[float, list[float]]:
        """Return a method's best rate, and the rates to try before it is known."""
        rates, epochs = self.settings["rates"], self.settings["tuning epochs"]
        own = [run for run in done if is_tuning(run) and run_key(run)[::2] == (method, epochs)]
        return search_rates(self.ladder or rates, rates, own, inaccuracy)

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

    def judge(self) -> list[Judgement]:
        return self.judge_claims(self.reported_runs(), self.claims)

    def judge_claims(self, runs: Runs, claims: Sequence[Claim]) -> list[Judgement]:
        """Judge some claims by these runs, for every goal."""
        (_, goal), *others = self.goals(runs).items()
        judged = [self._judge_claim(claim, runs, goal) for claim in claims]
        for rule, goal in others:
            pairs = zip(judged, [self._judge_claim(claim, runs, goal) for claim in claims], strict=True)
            judged = [one if _adds_nothing(other, one) else one.add_alternative(rule, other) for one, other in pairs]
        return judged

    def _judge_claim(self, claim: Claim, runs: Runs, goal: float) -> Judgement:
        if claim.measure == "training error" and not _has_training_accuracy(runs, claim.method, claim.other):
            found = "Accuracy on training images was not recorded; the training loss was."
            return Judgement(f"{self.id}/{claim.name}", claim.statement, "cannot be judged", found)
        judged = self._compare(claim, runs, goal)
        if claim.measure != "validation":
            return judged
        ten = self._compare(replace(claim, measure="ten-crop loss"), runs, goal)
        return judged.add_alternative("ten crops, as the paper evaluates, but at the end only", ten)

    def _compare(self, claim: Claim, runs: Runs, goal: float) -> Judgement:
        what, number = self.measures(goal)[claim.measure]
        both = [runs[method] for method in (claim.method, claim.other)]
        one, other = (median([number(run) for run in own]) for own in both)
        judged = self.preset == "full" and min(one, other) < math.inf  # nothing to compare if neither reaches the goal
        whole = [median([_total(claim.measure, run) for run in own]) for own in both]
        numbers = f"{claim.method}: {format_number(one, 3)}; {claim.other}: {format_number(other, 3)}"
        return Judgement(
            f"{self.id}/{claim.name}",
            claim.statement,
            to_verdict(claim.holds(one, other)) if judged else "cannot be judged",
            f"{what}: {numbers}.{'' if self.preset == 'full' else ' This preset is too small to judge by.'}",
            claim.kind,
            claim.paper,
            claim.threshold,
            margin=count_decades(min(one, whole[0]), min(other, whole[1])) if judged else None,
        )

    def timed_runs(self) -> Runs:
        """Return the runs that the time of an epoch is read from."""
        return self.reported_runs()

    def tables(self) -> list[Table]:
        """Compare what an epoch costs here and in the paper, the results, and the epochs that each trial needs."""
        runs, timed = self.reported_runs(), self.timed_runs()
        epochs = self.settings["epochs"]
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

    def pictures(self) -> list[Picture]:
        runs = self.reported_runs()
        goal = _lowest_median(runs[ADAMW])
        measures = self.measures(goal)
        horizontal = {f"target {value:.3f}": value for value in self.goals(runs).values()}

        def lines(name: str) -> list[Series]:
            return [_line(method, [run.result[name] for run in records]) for method, records in runs.items()]

        def accuracy(title: str, name: str) -> Panel:
            return Panel(title, "epoch", "accuracy", lines(name), yscale="linear")

        count = self.settings["trials"]
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


def _shared_config(run: Record) -> dict[str, Any]:
    """Return the part of a configuration that all compared runs have in common."""
    keys = ("method", "lr", "epochs", "seed")
    return {key: value for key, value in run.config.items() if key not in keys}


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
    """Return the total cost of a run: a lower bound on the cost of a goal that it does not reach."""
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
