"""Errors in variables: from a Hessian that is a Kronecker product to one that is far from it."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from egop_lab import theory
from egop_lab.data.matrices import matrix_with_decay
from egop_lab.experiments.base import Alternative, Judgement, count_decades, to_verdict
from egop_lab.experiments.curves import median, quartiles
from egop_lab.experiments.tuned_experiment import Case, Method, TunedExperiment
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training import batched
from egop_lab.training.batched import EGOP
from egop_lab.training.context import Context
from egop_lab.training.instances import Trials

EGOP_ADAM = Method("Adam", EGOP)
_SOAPS = (Method("SOAP"), Method("SOAP (0.95)"))
_SHAMPOO = Method("Shampoo")
_WHICH = {"SOAP": ", with the better of its two settings of betas,", "Shampoo": ""}

# Losses below this share of the first one are rounding: the floor of float64.
_FLOOR = 1e-28


class MaskedRegression(Trials):
    """½‖A(M∘W) − Y‖² with Y = A(M∘W*): each trial has its own A, M and W*; the start is zero."""

    def __init__(self, seeds: Sequence[int], *, nu: float, size: int, decay: float, samples: int) -> None:
        super().__init__(seeds, nu=nu, size=size, decay=decay, samples=samples)
        self.nu, self.size, self.decay = nu, size, decay
        instances = [self._instance(torch.Generator().manual_seed(seed)) for seed in seeds]
        self.data, self.mask, self.targets = (torch.stack(column)[:, None] for column in zip(*instances, strict=True))

    def start(self) -> batched.Point:
        return {"W": torch.zeros(len(self.seeds), self.size, self.size, dtype=torch.float64)}

    def losses(self, point: batched.Point, batch: Any) -> Tensor:
        return 0.5 * (self.data @ (self.mask * point["W"]) - self.targets).square().sum((-2, -1))

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        return {"loss": self.losses(point, 0)}

    def hessian(self, trial: int) -> Tensor:
        """Return diag(m) (AᵀA ⊗ I) diag(m), in torch's order of the entries of W."""
        data, mask = self.data[trial, 0], self.mask[trial, 0].flatten()
        return mask[:, None] * torch.kron(data.mT @ data, torch.eye(self.size, dtype=data.dtype)) * mask

    def _instance(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        data = matrix_with_decay(self.size, self.size, self.decay, generator)
        noise, truth = (
            torch.randn(self.size, self.size, generator=generator, dtype=torch.float64) for _ in ("mask", "truth")
        )
        mask = 1 + self.nu * noise
        return data, mask, data @ (mask * truth)


class ErrorsInVariablesExperiment(TunedExperiment):
    """EGOP against SOAP and Shampoo, which refresh every step, as the Kronecker structure is lost."""

    id: ClassVar[str] = "errors-in-variables"
    cosine: ClassVar[bool] = True

    def cases(self) -> list[Case]:
        settings = self.settings
        common = {name: settings[name] for name in ("size", "decay", "samples")}
        return [{"nu": nu, **common} for nu in settings["nu"]]

    def trials(self, case: Case, seeds: Sequence[int]) -> MaskedRegression:
        return MaskedRegression(seeds, **{name: case[name] for name in ("nu", "size", "decay", "samples")})

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the final loss, no smaller than the rounding floor."""
        return max(float(result["loss"][-1]), _FLOOR * float(result["loss"][0]))

    def run(self, context: Context) -> None:
        super().run(context)
        self.do_missing(
            [each for case in self.cases() for each in self._residual_configs(case)], self._measure_residual
        )

    def _measure_residual(self, config: Mapping[str, Any]) -> dict[str, float]:
        hessian = self.trials(config, [config["seed"]]).hessian(0)
        return {"residual": theory.kronecker_residual(hessian, config["size"], config["size"])}

    def judge(self) -> list[Judgement]:
        cases = self.cases()
        enough = len(cases) > 1
        final = {
            (case["nu"], method): self._final(case, method)
            for case in cases
            for method in (EGOP_ADAM, *_SOAPS, _SHAMPOO)
        }
        residuals = {case["nu"]: self.residual(case) for case in cases}
        soap = {nu: min(final[nu, method] for method in _SOAPS) for nu in residuals}  # the better of its two settings
        shampoo = {nu: final[nu, _SHAMPOO] for nu in residuals}
        judged = []
        for name, losses in (("SOAP", soap), ("Shampoo", shampoo)):
            words = f"{name} converges worse as the Hessian's Kronecker residual grows."
            ordered = sorted(residuals, key=lambda nu: residuals[nu])
            numbers = "; ".join(f"residual {residuals[nu]:.2f}: {losses[nu]:.2g}" for nu in ordered)
            worse = losses[ordered[-1]] > 10 * losses[ordered[0]]
            decided = to_verdict(worse) if enough else "cannot be judged"
            always = to_verdict(all(losses[one] < losses[other] for one, other in pairwise(ordered)))
            step_by_step = Alternative("from each residual to the next larger one", always, "The same numbers.")
            judged.append(
                Judgement(
                    f"{self.id}/{name}-degrades",
                    words,
                    decided,
                    f"Final loss{_WHICH[name]} at {numbers}.",
                    threshold="ten times the loss at the largest residual",
                    alternatives=() if always == decided else (step_by_step,),
                    margin=count_decades(losses[ordered[0]], losses[ordered[-1]]),
                )
            )
        judged.append(self._judge_linear())
        for name, losses in (("SOAP", soap), ("Shampoo", shampoo)):
            words = f"With noise of ν ≥ 0.5, {name} does not beat EGOP Adam, although it renews its basis every step."
            far = [nu for nu in residuals if nu >= 0.5]
            numbers = "; ".join(f"ν = {nu:g}: {final[nu, EGOP_ADAM]:.2g}, {losses[nu]:.2g}" for nu in far)
            better = to_verdict(all(final[nu, EGOP_ADAM] <= losses[nu] for nu in far)) if far else "cannot be judged"
            found = f"Final losses of EGOP Adam and {name}{_WHICH[name].removesuffix(',')}: {numbers}."
            margins = [count_decades(final[nu, EGOP_ADAM], losses[nu]) for nu in far]
            least = min((margin for margin in margins if margin is not None), default=None)
            judged.append(Judgement(f"{self.id}/{name}-no-better", words, better, found, margin=least))
        return judged

    def pictures(self) -> list[Picture]:
        cases, methods = self.cases(), self.methods()
        by_step = [
            Panel(str(method), "step", "loss", [self._by_step(case, method) for case in cases]) for method in methods
        ]
        residuals = [self.residual(case) for case in cases]
        against = [self._judge_against(method, residuals) for method in methods]
        sweeps = [
            Panel(
                f"ν = {case['nu']:g}",
                "learning rate",
                "final loss, tuning trials",
                [self.curve_by_rate(case, method) for method in methods],
                xscale="log",
            )
            for case in cases
        ]
        return [
            Picture(
                self.id,
                "Loss by step for masks of growing noise ν, at each method's best learning rate for that ν, and the "
                "final loss over the Kronecker residual of the Hessian (median over trials). SOAP and Shampoo renew "
                "their bases every step, EGOP has one from before training.",
                [*by_step, Panel("Final loss", "Kronecker residual", "loss", against)],
            ),
            Picture(f"{self.id}-rates", "The search for learning rates; stars mark the chosen ones.", sweeps),
        ]

    def residual(self, case: Case) -> float:
        """Return the median Kronecker residual of the reported trials."""
        runs = [self.store.get(config) for config in self._residual_configs(case)]
        if None in runs:
            raise LookupError(f"{self.id}: residuals are missing")
        return median([run.result["residual"] for run in runs if run is not None])

    def _residual_configs(self, case: Case) -> list[dict[str, Any]]:
        seeds = range(self.settings["trials"])
        return [self.config(part="Kronecker residual", **case, seed=seed) for seed in seeds]

    def _final(self, case: Case, method: Method) -> float:
        return median([run.result["loss"][-1] for run in self.reported_runs(case, method)])

    def _by_step(self, case: Case, method: Method) -> Series:
        curve = self.curve(case, method, "loss")
        label = f"ν = {case['nu']:g}, residual {self.residual(case):.2f}"
        return Series(label, curve.x, curve.median, curve.low, curve.high, f"ν = {case['nu']:g}", curve.egop)

    def _judge_against(self, method: Method, residuals: Sequence[float]) -> Series:
        rows = [
            quartiles([[run.result["loss"][-1]] for run in self.reported_runs(case, method)]) for case in self.cases()
        ]
        low, middle, high = ([row[part][0] for row in rows] for part in range(3))
        egop = method.coordinates == EGOP
        return Series(str(method), residuals, middle, low, high, method.optimizer if egop else str(method), egop)

    def _judge_linear(self) -> Judgement:
        """Judge linear convergence: a straight, steep line on a logarithmic axis, whatever ν is."""
        words = "EGOP Adam converges linearly for every ν."
        shapes = {}
        for case in self.cases():
            curve = self.curve(case, EGOP_ADAM, "loss")
            shapes[case["nu"]] = straightness(curve.median, self.settings["record every"])
        numbers = "; ".join(
            f"ν = {nu:g}: {fall:.1f} decades in {steps} steps, R² of a straight line {square:.2f}"
            for nu, (fall, steps, square) in shapes.items()
        )
        straight = all(fall >= 10 and square >= 0.9 for fall, _, square in shapes.values())
        threshold = "ten decades, R² from 0.9"
        return Judgement(f"{self.id}/EGOP-Adam-linear", words, to_verdict(straight), f"{numbers}.", threshold=threshold)


def straightness(curve: Sequence[float], every: int) -> tuple[float, int, float]:
    """Return the decades that a curve falls until the rounding floor, the steps it takes, and R² of the log loss."""
    if not all(math.isfinite(value) for value in curve) or curve[0] <= 0:
        return 0.0, 0, 0.0
    floor = _FLOOR * curve[0]
    end = next((index for index, value in enumerate(curve) if value <= floor), len(curve) - 1)
    logs = np.log10(np.maximum(curve[: end + 1], floor))
    fall = float(logs[0] - logs[-1])
    spread = logs.std()
    square = float(np.corrcoef(np.arange(end + 1), logs)[0, 1] ** 2) if end > 0 and spread > 0 else 0.0
    return fall, end * every, square
