"""A GPT on the bytes of a text: AdamW in both coordinates, SOAP and Muon; steps and seconds to AdamW's best loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from egop.pictures import Panel, Picture, Series
from egop_lab.experiments.base import Experiment, Judged, Verdict, verdict
from egop_lab.experiments.curves import bar_panel, best_rate, median, quartiles, rate_series
from egop_lab.experiments.resnet import epochs_to, seconds_to, target
from egop_lab.training.context import Context, Preset
from egop_lab.training.language import BETAS, METHODS, RENEWED, SOAP, Trials, shared
from egop_lab.training.records import Record, Store
from egop_lab.training.residual import ADAMW, BOTH_SIDES, ONLINE, fast
from egop_lab.training.sweeps import ORIGINAL, TUNING
from egop_lab.words import counted

Runs = dict[str, list[Record]]  # the reported runs by method

_UNJUDGED: Verdict = "cannot be judged"

# Name, the target, what is compared, whose number, with whose, and how much of that it may be at most; beating another
# method is to be strictly below it.
_CLAIMS = tuple(
    (f"{name}-{short}", f"Target: {words} {rest}", measure, method, other, part)
    for name, words, method in (
        ("online", "online EGOP, one-sided,", ONLINE),
        ("two-sided", "online EGOP, two-sided,", BOTH_SIDES),
    )
    for short, rest, measure, other, part in (
        ("steps", "reaches AdamW's best validation loss in at most 0.55 of its steps.", "steps", ADAMW, 0.55),
        ("time", "reaches AdamW's best validation loss in at most 0.65 of its time.", "seconds", ADAMW, 0.65),
        ("soap-time", "reaches AdamW's best validation loss in less time than SOAP.", "seconds", SOAP, 1.0),
    )
)


class LanguageModelExperiment(Experiment):
    """Time to quality on text: not in the paper, whose networks are classifiers; targets of this project instead."""

    id: ClassVar[str] = "language-model"
    title: ClassVar[str] = "A language model on bytes of text"
    figures: ClassVar[str] = "nothing like it; a further comparison, with targets of this project"
    gpu: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "methods": list(METHODS),
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
            "renewal": f"online bases and SOAP's after {RENEWED} steps, periodic ones after a period",
            "seconds": "training and bases, no evaluation; on a GPU the model's loss is replayed as a CUDA graph",
            "target": "AdamW's lowest median validation loss",
        }

    def run(self, store: Store, context: Context) -> None:
        trials = Trials(self, store, context)
        self.tune(trials) and self.report(trials)

    def tune(self, trials: Trials, methods: Sequence[str] = tuple(METHODS)) -> bool:
        """Do the runs that choose learning rates; whether they are all done. No time is read from them.

        Different methods may therefore be tuned by different processes at once, each with a store of its own.
        """
        settings = trials.settings
        steps, seeds = settings["tuning steps"], range(TUNING, TUNING + settings["tuning trials"])
        with fast(trials.context.device):
            for method in methods:
                while left := _search(settings, trials.done, method)[1]:
                    if not all(trials.do(method, rate, steps, seed) for rate in left for seed in seeds):
                        return False
        return True

    def report(self, trials: Trials) -> bool:
        """Do the runs that are reported, once all methods are tuned; whether they are all done."""
        settings = trials.settings
        best = {method: _chosen(settings, trials.done, method) for method in settings["methods"]}
        seeds = range(settings["trials"])
        with fast(trials.context.device):
            return all(trials.do(method, best[method], settings["steps"], seed) for seed in seeds for method in best)

    def chosen(self, store: Store, preset: Preset) -> dict[str, float]:
        """Each method's learning rate."""
        settings, done = self.settings(preset), self._done(store, preset)
        return {method: _chosen(settings, done, method) for method in settings["methods"]}

    def reported(self, store: Store, preset: Preset) -> Runs:
        """Each method's runs at its chosen rate."""
        settings, done, found = self.settings(preset), self._done(store, preset), Runs()
        for method, rate in self.chosen(store, preset).items():
            wanted = (method, rate, settings["steps"])
            runs = [run for run in done if not _is_tuning(run) and _of(run) == wanted]
            if len(runs) < settings["trials"]:
                raise LookupError(f"{method} has {len(runs)} of {settings['trials']} runs")
            found[method] = runs
        return found

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        runs = self.reported(store, preset)
        goal = target(runs[ADAMW])
        measures = _measures(goal)
        found = []
        for name, words, measure, method, other, part in _CLAIMS:
            what, number = measures[measure]
            one, two = (median([number(run) for run in runs[each]]) for each in (method, other))
            holds = one <= part * two if part < 1 else one < two
            judged = preset == "full" and min(one, two) < math.inf  # neither got there: nothing to compare
            ratio = f", {one / two:.2f} of that" if max(one, two) < math.inf else ""
            said = f"{what}: {other} {_said(two)}, {method} {_said(one)}{ratio}."
            decided = verdict(holds) if judged else _UNJUDGED
            found.append(Judged(f"{self.id}/{name}", words, decided, said, "target"))
        return found

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        runs = self.reported(store, preset)
        goal = target(runs[ADAMW])
        horizontal = {f"target {goal:.3f}": goal}
        count = counted(self.settings(preset)["trials"], "trial")
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
                    bar_panel("Steps to the target", "steps", runs, _measures(goal)["steps"][1]),
                    bar_panel("Seconds to the target", "seconds", runs, _measures(goal)["seconds"][1]),
                    bar_panel("A step", "milliseconds", runs, _step),
                ],
            ),
        ]

    def _rates(self, store: Store, preset: Preset) -> tuple[list[Series], str]:
        """What the search for learning rates saw, and which of those chosen lie at the end of what it may try."""
        settings, done, chosen = self.settings(preset), self._done(store, preset), self.chosen(store, preset)
        lines = [
            rate_series(_tuning(settings, done, method), _lowest, method, ORIGINAL, rate)
            for method, rate in chosen.items()
        ]
        ends = [method for method, rate in chosen.items() if rate in (_ladder(settings)[0], _ladder(settings)[-1])]
        return [replace(line, egop="EGOP" in line.label) for line in lines], ", ".join(ends) or "none"

    def _done(self, store: Store, preset: Preset) -> list[Record]:
        """The runs on the same text and with the same settings as the last one: others are not to be mixed in."""
        runs = self.records(store, preset)
        return [run for run in runs if shared(run) == shared(runs[-1])]


