"""The rules of the race, and the next runs that they ask for. No torch here: everything follows from the records."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from egop_lab.race.tasks import TUNING_SEEDS, Run, Task

RULES = """
1. Learning rates lie on the grid 1e-3 * 2**(k/2). Tuning starts at a guess for each task and method, with two rates on
   either side. Each rate is run with three tuning seeds (10000 to 10002); the median of the final validation loss
   decides. A run that diverges counts as infinity. Rates are added until the best one has at least two tried rates on
   both sides. Then methods that tried fewer rates than another one of the same task try as many: further rates at the
   side of their best rate that has fewer.
2. At the best rate each of these is tried alone, with the same three seeds: the other beta (AdamW, SOAP, PolarAdam and
   EGOP: beta2 0.95 or 0.99 on text, 0.99 or 0.999 on images; Muon and NorMuon: momentum 0.95 or 0.9), the other warm-up
   (50 or 100 steps), and gradient clipping (none or a norm of 1.0). Each value with the lower median wins; the base
   value (the first) wins a tie. The winners are combined, and the rate is tuned again for the combination: the best
   rate so far and its two neighbours on the grid, with the same three seeds, and further rates while the best one is at
   an end of those tried. If the combination is worse at every rate than the best single variant, that variant is taken
   instead. (Second tuning of the rate added on 2026-11-16, after the first 191 runs, all of AdamW, Muon, NorMuon and
   SOAP on gpt-6x384-400: clipping won for every method, and the rate had been chosen without it. The step is the same
   for every method, so it can only help the rivals as much as us.) Every method gets the same number of tuning runs,
   but for rates that are added at an end, and for combinations that are single variants and so have been run once
   already.
3. Tuning uses the validation part only. The test part is evaluated by final runs alone, once, at their end. (Broken
   before 2026-11-18 by 15 runs on GPT 6x384 that compared sizes of EGOP's updates with seeds 0 to 3.)
4. Final runs have the seeds 0, 1, ...: eight on GPT 6x384, five elsewhere, three on Python code. At a seed all methods
   have the same initialisation and the same batches.
5. Parameters that a method does not step (embeddings, head, norms) are stepped by AdamW with betas (0.9, beta2 of the
   task), and the same learning rate and weight decay, in every arm.
6. AdamW also runs at 1.5, 2 and 3 times the steps, with its other hyper-parameters as tuned and the rate tuned again
   for each length: three rates around its best one, more until the best has a tried rate on both sides; three tuning
   seeds, and then the final seeds. On GPT 12x768 only at 3 times the steps, on ViT only at twice. (Since 2026-11-18,
   before their first longer run: all lengths would take half an hour of GPU time.) Not on GPT 4x144 and Python code.
   (So since these tasks were added on 2026-11-18; written here on 2026-11-19.) With 1,600 steps only at twice. (Since
   2026-11-20, before its first longer run; it was to have none before.)
7. On all other tasks only the rate is tuned: three rates around a guess, more until the best has a tried rate on both
   sides; on Python code (gpt-12x768-code), where a run takes a minute, by runs of a quarter of the steps. The rest is
   the same for all methods: 50 steps of warm-up, clipping at 1.0, momentum 0.9, beta2 0.95 on text and 0.99 on images
   (on text, what most of the rivals chose on gpt-6x384-400). (Since 2026-11-18, before any of their runs: the full
   tuning of seven methods would take an hour of GPU time for each task.) Python code has one tuning seed. (Since
   2026-11-18, before its first run: three seeds would take a further half hour.)
8. SGD with momentum is one more rival on ResNet-34 (momentum 0.9; 0.95 is not tried since 2026-11-18, before its first
   run). It steps all parameters.
9. EGOP in a random rotation is a control: it runs with EGOP's tuned values. (Since 2026-11-18, before its first run.)
   On all tasks but gpt-6x384-400 so is PolarAdam, which is EGOP without a rotation. (Since 2026-11-18; on GPT 12x768
   and ResNet-34 it had run that way already.)
   So are variants of EGOP: the running mean of the momentum's squares (beta2 0.9) instead of the gradient's, both sides
   rotated instead of the smaller one, renewals at least every 20 steps instead of every 200, momentum 0.95 instead of
   0.9. The mean difference of the validation loss to EGOP's at the same seeds decides. (Since 2026-11-18, before their
   first run; momentum 0.95 since that evening, after the others had run.)
   Sizes of updates are compared by tuning runs at several rates: two and four times the learning rate for the
   parameters that AdamW steps, larger updates of convolutions, and updates as large as Adam's. (Since 2026-11-19. On
   that day EGOP's updates of convolutions whose windows overlap became three times as large, because it had lost 0.107
   at AdamW's rate on ResNet-34. EGOP's rate there comes from the tuning runs with these updates, and EGOP, its controls
   and its variants were run again; the earlier runs are in update-sizes.jsonl.)
