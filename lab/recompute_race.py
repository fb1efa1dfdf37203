"""Recompute the tables of results without the lab: ``python lab/recompute_race.py docs/records/race.jsonl``.

Prints a line for every task and method with the mean test loss and half the width of its 95 % interval, and for every
task how many times the steps AdamW needs to end where EGOP ends.
"""

import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365}  # 97.5 % quantiles by degrees of freedom
EGOP, ADAMW = "EGOP", "AdamW"
# For each task: steps, steps of its tuning runs, tuning seeds, final seeds.
TASKS = {
    "gpt-4x144-400": (400, 400, 3, 5),
    "gpt-6x384-400": (400, 400, 3, 8),
    "gpt-12x768-400": (400, 400, 3, 5),
    "gpt-12x768-code": (573, 144, 1, 3),
    "resnet-34": (730, 730, 3, 5),
    "vit-6x384": (1168, 1168, 3, 5),
}

runs = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
tuning, final, first = defaultdict(dict), defaultdict(dict), defaultdict(dict)
for run in runs:
    place = run["task"], run["method"], run["steps"]
    settings = run["rate"], run["beta"], run["warmup"], run["clip"]
    group, loss = (tuning, "validation") if run["seed"] >= 10_000 else (final, "test")
    group[place].setdefault(settings, {}).setdefault(run["seed"], math.inf if run["diverged"] else run[loss])
    if run["seed"] == 0:
        first[place].setdefault(settings, {0: run["validation"]})


def find_losses(task, method, steps, tuning_steps, seeds):
    """Return the test losses at the settings with the lowest median of the tuning seeds.

    Where these runs are shorter, AdamW is tuned again by the validation loss of full-length runs with seed 0.
    """
    if method == ADAMW and tuning_steps < steps:
        complete = first[task, method, steps]
    else:
        complete = {each: found for each, found in tuning[task, method, tuning_steps].items() if len(found) == seeds}
    if len(complete) < 3:
        return []
    best = min(complete, key=lambda each: statistics.median(complete[each].values()))
    return list(final[task, method, steps].get(best, {}).values())


for task, (steps, tuning_steps, tuning_seeds, seeds) in TASKS.items():
    means = {}
    for method in sorted({method for name, method, _ in final if name == task}):
        losses = find_losses(task, method, steps, tuning_steps, tuning_seeds)
        if not losses:
            continue
        means[method] = statistics.fmean(losses)
        count = "" if len(losses) == seeds else f" ({len(losses)} seed{'s' if len(losses) > 1 else ''})"
        half = ""
        if len(losses) > 1:
            half = f" ± {STUDENT[len(losses) - 1] * statistics.stdev(losses) / math.sqrt(len(losses)):.3f}"
        print(f"{task}, {method}: {means[method]:.3f}{half}{count}")
    points = [(1, means[ADAMW])]
    for length in sorted({length for name, method, length in final if (name, method) == (task, ADAMW)} - {steps}):
        losses = find_losses(task, ADAMW, length, length, tuning_seeds)
        points += [(length / steps, statistics.fmean(losses))] if losses else []
    for (short, high), (long, low) in itertools.pairwise(points):
        if low <= means[EGOP] <= high:
            print(f"{task}, AdamW needs: {short + (high - means[EGOP]) / (high - low) * (long - short):.2g}×")
