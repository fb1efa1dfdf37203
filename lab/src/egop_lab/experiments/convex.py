"""Convex objectives: log-sum-exp, logistic regression and least squares, to their global minima."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from egop_lab.data.matrices import matrix_with_decay
from egop_lab.experiments.base import Alternative, Judgement, count_decades, to_verdict
from egop_lab.experiments.curves import check_same_in_both, first_below, median
from egop_lab.experiments.tuned_experiment import Case, Method, TunedExperiment
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL, RANDOM
from egop_lab.training.instances import Trials
from egop_lab.training.records import Record

LOG_SUM_EXP, LOGISTIC, LEAST_SQUARES = "log-sum-exp", "logistic", "least squares"

STOP = 1e-8  # the gradient norm at which the paper stops

# Within this factor, in steps or in gradient norm, two methods count as equally good.
_EQUAL = 2.0
_SEEN = 1.05  # curves within this factor coincide in a figure


class ConvexTrials(Trials):
    """One kind of objective: each trial has its own data and solution, and a start drawn from N(0, I).

    What is recorded as loss is above the minimum, which is log n, 0, or found by Newton's method.
    """

    def __init__(self, seeds: Sequence[int], *, objective: str, n: int, d: int, decay: float, samples: int) -> None:
        super().__init__(seeds, objective=objective, n=n, d=d, decay=decay, samples=samples)
        self.kind = objective
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            data = matrix_with_decay(n, d, decay, generator)
            solution, start = (torch.randn(d, generator=generator, dtype=torch.float64) for _ in ("θ*", "θ₀"))
            targets = data @ solution
            if objective == LOGISTIC:  # as in the paper, whose labels have the opposite sign of its loss
                targets = torch.bernoulli(torch.sigmoid(-targets), generator=generator)
            rows.append((data, targets, start))
        self.data, self.targets, self.first = (torch.stack(column) for column in zip(*rows, strict=True))
        self.least = self._newton() if objective == LOGISTIC else torch.zeros(len(rows), dtype=torch.float64)

    def start(self) -> batched.Point:
        return {"theta": self.first}

    def losses(self, point: batched.Point, batch: Any) -> Tensor:
        values = torch.bmm(point["theta"], self.data.mT)
        if self.kind == LOGISTIC:
            return (F.softplus(values) - self.targets[:, None] * values).sum(-1)
        residuals = (values - self.targets[:, None]).square()
        return residuals.logsumexp(-1) if self.kind == LOG_SUM_EXP else 0.5 * residuals.sum(-1)

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        values = torch.bmm(point["theta"], self.data.mT)
        residuals = values - self.targets[:, None]
        if self.kind == LOGISTIC:
            above, outer = self.losses(point, 0) - self.least[:, None], values.sigmoid() - self.targets[:, None]
        elif self.kind == LEAST_SQUARES:
            above, outer = 0.5 * residuals.square().sum(-1), residuals
        else:  # log mean exp, accurate also for tiny residuals
            far = self.losses(point, 0) - math.log(residuals.shape[-1])
            above = torch.where(far < 1, residuals.square().expm1().mean(-1).log1p(), far)
            outer = 2 * residuals * residuals.square().softmax(-1)
        return {"loss": above, "gradient norm": torch.bmm(outer, self.data).norm(dim=-1)}

    def _newton(self) -> Tensor:
        """Compute the least loss of each trial; at these sizes undamped Newton steps suffice."""
        theta = torch.zeros_like(self.first)
        for _ in range(50):
            chances = torch.einsum("tnd,td->tn", self.data, theta).sigmoid()
            gradient = torch.einsum("tnd,tn->td", self.data, chances - self.targets)
            weights = chances * (1 - chances)
            hessian = torch.einsum("tnd,tn,tne->tde", self.data, weights, self.data)
            theta = theta - torch.linalg.solve(hessian, gradient)
        return self.losses({"theta": theta[:, None]}, 0)[:, 0]


def apply_stopping_rule(curve: Sequence[float]) -> list[float]:
    """Apply the paper's stopping rule to a curve of gradient norms: it stays at the tolerance once it is below."""
    end = first_below(curve, STOP)
    return list(curve) if end is None else [*curve[:end], *[STOP] * (len(curve) - end)]