def _ladder(settings: Mapping[str, Any]) -> list[float]:
    """All learning rates that may be tried."""
    return sorted([*settings["rates"], *settings["further rates"]])


def _search(settings: Mapping[str, Any], done: Sequence[Record], method: str) -> tuple[float, list[float]]:
    """The best learning rate, and those that are to be tried before there is one."""
    runs, ladder = _tuning(settings, done, method), _ladder(settings)
    there = {run.config["lr"] for run in runs}
    low, high = ladder.index(min(settings["rates"])), ladder.index(max(settings["rates"]))
    while True:
        tried = ladder[low : high + 1]
        if left := [rate for rate in tried if rate not in there]:
            return math.nan, left
        best = ladder.index(best_rate([run for run in runs if run.config["lr"] in tried], _lowest))
        if best == low > 0:
            low -= 1
        elif best == high < len(ladder) - 1:
            high += 1
        else:
            return ladder[best], []


def _chosen(settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
    best, left = _search(settings, done, method)
    if left:
        raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, left))}")
    return best


def _tuning(settings: Mapping[str, Any], done: Sequence[Record], method: str) -> list[Record]:
    wanted = (method, settings["tuning steps"])
    return [run for run in done if _is_tuning(run) and (run.config["method"], run.config["steps"]) == wanted]


def _measures(goal: float) -> dict[str, tuple[str, Callable[[Record], float]]]:
    where = f"to a validation loss of {goal:.3f}"
    return {
        "steps": (f"Steps {where}", lambda run: epochs_to(run, goal) * run.config["interval"]),
        "seconds": (f"Seconds {where}", lambda run: seconds_to(run, goal)),
    }


def _lowest(result: Mapping[str, Any]) -> float:
    return min((value for value in result["validation loss"] if value == value), default=math.inf)


def _step(run: Record) -> float:
    """Milliseconds of a step."""
    return 1000 * float(run.result["seconds"][-1]) / int(run.config["steps"])


def _said(number: float) -> str:
    return f"{number:.4g}" if math.isfinite(number) else "never"


def _curve(method: str, runs: Sequence[Record], by: str) -> Series:
    """The validation loss without the first tenth of the run, which would dwarf all that follows."""
    found = quartiles([run.result["validation loss"] for run in runs])
    interval, looks = float(runs[0].config["interval"]), len(found[1])
    first = max(1, looks // 10)
    seconds = quartiles([run.result["seconds"] for run in runs])[1]
    places = seconds if by == "seconds" else [interval * look for look in range(looks)]
    low, middle, high = (values[first:] for values in found)
    return Series(method, places[first:], middle, low, high, method, "EGOP" in method)


def _is_tuning(run: Record) -> bool:
    return bool(run.config["seed"] >= TUNING)


def _of(run: Record) -> tuple[str, float, int]:
    return run.config["method"], run.config["lr"], run.config["steps"]
