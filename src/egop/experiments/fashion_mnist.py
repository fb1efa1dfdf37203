"""Fashion-MNIST: auxiliary variables of several ranks, where the first layer is too large for a full basis."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from egop.experiments.base import (
    Context,
    Experiment,
    Judged,
    Panel,
    Picture,
    Preset,
    Series,
    finished,
    first_below,
    median,
    quartiles,
    verdict,
)
from egop.experiments.digits_spectrum import decay
from egop.experiments.fashion_runs import Runs
from egop.experiments.records import Record, Store
from egop.experiments.sweeps import TUNING

_CONVERGED = 0.995  # of the best validation accuracy
_FIRST_DECAY = 0.01  # at which the learning rate is searched first: AdamW's own


class FashionMnistExperiment(Experiment):
    """AdamW in original coordinates and with auxiliary variables; rank 0 stands for original coordinates."""

    id: ClassVar[str] = "fashion-mnist"
    title: ClassVar[str] = "A ReLU network on Fashion-MNIST, auxiliary variables"
    figures: ClassVar[str] = "Fashion-MNIST: loss and spectrum; supplementary: accuracy and wall-clock time"
    gpu: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        if preset == "full":
            return {
                "images": 60_000,
                "ranks": [50, 200, 1000, 2000],
                "epochs": 100,
                "trials": 3,
                "spectrum samples": 7951,
                "tuning epochs": 30,
                "rates": [1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1],
                "weight decays": [0, 1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1, 2e-1, 5e-1],
                "search": "lines",  # 17 of the 81 combinations; "grid" for all of them
            }
        return {
            "images": 6000,
            "ranks": [50, 200, 500],
            "epochs": 10,
            "trials": 1,
            "spectrum samples": 796,
            "tuning epochs": 3,
            "rates": [5e-3, 1e-2, 5e-2, 1e-1],
            "weight decays": [0, 1e-2, 1e-1],
            "search": "lines",
        }

    def run(self, store: Store, context: Context) -> None:
        settings = self.settings(context.preset)
        spectrum = self._spectrum_config(context.preset)
        methods = [0, *settings["ranks"]]
        runs: Runs | None = None  # the data are needed only where something is left to do
        if spectrum not in store:
            runs = Runs(settings["images"], context)
            began = time.perf_counter()
            store.add(finished(spectrum, runs.spectrum(spectrum), time.perf_counter() - began, context.device))
        for rank in methods:
            for configs in self._tuning(store, context.preset, rank):
                for config in store.missing(configs):
                    runs = runs or Runs(settings["images"], context)
                    curves = runs.train(config)
                    best = {"best validation accuracy": max(curves["validation accuracy"]), "final": curves["loss"][-1]}
                    store.add(finished(config, best, curves["seconds"], context.device))
        for rank in methods:
            for config in store.missing(self._reported_configs(store, context.preset, rank)):
                runs = runs or Runs(settings["images"], context)
                curves = runs.train(config)
                store.add(finished(config, curves, curves["seconds"], context.device))

    def chosen(self, store: Store, preset: Preset, rank: int) -> tuple[float, float]:
        """Learning rate and weight decay of a method's highest validation accuracy in the search; ties: the smaller."""
        return _best(self._searched(store, preset, rank))

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        found = {rank: self._reported(store, preset, rank) for rank in (0, *self.settings(preset)["ranks"])}
        curves = {rank: quartiles([run.result["loss"] for run in runs])[1] for rank, runs in found.items()}
        target = min(curves[0])
        epochs = {rank: first_below(curve, target) for rank, curve in curves.items()}
        return [
            *(_beats(rank, epochs) for rank in found if rank),
            _grows(epochs),
            *(_accurate(rank, found) for rank in found if rank),
            _wall_clock(found, judged=preset == "full"),
        ]

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        found = {rank: self._reported(store, preset, rank) for rank in (0, *self.settings(preset)["ranks"])}
        losses, accuracies = [], []
        for rank, runs in found.items():
            losses.append(_curve(rank, runs, "loss"))
            accuracies.append(_curve(rank, runs, "validation accuracy", chosen=median([_converged(r) for r in runs])))
        (record,) = self.records(store, preset, kind="spectrum")
        index = record.result["index"]
        spectrum = Series("first layer", index, decay(record.result, index), method="spectrum")
        bars = []
        for words, part in (("training", False), ("training and estimation", True)):
            times = {rank: quartiles([[_seconds(run, part)] for run in runs]) for rank, runs in found.items()}
            low, middle, high = ([times[rank][i][0] for rank in times] for i in range(3))
            bars.append(Series(words, [_label(rank) for rank in times], middle, low, high, words, part))
        return [
            Picture(
                "fashion-mnist",
                "Training loss by epoch, each method with its own learning rate and weight decay; λₖ/λ₁ of the first "
                f"layer's EGOP matrix, estimated from {record.result['samples']} gradients.",
                [
                    Panel("Training loss", "epoch", "loss", losses),
                    Panel("Eigenvalues, first layer", "k", "λₖ/λ₁", [spectrum]),
                ],
            ),
            Picture(
                "fashion-mnist-time",
                "Validation accuracy by epoch, starred at 99.5 % of a method's own best; seconds until then.",
                [
                    Panel("Validation accuracy", "epoch", "accuracy", accuracies, yscale="linear"),
                    Panel("Time to 99.5 % of best accuracy", "", "seconds", bars, yscale="linear", kind="bar"),
                ],
            ),
        ]

    def _tuning(self, store: Store, preset: Preset, rank: int) -> Iterable[list[dict[str, Any]]]:
        """The search of a method, stage by stage: the next one may depend on what the one before has found."""
        settings = self.settings(preset)
        rates, decays = settings["rates"], settings["weight decays"]
        if settings["search"] == "grid":
            yield [self._tuning_config(preset, rank, lr, decay) for lr in rates for decay in decays]
            return
        yield (line := [self._tuning_config(preset, rank, lr, _FIRST_DECAY) for lr in rates])
        lr, _ = _best([record for config in line if (record := store.get(config)) is not None])
        yield line + [self._tuning_config(preset, rank, lr, decay) for decay in decays if decay != _FIRST_DECAY]

    def _searched(self, store: Store, preset: Preset, rank: int) -> list[Record]:
        (*_, configs) = self._tuning(store, preset, rank)
        return [record for config in configs if (record := store.get(config)) is not None]

    def _tuning_config(self, preset: Preset, rank: int, lr: float, weight_decay: float) -> dict[str, Any]:
        return self._config(preset, rank, lr, weight_decay, self.settings(preset)["tuning epochs"], TUNING)

    def _reported_configs(self, store: Store, preset: Preset, rank: int) -> list[dict[str, Any]]:
        settings = self.settings(preset)
        chosen = self.chosen(store, preset, rank)
        return [self._config(preset, rank, *chosen, settings["epochs"], seed) for seed in range(settings["trials"])]

    def _reported(self, store: Store, preset: Preset, rank: int) -> list[Record]:
        records = [store.get(config) for config in self._reported_configs(store, preset, rank)]
        return [record for record in records if record is not None]

    def _config(
        self, preset: Preset, rank: int, lr: float, weight_decay: float, epochs: int, seed: int
    ) -> dict[str, Any]:
        own = {"rank": rank, "lr": lr, "weight_decay": weight_decay, "epochs": epochs, "seed": seed}
        return self.config(preset, kind="run", images=self.settings(preset)["images"], **own)

    def _spectrum_config(self, preset: Preset) -> dict[str, Any]:
        settings = self.settings(preset)
        own = {"images": settings["images"], "samples": settings["spectrum samples"], "seed": 0}
        return self.config(preset, kind="spectrum", **own)


