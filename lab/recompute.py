"""Recompute five verdicts of docs/reproduction.md without the lab: ``python lab/recompute.py docs/records``."""

import json
import math
import statistics
import sys
from pathlib import Path


def _runs(name, **wanted):
    """Yield configuration and result of every run with these settings; a line may hold several."""
    for line in (Path(sys.argv[1]) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for run in entry.get("runs", [{"config": {}, **entry}]):
            config = {**entry["config"], **run["config"]}
            if config["preset"] == "full" and all(config.get(key) == value for key, value in wanted.items()):
                yield config, run["result"]


def _reported(name, **wanted):  # without tuning runs
    return [(config, result) for config, result in _runs(name, **wanted) if config["seed"] < 10_000]


def _median(values):
    return statistics.median([math.inf if value is None else value for value in values])  # None: not finite


def _best_rate(tried, score):  # lowest median score; the smaller rate of a tie
    scores = {lr: _median(score(r) for c, r in tried if c["lr"] == lr) for lr in sorted({c["lr"] for c, _ in tried})}
    return min(scores, key=scores.get, default=None)


def _final(name, optimizer, kind):
    """Return the median final loss of the reported runs, at the rate that is best in original coordinates."""
    own = _reported(name, optimizer=optimizer)
    score = {"digits": lambda r: -r["best validation accuracy"], "linear-networks": lambda r: r["best validation"]}
    rate = _best_rate([run for run in own if run[0]["coordinates"] == "original"], score[name])
    return _median(r.get("final", r["loss"][-1]) for c, r in own if (c["coordinates"], c["lr"]) == (kind, rate))


def _lowest(method):  # in runs of 30 epochs, tuned by one of 10
    tuning = list(_runs("resnet", method=method, epochs=10, seed=10_000))
    rate = _best_rate(tuning, lambda r: -r["ten-crop accuracy"])
    return _median(min(r["validation loss"]) for _, r in _reported("resnet", method=method, lr=rate, epochs=30))


ADAPTIVE = [(name, kind) for name in ("Adam", "Adagrad") for kind in ("original", "EGOP")]
SGD, NAMES, NUS = ("SGD", "SGD+momentum"), ("digits", "linear-networks"), (0.5, 0.75, 1)
best_sgd = {name: min(_final(name, who, "original") for who in SGD) for name in NAMES}
MASKED = "errors-in-variables"  # reported runs exist at the chosen rate only
egop = [_median(r["loss"][-1] for _, r in _reported(MASKED, optimizer="Adam", coordinates="EGOP", nu=nu)) for nu in NUS]
shampoo = [_median(r["loss"][-1] for _, r in _reported(MASKED, optimizer="Shampoo", nu=nu)) for nu in NUS]
for claim, holds in {
    "digits/Adagrad-below-sgd": _final("digits", "Adagrad", "EGOP") < best_sgd["digits"],
    "linear-networks/adaptive": max(_final("linear-networks", *a) for a in ADAPTIVE) < best_sgd["linear-networks"],
    "digits-density/first": next(_runs("digits-density"))[1]["density"][0] > 0.5,
    "errors-in-variables/Shampoo-no-better": all(a <= b for a, b in zip(egop, shampoo, strict=True)),
    "resnet/validation-often": _lowest("EGOP each epoch") < _lowest("SOAP 100"),
}.items():
    print(f"{claim}: {'holds' if holds else 'does not hold'}")
