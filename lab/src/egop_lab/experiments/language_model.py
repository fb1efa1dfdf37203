"""A GPT on the bytes of a text: AdamW in both coordinates, SOAP and Muon; steps and seconds to AdamW's best loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.builders import REFRESH_EVERY, import_pytorch_optimizer
from egop_lab.data.text import load
from egop_lab.experiments.base import Kind
from egop_lab.experiments.curves import bar_panel, quartiles, rate_series
from egop_lab.experiments.timed_experiment import (
    Claim,
    TimedExperiment,
    format_number,
    is_tuning,
    lowest_loss,
    search_rates,
)
from egop_lab.formatting import pluralize
from egop_lab.methods import LANGUAGE, get_label, get_methods
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context, Preset
from egop_lab.training.language import BETAS, COMMON, Run
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import ORIGINAL, TUNING
from egop_lab.training.timed_runs import Trials, describe_precision, fast_math

ADAMW, SOAP = get_label(LANGUAGE, "adamw"), get_label(LANGUAGE, "soap")


class LanguageModelExperiment(TimedExperiment):
    """Time to quality on text: not in the paper, whose networks are classifiers; judged by targets of this project."""

    id: ClassVar[str] = "language-model"
    title: ClassVar[str] = "A language model on bytes of text"
    figures: ClassVar[str] = "nothing like it; a further comparison, with targets of this project"
    comparison: ClassVar[str] = LANGUAGE
    training = Run
    length: ClassVar[str] = "steps"
    kind: ClassVar[Kind] = "target"
    claims: ClassVar[Sequence[Claim]] = tuple(
        Claim(f"{name}-{short}", f"Target: {words} {rest}", measure, get_label(LANGUAGE, method), other, part)
        for name, words, method in (
            ("online", "online EGOP, one-sided,", "shared-online"),
            ("two-sided", "online EGOP, two-sided,", "kronecker-online"),
        )
        for short, rest, measure, other, part in (
            ("steps", "reaches AdamW's best validation loss in at most 0.55 of its steps.", "steps", ADAMW, 0.55),
            ("time", "reaches AdamW's best validation loss in at most 0.65 of its time.", "seconds", ADAMW, 0.65),
            ("soap-time", "reaches AdamW's best validation loss in less time than SOAP.", "seconds", SOAP, None),
        )
    )

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": list(get_methods(LANGUAGE)),
            "rates": [1e-3, 2e-3, 4e-3, 8e-3] if full else [2e-3, 8e-3, 3.2e-2],
            "further rates": [2.5e-4, 5e-4, 1.6e-2, 3.2e-2] if full else [5e-4, 1.28e-1],
            "rate": "lowest validation loss on the tuning trials; while it is the first or last rate tried, the next "
            "further one on that side is tried too",
            "trials": 3 if full else 1,
            "tuning trials": 1,
            "steps": 800 if full else 200,
            "tuning steps": 300 if full else 50,
            "interval": 20 if full else 10,
            "windows": 512 if full else 64,
            "layers": 6 if full else 2,
            "width": 384 if full else 64,
            "heads": 6 if full else 2,
            "context": 256 if full else 64,
            "batch": 64 if full else 8,
            "weight decay": 0.1,
            "warm-up": 50 if full else 10,
            "schedule": "linear warm-up, then constant: when a loss is reached does not depend on a planned end",
            "samples": 32 if full else 8,
            "period": 200 if full else 50,
            "betas": f"{BETAS}; SOAP and Muon have their own",
            "bases": "EGOP: of the blocks' weights, not of embeddings and head; SOAP: of every matrix, from both sides",
            "renewal": f"online bases and SOAP's after {REFRESH_EVERY} steps, periodic ones after a period",
            "seconds": "training and bases, no evaluation; on a GPU the model's loss is replayed as a CUDA graph",
            "target": "AdamW's lowest median validation loss",
        }

    def run(self, store: Store, context: Context) -> None:
        trials = self.trials(store, context)
        self.tune(trials) and self.run_reported(trials, self.settings(context.preset)["methods"])

    def trials(self, store: Store, context: Context) -> Trials:
        import_pytorch_optimizer(SOAP)  # takes seconds to import, which no run should pay for
        settings, device = self.settings(context.preset), context.device
        text = load(context.data, device, smallest=10 * settings["batch"] * settings["context"])
        common = self.config(
            context.preset,
            **{key: settings[key] for key in COMMON},
            data=text.summary,
            precision=describe_precision(device),
        )
        warm: set[str] = set()

        def warm_up(config: dict[str, Any]) -> None:
            """Set up what the first run would pay for, so that no timed run does."""
            if config["seed"] < TUNING and config["method"] not in warm:
                short = {"steps": config["interval"], "period": config["interval"] // 2}
                self.training(text, config | short, device)(progress=False)
                warm.add(config["method"])

        return Trials(
            store, context, lambda **own: common | own, lambda config: self.training(text, config, device), warm_up
        )

    def tune(self, trials: Trials, methods: Sequence[str] | None = None) -> bool:
        """Do the runs that choose learning rates; return True if all are done. They are not timed.

        Different methods may therefore be tuned by different processes at once, each with a store of its own.
        """
        settings = self.settings(trials.context.preset)
        steps, seeds = settings["tuning steps"], range(TUNING, TUNING + settings["tuning trials"])
        with fast_math(trials.context.device):
            for method in methods or settings["methods"]:
                while left := _search(settings, trials.done, method)[1]:
                    runs = [(rate, seed) for rate in left for seed in seeds]
                    if not all(trials.do(method=method, lr=rate, steps=steps, seed=seed) for rate, seed in runs):
                        return False
        return True

    def find_rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        best, left = _search(settings, done, method)
        if left:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def format_numbers(self, claim: Claim, one: float, other: float) -> str:
        ratio = f", {one / other:.2f} of that" if max(one, other) < math.inf else ""
        return f"{claim.other} {format_number(other, 4)}, {claim.method} {format_number(one, 4)}{ratio}"

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported_runs(store, preset)
        goal = self.goal(runs)
        measures = self.measures(goal)
        horizontal = {f"target {goal:.3f}": goal}
        count = pluralize(self.settings(preset)["trials"], "trial")
        sweeps, ends = self._rates(store, preset)
        curves = {name: [_curve(method, own, name) for method, own in runs.items()] for name in ("steps", "seconds")}
        return [
            Picture(
                "language-model",
                "Validation loss in nats a byte, each method at its own learning rate; medians and quartiles over "
                f"{count}, without the first tenth. Seconds are those of training, bases included. Right: the "
                "search for the learning rates, on a trial of its own and shorter runs; a star marks the chosen one "
                f"(at an end of all that may be tried: {ends}).",
                [
                    Panel("By steps", "steps", "validation loss", curves["steps"], horizontal=horizontal),
                    Panel("By time", "seconds", "validation loss", curves["seconds"], horizontal=horizontal),
                    Panel("Learning rates", "learning rate", "lowest validation loss", sweeps, xscale="log"),
                ],
            ),
            Picture(
                "language-model-time",
                f"Steps and seconds of training until the validation loss is at most {goal:.3f}, AdamW's lowest "
                "median; no bar: not reached. Seconds of a step are means over the whole run, bases included.",
                [
                    bar_panel("Steps to the target", "steps", runs, measures["steps"][1]),
                    bar_panel("Seconds to the target", "seconds", runs, measures["seconds"][1]),
                    bar_panel("A step", "milliseconds", runs, _step_milliseconds),
                ],
            ),
        ]

    def _rates(self, store: Store, preset: Preset) -> tuple[list[Series], str]:
        """Draw the search for learning rates; name the chosen rates at the end of the grid."""
        settings, done = self.settings(preset), self.finished_runs(store, preset)
        chosen = {method: self.find_rate(settings, done, method) for method in settings["methods"]}
        lines = [
            rate_series(_tuning(settings, done, method), lowest_loss, method, ORIGINAL, rate)
            for method, rate in chosen.items()
        ]
        ends = [method for method, rate in chosen.items() if rate in (_ladder(settings)[0], _ladder(settings)[-1])]
        return [replace(line, egop="EGOP" in line.label) for line in lines], ", ".join(ends) or "none"


def _ladder(settings: Mapping[str, Any]) -> list[float]:
    """Return all learning rates that may be tried."""
    return sorted([*settings["rates"], *settings["further rates"]])


def _search(settings: Mapping[str, Any], done: Sequence[Record], method: str) -> tuple[float, list[float]]:
    """Return the best learning rate, and the rates still to try."""
    return search_rates(_ladder(settings), settings["rates"], _tuning(settings, done, method), lowest_loss)


def _tuning(settings: Mapping[str, Any], done: Sequence[Record], method: str) -> list[Record]:
    wanted = (method, settings["tuning steps"])
    return [run for run in done if is_tuning(run) and (run.config["method"], run.config["steps"]) == wanted]


def _step_milliseconds(run: Record) -> float:
    """Return the milliseconds of a step."""
    return 1000 * float(run.result["seconds"][-1]) / int(run.config["steps"])


def _curve(method: str, runs: Sequence[Record], by: str) -> Series:
    """Draw the validation loss without the first tenth of the run, which would dwarf the rest."""
    bands = quartiles([run.result["validation loss"] for run in runs])
    interval, looks = float(runs[0].config["interval"]), len(bands[1])
    first = max(1, looks // 10)
    seconds = quartiles([run.result["seconds"] for run in runs])[1]
    places = seconds if by == "seconds" else [interval * look for look in range(looks)]
    low, middle, high = (values[first:] for values in bands)
    return Series(method, places[first:], middle, low, high, method, "EGOP" in method)
