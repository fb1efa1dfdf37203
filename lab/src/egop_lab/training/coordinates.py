"""Tasks of the comparison of coordinates, on the timed trainings."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

import egop
from egop_lab.builders import ADAM, Setup
from egop_lab.methods import COORDINATES
from egop_lab.training import classifiers, language, timed_runs

MEMORY = "8GiB"  # for all bases of a model: no method is to lack one for want of memory

Bases = dict[egop.Structure, egop.Basis]


@functools.lru_cache(maxsize=8)
def _kept(settings: str) -> Bases:
    """Return the cache of bases for runs that differ only in method, learning rate and length."""
    return {}


def _completed(start: Setup, config: Mapping[str, Any]) -> Setup:
    """Add the bases of other runs, unless the time before the first step is measured."""
    same = {key: value for key, value in config.items() if key not in ("method", "lr", "steps", "epochs")}
    bases = None if "rounds" in config else _kept(json.dumps(same, sort_keys=True))
    return replace(start, memory=MEMORY, bases=bases)


class LanguageRun(language.Run):
    """A GPT; the weights of its blocks are in the bases."""

    comparison: ClassVar[str] = COORDINATES

    def make_setup(self) -> Setup:
        return _completed(super().make_setup(), self.config)


class ImageRun(classifiers.Run):
    """A residual network, all of its convolutions in bases; or a transformer, its blocks and its first layer."""

    comparison: ClassVar[str] = COORDINATES

    def make_setup(self) -> Setup:
        adam = {"betas": ADAM, "fused": self.device.type == "cuda"}
        return _completed(replace(super().make_setup(), adam=adam, inside=hidden(self.model)), self.config)

    def final_metrics(self) -> dict[str, float]:
        """Return nothing: ten crops would take longer than an epoch of some networks."""
        return {}


def hidden(model: nn.Module) -> list[str]:
    """Return the names of a classifier's weights that get bases: all convolutions and linear layers but the last."""
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    return [f"{name}.weight" for name in layers[:-1]]


def step_times(
    runs: Mapping[str, Callable[[], timed_runs.Run]], config: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Time a step and what comes before the first one, by method and round; the methods take turns.

    Args:
        runs: makes a run of each method.
        config: how many ``rounds``, and in each how many steps to ``warm`` up and how many ``timed`` ones.
    """
    results: dict[str, dict[str, Any]] = {method: {"before": [], "step": []} for method in runs}
    next(iter(runs.values()))().set_up()  # what a process sets up once is nobody's time
    for _ in range(config["rounds"]):
        for method, make in runs.items():
            before, step = make().time_steps(config["warm"], config["timed"])
            results[method]["before"].append(before)
            results[method]["step"].append(step)
    return results
