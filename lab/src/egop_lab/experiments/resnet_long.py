"""The long runs of the residual-network experiment: by importance, several at once if wanted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from egop.runs import Picture
from egop_lab.experiments.base import Judged
from egop_lab.experiments.resnet_claims import (
    ADAMW,
    AROUND,
    PERIODIC,
    SOAP_100,
    SOAP_EPOCH,
    SOAP_ONCE,
    SOAP_OURS,
    UPFRONT,
    claims,
)
from egop_lab.experiments.resnet_runs import ShortRuns, inaccuracy, is_timed, pace
from egop_lab.experiments.timed import Claim, Runs, search
from egop_lab.training.classifiers import in_own_process
from egop_lab.training.context import Context, Preset, in_processes
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed import Trials, fast

# The methods of the long runs by importance: most claims are about the first ones; a package's SOAP takes longest.
FIRST = (ADAMW, UPFRONT, PERIODIC, SOAP_OURS)
_LONG = (FIRST, (SOAP_EPOCH, SOAP_ONCE), (SOAP_100, AROUND))

# Steps of about half a decade over the paper's range.
_LADDER = [float(f"{factor}e{exponent}") for exponent in range(-5, 0) for factor in (1, 3)] + [1.0]


class LongRuns(ShortRuns):
    """Runs of thirty epochs, of the paper's methods and a faster SOAP; tuned as the short ones."""

    often: ClassVar[str] = SOAP_OURS
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_OURS))
    pictured: ClassVar[str] = "resnet-long"

    def settings(self, preset: Preset) -> dict[str, Any]:
        methods = [method for group in _LONG for method in group]
        return super().settings(preset) | {
            "methods": methods,
            "epochs": 30 if preset == "full" else 3,
            "further rates": f"from {_LADDER[0]:g} to {_LADDER[-1]:g} by half decades, while the best one is at an end "
            "of those tried",
        }

    def required(self, preset: Preset) -> set[str]:
        return set()

    def rate(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> float:
        best, left = self._search(settings, done, method)
        if left:
            raise LookupError(f"{method} has no tuning run with learning rate {', '.join(map(str, left))}")
        return best

    def _search(self, settings: Mapping[str, Any], done: Sequence[Record], method: str) -> tuple[float, list[float]]:
        """The best rate; or those that are to be tried before there is one."""
        return search(_LADDER, settings["rates"], self.tuning(settings, done, method), inaccuracy)

    def all_of_them(self, store: Store, context: Context, processes: int) -> bool:
        """Do the runs that are missing, by importance; whether they are all there."""
        trials = self.trials(store, context)
        with fast(context.device):
            return all(self._part(trials, groups, processes) for groups in (_LONG[:-1], _LONG[-1:]))

    def _part(self, trials: Trials, groups: Sequence[Sequence[str]], processes: int) -> bool:
        """Runs that tune have the device to themselves: time is read from them."""
        while left := self._left(trials, groups):
            tuning = [entries for entries in left if entries["seed"] == TUNING]
            if tuning or processes == 1:
                done = all(trials.do(**entries) for entries in tuning or left)
            else:
                done = self._beside(trials, left, processes)
            if not done:
                return False
        return True

    def _left(self, trials: Trials, groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """What can be done now, by group and trial: of a method that is tuned its runs, else those that tune it."""
        settings = self.settings(trials.context.preset)
        entries: list[dict[str, Any]] = []
        for methods, seed in itertools.product(groups, range(settings["trials"])):
            for method in methods:
                best, rates = self._search(settings, trials.done, method)
                own = {"method": method, "lr": best, "epochs": settings["epochs"], "seed": seed}
                tuning = {"method": method, "epochs": settings["tuning epochs"], "seed": TUNING}
                entries += [tuning | {"lr": rate} for rate in rates if seed == 0] if rates else [own]
        return [each for each in entries if trials.configured(**each) not in trials.store]

    def _beside(self, trials: Trials, left: Sequence[dict[str, Any]], processes: int) -> bool:
        """Do runs by several processes at once; whether there was time for all of them."""
        context = replace(trials.context, workers=processes)
        source = self.source(trials.context)
        configs = trials.store.missing([trials.configured(**entries) for entries in left])
        in_processes(partial(in_own_process, source, trials.ends), configs, trials.store, context, "ResNet")
        return not trials.store.missing(configs)

    def complete(self, store: Store, preset: Preset) -> Runs:
        """The methods that have all of their runs; none where the targets are not known."""
        count = self.settings(preset)["trials"]
        runs = {method: own for method, own in self.reported(store, preset).items() if len(own) == count}
        return runs if {ADAMW, self.often} <= set(runs) else {}

    def reported(self, store: Store, preset: Preset) -> Runs:
        """Those that were done beside others have the seconds of runs that had the device to themselves."""
        done = self.done(store, preset)
        paces = {
            method: pace([run for run in done if run.config["method"] == method and is_timed(run)])
            for method in self.settings(preset)["methods"]
        }
        return {
            method: [run if is_timed(run) else _at_pace(run, paces[method]) for run in runs]
            for method, runs in super().reported(store, preset).items()
        }

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        """Only what can be, since the methods that it is about have all of their runs."""
        runs = self.complete(store, preset)
        return (
            []
            if not runs
            else self.verdicts(runs, preset, [c for c in self.claims if {c.method, c.other} <= set(runs)])
        )

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        first, second = super().pictures(store, preset)
        timed = " Seconds are those of runs that had the GPU to themselves, by epoch."
        return [first, replace(second, caption=second.caption + timed)]


def _at_pace(run: Record, seconds: tuple[float, float]) -> Record:
    before, epoch = seconds
    curve = [before + epoch * count for count in range(len(run.result["seconds"]))]
    return replace(run, result={**run.result, "seconds": curve})
