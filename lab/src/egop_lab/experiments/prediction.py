"""Right in advance: what can be known before a training about what a change of basis will gain in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.experiments import prediction_pictures
from egop_lab.experiments.base import Experiment, Judgement, Table, Verdict, to_verdict
from egop_lab.experiments.prediction_found import BUDGET, HALVES, WORTH, Found, half
from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context, Preset
from egop_lab.training.prediction import FORMS, SETTINGS, probed, started, step_times, trained
from egop_lab.training.predictors import predictors
from egop_lab.training.problems import PROBLEMS
from egop_lab.training.records import Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials

_QUICK = ("quadratic-dense", "quadratic-axes", "white-noise", "entries")
_WANTED = 0.7  # the rank correlation on the held-out half
_TRAININGS = 4.5  # that a rate takes, about, where three are tried at first


class PredictionExperiment(Experiment):
    """Many problems in five forms, each at its own learning rate; predictors from before the training beside gains."""

    id: ClassVar[str] = "prediction"
    title: ClassVar[str] = "What tells in advance whether a change of basis helps"
    figures: ClassVar[str] = "nothing like it; a further study, with targets of this project"

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        chosen = PROBLEMS if full else {id: PROBLEMS[id] for id in _QUICK}
        return {
            "problems": {
                id: {"kind": each.kind, "steps": each.steps if full else 50, "rate": each.rate, "half": half(id)}
                for id, each in chosen.items()
            },
            "forms": list(FORMS),
            "trials": 3 if full else 1,
            "looks": 25,
            "warm-up": 0.05,
            "decay": 0.4,
            "ladder": [1e-3 * 2**power for power in range(-6, 12)],
            "draws": 32,
            "probe": BUDGET,
            "probe rates": [2e-3, 8e-3, 3.2e-2],
            "timing": {"rounds": 5 if full else 1, "warm": 12 if full else 2, "timed": 20 if full else 2},
            "rate": "lowest last loss on one trial of its own; while it is at an end of the rates tried, the next one "
            "of the ladder is tried too. Forms begin around the rate that is best for the original",
            "schedule": "warm-up over a part of the steps, then constant, linear to nearly 0 over the last part",
            "optimizer": f"AdamW, {', '.join(f'{key} {value}' for key, value in SETTINGS.items())}; EGOP with the same",
            "bases": "of what Online() rotates; where that is nothing, of all matrices (EGOP is then AdamW)",
            "gain": "1 less the share of the original's steps until the loss is as low as the original's last one, the "
            "median over seeds; of the best form",
            "halves": "by the first byte of the id's SHA-256: even to choose on, odd to judge by",
            "choice": f"the largest rank correlation on the first half, of what takes at most {BUDGET:.0%} of a "
            f"training; leave it: below the smallest value of a problem there that gains more than {WORTH:.0%}",
        }

    def run(self, store: Store, context: Context, *, problems: Sequence[str] | None = None) -> None:
        """Do the runs that the store does not have yet, problem by problem.

        Args:
            store: where finished runs are.
            context: preset, time.
            problems: which ones; all by default. Several processes may work at once, each with a store of its own.
        """
        settings = self.settings(context.preset)
        names = list(problems or settings["problems"])
        ends = None if context.time_budget is None else time.monotonic() + context.time_budget

        def at(problem: str) -> Trials:
            left = None if ends is None else ends - time.monotonic()
            return self.trials(problem, store, replace(context, time_budget=left))

        if not all(self._measure(at(name), "times") for name in names):  # first, so that the rest can be foretold
            return
        context.say(f"All runs take about {self._minutes(store, context.preset, names):.0f} minutes on one core.")
        for place, name in enumerate(names):
            began = time.monotonic()
            if not self._work(name, at(name)):
                return
            context.say(f"{name}: {time.monotonic() - began:.0f} s, {len(names) - place - 1} to go")

    def trials(self, problem: str, store: Store, context: Context) -> Trials:
        """What does the runs of a problem."""
        settings = self.settings(context.preset)
        same = {key: settings[key] for key in ("looks", "warm-up", "decay")}
        common = self.config(context.preset, problem=problem, **same)
        return Trials(store, context, lambda **entries: common | entries, _made, lambda config: None)

    def _work(self, problem: str, trials: Trials) -> bool:
        """Everything of a problem; whether it is all done."""
        if not all(self._measure(trials, what) for what in ("predictors", "probes")):
            return False
        settings = self.settings(trials.context.preset)
        steps = settings["problems"][problem]["steps"]
        for form in FORMS:
            while left := Found(settings, {problem: trials.done}).search(problem, form)[1]:
                if not all(trials.do(method=form, lr=rate, steps=steps, seed=TUNING) for rate in left):
                    return False
        found = Found(settings, {problem: trials.done})
        runs = [(form, seed) for seed in range(settings["trials"]) for form in FORMS]
        return all(trials.do(method=form, lr=found.rate(problem, form), steps=steps, seed=seed) for form, seed in runs)

    def _measure(self, trials: Trials, what: str) -> bool:
        """One of the records of a problem that are no trainings; false when the time is over."""
        settings = self.settings(trials.context.preset)
        steps = settings["problems"][trials.make_config()["problem"]]["steps"]
        few = max(2, int(settings["probe"] * steps) // 2 * 2)  # halves of it are looked at
        entries: dict[str, dict[str, Any]] = {
            "times": settings["timing"],
            "predictors": {
                "draws": settings["draws"],
                "agreement": "what halves hold of each other",
                "steps": few,
                "lr": settings["probe rates"][1],
            },
            "probes": {"steps": few, "rates": settings["probe rates"]},
        }
        return trials.do(what=what, seed=TUNING, **entries[what])

    def _minutes(self, store: Store, preset: Preset, names: Sequence[str]) -> float:
        """What all runs of some problems take, done or not."""
        found, settings = self.found(store, preset), self.settings(preset)
        seconds = 0.0
        for name in names:
            steps = settings["problems"][name]["steps"] * (_TRAININGS + settings["trials"] + 3 * settings["probe"])
            seconds += steps * sum(times["step"] for times in found.measured(name, "times").values())
        return seconds / 60

    def found(self, store: Store, preset: Preset) -> Found:
        """What the records say."""
        by_problem: dict[str, list[Any]] = {}
        same = {key: self.settings(preset)[key] for key in ("looks", "warm-up", "decay")}
        for run in self.records(store, preset, **same):
            by_problem.setdefault(run.config["problem"], []).append(run)
        return Found(self.settings(preset), by_problem)

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        found = self.found(store, preset)
        chosen, counts = found.chosen, [len(found.of(part)) for part in HALVES]
        whole = preset == "full" and len(found.complete) == len(found.settings["problems"])
        correlation = chosen.correlations[HALVES[1]]
        side = "below" if chosen.sign > 0 else "above"

        def target(name: str, words: str, holds: bool, finding: str, judged: bool = True) -> Judgement:
            came_out: Verdict = to_verdict(holds) if whole and judged else "cannot be judged"
            return Judgement(f"{self.id}/{name}", words, came_out, finding, "target")

        return [
            target(
                "correlation",
                f"Target: the predictor's rank correlation with the gain is at least {_WANTED} on the held-out half.",
                correlation >= _WANTED if chosen.sign > 0 else correlation <= -_WANTED,
                f"Chosen: {chosen.candidate.name}. {chosen.correlations[HALVES[0]]:.2f} on the {counts[0]} problems it "
                f"was chosen on, {correlation:.2f} on the {counts[1]} others.",
            ),
            target(
                "leave-it",
                f"Target: of the held-out problems it calls “leave it” none gains more than {WORTH:.0%}.",
                not chosen.missed,
                f"Leave it {side} {chosen.sign * chosen.threshold:.3g}: {len(chosen.left)} of {counts[1]}; of these "
                f"gain more: {', '.join(chosen.missed) or 'none'}.",
                judged=bool(chosen.left),  # nothing was said, so nothing was wrong
            ),
            target(
                "budget",
                f"Target: what it needs of trial steps is at most {BUDGET:.0%} of a training.",
                chosen.candidate.budget <= BUDGET + 1e-9,
                f"{chosen.candidate.budget:.0%}.",
            ),
        ]

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        return prediction_pictures.pictures(self.found(store, preset))

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        return prediction_pictures.tables(self.found(store, preset))


def _made(config: Mapping[str, Any]) -> Callable[[bool], dict[str, Any]]:
    """The run of a configuration: a training, or something else that is recorded of a problem."""
    runs = {"times": _times, "predictors": _predictors, "probes": _probes}
    return lambda progress: runs.get(config.get("what", ""), trained)(config)


def _times(config: Mapping[str, Any]) -> dict[str, Any]:
    timing = {key: config[key] for key in ("rounds", "warm", "timed")}
    return dict(step_times(config["problem"], config["seed"], **timing))


def _predictors(config: Mapping[str, Any]) -> dict[str, Any]:
    start = started(config["problem"], config["seed"])
    return dict(predictors(start, config["draws"], config["steps"], config["lr"]))


def _probes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of each form the losses with each rate."""
    return {
        form: [probed({**config, "method": form, "lr": rate})["loss"] for rate in config["rates"]] for form in FORMS
    }
