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


def _best_rate(tried, score):
    """The learning rate with the lowest median score; of equal ones the smaller."""
    rates = sorted({config["lr"] for config, _ in tried})
    return min(rates, key=lambda rate: _median(score(result) for config, result in tried if config["lr"] == rate))


def _final(name, optimizer, kind):
    """The median end of the reported runs, at the rate that is best for them in original coordinates."""
    own = [run for run in _runs(name, optimizer=optimizer) if run[0]["seed"] < 10_000]
    score = {"digits": lambda r: -r["best validation accuracy"], "linear-networks": lambda r: r["best validation"]}
    rate = _best_rate([run for run in own if run[0]["coordinates"] == "original"], score[name])
    ends = [result for config, result in own if (config["coordinates"], config["lr"]) == (kind, rate)]
    return _median(result["final"] if "final" in result else result["loss"][-1] for result in ends)


def _masked(nu, optimizer, kind="original"):  # reported runs are there at the chosen rate only
    own = _runs("errors-in-variables", nu=nu, optimizer=optimizer, coordinates=kind)
    return _median(result["loss"][-1] for config, result in own if config["seed"] < 10_000)


def _lowest(method):
    rate = _best_rate(list(_runs("resnet", method=method, epochs=3)), lambda r: -r["ten-crop accuracy"])
    return _median(min(r["validation loss"]) for _, r in _runs("resnet", method=method, lr=rate, epochs=10))


SGD = [("SGD", "original"), ("SGD+momentum", "original")]
ADAPTIVE = [(name, kind) for name in ("Adam", "Adagrad") for kind in ("original", "EGOP")]
best_sgd = {name: min(_final(name, *who) for who in SGD) for name in ("digits", "linear-networks")}
no_better = [_masked(nu, "Adam", "EGOP") <= _masked(nu, "Shampoo") for nu in (0.5, 0.75, 1)]
for claim, holds in {
    "digits/Adagrad-below-sgd": _final("digits", "Adagrad", "EGOP") < best_sgd["digits"],
    "linear-networks/adaptive": max(_final("linear-networks", *a) for a in ADAPTIVE) < best_sgd["linear-networks"],
    "digits-density/first": next(_runs("digits-density"))[1]["density"][0] > 0.5,
    "errors-in-variables/Shampoo-no-better": all(no_better),
    "resnet/validation-often": _lowest("EGOP each epoch") < _lowest("SOAP every 10"),
}.items():
    print(f"{claim}: {'holds' if holds else 'does not hold'}")
