"""Recompute the first screen of the results without the lab: ``python lab/recompute_race.py docs/records/race.jsonl``.

Prints a line for every task and method with the mean test loss and half the width of its 95 % interval; and for every
task what the rotation adds, when EGOP reaches AdamW's final loss, and how many times the steps AdamW needs to end where
EGOP ends.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365}  # 97.5 % quantiles by degrees of freedom
EGOP, ADAMW, UNROTATED = "EGOP", "AdamW", "PolarAdam"
# For each task: steps, steps of its tuning runs, tuning seeds, final seeds.
TASKS = {
    "gpt-4x144-400": (400, 400, 3, 5),
    "gpt-6x384-400": (400, 400, 3, 8),
    "gpt-12x768-400": (400, 400, 3, 5),
    "gpt-12x768-code": (573, 144, 1, 3),
    "resnet-34": (730, 730, 3, 5),
    "vit-6x384": (1168, 1168, 3, 5),
}

tuning, final = defaultdict(dict), defaultdict(dict)
for run in map(json.loads, Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()):
    place = run["task"], run["method"], run["steps"]
    settings = run["rate"], run["beta"], run["warmup"], run["clip"]
    group = tuning if run["seed"] >= 10_000 else final
    group[place].setdefault(settings, {}).setdefault(run["seed"], run)


def find_runs(task, method, steps, tuning_steps, seeds):
    """Return the final runs, by seed, at the settings with the lowest median validation loss of the tuning seeds.

    Where tuning runs are shorter, AdamW is tuned again by full-length runs with seed 0. Without a rotation, the
    settings are EGOP's but for one task.
    """
    place = task, EGOP if method == UNROTATED and task != "gpt-6x384-400" else method, tuning_steps
    tried = {each: found for each, found in tuning[place].items() if len(found) == seeds}
    if method == ADAMW and tuning_steps < steps:
        tried = {each: {0: found[0]} for each, found in final[task, method, steps].items() if 0 in found}
    if len(tried) < 3:
        return {}
    best = min(tried, key=lambda each: statistics.median(read(run, "validation") for run in tried[each].values()))
    return final[task, method, steps].get(best, {})


def read(run, part="test"):
    """Return the loss of a run, infinity if it diverged."""
    return math.inf if run["diverged"] else run[part]


def summarize(values, sign=""):
    """Return the mean with half the width of its 95 % interval."""
    if len(values) == 1:
        return f"{values[0]:{sign}.3f}"
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{sign}.3f} ± {half:.3f}"


def cross(curve, loss):
    """Return the step at which a curve first falls to a loss."""
    for (step, before), (later, after) in pairwise(curve):
        if after <= loss:
            return step + (later - step) * (before - loss) / (before - after)
    return math.inf


for task, (steps, tuning_steps, tuning_seeds, seeds) in TASKS.items():
    found = {}
    for method in sorted({method for name, method, _ in final if name == task}):
        if own := find_runs(task, method, steps, tuning_steps, tuning_seeds):
            found[method] = own
            count = "" if len(own) == seeds else f" ({len(own)} seed{'s' if len(own) > 1 else ''})"
            print(f"{task}, {method}: {summarize([read(run) for run in own.values()])}{count}")
    ours, base, adamw = found[EGOP], found[UNROTATED], found[ADAMW]
    gains = [read(run) - read(base[seed]) for seed, run in ours.items() if seed in base]
    print(f"{task}, rotation: {summarize(gains, '+')}")
    parts = [
        100 * cross(ours[seed]["curve"], run["curve"][-1][1]) / steps for seed, run in adamw.items() if seed in ours
    ]
    print(f"{task}, reached after: {statistics.fmean(parts):.0f} % ({min(parts):.0f} to {max(parts):.0f} %)")
    goal, points = statistics.fmean(map(read, ours.values())), [(1, statistics.fmean(map(read, adamw.values())))]
    for length in sorted({length for name, method, length in final if (name, method) == (task, ADAMW)} - {steps}):
        if longer := find_runs(task, ADAMW, length, length, tuning_seeds):
            points.append((length / steps, statistics.fmean(map(read, longer.values()))))
    for (short, high), (long, low) in pairwise(points):
        if low <= goal <= high:
            print(f"{task}, AdamW needs: {short + (high - goal) / (high - low) * (long - short):.2g}×")
