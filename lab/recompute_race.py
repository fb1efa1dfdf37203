"""Recompute the README's table of results without the lab: ``python lab/recompute_race.py docs/records/race.jsonl``.

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

STUDENT = {3: 3.182, 4: 2.776, 7: 2.365}  # 97.5 % quantiles by degrees of freedom
EGOP, ADAMW = "EGOP", "AdamW"
STEPS = {"gpt-6x384-400": 400, "gpt-12x768-400": 400, "resnet-34": 730, "vit-6x384": 1168}

runs = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
tuning, final = defaultdict(dict), defaultdict(dict)
for run in runs:
    place = run["task"], run["method"], run["steps"]
    settings = run["rate"], run["beta"], run["warmup"], run["clip"]
    group, loss = (tuning, "validation") if run["seed"] >= 10_000 else (final, "test")
    group[place].setdefault(settings, {}).setdefault(run["seed"], math.inf if run["diverged"] else run[loss])


def find_losses(task, method, steps):
    """Return the test losses at the settings with the lowest median in tuning; EGOP untuned has AdamW's rate."""
    tried = {each: statistics.median(losses.values()) for each, losses in tuning[task, method, steps].items()}
    if len(tried) < 3:
        wanted = find_settings(task, ADAMW, steps)[0] if method == EGOP and tuning[task, ADAMW, steps] else None
        return next((list(losses.values()) for s, losses in final[task, method, steps].items() if s[0] == wanted), [])
    return list(final[task, method, steps].get(find_settings(task, method, steps), {}).values())


def find_settings(task, method, steps):
    """Return the settings with the lowest median of the tuning seeds."""
    complete = {each: found for each, found in tuning[task, method, steps].items() if len(found) == 3}
    return min(complete, key=lambda each: statistics.median(complete[each].values()))


for task, steps in STEPS.items():
    means = {}
    for method in sorted({method for name, method, _ in final if name == task}):
        losses, seeds = find_losses(task, method, steps), 8 if task.startswith("gpt-6") else 5
        if 2 * len(losses) < seeds:
            continue
        half = STUDENT[len(losses) - 1] * statistics.stdev(losses) / math.sqrt(len(losses))
        means[method] = statistics.fmean(losses)
        missing = f" ({len(losses)} seeds)" if len(losses) < seeds else ""
        print(f"{task}, {method}: {means[method]:.3f} ± {half:.3f}{missing}")
    lengths = {s / steps: find_losses(task, ADAMW, s) for name, method, s in final if (name, method) == (task, ADAMW)}
    points = sorted((multiple, statistics.fmean(losses)) for multiple, losses in lengths.items() if len(losses) >= 5)
    for (short, high), (long, low) in itertools.pairwise(points):
        if EGOP in means and low <= means[EGOP] <= high:
            print(f"{task}, AdamW needs: {short + (high - means[EGOP]) / (high - low) * (long - short):.2g}×")
