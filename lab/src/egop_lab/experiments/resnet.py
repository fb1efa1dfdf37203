"""ResNet-34 on ImageNet images: AdamW in both coordinates, SOAP and Muon; epochs and seconds to a validation loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from egop.pictures import Panel, Picture, Series
from egop_lab.data import images
from egop_lab.experiments.base import Experiment, Judged, Verdict, verdict
from egop_lab.experiments.curves import bar_panel, best_rate, first_below, median, quartiles
from egop_lab.training.context import Context, Preset, finished
from egop_lab.training.records import Record, Store
from egop_lab.training.residual import (
    ADAMW,
    BOTH_SIDES,
    METHODS,
    PERIODIC,
    SOAP_10,
    SOAP_EPOCH,
    SOAP_ONCE,
    UPFRONT,
    Run,
    fast,
    warm_up,
)
from egop_lab.training.sweeps import TUNING
from egop_lab.words import counted

Runs = dict[str, list[Record]]  # the reported runs by method

OPTIONAL = (BOTH_SIDES,)  # run last, when there is time; left out where its runs are missing

_UNJUDGED: Verdict = "cannot be judged"

# Name, the claim with the paper's numbers, what is compared, and which method's number is to be the smaller one.
_CLAIMS = (
    ("upfront-epochs", "EGOP up-front needs fewer epochs than AdamW (15, 24).", "epochs", UPFRONT, ADAMW),
    ("periodic-epochs", "EGOP each epoch needs no more epochs than up-front (13, 15).", "epochs", PERIODIC, UPFRONT),
    ("upfront-time", "EGOP up-front needs less time than AdamW (4.14 h, 5.66 h).", "seconds", UPFRONT, ADAMW),
    ("periodic-time", "EGOP each epoch needs less time than AdamW (3.62 h, 5.66 h).", "seconds", PERIODIC, ADAMW),
    ("upfront-soap", "EGOP up-front needs fewer epochs than SOAP once (15, 20).", "epochs", UPFRONT, SOAP_ONCE),
    ("upfront-soap-time", "EGOP up-front is faster than SOAP once (4.14 h, 7.06 h).", "seconds", UPFRONT, SOAP_ONCE),
    ("periodic-soap", "EGOP needs no more epochs than SOAP, both each epoch (13, 14).", "epochs", PERIODIC, SOAP_EPOCH),
    (
        "periodic-soap-time",
        "EGOP is faster than SOAP, both each epoch (3.62 h, 4.63 h).",
        "seconds",
        PERIODIC,
        SOAP_EPOCH,
    ),
    ("often-time", "EGOP each epoch is faster than SOAP renewed often (3.62 h, 4.82 h).", "seconds", PERIODIC, SOAP_10),
    ("soap-often", "SOAP renewed often needs fewer epochs than SOAP once (13, 20).", "epochs", SOAP_10, SOAP_ONCE),
    ("upfront-training", "EGOP up-front trains to a lower loss than AdamW.", "training", UPFRONT, ADAMW),
    ("periodic-training", "EGOP each epoch trains to a lower loss than up-front.", "training", PERIODIC, UPFRONT),
    ("validation", "EGOP each epoch validates lower than SOAP each epoch.", "validation", PERIODIC, SOAP_EPOCH),
    ("validation-often", "EGOP each epoch validates lower than SOAP (1.19, 1.22).", "validation", PERIODIC, SOAP_10),
    ("upfront-accuracy", "EGOP up-front is more accurate than AdamW.", "error", UPFRONT, ADAMW),
    ("periodic-accuracy", "EGOP each epoch is more accurate than AdamW.", "error", PERIODIC, ADAMW),
)

_JUDGED = {method for *_, less, more in _CLAIMS for method in (less, more)}


class ResnetExperiment(Experiment):
    """The paper's table of epochs and time at small scale; and online bases, SOAP every 10 steps and Muon beside it."""

    id: ClassVar[str] = "resnet"
    title: ClassVar[str] = "A residual network on ImageNet images"
    figures: ClassVar[str] = "the figure and table on residual networks; supplementary: validation loss, accuracy"
    gpu: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": list(METHODS),
            "rates": [3e-4, 1e-3, 3e-3] if full else [1e-3],
            "trials": 3 if full else 2,
            "tuning trials": 1,
            "epochs": 10 if full else 2,
            "tuning epochs": 3 if full else 1,
            "batch": 128 if full else 32,
            "weight decay": 1e-4,
            "side": 112 if full else 40,
            "crop": 96 if full else 32,
            "depths": [3, 4, 6, 3] if full else [1, 1, 1, 1],
            "width": 64 if full else 8,
            "seconds": "training and bases, no evaluation; on a GPU the network is replayed as a CUDA graph",
            "target": "AdamW's lowest median validation loss after an epoch",
            "SOAP": "its own betas (0.95, 0.95), a basis for every dimension of a kernel",
            "images": ["all", "all"] if full else [320, 160],
        }

    def run(self, store: Store, context: Context) -> None:
        settings, began = self.settings(context.preset), time.monotonic()
        limits = [None if count == "all" else count for count in settings["images"]]
        data = images.load(
            context.data,
            side=settings["side"],
            crop=settings["crop"],
            device=context.device,
            limits=(limits[0], limits[1]),
            workers=context.workers,
        )
        common = {key: settings[key] for key in ("batch", "weight decay", "side", "crop", "depths", "width")}
        common |= {"data": data.counts, "precision": "bfloat16, TF32" if context.device.type == "cuda" else "float32"}
        warm = False

        def do(method: str, lr: float, epochs: int, seed: int) -> bool:
            """Whether a run is done, now or before; not when the time is over."""
            nonlocal warm
            config = self.config(context.preset, method=method, lr=lr, epochs=epochs, seed=seed, **common)
            if config in store:
                return True
            if context.time_budget is not None and time.monotonic() - began > context.time_budget:
                return False
            if not warm:
                warm_up(data, config | {"method": ADAMW, "epochs": 1}, context.device)
                warm = True
            started = time.perf_counter()
            result = Run(data, config, context.device)(context.progress)
            store.add(finished(config, result, time.perf_counter() - started, context.device))
            return True

        def all_of(methods: Sequence[str]) -> bool:
            seeds = range(TUNING, TUNING + settings["tuning trials"])
            rates, epochs = settings["rates"], (settings["tuning epochs"], settings["epochs"])
            if not all(do(method, lr, epochs[0], seed) for method in methods for lr in rates for seed in seeds):
                return False
            best = {method: self.chosen(store, context.preset, method) for method in methods}
            trials = range(settings["trials"])
            return all(do(method, best[method], epochs[1], seed) for seed in trials for method in methods)

        with fast(context.device):
            all_of([method for method in METHODS if method not in OPTIONAL]) and all_of(OPTIONAL)

    def chosen(self, store: Store, preset: Preset, method: str) -> float:
        """The rate of the highest median ten-crop accuracy on the tuning trials: the paper's rule."""
        settings, latest = self.settings(preset), self._latest(store, preset)
        wanted = [(method, rate, settings["tuning epochs"]) for rate in settings["rates"]]
        runs = [run for run in latest if run.config["seed"] >= TUNING and _of(run) in wanted]
        if missing := set(settings["rates"]) - {run.config["lr"] for run in runs}:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, sorted(missing)))}")
        return best_rate(runs, lambda result: -result["ten-crop accuracy"])

    def reported(self, store: Store, preset: Preset) -> Runs:
        """Each method's runs at its chosen rate; of one that no claim is about, those that are there."""
        settings, latest = self.settings(preset), self._latest(store, preset)
        found: Runs = {}
        for method in settings["methods"]:
            try:
                wanted = (method, self.chosen(store, preset, method), settings["epochs"])
                runs = [run for run in latest if run.config["seed"] < TUNING and _of(run) == wanted]
                if len(runs) < (settings["trials"] if method in _JUDGED else 1):
                    raise LookupError(f"{method} has {len(runs)} of {settings['trials']} runs")
            except LookupError:
                if method in _JUDGED:
                    raise
            else:
                found[method] = runs
        return found

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        runs = self.reported(store, preset)
        goal = target(runs[ADAMW])
        measures: dict[str, tuple[str, Callable[[Record], float]]] = {
            "epochs": (f"Epochs to a validation loss of {goal:.3f}", lambda run: epochs_to(run, goal)),
            "seconds": (f"Seconds to a validation loss of {goal:.3f}", lambda run: seconds_to(run, goal)),
            "training": ("Last training loss", lambda run: run.result["training loss"][-1]),
            "validation": ("Lowest validation loss", lambda run: _lowest(run.result["validation loss"])),
            "error": ("Share of wrong answers, ten crops", lambda run: 1 - run.result["ten-crop accuracy"]),
        }
        found = []
        for name, words, measure, less, more in _CLAIMS:
            what, number = measures[measure]
            one, other = (median([number(run) for run in runs[method]]) for method in (less, more))
            holds = one <= other if "no more" in words else one < other
            judged = preset == "full" and min(one, other) < math.inf  # neither got there: nothing to compare
            said = f"{what}: {less} {_said(one)}, {more} {_said(other)}."
            found.append(Judged(f"resnet/{name}", words, verdict(holds) if judged else _UNJUDGED, said))
        return found

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported(store, preset)
        goal = target(runs[ADAMW])
        horizontal = {f"target {goal:.3f}": goal}

        def lines(name: str) -> list[Series]:
            return [_line(method, [run.result[name] for run in own]) for method, own in runs.items()]

        count = self.settings(preset)["trials"]
        fewer = "".join(f", {method}: {len(own)}" for method, own in runs.items() if len(own) < count)
        return [
            Picture(
                "resnet",
                f"By epoch, each method at its own learning rate; medians and quartiles over {counted(count, 'trial')}"
                f"{fewer}. The training loss is the mean over an epoch's batches; validation sees the central crop.",
                [
                    Panel("Training loss", "epoch", "loss", lines("training loss")),
                    Panel("Validation loss", "epoch", "loss", lines("validation loss"), horizontal=horizontal),
                    Panel("Validation accuracy", "epoch", "accuracy", lines("accuracy"), yscale="linear"),
                ],
            ),
            Picture(
                "resnet-time",
                f"Epochs and seconds of training (bases included) until the validation loss is at most {goal:.3f}, "
                "AdamW's lowest median; no bar: not reached. Accuracy of the mean output over ten crops at the end.",
                [
                    bar_panel("Epochs to the target", "epochs", runs, lambda run: epochs_to(run, goal)),
                    bar_panel("Seconds to the target", "seconds", runs, lambda run: seconds_to(run, goal)),
                    bar_panel("At the end", "ten-crop accuracy", runs, lambda run: run.result["ten-crop accuracy"]),
                ],
            ),
        ]

    def _latest(self, store: Store, preset: Preset) -> list[Record]:
        """The runs on the same data and with the same settings as the last one: others are not to be mixed in."""
        runs = self.records(store, preset)
        return [run for run in runs if _setting(run) == _setting(runs[-1])]