def _best(records: Sequence[Record]) -> tuple[float, float]:
    """Learning rate and weight decay of the highest validation accuracy; of equal ones the smaller."""
    places = sorted(((r.config["lr"], r.config["weight_decay"]), r.result["best validation accuracy"]) for r in records)
    best: tuple[float, float] = min(places, key=lambda place: -place[1] if math.isfinite(place[1]) else math.inf)[0]
    return best


def _label(rank: int) -> str:
    return f"r = {rank}" if rank else "original"


def _curve(rank: int, runs: Sequence[Record], name: str, chosen: float | None = None) -> Series:
    low, middle, high = quartiles([run.result[name] for run in runs])
    epochs = list(range(len(middle)))
    return Series(_label(rank), epochs, middle, low, high, _label(rank), rank > 0, chosen)


def _converged(run: Record) -> int:
    """The first epoch with 99.5 % of the run's best validation accuracy."""
    accuracies = run.result["validation accuracy"]
    found = first_below([-value for value in accuracies], -_CONVERGED * max(accuracies))
    assert found is not None, "the best one is above"
    return found


def _seconds(run: Record, estimation: bool) -> float:
    """Time in training steps until convergence, and that of the estimation where wanted."""
    training = run.result["seconds"] * _converged(run) / run.config["epochs"]
    return float(training + (run.result["estimation seconds"] if estimation else 0))