10. Schedule of every run: linear warm-up, constant, linear decay to 0 over the last 40 % of the steps.
11. EGOP also makes tuning runs at AdamW's tuned rate, to see what it loses there. (Since 2026-11-18.)
12. On Python code AdamW's rate is tuned again by full-length runs with seed 0: three rates around its best one, more
   until the best has a tried rate on both sides; the validation loss decides. (Since 2026-11-18, after three of these
   runs, which were to check whether shorter runs had chosen well: a rate of 1e-3 was better than 7e-4.)
13. GPT 6x384 with 1,600 steps trains with torch.compile instead of CUDA graphs, which is faster, in all arms. (Since
   2026-11-18, before its first run.)
   Of the other settings it takes those that each method chose for 400 steps: they are those of rule 7, but for AdamW's
   warm-up of 100 steps. (Since 2026-11-19, before its first run.) NorMuon, which chose no clipping for 400 steps, clips
   as on the other tasks.
14. On Python code AdamW also tries a warm-up of 100 steps, by a full-length run with seed 0 at its best rate; if that
   is better, the rate is tuned again with it, as in rule 2. (Since 2026-11-19, before that run: 50 steps might be too
   few for AdamW there, and rivals should be tuned at least as well as EGOP.)
15. Two further arms answer a critic. Muon with updates as large as EGOP's for each shape, relative to those of a square
   weight, on GPT 12x768 and on GPT 6x384 with 1,600 steps, tuned like every method there. AdamW with four times the
   rate for embeddings, head and norms on Python code, with AdamW's tuned values. (Since 2026-11-20, before their first
   run.)
"""

BASELINE = "AdamW"  # which also runs for longer
_FARTHEST = 40  # grid places from the guess at which the search for a rate gives up

Losses = Mapping[Run, float]


def read_run(record: Mapping[str, Any]) -> Run:
    """Return the run that a record describes."""
    return Run(**{field.name: record[field.name] for field in dataclasses.fields(Run)})


def read_losses(records: Iterable[Mapping[str, Any]]) -> dict[Run, float]:
    """Return the final validation loss of every run; infinity if it diverged."""
    return {read_run(record): math.inf if record["diverged"] else record["validation"] for record in records}


class Tuning:
    """Tuning of one method at one length, as far as the records go.

    Args:
        losses: of all runs so far.
        base: a run with the base hyper-parameters; its rate is where the search starts, its seed is ignored.
        room: how many tried rates the best one must have on both sides.
        seeds: with which each setting is run.
    """

    def __init__(self, losses: Losses, base: Run, room: int, seeds: Sequence[int]) -> None:
        self.losses, self.base, self.room, self.seeds = losses, base, room, seeds
        span = range(base.rate - _FARTHEST, base.rate + _FARTHEST + 1)
        medians = {rate: self.median(rate=rate) for rate in span}
        self.tried = {rate: median for rate, median in medians.items() if not math.isnan(median)}

    def median(self, **changes: Any) -> float:
        """Return the median loss of the base run with some changes; nan while a seed is missing."""
        found = [self.losses.get(run, math.nan) for run in self.runs(**changes)]
        return math.nan if any(map(math.isnan, found)) else statistics.median(found)

    def runs(self, **changes: Any) -> list[Run]:
        """Return the tuning runs for the base run with some changes."""
        return [dataclasses.replace(self.base, **{"seed": seed, **changes}) for seed in self.seeds]

    @property
    def best(self) -> int:
        """The best tried rate; the lowest of several that are equal."""
        return min(self.tried, key=lambda rate: (self.tried[rate], rate))

    def missing_rates(self) -> list[int]:
        """Return the rates to try next; empty when the best one has room on both sides."""
        start = self._untried(self.base.rate)
        rates = start or self._untried(self.best)
        if any(abs(rate - self.base.rate) > _FARTHEST for rate in rates):
            raise RuntimeError(f"No best learning rate near the guess for {self.base.method} on {self.base.task}.")
        return rates

    def _untried(self, middle: int) -> list[int]:
        around = range(middle - self.room, middle + self.room + 1)
        return [rate for rate in sorted(around, key=lambda rate: abs(rate - middle)) if rate not in self.tried]

    def padding(self, count: int) -> list[int]:
        """Return further rates, so that as many as ``count`` are tried."""
        low, high, best = min(self.tried), max(self.tried), self.best
        added = []
        while high - low + 1 < count:
            if best - low < high - best:
                low -= 1
                added.append(low)
            else:
                high += 1
                added.append(high)
        return added

    def missing_runs(self, rates: Iterable[int], **changes: Any) -> list[Run]:
        """Return the runs at these rates that are not made yet."""
        return [run for rate in rates for run in self.runs(rate=rate, **changes) if run not in self.losses]

    def choose(self, variants: Mapping[str, Any]) -> Run | list[Run]:
        """Return a run as tuned; or, while that is open, the runs that are missing: variants, then the rate again."""
        rate = self.best
        if missing := [run for name in variants for run in self.missing_runs([rate], **{name: variants[name]})]:
            return missing
        medians = {name: self.median(rate=rate, **{name: value}) for name, value in variants.items()}
        winners = {name: variants[name] for name, median in medians.items() if median < self.tried[rate]}
        again = Tuning(self.losses, dataclasses.replace(self.base, rate=rate, **winners), room=1, seeds=self.seeds)
        if rates := again.missing_rates():
            return again.missing_runs(rates)
        best = min(winners, key=lambda name: medians[name], default=None)
        if best is not None and medians[best] < again.tried[again.best]:
            return dataclasses.replace(self.base, rate=rate, **{best: winners[best]})
        return dataclasses.replace(again.base, rate=again.best)


def start_tuning(task: Task, method: str, losses: Losses) -> Tuning:
    """Return the tuning of a method at the task's own length, or by shorter runs if the task says so."""
    base = Run(
        task=task.name,
        method=method,
        steps=task.tuning_steps or task.steps,
        seed=TUNING_SEEDS[0],
        rate=task.guesses[method],
        beta=task.betas[method][0],
        warmup=task.warmups[method][0],
        clip=task.clips[0],
    )
    return Tuning(losses, base, room=task.room, seeds=TUNING_SEEDS[: task.tuning_seeds])