class ConvexExperiment(TunedExperiment):
    """Adagrad and Adam in both coordinate systems, each tuned separately, and gradient descent, which has none."""

    id: ClassVar[str] = "convex"

    def cases(self) -> list[Case]:
        return list(self.settings["objectives"])

    def methods(self) -> list[Method]:
        more = [Method("Adam", RANDOM), Method("Adagrad", RANDOM)] if self.preset == "full" else []
        names = self.settings["exponents"]
        return [Method(name, kind) for name in names for kind in (ORIGINAL, EGOP)] + more

    def trials(self, case: Case, seeds: Sequence[int]) -> ConvexTrials:
        return ConvexTrials(seeds, **{name: case[name] for name in ("objective", "n", "d", "decay", "samples")})

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the final loss; runs that stopped are better than any other, and the earlier the better."""
        end = first_below(result["gradient norm"], STOP)
        return float(result["loss"][-1]) if end is None else end / len(result["loss"]) - 1

    def tuning_method(self, method: Method) -> Method:
        return Method(method.optimizer) if method.optimizer.startswith("SGD") else method

    def judge(self) -> list[Judgement]:
        judged = []
        for case in self.cases():
            judged.append(self._judge_better(case, "Adagrad"))
            same = case["objective"] == LOGISTIC
            judged.append((self._judge_unchanged if same else self._judge_better)(case, "Adam"))
            if same:
                judged.append(self._judge_competitive(case))
            for name in ("SGD", "SGD+momentum"):
                one, other = (self._stopped_runs(case, Method(name, kind)) for kind in (ORIGINAL, EGOP))
                who = f"{name} on {case['objective']}"
                judged.append(check_same_in_both(_id(case, f"{name}-same"), who, one, other, "gradient norm", 0.05))
        return judged

    def pictures(self) -> list[Picture]:
        cases, methods = self.cases(), self.methods()
        tuned = [method for method in methods if self.tuning_method(method) == method]
        norms = [
            Panel(
                case["objective"],
                "step",
                "gradient norm",
                [self._norms(case, method) for method in methods],
                horizontal={"stop": STOP},
            )
            for case in cases
        ]
        losses = [
            Panel(
                f"{case['objective']}, final loss",
                "learning rate",
                "loss above minimum, tuning trials",
                [self._final_losses(case, method) for method in tuned],
                xscale="log",
            )
            for case in cases
        ]
        return [
            Picture(
                self.id,
                "Gradient norm by step, each method at its own best learning rate; runs stop at the dotted line. "
                "Below: what the search for learning rates saw. Medians and quartiles over trials.",
                [*norms, *losses],
            )
        ]

    def measure(self, case: Case, method: Method) -> tuple[float, float]:
        """Return the median final gradient norm and the median number of steps under the stopping rule."""
        every, steps = (self.settings[name] for name in ("record every", "steps"))
        norms, ends = [], []
        for run in self.reported_runs(case, method):
            curve = apply_stopping_rule(run.result["gradient norm"])
            end = first_below(curve, STOP)
            norms.append(curve[-1])
            ends.append(float(steps if end is None else end * every))
        return median(norms), median(ends)

    def _judge_better(self, case: Case, optimizer: str) -> Judgement:
        original, turned = (self.measure(case, Method(optimizer, kind)) for kind in (ORIGINAL, EGOP))
        words = f"EGOP {optimizer} converges better than {optimizer} on {case['objective']}."
        edges = "".join(self.at_edge(case, Method(optimizer, kind)) for kind in (ORIGINAL, EGOP))
        finding = f"EGOP: {_format_result(turned)}; original: {_format_result(original)}{edges}."
        margin = count_decades(
            *(measure[0] if turned[0] < original[0] else measure[1] for measure in (turned, original))
        )
        return Judgement(_id(case, f"{optimizer}-better"), words, to_verdict(turned < original), finding, margin=margin)

    def _judge_unchanged(self, case: Case, optimizer: str) -> Judgement:
        original, turned = (self.measure(case, Method(optimizer, kind)) for kind in (ORIGINAL, EGOP))
        words = f"EGOP does not change {optimizer} on {case['objective']}."

        def within(factor: float) -> bool:
            return all(a <= factor * b and b <= factor * a for a, b in zip(original, turned, strict=True))

        rates = [self.choose_rate(case, Method(optimizer, kind)) for kind in (EGOP, ORIGINAL)]
        finding = (
            f"EGOP: {_format_result(turned)}, learning rate {rates[0]:g}; original: {_format_result(original)}, "
            f"learning rate {rates[1]:g}."
        )
        loosely = Alternative(f"within a factor of {_EQUAL:g}", to_verdict(within(_EQUAL)), "The same numbers.")
        return Judgement(
            _id(case, f"{optimizer}-unchanged"),
            words,
            to_verdict(within(_SEEN)),
            finding,
            paper="the traces coincide",
            threshold=f"coincide: within {_SEEN - 1:.0%}",
            alternatives=() if within(_SEEN) else (loosely,),
        )

    def _judge_competitive(self, case: Case) -> Judgement:
        turned = self.measure(case, Method("Adagrad", EGOP))
        rivals = {name: self.measure(case, Method(name)) for name in ("Adam", "SGD+momentum")}
        best = min(rivals, key=lambda name: rivals[name])
        words = f"On {case['objective']}, EGOP makes Adagrad competitive with the methods that have momentum."
        close = all(mine <= _EQUAL * rival for mine, rival in zip(turned, rivals[best], strict=True))
        finding = f"EGOP Adagrad: {_format_result(turned)}; {best}: {_format_result(rivals[best])}."
        threshold = f"competitive: within a factor of {_EQUAL:g}"
        return Judgement(_id(case, "Adagrad-competitive"), words, to_verdict(close), finding, threshold=threshold)

    def _stopped_runs(self, case: Case, method: Method) -> list[Record]:
        """Return the reported runs under the stopping rule: what comes later is rounding."""
        runs = self.reported_runs(case, method)
        return [
            replace(run, result={"gradient norm": apply_stopping_rule(run.result["gradient norm"])}) for run in runs
        ]

    def _norms(self, case: Case, method: Method) -> Series:
        curve = self.curve(case, method, "gradient norm")
        assert curve.low is not None
        assert curve.high is not None
        return replace(
            curve,
            median=apply_stopping_rule(curve.median),
            low=apply_stopping_rule(curve.low),
            high=apply_stopping_rule(curve.high),
        )

    def _final_losses(self, case: Case, method: Method) -> Series:
        shown = self.curve_by_rate(case, method, lambda result: max(result["loss"][-1], 1e-32))
        return replace(shown, label=str(method))


def _format_result(measured: tuple[float, float]) -> str:
    norm, steps = measured
    return f"converged after {steps:g} steps" if norm <= STOP else f"gradient norm {norm:.2g} after {steps:g} steps"


def _id(case: Case, name: str) -> str:
    return f"convex/{case['objective'].replace(' ', '-')}-{name}"
