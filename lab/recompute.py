"""Five verdicts of docs/reproduction.md without the lab, to be run as ``python lab/recompute.py docs/records``."""

import json
import math
import statistics
import sys
from pathlib import Path


def _runs(name, **wanted):
    """Configuration and result of every run that has these settings; a line may hold several."""
    for line in (Path(sys.argv[1]) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for run in entry.get("runs", [{"config": {}, **entry}]):
            config = {**entry["config"], **run["config"]}
            if config["preset"] == "full" and all(config.get(key) == value for key, value in wanted.items()):
                yield config, run["result"]


def _median(values):
    return statistics.median([math.inf if value is None else value for value in values])  # None: not finite


def _best_rate(tried, score):  # with the lowest median score; of equal ones the smaller
    scores = {lr: _median(score(r) for c, r in tried if c["lr"] == lr) for lr in sorted({c["lr"] for c, _ in tried})}
    return min(scores, key=scores.get, default=None)


def _final(name, optimizer, kind):
    """The median end of the reported runs, at the rate that is best for them in original coordinates."""
    own = [run for run in _runs(name, optimizer=optimizer) if run[0]["seed"] < 10_000]
    score = {"digits": lambda r: -r["best validation accuracy"], "linear-networks": lambda r: r["best validation"]}
    rate = _best_rate([run for run in own if run[0]["coordinates"] == "original"], score[name])
    return _median(r.get("final", r["loss"][-1]) for c, r in own if (c["coordinates"], c["lr"]) == (kind, rate))


def _masked(nu, **who):  # reported runs are there at the chosen rate only
    return _median(r["loss"][-1] for c, r in _runs("errors-in-variables", nu=nu, **who) if c["seed"] < 10_000)


def _lowest(method, epochs):
    rate = _best_rate(list(_runs("resnet", method=method, epochs=3)), lambda r: -r["ten-crop accuracy"])
    return [min(r["validation loss"]) for _, r in _runs("resnet", method=method, lr=rate, epochs=epochs)]


ADAPTIVE = [(name, kind) for name in ("Adam", "Adagrad") for kind in ("original", "EGOP")]
SGD, NAMES = ("SGD", "SGD+momentum"), ("digits", "linear-networks")
best_sgd = {name: min(_final(name, who, "original") for who in SGD) for name in NAMES}
LONG = ("AdamW", "EGOP each epoch", "SOAP 100, ours")  # where there are runs of 30 epochs, these count
often, epochs = (LONG[-1], 30) if all(len(_lowest(name, 30)) == 3 for name in LONG) else ("SOAP every 10", 10)
ours = {"optimizer": "Adam", "coordinates": "EGOP"}
no_better = [_masked(nu, **ours) <= _masked(nu, optimizer="Shampoo") for nu in (0.5, 0.75, 1)]
for claim, holds in {
    "digits/Adagrad-below-sgd": _final("digits", "Adagrad", "EGOP") < best_sgd["digits"],
    "linear-networks/adaptive": max(_final("linear-networks", *a) for a in ADAPTIVE) < best_sgd["linear-networks"],
    "digits-density/first": next(_runs("digits-density"))[1]["density"][0] > 0.5,
    "errors-in-variables/Shampoo-no-better": all(no_better),
    "resnet/validation-often": _median(_lowest("EGOP each epoch", epochs)) < _median(_lowest(often, epochs)),
}.items():
    print(f"{claim}: {'holds' if holds else 'does not hold'}")
