"""Low-rank matrix factorisation, which has the structure that SOAP and Shampoo are made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from egop_lab.experiments.base import Alternative, Judgement, count_decades, to_verdict
from egop_lab.experiments.curves import first_below, median, quartiles
from egop_lab.experiments.tuned_experiment import Case, Method, Score, TunedExperiment
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.batched import EGOP, RANDOM
from egop_lab.training.factorization import PRINTED, ROUNDING, SPECTRAL, Factorization

# Nine digits: no figure shows a smaller difference. Runs that end this close have all found the optimum.
AT_OPTIMUM = 1e-9
THRESHOLDS = (1e-2, 1e-4, 1e-6)  # relative distance to the optimal loss, for counting steps
SPEED = 1e-6  # threshold for the second choice of learning rates
_CLOSER = 1e-3  # smaller differences of errors no figure shows
_SUPERIMPOSED = 1.1  # no eye sees a smaller ratio on the figure's axis
_MOSTLY = 0.9  # of the steps


RIVALS = ("Adam", "Adagrad", "SOAP", "SOAP (0.95)", "Shampoo")
PAPERS = ("Adam", "Adagrad", "SOAP", "Shampoo")
CONSTANT = "constant"  # schedule of the learning rate, instead of annealing


class MatrixFactorizationExperiment(TunedExperiment):
    """EGOP with a block for L and one for R, against Adam, Adagrad, SOAP and Shampoo.

    Learning rates are chosen twice: by the final loss, as in the paper, and by the steps to a threshold, because by
    the final loss many rates are equally good.
    """

    id: ClassVar[str] = "matrix-factorization"
    cosine: ClassVar[bool] = True

    def cases(self) -> list[Case]:
        return [case for schedule in self.settings["schedules"] for case in self.starts(schedule)]

    def starts(self, schedule: str = "cosine") -> list[Case]:
        """Return the cases of a schedule; defaults are not part of a configuration."""
        settings = self.settings
        rest = {} if schedule == "cosine" else {"schedule": schedule}
        return [
            settings["sizes"] | ({} if start == SPECTRAL else {"start": start}) | rest for start in settings["starts"]
        ]

    def pairs(self) -> list[tuple[Case, Method]]:
        """Use only the paper's methods from the printed start and without a schedule."""
        return [
            (case, method)
            for case, method in super().pairs()
            if not {"start", "schedule"} & set(case) or (method.optimizer in PAPERS and method.coordinates != RANDOM)
        ]

    def anneals(self, case: Case) -> bool:
        return case.get("schedule") != CONSTANT

    def trials(self, case: Case, seeds: Sequence[int]) -> Factorization:
        names = ("n", "rank", "condition", "decay", "noise", "samples")
        return Factorization(seeds, **{name: case[name] for name in names}, start=case.get("start", SPECTRAL))

    def score(self, result: Mapping[str, Any]) -> float:
        return float(result["excess"][-1])

    def scores(self, case: Case) -> list[Score]:
        """Compare speed with a schedule only."""
        return [self.score, speed] if self.anneals(case) else [self.score]

    def fastest(self, method: Method, case: Case | None = None) -> float:
        """Return the rate with the fewest steps to the threshold, median over the tuning trials."""
        return self.choose_rate(case or self.cases()[0], method, speed)

    def constant(self) -> list[Case]:
        return self.starts(CONSTANT) if CONSTANT in self.settings["schedules"] else []

    def pictures(self) -> list[Picture]:
        case, methods = self.cases()[0], self.methods()
        fast = {method: self.fastest(method) for method in methods}

        def panel(title: str, ylabel: str, series_of: Callable[[Method], Series], xscale: Any = "linear") -> Panel:
            xlabel = "step" if xscale == "linear" else "learning rate"
            return Panel(title, xlabel, ylabel, [series_of(method) for method in methods], xscale=xscale)

        above = "loss above optimum, relative"
        panels = [
            panel("Loss", above, lambda method: self.curve(case, method, "excess")),
            panel("Reconstruction", "‖LRᵀ − X*‖²", lambda method: self.curve(case, method, "error")),
            panel("Learning rates", f"final {above}", lambda method: self.curve_by_rate(case, method), "log"),
            panel("Loss, fastest rates", above, lambda m: self.curve(case, m, "excess", fast[m])),
            panel("Reconstruction, fastest rates", "‖LRᵀ − X*‖²",
                  lambda m: self.curve(case, m, "error", fast[m])),
            self._bars(),
        ]  # fmt: skip
        return [
            Picture(
                self.id,
                f"Loss above the optimum (known in closed form) and reconstruction error by step, from {SPECTRAL}. "
                "Above: each method at "
                "the learning rate with the lowest final loss, as in the paper; below: at the one that comes fastest "
                f"to {SPEED:g} above the optimum. Medians and quartiles over fresh trials.",
                panels,
            ),
            *self._printed(),
        ]

    def _printed(self) -> list[Picture]:
        """Draw the same from the printed start, with and without a schedule; nothing if it was not run."""
        there = [*self.starts(), *self.constant()]
        cases = [case for case in there if case.get("start") == PRINTED]
        if not cases:
            return []
        names = {"excess": "loss above optimum, relative", "error": "‖LRᵀ − X*‖²"}

        def panel(case: Case, name: str) -> Panel:
            methods = [method for other, method in self.pairs() if other == case]
            series = [self.curve(case, method, name) for method in methods]
            return Panel("Annealed" if self.anneals(case) else "Constant", "step", names[name], series)

        return [
            Picture(
                f"{self.id}-printed",
                f"The same from {PRINTED}, as printed in the paper, with rates that are annealed and with constant "
                "ones: each method at the rate with the lowest final loss. Medians and quartiles over fresh trials.",
                [panel(case, name) for case in cases for name in names],
            )
        ]

    def steps_to(self, method: Method, threshold: float, case: Case | None = None) -> float:
        """Return the median steps to a relative distance from the optimum, at the fastest rate; maybe infinite."""
        every, case = self.settings["record every"], case or self.cases()[0]
        runs = self.reported_runs(case, method, self.fastest(method, case))
        return median([crossing(run.result["excess"], threshold) * every for run in runs])

    def _bars(self) -> Panel:
        names = [f"{threshold:g}" for threshold in THRESHOLDS]
        bars = []
        for method in self.methods():
            steps = [self.steps_to(method, threshold) for threshold in THRESHOLDS]
            egop = method.coordinates == EGOP
            heights = [min(count, self.settings["steps"]) for count in steps]
            bars.append(
                Series(str(method), names, heights, method=method.optimizer if egop else str(method), egop=egop)
            )
        return Panel("Steps needed", "relative distance to the optimum", "steps", bars, yscale="linear", kind="bar")

    def judge(self) -> list[Judgement]:
        """Judge by the printed start if it was run, with the spectral one as an alternative."""
        starts = self.starts()
        found = [
            self._judge_by_start(starts, partial(one, optimizer))
            for optimizer in ("Adam", "Adagrad")
            for one in (self._judge_lower, self._judge_closer, self._judge_fastest, self._judge_faster_than_original)
        ]
        found.append(self._judge_by_start(starts, self._judge_superimposed))
        if constant := self.constant():
            found += [
                self._judge_by_start(constant, partial(self._judge_persistence, optimizer))
                for optimizer in ("Adam", "Adagrad")
            ]
        return found

    def _judge_by_start(self, cases: Sequence[Case], judge: Callable[[Case], Judgement]) -> Judgement:
        *others, papers = map(judge, cases)
        for other in others:
            papers = papers.add_alternative(f"from {SPECTRAL}", other) if other.finding != papers.finding else papers
        return papers

    def _finals(self, case: Case, optimizer: str, name: str) -> tuple[float, str, float]:
        """Return the final number of EGOP's runs, and the best rival's."""

        def last(method: Method) -> float:
            return median([run.result[name][-1] for run in self.reported_runs(case, method)])

        rivals = {rival: last(Method(rival)) for rival in RIVALS if (case, Method(rival)) in self.pairs()}
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
            f"{self.id}/{optimizer}-lower",
            f"EGOP {optimizer} ends at a lower loss than Adam, Adagrad, SOAP and Shampoo.",
            to_verdict(rival > AT_OPTIMUM and turned < rival),
            finding,
            threshold=f"below {AT_OPTIMUM:g} all are at the optimum",
            margin=count_decades(turned, rival, AT_OPTIMUM),
        )

    def _judge_closer(self, optimizer: str, case: Case) -> Judgement:
        turned, best, rival = self._finals(case, optimizer, "error")
        return Judgement(
            f"{self.id}/{optimizer}-closer",
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
        mine = [self.steps_to(Method(optimizer, EGOP), threshold, case) for threshold in THRESHOLDS]
        others = {
            rival: [self.steps_to(Method(rival), threshold, case) for threshold in THRESHOLDS]
            for rival in rivals
            if (case, Method(rival)) in self.pairs()
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
            f"{self.id}/{name}",
            words,
            to_verdict(faster),
            f"{_describe_start(case)} at the fastest rate: {numbers}.",
            "reading",
        )

    def _judge_persistence(self, optimizer: str, case: Case) -> Judgement:
        """Judge both trends at once, by the rules of the runs with a schedule."""
        lower, closer = (one(optimizer, case) for one in (self._judge_lower, self._judge_closer))
        return Judgement(
            f"{self.id}/{optimizer}-without-schedule",
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
        every = self.settings["record every"]

        def steps(method: Method) -> float:
            runs = self.reported_runs(case, method)
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
        every = self.settings["record every"]

        def spread(methods: Sequence[Method], least: float) -> list[float]:
            """Return the largest median over the smallest at every recorded step."""
            curves = [[run.result["excess"] for run in self.reported_runs(case, m)] for m in methods]
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
            f"{self.id}/superimposed",
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