def target(runs: Sequence[Record]) -> float:
    """The lowest median validation loss after any epoch."""
    return min(quartiles([run.result["validation loss"] for run in runs])[1])


def epochs_to(run: Record, goal: float) -> float:
    """After how many epochs the validation loss is at most the goal; infinitely many when it never is."""
    found = first_below(run.result["validation loss"], goal)
    return math.inf if found is None else found


def seconds_to(run: Record, goal: float) -> float:
    """After how many seconds of training, the estimation of bases included."""
    found = first_below(run.result["validation loss"], goal)
    return math.inf if found is None else run.result["seconds"][found]


def _lowest(curve: Sequence[float]) -> float:
    return min((value for value in curve if value == value), default=math.inf)


def _said(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "never"


def _line(method: str, curves: Sequence[Sequence[float]]) -> Series:
    """By epoch, from the end of the first one: the loss of the start would dwarf all others."""
    low, middle, high = quartiles([curve[1:] for curve in curves])
    color = "SOAP" if method == SOAP_10 else method
    return Series(method, list(range(1, len(middle) + 1)), middle, low, high, color, "EGOP" in method)


def _of(run: Record) -> tuple[str, float, int]:
    return run.config["method"], run.config["lr"], run.config["epochs"]


def _setting(run: Record) -> dict[str, Any]:
    """What all runs that are compared have in common."""
    return {key: value for key, value in run.config.items() if key not in ("method", "lr", "epochs", "seed")}
