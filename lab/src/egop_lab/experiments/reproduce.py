"""Run experiments one after the other; if one lacks its data, say so and continue."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.base import Experiment, Judgement
from egop_lab.experiments.registry import experiment
from egop_lab.training.context import Context
from egop_lab.training.records import Store


@dataclass(frozen=True)
class Outcome:
    """Result of one experiment."""

    id: str
    judged: tuple[Judgement, ...] = ()  # empty if it could not run
    seconds: float = 0.0  # spent by this call
    problem: str | None = None  # why it could not run, in one line


def open_store(folder: Path, id: str) -> Store:
    """Open the records of an experiment."""
    return Store(folder / f"{id}.jsonl")


def reproduce(ids: Sequence[str], folder: Path, context: Context, say: Callable[[str], None] = print) -> list[Outcome]:
    """Do the runs of experiments that are not recorded yet, and judge their claims."""
    chosen = {id: experiment(id) for id in ids}  # an unknown id is an error before anything runs
    outcomes = []
    for id, one in chosen.items():
        say(f"{id}: {one.title} ({context.preset} preset)")
        once = cache(lambda line: say(f"  {line}"))  # an experiment may load its data more than once
        outcomes.append(_run(one, open_store(folder, id), replace(context, say=once)))
        outcome = outcomes[-1]
        if outcome.problem:
            say(f"  left out: {outcome.problem}")
        for judged in outcome.judged:
            say(f"  {judged.verdict}: {judged.statement} {judged.finding}")
    return outcomes


def _run(one: Experiment, store: Store, context: Context) -> Outcome:
    began = time.perf_counter()
    try:
        one.run(store, context)
    except MissingDataError as error:
        return Outcome(one.id, problem=str(error))
    seconds = time.perf_counter() - began
    try:
        return Outcome(one.id, tuple(one.judge(store, context.preset)), seconds)
    except LookupError as error:  # a time budget ended before all runs were done
        return Outcome(one.id, seconds=seconds, problem=f"not all of its runs are done yet ({error}); run it again")
