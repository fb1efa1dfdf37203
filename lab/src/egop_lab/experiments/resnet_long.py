"""The long runs of the residual-network experiment, by importance, in several processes if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.experiments.base import Judgement, Table, add_alternatives
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
    is_timed,
    pace,
    run_key,
)
from egop_lab.plots.picture import Picture
from egop_lab.training.records import Record
from egop_lab.training.tuning import is_tuning

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
    ladder: ClassVar[Sequence[float]] = _LADDER
    groups = _LONG

    @property
    def settings(self) -> dict[str, Any]:
        methods = [method for group in _LONG for method in group]
        return super().settings | {
            "methods": methods,
            "epochs": 30 if self.preset == "full" else 3,
            "tuning epochs": 10 if self.preset == "full" else 1,
            "further rates": f"from {_LADDER[0]:g} to {_LADDER[-1]:g} by half decades, while the best one is at an end "
            "of those tried",
        }

    def required_methods(self) -> set[str]:
        return set()

    def complete_runs(self) -> Runs:
        """Return the methods that have all of their runs; none if the targets are not known."""
        count = self.settings["trials"]
        runs = {method: own for method, own in self.reported_runs().items() if len(own) == count}
        return runs if {ADAMW, self.soap} <= set(runs) else {}

    def reported_runs(self) -> Runs:
        done = self.finished_runs()
        return {method: _fill_in_seconds(runs, done) for method, runs in super().reported_runs().items()}

    def judge(self) -> list[Judgement]:
        """Judge the claims about methods that have all of their runs."""
        runs = self.complete_runs()
        if not runs:
            return []
        judged = self.judge_present(runs)
        for rate, adamws in self._at_other_rates().items():
            judged = add_alternatives(judged, f"{ADAMW} at {rate:g}", self.judge_present(runs | {ADAMW: adamws}, ADAMW))
        if SOAP_OURS in runs:
            direct = {f"{self.id}/{claim.name}" for claim in self.claims if self.soap in (claim.method, claim.other)}
            judged = add_alternatives(
                judged, "SOAP 100 in our form", _LongRunsWithOurSoap(self.preset).judge_present(runs), always=direct
            )
        return judged

    def judge_present(self, runs: Runs, other: str | None = None) -> list[Judgement]:
        """Judge the claims about the given methods; if ``other`` is named, only those that compare with it."""
        about = [claim for claim in self.claims if {claim.method, claim.other} <= set(runs)]
        return self.judge_claims(runs, [claim for claim in about if other in (None, claim.other)])

    def _at_other_rates(self) -> dict[float, list[Record]]:
        """Return AdamW's complete runs at rates that were not chosen, to give it every chance."""
        settings, done = self.settings, self.finished_runs()
        chosen = self.choose_rate(ADAMW)
        by_rate: dict[float, list[Record]] = {}
        for run in done:
            method, rate, epochs = run_key(run)
            if (method, epochs) == (ADAMW, settings["epochs"]) and rate != chosen and not is_tuning(run):
                by_rate.setdefault(rate, []).append(run)
        return {rate: _fill_in_seconds(runs, done) for rate, runs in by_rate.items() if len(runs) == settings["trials"]}

    def timed_runs(self) -> Runs:
        """Return all runs that had the device to themselves, short ones too."""
        timed = [run for run in self.finished_runs() if is_timed(run)]
        methods = self.settings["methods"]
        return {method: [run for run in timed if run.config["method"] == method] for method in methods}

    def tables(self) -> list[Table]:
        """Add AdamW at its other rates to the tables."""
        table, reached = super().tables()
        others = self._at_other_rates().values()
        rows = [self.row(ADAMW, runs, self.timed_runs()) for runs in others]
        return [replace(table, rows=(table.rows[0], *rows, *table.rows[1:])), reached]

    def pictures(self) -> list[Picture]:
        first, second = super().pictures()
        timed = " Seconds are those of runs that had the GPU to themselves, by epoch."
        return [first, replace(second, caption=second.caption + timed)]


class _LongRunsWithOurSoap(LongRuns):
    """The long runs with our SOAP as the frequent one: a step of the package's takes several times as long."""

    soap: ClassVar[str] = SOAP_OURS
    claims: ClassVar[Sequence[Claim]] = tuple(claims(SOAP_OURS))


def _fill_in_seconds(runs: Sequence[Record], done: Sequence[Record]) -> list[Record]:
    """Return a method's runs; those that shared the device get the seconds of runs that did not."""
    before, epoch = pace([run for run in done if run.config["method"] == runs[0].config["method"]])
    curve = [before + epoch * count for count in range(len(runs[0].result["seconds"]))]
    return [run if is_timed(run) else replace(run, result={**run.result, "seconds": curve}) for run in runs]