def tune_again(
    start: Run, losses: Losses, seeds: Sequence[int], variants: Mapping[str, Any] | None = None
) -> Run | list[Run]:
    """Return a run as tuned, near the start; or, while that is open, the runs that are missing."""
    tuning = Tuning(losses, start, room=1, seeds=seeds)
    rates = tuning.missing_rates()
    return tuning.missing_runs(rates) if rates else tuning.choose(variants or {})


def median_loss(task: Task, choice: Run, rate: int, losses: Losses) -> float:
    """Return the median loss of a method's tuning runs at a rate, otherwise as tuned; nan while a seed is missing."""
    return start_tuning(task, choice.method, losses).median(rate=rate, **_settings(choice))


def _settings(run: Run) -> dict[str, Any]:
    """Return the tuned hyper-parameters besides the rate."""
    return {"beta": run.beta, "warmup": run.warmup, "clip": run.clip}


def list_variants(task: Task, method: str) -> dict[str, Any]:
    """Return the value of each further hyper-parameter that is tried against the base value."""
    values = {"beta": task.betas[method], "warmup": task.warmups[method], "clip": task.clips}
    return {name: some[1] for name, some in values.items() if len(some) > 1}


def plan_tuning(task: Task, methods: Sequence[str], losses: Losses) -> tuple[list[Run], dict[str, Run]]:
    """Return the tuning runs to make now; and, if all methods are tuned, a run of each with the tuned values."""
    leaders = dict.fromkeys(task.controls.get(method, method) for method in methods)
    tunings = {method: start_tuning(task, method, losses) for method in leaders}
    runs: list[Run] = []
    choices: dict[str, Run] = {}
    has_rate = []
    for method, tuning in tunings.items():
        if rates := tuning.missing_rates():
            runs += tuning.missing_runs(rates)
            continue
        has_rate.append(tuning)
        variants = list_variants(task, method)
        if method == BASELINE and task.tuning_steps:  # by shorter runs the rate alone
            start = dataclasses.replace(tuning.base, rate=tuning.best, steps=task.steps)
            found = tune_again(start, losses, seeds=(0,), variants=variants)
        else:
            found = tuning.choose(variants)
        if isinstance(found, Run):
            choices[method] = found
        else:
            runs += found
    if len(has_rate) == len(tunings):
        most = max(len(tuning.tried) for tuning in has_rate)
        for tuning in has_rate:
            runs += tuning.missing_runs(tuning.padding(most))
    if runs:
        return runs, {}
    return [], {
        method: dataclasses.replace(choices[task.controls.get(method, method)], method=method) for method in methods
    }


def plan_longer(task: Task, choice: Run, multiple: float, losses: Losses) -> Run | list[Run]:
    """Return a longer run with its tuned rate; or, while that is open, the runs that are missing."""
    start = dataclasses.replace(choice, steps=task.length(multiple))
    return tune_again(start, losses, TUNING_SEEDS[: task.tuning_seeds])


def final_runs(task: Task, choice: Run, multiple: float = 1.0) -> list[Run]:
    """Return the runs that are reported."""
    return [dataclasses.replace(choice, steps=task.length(multiple), seed=seed) for seed in range(task.seeds)]


def plan(task: Task, methods: Sequence[str], losses: Losses, baseline: str = BASELINE) -> list[Run]:
    """Return the runs that the rules ask for now, in the order to make them; empty when the task is finished.

    More may follow once these are done. Tuning comes first, then the final runs seed by seed, then the longer runs
    of the baseline.

    Args:
        task: the task.
        methods: which methods race.
        losses: validation losses of all runs so far.
        baseline: the method that also runs for longer.
    """
    runs, choices = plan_tuning(task, methods, losses)
    if {baseline, "EGOP"} <= choices.keys():
        runs += start_tuning(task, "EGOP", losses).missing_runs([choices[baseline].rate], **_settings(choices["EGOP"]))
    finals = [final_runs(task, choice) for choice in choices.values()]
    runs += [run for seed in zip(*finals, strict=True) for run in seed]
    for multiple in task.multiples if baseline in choices else ():
        longer = plan_longer(task, choices[baseline], multiple, losses)
        runs += final_runs(task, longer, multiple) if isinstance(longer, Run) else longer
    return [run for run in runs if run not in losses]
