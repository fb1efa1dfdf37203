"""Experiments of two sweeps: tuning trials choose a learning rate in original coordinates, reported ones are judged."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from egop_lab.experiments.base import Experiment
from egop_lab.experiments.curves import best_rate
from egop_lab.training.context import Preset
from egop_lab.training.records import Record, Store
from egop_lab.training.sweeps import ORIGINAL, TUNING


class SweptExperiment(Experiment):
    """The learning rate of original coordinates is that of EGOP ones too."""

    @abc.abstractmethod
    def score(self, result: Mapping[str, Any]) -> float:
        """What a learning rate is chosen by, median over the tuning trials; the smaller the better."""

    def chosen(self, store: Store, preset: Preset, optimizer: str) -> float:
        """The rate of the best score."""
        runs = self.records(store, preset, optimizer=optimizer, coordinates=ORIGINAL)
        return best_rate([run for run in runs if run.config["seed"] >= TUNING], self.score)

    def fresh(self, store: Store, preset: Preset, optimizer: str, coordinates: str) -> list[Record]:
        """The runs on reported trials, at all rates."""
        runs = self.records(store, preset, optimizer=optimizer, coordinates=coordinates)
        return [run for run in runs if run.config["seed"] < TUNING]

    def reported(self, store: Store, preset: Preset, optimizer: str, coordinates: str) -> list[Record]:
        """Those at the chosen rate."""
        rate = self.chosen(store, preset, optimizer)
        return [run for run in self.fresh(store, preset, optimizer, coordinates) if run.config["lr"] == rate]
