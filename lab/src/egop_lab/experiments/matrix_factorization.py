"""Low-rank matrix factorisation: where SOAP and Shampoo have the structure that they are made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from egop.runs import Panel, Picture, Series
from egop_lab.data.matrices import random_orthonormal, with_decay
from egop_lab.experiments.base import Judged, beside, decades, verdict
from egop_lab.experiments.curves import first_below, median
from egop_lab.experiments.tuned import Case, Method, Score, TunedExperiment
from egop_lab.methods import describe
from egop_lab.training import batched
from egop_lab.training.context import Preset
from egop_lab.training.instances import RANDOM, Trials
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP

# Nine digits: no figure shows a smaller difference. Runs that end this close have all found the optimum.
AT_OPTIMUM = 1e-9
THRESHOLDS = (1e-2, 1e-4, 1e-6)  # relative distance to the optimal loss, for counting steps
SPEED = 1e-6  # the threshold of the second choice of learning rates
_CLOSER = 1e-3  # smaller differences of errors no figure shows
_ROUNDING = 1e-16

# What the singular values of the spectral estimate are taken to: the start that the name means, and the printed one.
SPECTRAL, PRINTED = "Σ^½", "Σ^-½"
_POWERS = {SPECTRAL: 0.5, PRINTED: -0.5}

_RIVALS = ("Adam", "Adagrad", "SOAP", "SOAP (0.95)", "Shampoo")
_PAPERS = ("Adam", "Adagrad", "SOAP", "Shampoo")


class Factorization(Trials):
    """½‖A L Rᵀ − Y‖², Y = A X* + noise: each trial has its own A, X* and noise, and starts at the spectral estimate.

    A is invertible, so the least loss is known: what the best rank-r approximation of Y leaves over.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        n: int,
        rank: int,
        condition: float,
        decay: float,
        noise: float,
        samples: int,
        start: str = SPECTRAL,
    ) -> None:
        self.seeds, self.samples, self.rank, self.begun = list(seeds), samples, rank, start
        self.sizes = {"n": n, "rank": rank, "condition": condition, "decay": decay, "noise": noise, "samples": samples}
        instances = [self._instance(torch.Generator().manual_seed(seed)) for seed in seeds]
        self.data, self.truth, self.targets = (torch.stack(column) for column in zip(*instances, strict=True))
        values = torch.linalg.svdvals(self.targets)
        self.least = 0.5 * values[:, rank:].square().sum(-1)

    def alone(self, seed: int) -> Self:
        return type(self)([seed], start=self.begun, **self.sizes)  # type: ignore[arg-type]

    def start(self) -> batched.Point:
        U, values, Vh = torch.linalg.svd(torch.linalg.pinv(self.data) @ self.targets)
        scale = values[:, None, : self.rank] ** _POWERS[self.begun]
        return {"L": U[:, :, : self.rank] * scale, "R": Vh.mT[:, :, : self.rank] * scale}

    def losses(self, point: batched.Point, batch: Any) -> Tensor:
        product = self.data[:, None] @ (point["L"] @ point["R"].mT)
        return 0.5 * (product - self.targets[:, None]).square().sum((-2, -1))

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        excess = self.losses(point, 0) / self.least[:, None] - 1
        error = (point["L"] @ point["R"].mT - self.truth[:, None]).square().sum((-2, -1))
        return {"excess": excess.clamp(min=_ROUNDING), "error": error}

    def _instance(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        n, rank = int(self.sizes["n"]), self.rank
        data = with_decay(n, n, self.sizes["decay"], generator)
        left, right = (random_orthonormal(n, rank, generator) for _ in ("left", "right"))
        truth = left * torch.linspace(1, 1 / self.sizes["condition"], rank, dtype=torch.float64) @ right.mT
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        return data, truth, data @ truth + self.sizes["noise"] * noise


class MatrixFactorizationExperiment(TunedExperiment):
    """EGOP with a block for L and one for R, against Adam, Adagrad, SOAP and Shampoo.

    Learning rates are chosen twice: by the final loss, as in the paper, and by the steps to a threshold, because by
    the final loss many rates are equally good.
    """

    id: ClassVar[str] = "matrix-factorization"
    title: ClassVar[str] = "Low-rank matrix factorisation"
    figures: ClassVar[str] = "Figure on low-rank matrix factorisation (loss and reconstruction error)"
    labels: ClassVar[tuple[str, ...]] = ("fig:LRMF",)
    paper: ClassVar[Mapping[str, str]] = {
        "trials": "5",
        "tuning trials": "5",
        "steps": "1000",
        "sizes": "the same, but noise 0.01 (appendix) or √0.001 (text), samples not named",
        "starts": f"{PRINTED} printed, called the standard spectral start, which is {SPECTRAL}",
    }
    cosine: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        optimizers = [*_RIVALS, *(["GaLore"] if full else [])]
        return {
            "trials": 5 if full else 3,
            "tuning trials": 5 if full else 2,
            "steps": 1000,
            "record every": 5,
            "record tuning every": 20,
            # The paper names neither rho nor M here: those of its errors-in-variables experiment.
            "sizes": {"n": 20, "rank": 5, "condition": 2.0, "decay": 0.5, "noise": 0.01, "samples": 1000},
            "starts": [SPECTRAL, PRINTED] if full else [SPECTRAL],
            "exponents": {
                name: ([-2, 1] if name == "Shampoo" else [-4, -1]) if not full else [-5, 2] for name in optimizers
            },
            "baselines": {name: call for name in optimizers if (call := describe(name))},
        }

    def cases(self, preset: Preset) -> list[Case]:
        settings = self.settings(preset)
        return [settings["sizes"] | ({} if start == SPECTRAL else {"start": start}) for start in settings["starts"]]

    def pairs(self, preset: Preset) -> list[tuple[Case, Method]]:
        """From the printed start the paper's methods only."""
        return [
            (case, method)
            for case, method in super().pairs(preset)
            if "start" not in case or (method.optimizer in _PAPERS and method.coordinates != RANDOM)
        ]

    def trials(self, case: Case, seeds: Sequence[int]) -> Factorization:
        names = ("n", "rank", "condition", "decay", "noise", "samples")
        return Factorization(seeds, **{name: case[name] for name in names}, start=case.get("start", SPECTRAL))

    def score(self, result: Mapping[str, Any]) -> float:
        """The final loss, relative to the trial's optimum."""
        return float(result["excess"][-1])

    def scores(self) -> list[Score]:
        return [self.score, _speed]

    def fastest(self, store: Store, preset: Preset, method: Method, case: Case | None = None) -> float:
        """The rate with the fewest steps to the threshold, median over the tuning trials."""
        return self.chosen(store, preset, case or self.cases(preset)[0], method, _speed)

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        """By the printed start where it was run, beside it by the spectral one."""
        return [
            self._by_start(preset, lambda case, one=one, optimizer=optimizer: one(store, preset, case, optimizer))  # type: ignore[misc]
            for optimizer in ("Adam", "Adagrad")
            for one in (self._lower, self._closer, self._fastest_of_all, self._faster_than_original)
        ]

    def _by_start(self, preset: Preset, judge: Callable[[Case], Judged]) -> Judged:
        *others, papers = map(judge, self.cases(preset))
        differing = [other for other in others if other.found != papers.found]
        return replace(papers, beside=tuple(beside(f"from {SPECTRAL}", other) for other in differing))

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        case, methods = self.cases(preset)[0], self.methods(preset)
        fast = {method: self.fastest(store, preset, method) for method in methods}

        def panel(title: str, ylabel: str, series_of: Callable[[Method], Series], xscale: Any = "linear") -> Panel:
            xlabel = "step" if xscale == "linear" else "learning rate"
            return Panel(title, xlabel, ylabel, [series_of(method) for method in methods], xscale=xscale)

        above = "loss above optimum, relative"
        panels = [
            panel("Loss", above, lambda method: self.curve(store, preset, case, method, "excess")),
            panel("Reconstruction", "‖LRᵀ − X*‖²", lambda method: self.curve(store, preset, case, method, "error")),
            panel("Learning rates", f"final {above}", lambda method: self.sweep(store, preset, case, method), "log"),
            panel("Loss, fastest rates", above, lambda m: self.curve(store, preset, case, m, "excess", fast[m])),
            panel("Reconstruction, fastest rates", "‖LRᵀ − X*‖²",
                  lambda m: self.curve(store, preset, case, m, "error", fast[m])),
            self._bars(store, preset),
        ]  # fmt: skip
        return [
            Picture(
                self.id,
                f"Loss above the optimum (known in closed form) and reconstruction error by step, from {SPECTRAL}. "
                "Above: each method at "
                "the learning rate with the lowest final loss, as in the paper; below: at the one that comes fastest "
                f"to {SPEED:g} above the optimum. Medians and quartiles over fresh trials.",
                panels,
            )
        ]

    def steps_to(
        self, store: Store, preset: Preset, method: Method, threshold: float, case: Case | None = None
    ) -> float:
        """Median steps to a relative distance from the optimum, at the fastest rate; ``inf`` when not reached."""
        every, case = self.settings(preset)["record every"], case or self.cases(preset)[0]
        runs = self.reported(store, preset, case, method, self.fastest(store, preset, method, case))
        return median([crossing(run.result["excess"], threshold) * every for run in runs])

    def _finals(self, store: Store, preset: Preset, case: Case, optimizer: str, name: str) -> tuple[float, str, float]:
        """The last number of EGOP's runs, and the best rival's."""

        def last(method: Method) -> float:
            return median([run.result[name][-1] for run in self.reported(store, preset, case, method)])

        rivals = {rival: last(Method(rival)) for rival in _RIVALS if (case, Method(rival)) in self.pairs(preset)}
        best = min(rivals, key=lambda rival: rivals[rival])
        return last(Method(optimizer, EGOP)), best, rivals[best]

    def _lower(self, store: Store, preset: Preset, case: Case, optimizer: str) -> Judged:
        turned, best, rival = self._finals(store, preset, case, optimizer, "excess")
        finding = (
            f"Above the optimum, relative, from {case.get('start', SPECTRAL)}: EGOP {optimizer} {turned:.2g}; {best}, "
            f"the best rival, {rival:.2g}."
        )
        if max(turned, rival) <= AT_OPTIMUM:
            finding += " Both have found the optimum."
        return Judged(
            f"{self.id}/{optimizer}-lower",
            f"EGOP {optimizer} ends at a lower loss than Adam, Adagrad, SOAP and Shampoo.",
            verdict(rival > AT_OPTIMUM and turned < rival),
            finding,
            threshold=f"below {AT_OPTIMUM:g} all are at the optimum",
            margin=decades(turned, rival, AT_OPTIMUM),
        )

    def _closer(self, store: Store, preset: Preset, case: Case, optimizer: str) -> Judged:
        turned, best, rival = self._finals(store, preset, case, optimizer, "error")
        return Judged(
            f"{self.id}/{optimizer}-closer",
            f"EGOP {optimizer} ends at a lower reconstruction error than Adam, Adagrad, SOAP and Shampoo.",
            verdict(turned < (1 - _CLOSER) * rival),
            f"‖LRᵀ − X*‖² from {case.get('start', SPECTRAL)}: EGOP {optimizer} {turned:.5g}; {best}, the best rival, "
            f"{rival:.5g}.",
            threshold=f"by more than {_CLOSER:.1%}",
            margin=decades(turned, rival),
        )

    def _fastest_of_all(self, store: Store, preset: Preset, case: Case, optimizer: str) -> Judged:
        return self._faster(store, preset, case, optimizer, _RIVALS, "Adam, Adagrad, SOAP and Shampoo")

    def _faster_than_original(self, store: Store, preset: Preset, case: Case, optimizer: str) -> Judged:
        return self._faster(store, preset, case, optimizer, [optimizer], optimizer)

    def _faster(
        self, store: Store, preset: Preset, case: Case, optimizer: str, rivals: Sequence[str], against: str
    ) -> Judged:
        mine = [self.steps_to(store, preset, Method(optimizer, EGOP), threshold, case) for threshold in THRESHOLDS]
        others = {
            rival: [self.steps_to(store, preset, Method(rival), threshold, case) for threshold in THRESHOLDS]
            for rival in rivals
            if (case, Method(rival)) in self.pairs(preset)
        }
        words = f"EGOP {optimizer} comes near the optimum in fewer steps than {against}."
        best = [min(steps[place] for steps in others.values()) for place in range(len(THRESHOLDS))]
        names = [next(rival for rival in others if others[rival][place] == best[place]) for place in range(len(best))]
        numbers = "; ".join(
            f"to {threshold:g}: EGOP {optimizer} {steps:.0f}, {name} {rival:.0f}"
            for threshold, steps, name, rival in zip(THRESHOLDS, mine, names, best, strict=True)
        )
        faster = all(steps < rival for steps, rival in zip(mine, best, strict=True))
        name = f"{optimizer}-faster" if len(rivals) > 1 else f"{optimizer}-faster-than-original"
        return Judged(
            f"{self.id}/{name}", words, verdict(faster), f"{_from(case)} at the fastest rate: {numbers}.", "reading"
        )

    def _bars(self, store: Store, preset: Preset) -> Panel:
        names = [f"{threshold:g}" for threshold in THRESHOLDS]
        bars = []
        for method in self.methods(preset):
            steps = [self.steps_to(store, preset, method, threshold) for threshold in THRESHOLDS]
            egop = method.coordinates == EGOP
            heights = [min(count, self.settings(preset)["steps"]) for count in steps]
            bars.append(
                Series(str(method), names, heights, method=method.optimizer if egop else str(method), egop=egop)
            )
        return Panel("Steps needed", "relative distance to the optimum", "steps", bars, yscale="linear", kind="bar")


def _from(case: Case) -> str:
    return f"Steps from {case.get('start', SPECTRAL)}"


def crossing(curve: Sequence[float], threshold: float) -> float:
    """Where a curve first reaches the threshold, in records: straight lines between them, on a logarithmic axis."""
    step = first_below(curve, threshold)
    if not step:
        return math.inf if step is None else 0.0
    before, after = curve[step - 1], max(curve[step], _ROUNDING)
    if not math.isfinite(before):
        return float(step)
    return step - 1 + math.log(before / threshold) / math.log(before / after)


def _speed(result: Mapping[str, Any]) -> float:
    """Where in the curve the threshold is reached; behind its end where it is not, the closer the better."""
    step = crossing(result["excess"], SPEED)
    return step if math.isfinite(step) else len(result["excess"]) + float(result["excess"][-1])
