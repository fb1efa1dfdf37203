"""Low-rank matrix factorisation: where SOAP and Shampoo have the structure that they are made for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from egop.runs import Panel, Picture, Series
from egop_lab.experiments.base import Beside, Judged, beside, decades, verdict
from egop_lab.experiments.curves import first_below, median, quartiles
from egop_lab.experiments.tuned import Case, Method, Score, TunedExperiment
from egop_lab.methods import describe
from egop_lab.training.context import Preset
from egop_lab.training.factorization import PRINTED, ROUNDING, SPECTRAL, Factorization
from egop_lab.training.instances import RANDOM
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP

# Nine digits: no figure shows a smaller difference. Runs that end this close have all found the optimum.
AT_OPTIMUM = 1e-9
THRESHOLDS = (1e-2, 1e-4, 1e-6)  # relative distance to the optimal loss, for counting steps
SPEED = 1e-6  # the threshold of the second choice of learning rates
_CLOSER = 1e-3  # smaller differences of errors no figure shows
_SUPERIMPOSED = 1.1  # no eye sees a smaller ratio on the figure's axis
_MOSTLY = 0.9  # of the steps

CONSTANT = "constant"  # of the learning rate; else it is annealed

_RIVALS = ("Adam", "Adagrad", "SOAP", "SOAP (0.95)", "Shampoo")
_PAPERS = ("Adam", "Adagrad", "SOAP", "Shampoo")


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
        "schedules": "cosine; others not shown",
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
            "schedules": ["cosine", CONSTANT] if full else ["cosine"],
            "exponents": {
                name: ([-2, 1] if name == "Shampoo" else [-4, -1]) if not full else [-5, 2] for name in optimizers
            },
            "baselines": {name: call for name in optimizers if (call := describe(name))},
        }

    def cases(self, preset: Preset) -> list[Case]:
        return [case for schedule in self.settings(preset)["schedules"] for case in self.starts(preset, schedule)]

    def starts(self, preset: Preset, schedule: str = "cosine") -> list[Case]:
        """The cases that have a schedule; what is usual is not in a configuration."""
        settings = self.settings(preset)
        rest = {} if schedule == "cosine" else {"schedule": schedule}
        return [
            settings["sizes"] | ({} if start == SPECTRAL else {"start": start}) | rest for start in settings["starts"]
        ]

    def pairs(self, preset: Preset) -> list[tuple[Case, Method]]:
        """From the printed start, and without a schedule, the paper's methods only."""
        return [
            (case, method)
            for case, method in super().pairs(preset)
            if not {"start", "schedule"} & set(case) or (method.optimizer in _PAPERS and method.coordinates != RANDOM)
        ]

    def anneals(self, case: Case) -> bool:
        return case.get("schedule") != CONSTANT

    def trials(self, case: Case, seeds: Sequence[int]) -> Factorization:
        names = ("n", "rank", "condition", "decay", "noise", "samples")
        return Factorization(seeds, **{name: case[name] for name in names}, start=case.get("start", SPECTRAL))

    def score(self, result: Mapping[str, Any]) -> float:
        """The final loss, relative to the trial's optimum."""
        return float(result["excess"][-1])

    def scores(self, case: Case) -> list[Score]:
        """Speed is compared with a schedule only."""
        return [self.score, _speed] if self.anneals(case) else [self.score]

    def fastest(self, store: Store, preset: Preset, method: Method, case: Case | None = None) -> float:
        """The rate with the fewest steps to the threshold, median over the tuning trials."""
        return self.chosen(store, preset, case or self.cases(preset)[0], method, _speed)

    def judge(self, store: Store, preset: Preset) -> list[Judged]:
        """By the printed start where it was run, beside it by the spectral one."""
        found = [
            self._by_start(self.starts(preset), partial(one, store, preset, optimizer))
            for optimizer in ("Adam", "Adagrad")
            for one in (self._lower, self._closer, self._fastest_of_all, self._faster_than_original)
        ]
        found.append(self._by_start(self.starts(preset), partial(self._superimposed, store, preset)))
        if constant := self._constant(store, preset):
            found += [self._by_start(constant, partial(self._persists, store, preset, o)) for o in ("Adam", "Adagrad")]
        return found

    def remarks(self, store: Store, preset: Preset) -> list[str]:
        missing = CONSTANT in self.settings(preset)["schedules"] and not self._constant(store, preset)
        return ["Not run to their end: runs without a schedule."] if missing else []

    def _constant(self, store: Store, preset: Preset) -> list[Case]:
        """The cases without a schedule; none where they were not run to their end."""
        wanted = self.starts(preset, CONSTANT) if CONSTANT in self.settings(preset)["schedules"] else []
        try:
            for case, method in self.pairs(preset):
                if case in wanted:
                    self.reported(store, preset, case, method)
        except LookupError:
            return []
        return wanted

    def _by_start(self, cases: Sequence[Case], judge: Callable[[Case], Judged]) -> Judged:
        *others, papers = map(judge, cases)
        differing = [beside(f"from {SPECTRAL}", other) for other in others if other.found != papers.found]
        return replace(papers, beside=(*papers.beside, *differing))

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
            ),
            *self._printed(store, preset),
        ]

    def _printed(self, store: Store, preset: Preset) -> list[Picture]:
        """The same from the printed start, with a schedule and without; nothing where that was not run."""
        there = [*self.starts(preset), *self._constant(store, preset)]
        cases = [case for case in there if case.get("start") == PRINTED]
        if not cases:
            return []
        names = {"excess": "loss above optimum, relative", "error": "‖LRᵀ − X*‖²"}

        def panel(case: Case, name: str) -> Panel:
            methods = [method for other, method in self.pairs(preset) if other == case]
            series = [self.curve(store, preset, case, method, name) for method in methods]
            return Panel("Annealed" if self.anneals(case) else "Constant", "step", names[name], series)

        return [
            Picture(
                f"{self.id}-printed",
                f"The same from {PRINTED}, as printed in the paper, with rates that are annealed and with constant "
                "ones: each method at the rate with the lowest final loss. Medians and quartiles over fresh trials.",
                [panel(case, name) for case in cases for name in names],
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

    def _lower(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Judged:
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

    def _closer(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Judged:
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

    def _fastest_of_all(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Judged:
        return self._faster(store, preset, optimizer, case, _RIVALS, "Adam, Adagrad, SOAP and Shampoo")

    def _faster_than_original(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Judged:
        return self._faster(store, preset, optimizer, case, [optimizer], optimizer)

    def _faster(
        self, store: Store, preset: Preset, optimizer: str, case: Case, rivals: Sequence[str], against: str
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

    def _persists(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Judged:
        """Both trends at once, by the rules of the runs with a schedule."""
        lower, closer = (one(store, preset, optimizer, case) for one in (self._lower, self._closer))
        return Judged(
            f"{self.id}/{optimizer}-without-schedule",
            f"The trends persist without a schedule: EGOP {optimizer} ends at a lower loss and reconstruction error "
            "than Adam, Adagrad, SOAP and Shampoo.",
            verdict(lower.verdict == closer.verdict == "holds"),
            f"{lower.found} {closer.found}",
            threshold=f"{lower.threshold}; of the error, {closer.threshold}",
            beside=(self._sooner(store, preset, optimizer, case),),
            margin=lower.margin,
        )

    def _sooner(self, store: Store, preset: Preset, optimizer: str, case: Case) -> Beside:
        """By steps to the threshold, at the rates with the lowest final loss."""
        every = self.settings(preset)["record every"]

        def steps(method: Method) -> float:
            runs = self.reported(store, preset, case, method)
            return median([crossing(run.result["excess"], SPEED) * every for run in runs])

        needed = {name: steps(Method(name)) for name in _PAPERS}
        best, mine = min(needed, key=lambda name: needed[name]), steps(Method(optimizer, EGOP))
        return Beside(
            f"fewer steps to {SPEED:g} above the optimum, at the same rates",
            verdict(mine < needed[best]),
            f"EGOP {optimizer} {mine:.0f}; {best}, the best rival, {needed[best]:.0f}.",
        )

    def _superimposed(self, store: Store, preset: Preset, case: Case) -> Judged:
        """By the loss, as in the paper's figure; on a scale of what is left of it the traces come apart."""
        every = self.settings(preset)["record every"]

        def spread(methods: Sequence[Method], least: float) -> list[float]:
            """At every recorded step the largest median over the smallest."""
            curves = [[run.result["excess"] for run in self.reported(store, preset, case, m)] for m in methods]
            middle = [[value + least for value in quartiles(trials)[1]] for trials in curves]
            return [max(values) / min(values) for values in zip(*middle, strict=True)]

        rivals = [Method(name) for name in _PAPERS]
        egop = [Method(name, EGOP) for name in ("Adam", "Adagrad")]
        losses, with_egop, left = spread(rivals, 1.0), spread([*rivals, *egop], 1.0), spread(rivals, AT_OPTIMUM)
        together, all_together, apart = (
            sum(value <= _SUPERIMPOSED for value in values) / len(values) for values in (losses, with_egop, left)
        )
        place = losses.index(max(losses))
        start = case.get("start", SPECTRAL)
        return Judged(
            f"{self.id}/superimposed",
            "The traces of Adam, Adagrad, Shampoo and SOAP are superimposed.",
            verdict(together >= _MOSTLY),
            f"From {start}, median losses within {_SUPERIMPOSED - 1:.0%} of each other at {together:.0%} of the steps; "
            f"furthest apart at step {place * every}, by a factor of {losses[place]:.2g}. With EGOP Adam and Adagrad "
            f"among them: at {all_together:.0%}.",
            threshold=f"within {_SUPERIMPOSED - 1:.0%} at {_MOSTLY:.0%} of the steps",
            beside=(
                Beside(
                    f"what is left above the optimum, down to {AT_OPTIMUM:g}",
                    verdict(apart >= _MOSTLY),
                    f"Within {_SUPERIMPOSED - 1:.0%} at {apart:.0%} of the steps.",
                ),
            ),
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
    before, after = curve[step - 1], max(curve[step], ROUNDING)
    if not math.isfinite(before):
        return float(step)
    return step - 1 + math.log(before / threshold) / math.log(before / after)


def _speed(result: Mapping[str, Any]) -> float:
    """Where in the curve the threshold is reached; behind its end where it is not, the closer the better."""
    step = crossing(result["excess"], SPEED)
    return step if math.isfinite(step) else len(result["excess"]) + float(result["excess"][-1])
