"""The paper's claims about low-rank matrix factorisation, judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from egop_lab.experiments.base import Alternative, Judgement, count_decades, make_alternative, to_verdict
from egop_lab.experiments.curves import first_below, median, quartiles
from egop_lab.experiments.tuned_experiment import Case, Method
from egop_lab.training.context import Preset
from egop_lab.training.factorization import ROUNDING, SPECTRAL
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP

if TYPE_CHECKING:
    from egop_lab.experiments.matrix_factorization import MatrixFactorizationExperiment

# Nine digits: no figure shows a smaller difference. Runs that end this close have all found the optimum.
AT_OPTIMUM = 1e-9
THRESHOLDS = (1e-2, 1e-4, 1e-6)  # relative distance to the optimal loss, for counting steps
SPEED = 1e-6  # threshold for the second choice of learning rates
_CLOSER = 1e-3  # smaller differences of errors no figure shows
_SUPERIMPOSED = 1.1  # no eye sees a smaller ratio on the figure's axis
_MOSTLY = 0.9  # of the steps


RIVALS = ("Adam", "Adagrad", "SOAP", "SOAP (0.95)", "Shampoo")
PAPERS = ("Adam", "Adagrad", "SOAP", "Shampoo")


@dataclass(frozen=True)
class Claims:
    """The records of a preset."""

    experiment: MatrixFactorizationExperiment
    store: Store
    preset: Preset

    def judge_all(self) -> list[Judgement]:
        """Judge by the printed start if it was run, with the spectral one as an alternative."""
        starts = self.experiment.starts(self.preset)
        found = [
            self._judge_by_start(starts, partial(one, optimizer))
            for optimizer in ("Adam", "Adagrad")
            for one in (self._judge_lower, self._judge_closer, self._judge_fastest, self._judge_faster_than_original)
        ]
        found.append(self._judge_by_start(starts, self._judge_superimposed))
        if constant := self.experiment.constant(self.store, self.preset):
            found += [
                self._judge_by_start(constant, partial(self._judge_persistence, optimizer))
                for optimizer in ("Adam", "Adagrad")
            ]
        return found

    def _judge_by_start(self, cases: Sequence[Case], judge: Callable[[Case], Judgement]) -> Judgement:
        *others, papers = map(judge, cases)
        differing = [make_alternative(f"from {SPECTRAL}", other) for other in others if other.finding != papers.finding]
        return replace(papers, alternatives=(*papers.alternatives, *differing))

    def _finals(self, case: Case, optimizer: str, name: str) -> tuple[float, str, float]:
        """Return the final number of EGOP's runs, and the best rival's."""

        def last(method: Method) -> float:
            return median(
                [run.result[name][-1] for run in self.experiment.reported_runs(self.store, self.preset, case, method)]
            )

        rivals = {
            rival: last(Method(rival))
            for rival in RIVALS
            if (case, Method(rival)) in self.experiment.pairs(self.preset)
        }
        best = min(rivals, key=lambda rival: rivals[rival])
        return last(Method(optimizer, EGOP)), best, rivals[best]

    def _judge_lower(self, optimizer: str, case: Case) -> Judgement:
        turned, best, rival = self._finals(case, optimizer, "excess")
        finding = (
            f"Above the optimum, relative, from {case.get('start', SPECTRAL)}: EGOP {optimizer} {turned:.2g}; {best}, "
            f"the best rival, {rival:.2g}."
        )
        if max(turned, rival) <= AT_OPTIMUM:
            finding += " Both have found the optimum."
        return Judgement(
            f"{self.experiment.id}/{optimizer}-lower",
            f"EGOP {optimizer} ends at a lower loss than Adam, Adagrad, SOAP and Shampoo.",
            to_verdict(rival > AT_OPTIMUM and turned < rival),
            finding,
            threshold=f"below {AT_OPTIMUM:g} all are at the optimum",
            margin=count_decades(turned, rival, AT_OPTIMUM),
        )

    def _judge_closer(self, optimizer: str, case: Case) -> Judgement:
        turned, best, rival = self._finals(case, optimizer, "error")
        return Judgement(
            f"{self.experiment.id}/{optimizer}-closer",
            f"EGOP {optimizer} ends at a lower reconstruction error than Adam, Adagrad, SOAP and Shampoo.",
            to_verdict(turned < (1 - _CLOSER) * rival),
            f"‖LRᵀ − X*‖² from {case.get('start', SPECTRAL)}: EGOP {optimizer} {turned:.5g}; {best}, the best rival, "
            f"{rival:.5g}.",
            threshold=f"by more than {_CLOSER:.1%}",
            margin=count_decades(turned, rival),
        )

    def _judge_fastest(self, optimizer: str, case: Case) -> Judgement:
        return self._judge_faster(optimizer, case, RIVALS, "Adam, Adagrad, SOAP and Shampoo")

    def _judge_faster_than_original(self, optimizer: str, case: Case) -> Judgement:
        return self._judge_faster(optimizer, case, [optimizer], optimizer)

    def _judge_faster(self, optimizer: str, case: Case, rivals: Sequence[str], against: str) -> Judgement:
        mine = [
            self.experiment.steps_to(self.store, self.preset, Method(optimizer, EGOP), threshold, case)
            for threshold in THRESHOLDS
        ]
        others = {
            rival: [
                self.experiment.steps_to(self.store, self.preset, Method(rival), threshold, case)
                for threshold in THRESHOLDS
            ]
            for rival in rivals
            if (case, Method(rival)) in self.experiment.pairs(self.preset)
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
        return Judgement(
            f"{self.experiment.id}/{name}",
            words,
            to_verdict(faster),
            f"{_describe_start(case)} at the fastest rate: {numbers}.",
            "reading",
        )

    def _judge_persistence(self, optimizer: str, case: Case) -> Judgement:
        """Judge both trends at once, by the rules of the runs with a schedule."""
        lower, closer = (one(optimizer, case) for one in (self._judge_lower, self._judge_closer))
        return Judgement(
            f"{self.experiment.id}/{optimizer}-without-schedule",
            f"The trends persist without a schedule: EGOP {optimizer} ends at a lower loss and reconstruction error "
            "than Adam, Adagrad, SOAP and Shampoo.",
            to_verdict(lower.verdict == closer.verdict == "holds"),
            f"{lower.finding} {closer.finding}",
            threshold=f"{lower.threshold}; of the error, {closer.threshold}",
            alternatives=(self._compare_steps(optimizer, case),),
            margin=lower.margin,
        )

    def _compare_steps(self, optimizer: str, case: Case) -> Alternative:
        """Compare the steps to the threshold, at the rates with the lowest final loss."""
        every = self.experiment.settings(self.preset)["record every"]

        def steps(method: Method) -> float:
            runs = self.experiment.reported_runs(self.store, self.preset, case, method)
            return median([crossing(run.result["excess"], SPEED) * every for run in runs])

        needed = {name: steps(Method(name)) for name in PAPERS}
        best, mine = min(needed, key=lambda name: needed[name]), steps(Method(optimizer, EGOP))
        return Alternative(
            f"fewer steps to {SPEED:g} above the optimum, at the same rates",
            to_verdict(mine < needed[best]),
            f"EGOP {optimizer} {mine:.0f}; {best}, the best rival, {needed[best]:.0f}.",
        )

    def _judge_superimposed(self, case: Case) -> Judgement:
        """Compare losses, as in the paper's figure; distances to the optimum would come apart."""
        every = self.experiment.settings(self.preset)["record every"]

        def spread(methods: Sequence[Method], least: float) -> list[float]:
            """Return the largest median over the smallest at every recorded step."""
            curves = [
                [run.result["excess"] for run in self.experiment.reported_runs(self.store, self.preset, case, m)]
                for m in methods
            ]
            middle = [[value + least for value in quartiles(trials)[1]] for trials in curves]
            return [max(values) / min(values) for values in zip(*middle, strict=True)]

        rivals = [Method(name) for name in PAPERS]
        egop = [Method(name, EGOP) for name in ("Adam", "Adagrad")]
        losses, with_egop, left = spread(rivals, 1.0), spread([*rivals, *egop], 1.0), spread(rivals, AT_OPTIMUM)
        together, all_together, apart = (
            sum(value <= _SUPERIMPOSED for value in values) / len(values) for values in (losses, with_egop, left)
        )
        place = losses.index(max(losses))
        start = case.get("start", SPECTRAL)
        return Judgement(
            f"{self.experiment.id}/superimposed",
            "The traces of Adam, Adagrad, Shampoo and SOAP are superimposed.",
            to_verdict(together >= _MOSTLY),
            f"From {start}, median losses within {_SUPERIMPOSED - 1:.0%} of each other at {together:.0%} of the steps; "
            f"furthest apart at step {place * every}, by a factor of {losses[place]:.2g}. With EGOP Adam and Adagrad "
            f"among them: at {all_together:.0%}.",
            threshold=f"within {_SUPERIMPOSED - 1:.0%} at {_MOSTLY:.0%} of the steps",
            alternatives=(
                Alternative(
                    f"what is left above the optimum, down to {AT_OPTIMUM:g}",
                    to_verdict(apart >= _MOSTLY),
                    f"Within {_SUPERIMPOSED - 1:.0%} at {apart:.0%} of the steps.",
                ),
            ),
        )


def _describe_start(case: Case) -> str:
    return f"Steps from {case.get('start', SPECTRAL)}"


def crossing(curve: Sequence[float], threshold: float) -> float:
    """Return where a curve first reaches the threshold, in records, interpolated on a logarithmic axis."""
    step = first_below(curve, threshold)
    if not step:
        return math.inf if step is None else 0.0
    before, after = curve[step - 1], max(curve[step], ROUNDING)
    if not math.isfinite(before):
        return float(step)
    return step - 1 + math.log(before / threshold) / math.log(before / after)


def speed(result: Mapping[str, Any]) -> float:
    """Return where the curve reaches the threshold; beyond its end if it does not, the closer the better."""
    step = crossing(result["excess"], SPEED)
    return step if math.isfinite(step) else len(result["excess"]) + float(result["excess"][-1])
