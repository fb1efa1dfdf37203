"""The long runs of the residual-network experiment, by importance, in several processes if wanted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from egop_lab.experiments.base import Judgement, Table, add_alternatives
from egop_lab.experiments.curves import median
from egop_lab.experiments.resnet_claims import (
    ADAMW,
    AROUND,
    PERIODIC,
    SOAP_100,
    SOAP_EPOCH,
    SOAP_ONCE,
    SOAP_OURS,
    UPFRONT,
    Claim,
    claims,
)
from egop_lab.experiments.resnet_runs import (
    Runs,
    ShortRuns,
    find_lowest_epoch,
    inaccuracy,
    is_timed,
    pace,
    run_key,
)
from egop_lab.gpu import fast_math
from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context, Preset, run_in_processes
from egop_lab.training.records import Record, Store
from egop_lab.training.resnet import train_in_process
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Trials
from egop_lab.training.tuning import is_tuning, search_rates

# The methods of the long runs by importance: most claims are about the first ones.
FIRST = (ADAMW, UPFRONT, PERIODIC, SOAP_100)
_LONG = (FIRST, (SOAP_EPOCH, SOAP_ONCE), (SOAP_OURS, AROUND), ("Random rotation",))

# Steps of about half a decade over the paper's range.
_LADDER = [float(f"{factor}e{exponent}") for exponent in range(-5, 0) for factor in (1, 3)] + [1.0]


class LongRuns(ShortRuns):
    """Runs of thirty epochs, of the paper's methods and a faster SOAP; tuned by runs as long as the paper's."""

    soap: ClassVar[str] = SOAP_100
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_100))
    picture_name: ClassVar[str] = "resnet-long"

    def settings(self, preset: Preset) -> dict[str, Any]:
        methods = [method for group in _LONG for method in group]
        return super().settings(preset) | {
            "methods": methods,
            "epochs": 30 if preset == "full" else 3,
            "tuning epochs": 10 if preset == "full" else 1,
            "further rates": f"from {_LADDER[0]:g} to {_LADDER[-1]:g} by half decades, while the best one is at an end "
            "of those tried",
        }

    def required_methods(self) -> set[str]:
        return set()

    def find_rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        best, left = self._search(settings, done, method)
        if left:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def _search(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> tuple[float, list[float]]:
        """Return the best rate, and the rates still to try."""
        return search_rates(_LADDER, settings["rates"], self.tuning_runs(settings, done, method), inaccuracy)

    def run_missing(self, store: Store, context: Context, processes: int) -> bool:
        """Do the missing runs, tuning first, by importance; return True if all are there.

        One run of each method has the device to itself; times are taken from that run.
        """
        trials = self.trials(store, context)
        with fast_math(context.device):
            while left := self._missing_runs(trials):
                now = [entries for entries in left if entries["seed"] == TUNING] or left
                alone = now if processes == 1 else _find_untimed(trials.done, now)
                others = [entries for entries in now if entries not in alone]
                if not all(trials.do(**entries) for entries in alone):
                    return False
                if not self._run_in_processes(trials, others, processes):
                    return False
        return True

    def _missing_runs(self, trials: Trials) -> list[dict[str, Any]]:
        """Return the runs to do now, by group and trial: reported runs of tuned methods, tuning runs of others."""
        settings = self.settings(trials.context.preset)
        entries: list[dict[str, Any]] = []
        for methods, seed in itertools.product(_LONG, range(settings["trials"])):
            for method in methods:
                best, rates = self._search(settings, trials.done, method)
                own = {"method": method, "lr": best, "epochs": settings["epochs"], "seed": seed}
                tuning = {"method": method, "epochs": settings["tuning epochs"], "seed": TUNING}
                entries += [tuning | {"lr": rate} for rate in rates if seed == 0] if rates else [own]
        return [each for each in entries if trials.make_config(**each) not in trials.store]

    def _run_in_processes(self, trials: Trials, left: Sequence[dict[str, Any]], processes: int) -> bool:
        """Do runs in several processes at once; return True if there was time for all of them."""
        context = replace(trials.context, workers=processes)
        source = self.source(trials.context)
        configs = trials.store.missing([trials.make_config(**entries) for entries in left])
        run_in_processes(partial(train_in_process, source, trials.deadline), configs, trials.store, context, "ResNet")
        return not trials.store.missing(configs)

    def complete_runs(self, store: Store, preset: Preset) -> Runs:
        """Return the methods that have all of their runs; none if the targets are not known."""
        count = self.settings(preset)["trials"]
        runs = {method: own for method, own in self.reported_runs(store, preset).items() if len(own) == count}
        return runs if {ADAMW, self.soap} <= set(runs) else {}

    def still_falling(self, store: Store, preset: Preset) -> list[str]:
        """Return the methods whose median validation loss is lowest in the last tenth of the epochs."""
        from_here = 0.9 * self.settings(preset)["epochs"]
        runs = self.complete_runs(store, preset)
        return [
            method for method, own in runs.items() if median([find_lowest_epoch(run.result) for run in own]) > from_here
        ]

    def reported_runs(self, store: Store, preset: Preset) -> Runs:
        done = self.finished_runs(store, preset)
        return {method: _fill_in_seconds(runs, done) for method, runs in super().reported_runs(store, preset).items()}

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        """Judge the claims about methods that have all of their runs."""
        runs = self.complete_runs(store, preset)
        if not runs:
            return []
        judged = self.judge_present(runs, preset)
        for rate, adamws in self._at_other_rates(store, preset).items():
            judged = add_alternatives(
                judged, f"{ADAMW} at {rate:g}", self.judge_present(runs | {ADAMW: adamws}, preset, ADAMW)
            )
        if SOAP_OURS in runs:
            direct = {f"{self.id}/{claim.name}" for claim in self.claims if self.soap in (claim.method, claim.other)}
            judged = add_alternatives(
                judged, "SOAP 100 in our form", _LongRunsWithOurSoap().judge_present(runs, preset), always=direct
            )
        return judged

    def judge_present(self, runs: Runs, preset: Preset, other: str | None = None) -> list[Judgement]:
        """Judge the claims about the given methods; if ``other`` is named, only those that compare with it."""
        about = [claim for claim in self.claims if {claim.method, claim.other} <= set(runs)]
        return self.judge_claims(runs, preset, [claim for claim in about if other in (None, claim.other)])

    def _at_other_rates(self, store: Store, preset: Preset) -> dict[float, list[Record]]:
        """Return AdamW's complete runs at rates that were not chosen, to give it every chance."""
        settings, done = self.settings(preset), self.finished_runs(store, preset)
        chosen = self.find_rate(settings, done, ADAMW)
        by_rate: dict[float, list[Record]] = {}
        for run in done:
            method, rate, epochs = run_key(run)
            if (method, epochs) == (ADAMW, settings["epochs"]) and rate != chosen and not is_tuning(run):
                by_rate.setdefault(rate, []).append(run)
        return {rate: _fill_in_seconds(runs, done) for rate, runs in by_rate.items() if len(runs) == settings["trials"]}

    def timed_runs(self, store: Store, preset: Preset) -> Runs:
        """Return all runs that had the device to themselves, short ones too."""
        timed = [run for run in self.finished_runs(store, preset) if is_timed(run)]
        methods = self.settings(preset)["methods"]
        return {method: [run for run in timed if run.config["method"] == method] for method in methods}

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        """Add AdamW at its other rates to the tables."""
        table, reached = super().tables(store, preset)
        others = self._at_other_rates(store, preset).values()
        rows = [self.row(ADAMW, runs, self.timed_runs(store, preset)) for runs in others]
        return [replace(table, rows=(table.rows[0], *rows, *table.rows[1:])), reached]

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        first, second = super().pictures(store, preset)
        timed = " Seconds are those of runs that had the GPU to themselves, by epoch."
        return [first, replace(second, caption=second.caption + timed)]


class _LongRunsWithOurSoap(LongRuns):
    """The long runs with our SOAP as the frequent one: a step of the package's takes several times as long."""

    soap: ClassVar[str] = SOAP_OURS
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_OURS))


def _find_untimed(done: Sequence[Record], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first run of every method that has no timed run."""
    timed = {run.config["method"] for run in done if is_timed(run)}
    first = {own["method"]: own for own in reversed(entries) if own["method"] not in timed}
    return [own for own in entries if own is first.get(own["method"])]


def _fill_in_seconds(runs: Sequence[Record], done: Sequence[Record]) -> list[Record]:
    """Return a method's runs; those that shared the device get the seconds of runs that did not."""
    before, epoch = pace([run for run in done if run.config["method"] == runs[0].config["method"]])
    curve = [before + epoch * count for count in range(len(runs[0].result["seconds"]))]
    return [run if is_timed(run) else replace(run, result={**run.result, "seconds": curve}) for run in runs]
