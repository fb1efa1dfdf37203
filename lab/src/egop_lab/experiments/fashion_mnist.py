"""Fashion-MNIST: auxiliary variables of several ranks, where the first layer is too large for a full basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from egop_lab.experiments import fashion_claims as claims
from egop_lab.experiments.base import Alternative, Experiment, Judgement, make_alternative
from egop_lab.experiments.curves import first_below, median, quartiles
from egop_lab.experiments.fashion_claims import Method, MethodRuns
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context, Preset, make_record, record_run
from egop_lab.training.fashion import Curves, Runs, train_batched
from egop_lab.training.records import Record, Store
from egop_lab.training.spectra import decay
from egop_lab.training.sweeps import TUNING

_FIRST_DECAY = 0.01  # for the first search of the learning rate: AdamW's default

SEARCHES = {
    "lines": f"(all rates with a weight decay of {_FIRST_DECAY:g}, then all weight decays with the best of them)",
    "grid": "(every combination, as in the paper; added when the results of the lines were known)",
}


class FashionMnistExperiment(Experiment):
    """AdamW in original coordinates and with auxiliary variables; rank 0 stands for original coordinates.

    A further row has the leading directions alone: low-rank descent.
    """

    id: ClassVar[str] = "fashion-mnist"
    title: ClassVar[str] = "A ReLU network on Fashion-MNIST, auxiliary variables"
    figures: ClassVar[str] = "Fashion-MNIST: loss and spectrum; supplementary: accuracy and wall-clock time"
    labels: ClassVar[tuple[str, ...]] = ("fig:fashionMNIST", "fig:auxilliary-cost-benefit-tradeoff")
    paper: ClassVar[Mapping[str, str]] = {
        "images": "60000",
        "ranks": "[50, 200, 1000, 2000]",
        "gradients": "0.01 d = 795, of which no 1000 or 2000 directions can be had",
        "epochs": "100",
        "trials": "not named",
        "spectrum samples": "795, of which no 4000 eigenvalues can be had",
        "tuning epochs": "30",
        "timing": "an RTX A6000, two cores",
    }
    version: ClassVar[int] = 2

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        return {
            "images": 60_000 if full else 6000,
            "ranks": [50, 200, 1000, 2000] if full else [50, 200],
            "gradients": "at least 0.01 d and the rank",
            "leading directions alone": 1000 if full else 200,
            "epochs": 100 if full else 10,
            "trials": 3 if full else 1,
            "spectrum samples": 7951 if full else 796,
            "tuning epochs": 30 if full else 3,
            "rates": [1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1] if full else [5e-3, 1e-2, 5e-2, 1e-1],
            "weight decays": [0, 1e-5, 1e-4, 1e-3, 1e-2, 5e-2, 1e-1, 2e-1, 5e-1] if full else [0, 1e-2, 1e-1],
            "searches": SEARCHES if full else {"lines": SEARCHES["lines"]},
            "timed epochs": 10 if full else 2,
            "timing": "single runs of the library's optimizer, nothing else running; batched ones gave the curves",
        }

    def run(self, store: Store, context: Context) -> None:
        self.train(store, context)
        self.time(store, context)

    def train(self, store: Store, context: Context) -> None:
        """Do everything but the timing."""
        spectrum = self._spectrum_config(context.preset)
        runs: Runs | None = None  # load the data only if there is something to run
        if spectrum not in store:
            runs = self._runs(context)
            record_run(store, spectrum, runs.spectrum, context.device)
        for method in self._methods(context.preset):
            for search in self.settings(context.preset)["searches"]:
                for configs in self._tuning(store, context.preset, method, search):
                    if left := store.missing(configs):
                        runs = runs or self._runs(context)
                        self._add(left, runs, store, _compact)
                if left := store.missing(self._reported_configs(store, context.preset, method, search)):
                    runs = runs or self._runs(context)
                    self._add(left, runs, store, lambda curves: curves)

    def time(self, store: Store, context: Context) -> None:
        """Time single runs; call it when nothing else is running."""
        configs = {
            method: self._timing_config(store, context.preset, method) for method in self._methods(context.preset)
        }
        if not (left := store.missing(configs.values())):
            return
        runs = self._runs(context)
        # Warm up with a basis that is not used again.
        runs.time_epochs(next(config for config in configs.values() if config["rank"]) | {"seed": TUNING})
        for config in left:
            record_run(store, config, runs.time_epochs, context.device)

    def choose_rates(self, store: Store, preset: Preset, method: Method, search: str) -> tuple[float, float]:
        """Return the pair (rate, weight decay) of a method's best validation accuracy in a search."""
        (*_, configs) = self._tuning(store, preset, method, search)
        return _best([record for config in configs if (record := store.get(config)) is not None])

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        """Judge by the search over the whole grid, as in the paper, with the other search as an alternative."""
        *others, papers = self.settings(preset)["searches"]
        judged = self._judge_search(store, preset, papers)
        for search in others:
            rule = f"search along {search}"
            pairs = zip(judged, self._judge_search(store, preset, search), strict=True)
            judged = [
                one if one.finding == other.finding else _add_alternative(one, make_alternative(rule, other))
                for one, other in pairs
            ]
        equal = self._compare_at_equal_settings(store, preset)
        judged = [_add_alternative(one, equal) if equal and one.id.endswith("/grows") else one for one in judged]
        (record,) = self.records(store, preset, kind="spectrum")
        return [*judged, claims.judge_rank(record.result, judged=preset == "full")]

    def _judge_search(self, store: Store, preset: Preset, search: str) -> list[Judgement]:
        by_method = self._load_runs(store, preset, search)
        by_rank = {method.rank: results for method, results in by_method.items() if not method.reduced}
        (reduced,) = (method for method in by_method if method.reduced)
        curves = {rank: quartiles(results.curves("loss"))[1] for rank, results in by_rank.items()}
        target = min(curves[0])
        epochs = {rank: first_below(curve, target) for rank, curve in curves.items()}
        return [
            *(claims.judge_faster(rank, epochs) for rank in by_rank if rank),
            claims.judge_growth(epochs),
            *(claims.judge_accuracy(rank, by_rank) for rank in by_rank if rank),
            claims.judge_wall_clock(by_rank, judged=preset == "full"),
            claims.judge_sooner(by_rank, judged=preset == "full"),
            claims.judge_auxiliary(reduced, by_rank[reduced.rank], by_method[reduced]),
        ]

    def _compare_at_equal_settings(self, store: Store, preset: Preset) -> Alternative | None:
        """Judge whether the gain grows with r at equal rate and weight decay, by the runs of the search."""
        ranks = [0, *self.settings(preset)["ranks"]]
        by_place: dict[tuple[float, float], dict[int, float]] = {}
        for run in self.records(store, preset, kind="run", epochs=self.settings(preset)["tuning epochs"], seed=TUNING):
            if not run.config.get("reduced"):
                place = run.config["lr"], run.config["weight_decay"]
                by_place.setdefault(place, {})[run.config["rank"]] = run.result["final"]
        finals = [[losses[rank] for rank in ranks] for losses in by_place.values() if len(losses) == len(ranks)]
        return claims.compare_at_equal_settings(ranks, finals) if finals else None

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        return [each for search in self.settings(preset)["searches"] for each in self._pictures(store, preset, search)]

    def _pictures(self, store: Store, preset: Preset, search: str) -> list[Picture]:
        by_method = self._load_runs(store, preset, search)
        losses = [_curve(method, results, "loss") for method, results in by_method.items()]
        accuracies = [
            _curve(method, results, "validation accuracy", chosen=median(results.epochs_to_convergence()))
            for method, results in by_method.items()
        ]
        (record,) = self.records(store, preset, kind="spectrum")
        index = record.result["index"]
        spectrum = Series("first layer", index, decay(record.result, index), method="spectrum")
        bars = []
        for words, part in (("training", False), ("training and estimation", True)):
            times = [quartiles([[seconds] for seconds in results.seconds(part)]) for results in by_method.values()]
            low, middle, high = ([time[i][0] for time in times] for i in range(3))
            bars.append(Series(words, [str(method) for method in by_method], middle, low, high, words, part))
        return [
            Picture(
                f"fashion-mnist-{search}",
                f"Training loss by epoch, each method with its own learning rate and weight decay (search: {search}); "
                f"λₖ/λ₁ of the first layer's EGOP matrix, estimated from {record.result['samples']} gradients.",
                [
                    Panel("Training loss", "epoch", "loss", losses),
                    Panel("Eigenvalues, first layer", "k", "λₖ/λ₁", [spectrum]),
                ],
            ),
            Picture(
                f"fashion-mnist-{search}-time",
                f"Validation accuracy by epoch (search: {search}), starred at 99.5 % of a method's own best; seconds "
                "until then.",
                [
                    Panel("Validation accuracy", "epoch", "accuracy", accuracies, yscale="linear"),
                    Panel("Time to 99.5 % of best accuracy", "", "seconds", bars, yscale="linear", kind="bar"),
                ],
            ),
        ]

    def _methods(self, preset: Preset) -> list[Method]:
        settings = self.settings(preset)
        return [*map(Method, (0, *settings["ranks"])), Method(settings["leading directions alone"], reduced=True)]

    def _load_runs(self, store: Store, preset: Preset, search: str) -> dict[Method, MethodRuns]:
        by_method = {}
        for method in self._methods(preset):
            runs, time = (
                self._reported_runs(store, preset, method, search),
                store.get(self._timing_config(store, preset, method)),
            )
            if time is None or not runs:
                raise LookupError(f"{self.id}: {method} has runs left")
            by_method[method] = MethodRuns(runs, time.result["seconds per epoch"], time.result["estimation seconds"])
        return by_method

    def _runs(self, context: Context) -> Runs:
        return Runs(self.settings(context.preset)["images"], context)

    def _add(
        self,
        configs: Sequence[Mapping[str, Any]],
        runs: Runs,
        store: Store,
        kept: Callable[[Curves], Mapping[str, Any]],
    ) -> None:
        curves, seconds = train_batched(runs, configs)
        device = runs.context.device
        pairs = zip(configs, curves, strict=True)
        store.add(*(make_record(config, kept(curves), seconds / len(configs), device) for config, curves in pairs))

    def _tuning(self, store: Store, preset: Preset, method: Method, search: str) -> Iterable[list[dict[str, Any]]]:
        """Yield the search of a method stage by stage: a stage may depend on the results of the one before."""
        settings = self.settings(preset)
        rates, decays = settings["rates"], settings["weight decays"]
        if search == "grid":
            yield [self._tuning_config(preset, method, lr, decay) for lr in rates for decay in decays]
            return
        yield (line := [self._tuning_config(preset, method, lr, _FIRST_DECAY) for lr in rates])
        lr, _ = _best([record for config in line if (record := store.get(config)) is not None])
        yield line + [self._tuning_config(preset, method, lr, decay) for decay in decays if decay != _FIRST_DECAY]

    def _tuning_config(self, preset: Preset, method: Method, lr: float, weight_decay: float) -> dict[str, Any]:
        return self._config(preset, method, lr, weight_decay, self.settings(preset)["tuning epochs"], TUNING)

    def _reported_configs(self, store: Store, preset: Preset, method: Method, search: str) -> list[dict[str, Any]]:
        settings = self.settings(preset)
        chosen = self.choose_rates(store, preset, method, search)
        return [self._config(preset, method, *chosen, settings["epochs"], seed) for seed in range(settings["trials"])]

    def _reported_runs(self, store: Store, preset: Preset, method: Method, search: str) -> list[Record]:
        records = [store.get(config) for config in self._reported_configs(store, preset, method, search)]
        return [record for record in records if record is not None]

    def _config(
        self, preset: Preset, method: Method, lr: float, weight_decay: float, epochs: int, seed: int
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {"rank": method.rank, **({"reduced": True} if method.reduced else {})}
        entries |= {"lr": lr, "weight_decay": weight_decay, "epochs": epochs, "seed": seed}
        return self.config(preset, kind="run", images=self.settings(preset)["images"], **entries)

    def _timing_config(self, store: Store, preset: Preset, method: Method) -> dict[str, Any]:
        """Return the configuration to time: its seconds do not depend on the search."""
        chosen, epochs = self.choose_rates(store, preset, method, "lines"), self.settings(preset)["timed epochs"]
        return self._config(preset, method, *chosen, epochs, 0) | {"kind": "timing"}

    def _spectrum_config(self, preset: Preset) -> dict[str, Any]:
        settings = self.settings(preset)
        entries = {"images": settings["images"], "samples": settings["spectrum samples"], "seed": 0}
        return self.config(preset, kind="spectrum", **entries)


def _add_alternative(judged: Judgement, other: Alternative) -> Judgement:
    return replace(judged, alternatives=(*judged.alternatives, other))


def _best(records: Sequence[Record]) -> tuple[float, float]:
    """Return the learning rate and weight decay of the highest validation accuracy; the smaller ones of a tie."""
    if not records:
        raise LookupError("the search for learning rate and weight decay has runs left")
    places = sorted(((r.config["lr"], r.config["weight_decay"]), r.result["best validation accuracy"]) for r in records)
    best: tuple[float, float] = min(places, key=lambda place: -place[1] if math.isfinite(place[1]) else math.inf)[0]
    return best


def _compact(curves: Curves) -> dict[str, float]:
    """Keep what is needed of a run of the search."""
    return {"best validation accuracy": max(curves["validation accuracy"]), "final": curves["loss"][-1]}


def _curve(method: Method, results: MethodRuns, name: str, chosen: float | None = None) -> Series:
    low, middle, high = quartiles(results.curves(name))
    label = str(method)
    return Series(label, list(range(len(middle))), middle, low, high, label, method.rank > 0, chosen)
