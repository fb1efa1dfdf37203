"""Recompute the first screen of the results without the lab: ``python lab/recompute_race.py docs/records``.

Prints a line for every task and method with the mean test loss and half the width of its 95 % interval; and for every
task what the rotation adds, when EGOP reaches the final loss of others, how many times the steps AdamW needs to end
where EGOP ends, how the best learning rates compare, and what a step takes as a multiple of AdamW's.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365}  # 97.5 % quantiles by degrees of freedom
EGOP, ADAMW, UNROTATED, RANDOM = "EGOP", "AdamW", "PolarAdam", "EGOP, random rotation"
# For each task: steps, steps of its tuning runs, tuning seeds, final seeds.
TASKS = {
    "gpt-4x144-400": (400, 400, 3, 5),
    "gpt-6x384-400": (400, 400, 3, 8),
    "gpt-6x384-1600": (1600, 1600, 3, 8),
    "gpt-12x768-400": (400, 400, 3, 5),
    "gpt-12x768-code": (573, 144, 1, 3),
    "resnet-34": (730, 730, 3, 5),
    "vit-6x384": (1168, 1168, 3, 5),
}

tuning, final = defaultdict(dict), defaultdict(dict)
times = {}
for line in Path(sys.argv[1], "race-times.jsonl").read_text(encoding="utf-8").splitlines():
    record = json.loads(line)
    renewals = record.get("renewal seconds", [0] * len(record["step seconds"]))
    times[record["task"], record["network"], record["method"]] = list(
        zip(record["step seconds"], renewals, strict=True)
    )
for run in map(json.loads, Path(sys.argv[1], "race.jsonl").read_text(encoding="utf-8").splitlines()):
    place = run["task"], run["method"], run["steps"]
    settings = run["rate"], run["beta"], run["warmup"], run["clip"]
    group = tuning if run["seed"] >= 10_000 else final
    group[place].setdefault(settings, {}).setdefault(run["seed"], run)


def find_runs(task, method, steps, tuning_steps, seeds):
    """Return the final runs, by seed, at the settings with the lowest median validation loss of the tuning seeds.

    Where tuning runs are shorter, AdamW is tuned again by full-length runs with seed 0. In a random rotation, the
    settings are EGOP's, and without a rotation too, but for one task.
    """
    is_control = method == RANDOM or (method == UNROTATED and task != "gpt-6x384-400")
    place = task, EGOP if is_control else method, tuning_steps
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


def count_renewals(steps):
    """Return how often EGOP renews its bases in a run: after 1, 2, 3, 4, 6, 8, 12, ..., 192 and every 200 steps."""
    early = {1, *(2**power for power in range(1, 8)), *(3 * 2**power for power in range(7))}
    return sum(step in early or step % 200 == 0 for step in range(1, steps))


def ratio_of_times(task, network, method, base, steps, end):
    """Return the median over the rounds of the time of some steps over that of another method's whole run."""
    rounds = zip(times[task, network, method], times[task, network, base], strict=True)
    renewals = count_renewals(round(steps))
    return statistics.median((steps * own + renewals * more) / (end * other) for (own, more), (other, _) in rounds)


for task, (steps, tuning_steps, tuning_seeds, seeds) in TASKS.items():
    found = {}
    for method in sorted({method for name, method, _ in final if name == task}):
        if own := find_runs(task, method, steps, tuning_steps, tuning_seeds):
            found[method] = own
            count = "" if len(own) == seeds else f" ({len(own)} seed{'s' if len(own) > 1 else ''})"
            print(f"{task}, {method}: {summarize([read(run) for run in own.values()])}{count}")
    ours, base, adamw = found[EGOP], found[UNROTATED], found[ADAMW]
    gains = [read(run) - read(base[seed]) for seed, run in ours.items() if seed in base]
    print(f"{task}, rotation: {summarize(gains, '+')}{'' if len(gains) == seeds else f' ({len(gains)} seeds)'}")
    for name in (ADAMW, "Muon", UNROTATED):
        goals = {seed: run["curve"][-1][1] for seed, run in found[name].items() if seed in ours}
        parts = [100 * cross(ours[seed]["curve"], goal) / steps for seed, goal in goals.items()]
        span = f"({min(parts):.0f} to {max(parts):.0f} %{f'; {len(parts)} seeds' if len(parts) < seeds else ''})"
        missed = sum(map(math.isinf, parts))
        known = f"{statistics.fmean(parts):.0f} % {span}"
        print(f"{task}, {name} reached: {f'never with {missed} of {len(parts)} seeds' if missed else known}")
        if (task, "CUDA graph", name) in times and not missed:
            reached = [ratio_of_times(task, "CUDA graph", EGOP, name, part * steps / 100, steps) for part in parts]
            print(f"{task}, {name} reached in time: {100 * statistics.fmean(reached):.0f} %")
    ends = {name: statistics.fmean(map(read, runs.values())) for name, runs in found.items()}
    goal, points = ends[EGOP], [(1, ends[ADAMW])]
    print(f"{task}, gain without rotation: {100 * (ends[ADAMW] - ends[UNROTATED]) / (ends[ADAMW] - goal):.0f} %")
    rates = [next(iter(runs.values()))["lr"] for runs in (ours, adamw)]
    print(f"{task}, rate over AdamW's: {rates[0] / rates[1]:.2g}")
    for network in ("CUDA graph", "eager"):
        if (task, network, EGOP) in times:
            print(f"{task}, {network}: {ratio_of_times(task, network, EGOP, ADAMW, steps, steps):.2f}")
    for length in sorted({length for name, method, length in final if (name, method) == (task, ADAMW)} - {steps}):
        if longer := find_runs(task, ADAMW, length, length, tuning_seeds):
            points.append((length / steps, statistics.fmean(map(read, longer.values()))))
    for (short, high), (long, low) in pairwise(points):
        if low <= goal <= high:
            print(f"{task}, AdamW needs: {short + (high - goal) / (high - low) * (long - short):.2g}×")
    if len(points) > 1 and points[-1][1] > goal:
        print(f"{task}, AdamW needs: > {points[-1][0]:g}×")
