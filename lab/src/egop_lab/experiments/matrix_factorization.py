"""Low-rank matrix factorisation, which has the structure that SOAP and Shampoo are made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from egop_lab.experiments.base import Judgement
from egop_lab.experiments.curves import median
from egop_lab.experiments.matrix_factorization_claims import PAPERS, RIVALS, SPEED, THRESHOLDS, Claims, crossing, speed
from egop_lab.experiments.tuned_experiment import Case, Method, Score, TunedExperiment
from egop_lab.methods import describe
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Preset
from egop_lab.training.factorization import PRINTED, SPECTRAL, Factorization
from egop_lab.training.instances import RANDOM
from egop_lab.training.records import Store
from egop_lab.training.sweeps import EGOP

CONSTANT = "constant"  # schedule of the learning rate, instead of annealing


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
        "precision": "not named",
    }
    cosine: ClassVar[bool] = True

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        optimizers = [*RIVALS, *(["GaLore"] if full else [])]
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
            "precision": "float64",
        }

    def cases(self, preset: Preset) -> list[Case]:
        return [case for schedule in self.settings(preset)["schedules"] for case in self.starts(preset, schedule)]

    def starts(self, preset: Preset, schedule: str = "cosine") -> list[Case]:
        """Return the cases of a schedule; defaults are not part of a configuration."""
        settings = self.settings(preset)
        rest = {} if schedule == "cosine" else {"schedule": schedule}
        return [
            settings["sizes"] | ({} if start == SPECTRAL else {"start": start}) | rest for start in settings["starts"]
        ]

    def pairs(self, preset: Preset) -> list[tuple[Case, Method]]:
        """Use only the paper's methods from the printed start and without a schedule."""
        return [
            (case, method)
            for case, method in super().pairs(preset)
            if not {"start", "schedule"} & set(case) or (method.optimizer in PAPERS and method.coordinates != RANDOM)
        ]

    def anneals(self, case: Case) -> bool:
        return case.get("schedule") != CONSTANT

    def trials(self, case: Case, seeds: Sequence[int]) -> Factorization:
        names = ("n", "rank", "condition", "decay", "noise", "samples")
        return Factorization(seeds, **{name: case[name] for name in names}, start=case.get("start", SPECTRAL))

    def score(self, result: Mapping[str, Any]) -> float:
        """Return the final loss, relative to the trial's optimum."""
        return float(result["excess"][-1])

    def scores(self, case: Case) -> list[Score]:
        """Compare speed with a schedule only."""
        return [self.score, speed] if self.anneals(case) else [self.score]

    def fastest(self, store: Store, preset: Preset, method: Method, case: Case | None = None) -> float:
        """Return the rate with the fewest steps to the threshold, median over the tuning trials."""
        return self.choose_rate(store, preset, case or self.cases(preset)[0], method, speed)

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        return Claims(self, store, preset).judge_all()

    def remarks(self, store: Store, preset: Preset) -> list[str]:
        missing = CONSTANT in self.settings(preset)["schedules"] and not self.constant(store, preset)
        return ["Not run to their end: runs without a schedule."] if missing else []

    def constant(self, store: Store, preset: Preset) -> list[Case]:
        """Return the cases without a schedule; none if some of their runs are missing."""
        wanted = self.starts(preset, CONSTANT) if CONSTANT in self.settings(preset)["schedules"] else []
        try:
            for case, method in self.pairs(preset):
                if case in wanted:
                    self.reported_runs(store, preset, case, method)
        except LookupError:
            return []
        return wanted

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
        """Draw the same from the printed start, with and without a schedule; nothing if it was not run."""
        there = [*self.starts(preset), *self.constant(store, preset)]
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
        """Return the median steps to a relative distance from the optimum, at the fastest rate; maybe infinite."""
        every, case = self.settings(preset)["record every"], case or self.cases(preset)[0]
        runs = self.reported_runs(store, preset, case, method, self.fastest(store, preset, method, case))
        return median([crossing(run.result["excess"], threshold) * every for run in runs])

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
