"""ResNet-34 on ImageNet images: AdamW in both coordinates, SOAP and Muon; epochs and seconds to a validation loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from egop.runs import Panel, Picture, Series, counted
from egop_lab.data import images
from egop_lab.experiments.base import Judged
from egop_lab.experiments.curves import bar_panel, best_rate, quartiles
from egop_lab.experiments.timed import Claim, Measures, Runs, TimedExperiment, is_tuning, lowest, number
from egop_lab.making import foreign
from egop_lab.methods import RESNET, compared, label
from egop_lab.training.classifiers import Run
from egop_lab.training.context import Context, Preset
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed import Trials, fast, precision

ADAMW, UPFRONT, PERIODIC, BOTH_SIDES, SOAP_ONCE, SOAP_EPOCH, SOAP_10 = (
    label(RESNET, name)
    for name in ("adamw", "shared-fixed", "shared-renewed", "kronecker-online", "soap-once", "soap-period", "soap")
)

_EPOCHS, _TIME = "EGOP each epoch needs no more epochs", "EGOP each epoch is faster"
_COMPETITIVE = 1.1
_NEAR = 1.05  # the paper's target: so many times SOAP's lowest validation loss, where SOAP is renewed often

_IMAGENETTE = 9469  # training images

OPTIONAL = (BOTH_SIDES,)  # run last, when there is time; left out where its runs are missing

# Name, the claim, what is compared, which method's number is to be the smaller one, and the paper's numbers.
_CLAIMS = (
    ("upfront-epochs", "EGOP up-front needs fewer epochs than AdamW.", "epochs", UPFRONT, ADAMW, "15 and 24"),
    (
        "periodic-epochs",
        "EGOP each epoch needs no more epochs than up-front.",
        "epochs",
        PERIODIC,
        UPFRONT,
        "13 and 15",
    ),
    ("upfront-time", "EGOP up-front needs less time than AdamW.", "seconds", UPFRONT, ADAMW, "4.14 h and 5.66 h"),
    ("periodic-time", "EGOP each epoch needs less time than AdamW.", "seconds", PERIODIC, ADAMW, "3.62 h and 5.66 h"),
    ("upfront-soap", "EGOP up-front needs fewer epochs than SOAP once.", "epochs", UPFRONT, SOAP_ONCE, "15 and 20"),
    (
        "upfront-soap-time",
        "EGOP up-front is faster than SOAP once.",
        "seconds",
        UPFRONT,
        SOAP_ONCE,
        "4.14 h and 7.06 h",
    ),
    ("periodic-soap", f"{_EPOCHS} than SOAP, both each epoch.", "epochs", PERIODIC, SOAP_EPOCH, "13 and 14"),
    ("periodic-soap-time", f"{_TIME} than SOAP each epoch.", "seconds", PERIODIC, SOAP_EPOCH, "3.62 h and 4.63 h"),
    ("periodic-often", f"{_EPOCHS} than SOAP renewed often.", "epochs", PERIODIC, SOAP_10, "13 and 13"),
    ("often-time", f"{_TIME} than SOAP renewed often.", "seconds", PERIODIC, SOAP_10, "3.62 h and 4.82 h"),
    ("soap-often", "SOAP renewed often needs fewer epochs than once.", "epochs", SOAP_10, SOAP_ONCE, "13 and 20"),
    ("upfront-training", "EGOP up-front trains to a lower loss than AdamW.", "training", UPFRONT, ADAMW, ""),
    ("periodic-training", "EGOP each epoch trains to a lower loss than up-front.", "training", PERIODIC, UPFRONT, ""),
    ("upfront-validation", "EGOP up-front validates lower than AdamW.", "validation", UPFRONT, ADAMW, ""),
    (
        "validation-often",
        "EGOP each epoch validates lower than SOAP.",
        "validation",
        PERIODIC,
        SOAP_10,
        "1.19 and 1.22",
    ),
    ("upfront-accuracy", "EGOP up-front is more accurate than AdamW.", "error", UPFRONT, ADAMW, ""),
    ("periodic-accuracy", "EGOP each epoch is more accurate than AdamW.", "error", PERIODIC, ADAMW, ""),
)


def _claims() -> Iterator[Claim]:
    for name, words, measure, method, other, paper in _CLAIMS:
        yield Claim(name, words, measure, method, other, 1.0 if "no more" in words else None, paper)
    yield Claim(
        "soap-accuracy",
        "The accuracy of EGOP each epoch is competitive with SOAP's.",
        "error",
        PERIODIC,
        SOAP_10,
        part=_COMPETITIVE,
        threshold=f"competitive: at most {_COMPETITIVE:g} times its wrong answers",
    )
    yield Claim(
        "validation",
        "EGOP each epoch validates lower than SOAP each epoch.",
        "validation",
        PERIODIC,
        SOAP_EPOCH,
        kind="reading",
    )


class ResnetExperiment(TimedExperiment):
    """The paper's table of epochs and time at small scale; and online bases, SOAP every 10 steps and Muon beside it."""

    id: ClassVar[str] = "resnet"
    title: ClassVar[str] = "A residual network on Imagenette, ten classes of ImageNet"
    figures: ClassVar[str] = "the figure and table on residual networks; supplementary: validation loss, accuracy"
    labels: ClassVar[tuple[str, ...]] = (
        "fig:new-resnet-fig-plus-table",
        "table:wallclock-time",
        "fig:ResNet-sup-val",
        "fig:ResNet-sup",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "data": "ImageNet, 1.28 million images of 1000 classes, on an RTX 6000 Ada",
        "rates": "a sweep over powers of ten from 1e-05 to 1",
        "trials": "not named; median ± standard deviation",
        "epochs": "40",
        "tuning epochs": "10",
        "batch": "128",
        "weight decay": "0.0001",
        "side": "256",
        "crop": "224",
        "target": "1.3, within 5 % of SOAP 100's lowest validation loss",
        "SOAP": "renewed never, every 100 and every 10000 steps (an epoch)",
    }
    comparison: ClassVar[str] = RESNET
    training = Run
    length: ClassVar[str] = "epochs"
    claims: ClassVar[Sequence[Claim]] = tuple(_claims())

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": list(compared(RESNET)),
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
            "data": "Imagenette, ten classes of ImageNet",
            "target": f"{_NEAR:g} times the lowest median validation loss of {SOAP_10}, and AdamW's lowest one beside",
            "SOAP": "renewed never, each epoch and every 10 steps; its own betas (0.95, 0.95), a basis for every "
            "dimension of a kernel",
            "images": ["all", "all"] if full else [320, 160],
        }

    def run(self, store: Store, context: Context) -> None:
        trials = self.trials(store, context)
        methods = self.settings(context.preset)["methods"]
        with fast(context.device):
            first = [method for method in methods if method not in OPTIONAL]
            self._all_of(trials, first) and self._all_of(trials, OPTIONAL)

    def trials(self, store: Store, context: Context) -> Trials:
        settings, device = self.settings(context.preset), context.device
        limits = [None if count == "all" else count for count in settings["images"]]
        data = images.load(
            context.data,
            side=settings["side"],
            crop=settings["crop"],
            device=device,
            limits=(limits[0], limits[1]),
            workers=context.workers,
        )
        common = {key: settings[key] for key in ("batch", "weight decay", "side", "crop", "depths", "width")}
        common |= {"data": data.counts, "precision": precision(device)}
        warm = False

        def warm_up(config: dict[str, Any]) -> None:
            """On a GPU, an epoch and decompositions that nobody times: no run pays for what the first one sets up."""
            nonlocal warm
            if warm:
                return
            foreign(SOAP_10)  # takes seconds to import
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

    def _all_of(self, trials: Trials, methods: Sequence[str]) -> bool:
        """Tune some methods and do their runs; whether that is done, or the time is over."""
        settings = self.settings(trials.context.preset)
        seeds = range(TUNING, TUNING + settings["tuning trials"])
        tuning = [(method, lr, seed) for method in methods for lr in settings["rates"] for seed in seeds]
        epochs = settings["tuning epochs"]
        if not all(trials.do(method=method, lr=lr, epochs=epochs, seed=seed) for method, lr, seed in tuning):
            return False
        return self.report(trials, methods)

    def required(self, preset: Preset) -> set[str]:
        return {method for claim in self.claims for method in (claim.method, claim.other)}

    def rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        """The rate of the highest median ten-crop accuracy on the tuning trials: the paper's rule."""
        wanted = [(method, rate, settings["tuning epochs"]) for rate in settings["rates"]]
        runs = [run for run in done if is_tuning(run) and self.key(run) in wanted]
        if missing := set(settings["rates"]) - {run.config["lr"] for run in runs}:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, sorted(missing)))}")
        return best_rate(runs, lambda result: -result["ten-crop accuracy"])

    def measures(self, goal: float) -> Measures:
        return {
            **super().measures(goal),
            "training": ("Last training loss", lambda run: run.result["training loss"][-1]),
            "validation": ("Lowest validation loss", lambda run: lowest(run.result)),
            "error": ("Share of wrong answers, ten crops", lambda run: 1 - run.result["ten-crop accuracy"]),
        }

    def goals(self, runs: Runs) -> Mapping[str, float]:
        often = min(quartiles([run.result["validation loss"] for run in runs[SOAP_10]])[1])
        return {f"{_NEAR:g} times SOAP's lowest": _NEAR * often, "to AdamW's lowest validation loss": self.goal(runs)}

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        unknown = Judged(
            f"{self.id}/training-accuracy",
            "EGOP is more accurate than AdamW on training images.",
            "cannot be judged",
            "Accuracy on training images was not recorded; the training loss was.",
        )
        return [*super().judge(store, preset), unknown]

    def remarks(self, store: Store, preset: Preset) -> list[str]:
        config = self.done(store, preset)[-1].config
        counts = config["data"]
        whose = "Imagenette's" if counts["train"] == _IMAGENETTE else "a folder's"
        epochs = self.settings(preset)["epochs"]
        remark = (
            f"The images are {whose} {counts['train']:,} of {counts['classes']} classes at {config['crop']} px, not "
            f"ImageNet's 1.28 million of 1,000 classes at 224 px, and there are {epochs} epochs of them, not 40: what "
            "is found is about this small task."
        )
        return [remark]

    def said(self, claim: Claim, one: float, other: float) -> str:
        return f"{claim.method} {number(one, 3)}, {claim.other} {number(other, 3)}"

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported(store, preset)
        goal = self.goal(runs)
        measures = self.measures(goal)
        horizontal = {f"target {goal:.3f}": goal}

        def lines(name: str) -> list[Series]:
            return [_line(method, [run.result[name] for run in records]) for method, records in runs.items()]

        count = self.settings(preset)["trials"]
        fewer = "".join(f", {method}: {len(records)}" for method, records in runs.items() if len(records) < count)
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
                    bar_panel("Epochs to the target", "epochs", runs, measures["epochs"][1]),
                    bar_panel("Seconds to the target", "seconds", runs, measures["seconds"][1]),
                    bar_panel("At the end", "ten-crop accuracy", runs, lambda run: run.result["ten-crop accuracy"]),
                ],
            ),
        ]


def _line(method: str, curves: Sequence[Sequence[float]]) -> Series:
    """By epoch, from the end of the first one: the loss of the start would dwarf all others."""
    low, middle, high = quartiles([curve[1:] for curve in curves])
    color = "SOAP" if method == SOAP_10 else method
    return Series(method, list(range(1, len(middle) + 1)), middle, low, high, color, "EGOP" in method)
