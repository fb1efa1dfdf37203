"""Run experiments one after the other; if one lacks its data, say so and continue."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from egop_lab.data.missing import MissingDataError
from egop_lab.experiments.base import Preset
from egop_lab.experiments.registry import find_experiment
from egop_lab.training.context import Context
from egop_lab.training.records import Store


def reproduce(
    ids: Sequence[str], folder: Path, preset: Preset, context: Context, say: Callable[[str], None] = print
) -> bool:
    """Do the runs of experiments that are not recorded yet, and judge their claims; return True if all could run."""
    problems = []
    for id in ids:
        one = find_experiment(id)(preset, Store(folder / f"{id}.jsonl"))
        say(f"{id}: {one.title} ({preset} preset)")
        once = cache(lambda line: say(f"  {line}"))  # an experiment may load its data more than once
        try:
            one.run(replace(context, say=once))
            for judged in one.judge():
                say(f"  {judged.verdict}: {judged.statement} {judged.finding}")
        except MissingDataError as error:
            problems.append(str(error))
        except LookupError as error:  # some experiments read the records of others
            problems.append(f"not all runs that it needs are done yet ({error})")
        else:
            continue
        say(f"  left out: {problems[-1]}")
    return not problems