def _beats(rank: int, epochs: Mapping[int, int | None]) -> Judged:
    """Compared by the epochs to the lowest training loss that original coordinates reach."""
    own, original = epochs[rank], epochs[0]
    assert original is not None
    reached = f"after {own}" if own is not None else "not reached"
    words = f"With r = {rank} the training loss falls faster by epoch than in original coordinates."
    found = f"Epochs to the lowest loss of original coordinates: {reached}; original: {original}."
    return Judged(f"fashion-mnist/r{rank}-faster", words, verdict(own is not None and own < original), found)


def _grows(epochs: Mapping[int, int | None]) -> Judged:
    needed = {rank: math.inf if epochs[rank] is None else float(epochs[rank] or 0) for rank in sorted(epochs) if rank}
    values = list(needed.values())
    ordered = all(one >= other for one, other in pairwise(values)) and values[0] > values[-1]
    shown = "; ".join(f"{_label(rank)}: {value:g}" for rank, value in needed.items())
    words = "The gain grows with r."
    found = f"Epochs to the lowest loss of original coordinates (holds when they never rise, and fall): {shown}."
    return Judged("fashion-mnist/grows", words, verdict(ordered), found)


def _accurate(rank: int, found: Mapping[int, Sequence[Record]]) -> Judged:
    own, original = (-median([-max(run.result["validation accuracy"]) for run in found[each]]) for each in (rank, 0))
    words = f"With r = {rank} the best validation accuracy is as good or better."
    shown = f"{_label(rank)}: {own:.2%}; original: {original:.2%}."
    return Judged(f"fashion-mnist/r{rank}-accuracy", words, verdict(own >= original), shown)


def _wall_clock(found: Mapping[int, Sequence[Record]], *, judged: bool) -> Judged:
    """The winner is looked for with the estimation counted, as a user would have to."""
    times = {rank: median([_seconds(run, True) for run in runs]) for rank, runs in found.items()}
    alone = {rank: median([_seconds(run, False) for run in runs]) for rank, runs in found.items()}
    winner = min(times, key=lambda rank: times[rank])
    shown = "; ".join(f"{_label(rank)}: {times[rank]:.3g} ({alone[rank]:.3g})" for rank in times)
    note = "" if judged else " This preset has too few images, epochs and ranks for convergence times to mean much."
    return Judged(
        "fashion-mnist/wall-clock",
        "Intermediate r converges first by the clock.",
        verdict(winner in sorted(rank for rank in times if rank)[1:-1]) if judged else "cannot be judged",
        f"Seconds to 99.5 % of the best validation accuracy, in brackets without estimation: {shown}.{note}",
    )
