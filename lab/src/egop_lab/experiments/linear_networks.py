"""Linear networks of three layers: all parameters in one basis, a basis for each layer, the first layer alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from egop_lab.experiments.base import Judgement
from egop_lab.experiments.curves import curve_series, rate_series
from egop_lab.experiments.linear_networks_claims import ADAPTIVE, KINDS, Claims, Score, best_validation_loss, final_loss
from egop_lab.experiments.sweep_experiment import SweepExperiment
from egop_lab.plots.picture import Panel, Picture
from egop_lab.training import batched
from egop_lab.training.context import Context, Preset
from egop_lab.training.linear import BATCH, BLOCK, FIRST, SIZE, LinearProblem
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP, ORIGINAL, TUNING, Sweep, run_sweep
from egop_lab.training.tuning import doublings

_POINTS = 50  # recorded points of a curve


class LinearNetworksExperiment(SweepExperiment):
    """Adam and Adagrad in three kinds of EGOP coordinates against original ones, and SGD."""

    id: ClassVar[str] = "linear-networks"
    title: ClassVar[str] = "Multilayer linear networks"
    figures: ClassVar[str] = (
        "Linear networks: loss by epoch, by learning rate, validation; supplementary: three variants"
    )
    labels: ClassVar[tuple[str, ...]] = (
        "fig:global-reparam-linear-layers",
        "fig:linear-layers-global-reparam-loss-vs-epochs",
        "fig:linear-layers-global-reparam-loss-vs-LR",
        "fig:linear-layers-global-reparam-valloss-vs-LR",
        "fig:sup-linear-networks",
        "fig:global-sup",
        "fig:block-sup",
        "fig:first-layer-only-sup",
    )
    paper: ClassVar[Mapping[str, str]] = {
        "trials": "10",
        "tuning trials": "none: rates are chosen on the reported trials",
        "epochs": "1000",
        "samples": "20000",
        "batch": "500",
        "gradients": "4600",
        "layers": "10-50-30-10 (text), 10-30-50-10 (appendix)",
        "precision": "not named",
    }

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        rates = {
            "Adam": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "Adagrad": doublings(1e-3, 1) if full else [0.01, 0.04, 0.1, 0.2],
            "SGD": doublings(10, 1e4) if full else [400.0, 1000.0, 2000.0, 4000.0],
            "SGD+momentum": doublings(1, 1e3) if full else [100.0, 200.0, 400.0, 800.0],
        }
        return {
            "trials": 10 if full else 3,
            "tuning trials": 5 if full else 2,
            "epochs": 1000 if full else 30,
            "samples": 20_000,  # half to train, a fifth to validate, the rest is the paper's test set
            "batch": BATCH,
            "gradients": 2 * SIZE,
            "layers": "10-50-30-10",
            "precision": "float64" if full else "float32",
            "rates": rates,
        }

    def run(self, store: Store, context: Context) -> None:
        settings = self.settings(context.preset)
        epochs, steps_per_epoch = settings["epochs"], settings["samples"] // 2 // BATCH
        common: dict[str, Any] = {
            "steps": epochs * steps_per_epoch,
            "record_every": steps_per_epoch,
            "at_once": 10 if context.device.type == "cuda" else 3,
            "extra": {name: settings[name] for name in ("samples", "gradients", "precision")},
        }
        rates, reported = settings["rates"], range(settings["trials"])
        adaptive = {name: rates[name] for name in ADAPTIVE}
        tuning = range(TUNING, TUNING + settings["tuning trials"])

        def go(sweep: Sweep) -> None:
            run_sweep(
                self.config,
                sweep,
                store,
                context,
                problem=lambda seeds: LinearProblem(
                    seeds,
                    settings["samples"],
                    settings["gradients"],
                    getattr(torch, settings["precision"]),
                    context.device,
                    context.workers if context.device.type == "cuda" else 1,
                ),
                basis=lambda problem, kind: problem.basis(kind),
                schedule=batched.cosine(epochs),
                compact=_compact,
            )

        go(Sweep(rates=rates, seeds=tuning, coordinates=[ORIGINAL], **common))
        # Curves are recorded at these rates only, so that the rates are part of the configuration.
        common["extra"] |= {"chosen": {name: self.choose_rate(store, context.preset, name) for name in rates}}
        go(Sweep(rates=rates, seeds=reported, coordinates=[ORIGINAL, EGOP], **common))
        go(Sweep(rates=adaptive, seeds=reported, coordinates=[BLOCK, FIRST], **common))

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the best validation loss."""
        return best_validation_loss(result)

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        return Claims(self, store, preset).judge_all()

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        curves = []
        for optimizer in self.settings(preset)["rates"]:
            for kind in (ORIGINAL, EGOP):
                runs = self.reported_runs(store, preset, optimizer, kind)
                curves.append(curve_series(runs, "loss", optimizer, kind, runs[0].result["epoch"]))

        def over_rates(title: str, score: Score, kind: str) -> Panel:
            series = [
                rate_series(runs, score, name, coordinates, self.choose_rate(store, preset, name))
                for name in self.settings(preset)["rates"]
                for coordinates in (ORIGINAL, kind)
                if (runs := self.fresh_runs(store, preset, name, coordinates))
            ]
            return Panel(title, "learning rate", "loss", series, xscale="log")

        return [
            Picture(
                "linear-networks",
                "Training loss by epoch at the learning rate chosen for original coordinates; final training loss and "
                "least validation loss by learning rate. Medians and quartiles over trials.",
                [
                    Panel("Training loss", "epoch", "loss", curves),
                    over_rates("Final training loss", final_loss, EGOP),
                    over_rates("Least validation loss", best_validation_loss, EGOP),
                ],
            ),
            Picture(
                "linear-networks-variants",
                "Final training loss by learning rate for three ways to reparameterise.",
                [over_rates(words.capitalize(), final_loss, kind) for kind, words in KINDS.items()],
            ),
        ]


def _least(values: Sequence[float]) -> float:
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _compact(config: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Keep single numbers; keep some points of the curves for reported trials at the chosen rate."""
    numbers = {"final": result["loss"][-1], "best validation": _least(result["validation loss"])}
    if config.get("chosen", {}).get(config["optimizer"]) != config["lr"]:
        return numbers
    epochs = len(result["loss"]) - 1
    kept = sorted({round(place * epochs / _POINTS) for place in range(_POINTS + 1)})
    return numbers | {"epoch": kept} | {name: [values[k] for k in kept] for name, values in result.items()}
