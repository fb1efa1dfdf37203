"""Fashion-MNIST: auxiliary variables of several ranks, where the first layer is too large for a full basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from egop_lab.experiments import fashion_claims as claims
from egop_lab.experiments.base import Alternative, Experiment, Judgement
from egop_lab.experiments.curves import first_below, median, quartiles
from egop_lab.experiments.fashion_claims import Method, MethodRuns
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context, make_record
from egop_lab.training.fashion import Curves, Runs, train_batched
from egop_lab.training.records import Record
from egop_lab.training.spectra import decay
from egop_lab.training.tuning import TUNING

_FIRST_DECAY = 0.01  # for the first search of the learning rate: AdamW's default


class FashionMnistExperiment(Experiment):
    """AdamW in original coordinates and with auxiliary variables; rank 0 stands for original coordinates.

    A further row has the leading directions alone: low-rank descent.
    """

    id: ClassVar[str] = "fashion-mnist"
    version: ClassVar[int] = 2

    def run(self, context: Context) -> None:
        """Train and time; nothing else may be running during the timing."""
        load = cache(lambda: Runs(self.settings["images"], context))  # only if there is something to run
        self.do_missing([self._spectrum_config()], lambda config: load().spectrum(config), context.device)
        for method in self._methods():
            for search in self.settings["searches"]:
                for configs in self._tuning(method, search):
                    self._train(configs, load, _compact)
                self._train(self._reported_configs(method, search), load, dict)
        timed = [self._timing_config(method) for method in self._methods()]
        if self.store.missing(timed):  # warm up with a basis that is not used again
            load().time_epochs(next(config for config in timed if config["rank"]) | {"seed": TUNING})
        self.do_missing(timed, lambda config: load().time_epochs(config), context.device)

    def _train(
        self,
        configs: Sequence[Mapping[str, Any]],
        load: Callable[[], Runs],
        kept: Callable[[Curves], Mapping[str, Any]],
    ) -> None:
        """Do the missing runs together."""
        if not (left := self.store.missing(configs)):
            return
        curves, seconds = train_batched(load(), left)
        pairs, device = zip(left, curves, strict=True), load().context.device
        self.store.add(*(make_record(config, kept(curves), seconds / len(left), device) for config, curves in pairs))

    @property
    def papers_search(self) -> str:
        """The paper's search, if the preset has it."""
        return list(self.settings["searches"])[-1]

    def choose_rates(self, method: Method, search: str) -> tuple[float, float]:
        """Return the pair (rate, weight decay) of a method's best validation accuracy in a search."""
        (*_, configs) = self._tuning(method, search)
        return _best([record for config in configs if (record := self.store.get(config)) is not None])

    def judge(self) -> list[Judgement]:
        """Judge by the search over the whole grid, as in the paper, with the other search as an alternative."""
        *others, papers = self.settings["searches"]
        judged = self._judge_search(papers)
        for search in others:
            rule = f"search along {search}"
            pairs = zip(judged, self._judge_search(search), strict=True)
            judged = [one if one.finding == other.finding else one.add_alternative(rule, other) for one, other in pairs]
        equal = self._compare_at_equal_settings()
        judged = [
            replace(one, alternatives=(*one.alternatives, *equal)) if one.id.endswith("/grows") else one
            for one in judged
        ]
        (record,) = self.records(kind="spectrum")
        return [*judged, claims.judge_rank(record.result, judged=self.preset == "full")]

    def _judge_search(self, search: str) -> list[Judgement]:
        by_method = self._load_runs(search)
        by_rank = {method.rank: results for method, results in by_method.items() if not method.reduced}
        (reduced,) = (method for method in by_method if method.reduced)
        curves = {rank: quartiles(results.curves("loss"))[1] for rank, results in by_rank.items()}
        target = min(curves[0])
        epochs = {rank: first_below(curve, target) for rank, curve in curves.items()}
        return [
            *(claims.judge_faster(rank, epochs) for rank in by_rank if rank),
            claims.judge_growth(epochs),
            *(claims.judge_accuracy(rank, by_rank) for rank in by_rank if rank),
            claims.judge_wall_clock(by_rank, judged=self.preset == "full"),
            claims.judge_sooner(by_rank, judged=self.preset == "full"),
            claims.judge_auxiliary(reduced, by_rank[reduced.rank], by_method[reduced]),
        ]

    def _compare_at_equal_settings(self) -> list[Alternative]:
        """Judge whether the gain grows with r at equal rate and weight decay, by the runs of the search."""
        ranks = [0, *self.settings["ranks"]]
        by_place: dict[tuple[float, float], dict[int, float]] = {}
        for run in self.records(kind="run", epochs=self.settings["tuning epochs"], seed=TUNING):
            if not run.config.get("reduced"):
                place = run.config["lr"], run.config["weight_decay"]
                by_place.setdefault(place, {})[run.config["rank"]] = run.result["final"]
        finals = [[losses[rank] for rank in ranks] for losses in by_place.values() if len(losses) == len(ranks)]
        return [claims.compare_at_equal_settings(ranks, finals)] if finals else []

    def pictures(self) -> list[Picture]:
        return [each for search in self.settings["searches"] for each in self._pictures(search)]

    def _pictures(self, search: str) -> list[Picture]:
        by_method = self._load_runs(search)
        losses = [_curve(method, results, "loss") for method, results in by_method.items()]
        accuracies = [
            _curve(method, results, "validation accuracy", chosen=median(results.epochs_to_convergence()))
            for method, results in by_method.items()
        ]
        (record,) = self.records(kind="spectrum")
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

    def _methods(self) -> list[Method]:
        settings = self.settings
        return [*map(Method, (0, *settings["ranks"])), Method(settings["leading directions alone"], reduced=True)]

    def _load_runs(self, search: str) -> dict[Method, MethodRuns]:
        by_method = {}
        for method in self._methods():
            runs = [run for config in self._reported_configs(method, search) if (run := self.store.get(config))]
            time = self.store.get(self._timing_config(method))
            if time is None or not runs:
                raise LookupError(f"{self.id}: {method} has runs left")
            by_method[method] = MethodRuns(runs, time.result["seconds per epoch"], time.result["estimation seconds"])
        return by_method

    def _tuning(self, method: Method, search: str) -> Iterable[list[dict[str, Any]]]:
        """Yield the search of a method stage by stage: a stage may depend on the results of the one before."""
        settings = self.settings
        rates, decays = settings["rates"], settings["weight decays"]
        if search == "grid":
            yield [self._tuning_config(method, lr, decay) for lr in rates for decay in decays]
            return
        yield (line := [self._tuning_config(method, lr, _FIRST_DECAY) for lr in rates])
        lr, _ = _best([record for config in line if (record := self.store.get(config)) is not None])
        yield line + [self._tuning_config(method, lr, decay) for decay in decays if decay != _FIRST_DECAY]

    def _tuning_config(self, method: Method, lr: float, weight_decay: float) -> dict[str, Any]:
        return self._config(method, lr, weight_decay, self.settings["tuning epochs"], TUNING)

    def _reported_configs(self, method: Method, search: str) -> list[dict[str, Any]]:
        settings = self.settings
        chosen = self.choose_rates(method, search)
        return [self._config(method, *chosen, settings["epochs"], seed) for seed in range(settings["trials"])]

    def _config(self, method: Method, lr: float, weight_decay: float, epochs: int, seed: int) -> dict[str, Any]:
        entries: dict[str, Any] = {"rank": method.rank, **({"reduced": True} if method.reduced else {})}
        entries |= {"lr": lr, "weight_decay": weight_decay, "epochs": epochs, "seed": seed}
        return self.config(kind="run", images=self.settings["images"], **entries)

    def _timing_config(self, method: Method) -> dict[str, Any]:
        """Return the configuration to time: its seconds do not depend on the search."""
        chosen, epochs = self.choose_rates(method, "lines"), self.settings["timed epochs"]
        return self._config(method, *chosen, epochs, 0) | {"kind": "timing"}

    def _spectrum_config(self) -> dict[str, Any]:
        settings = self.settings
        entries = {"images": settings["images"], "samples": settings["spectrum samples"], "seed": 0}
        return self.config(kind="spectrum", **entries)


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
