"""How dense the leading EGOP eigenvectors of the digits network are, from the runs of the spectrum."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from egop_lab.experiments.base import Experiment, Judgement, count_decades, to_verdict
from egop_lab.experiments.digits_spectrum import NORMAL, DigitsSpectrumExperiment, measure
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context, Preset, make_record
from egop_lab.training.records import Record, Store

_SEVERAL = 3
_FAR_ABOVE = 10  # times 1/d


class DigitsDensityExperiment(Experiment):
    """β_k = ‖v_k‖₁²/d of the 100 leading eigenvectors, for standard normal points."""

    id: ClassVar[str] = "digits-density"
    title: ClassVar[str] = "The density of the leading EGOP eigenvectors"
    figures: ClassVar[str] = "Supplementary: density of the 100 leading eigenvectors"
    labels: ClassVar[tuple[str, ...]] = ("fig:MNIST-global-eigvec-density",)
    paper: ClassVar[Mapping[str, str]] = {"samples per dimension": "10", "eigenvectors": "100"}

    def settings(self, preset: Preset) -> dict[str, Any]:
        settings = DigitsSpectrumExperiment().settings(preset)
        return {key: value for key, value in settings.items() if key != "scales"} | {"rho": NORMAL, "eigenvectors": 100}

    def run(self, store: Store, context: Context) -> None:
        if self._config(context.preset) in store:
            return
        known = _find_record(store, context.preset)
        if known is None:
            began = time.perf_counter()
            result = measure(self._config(context.preset), context.device)
            known = make_record(self._config(context.preset), result, time.perf_counter() - began, context.device)
        result = {key: known.result[key] for key in ("density", "dimension", "samples", "stable rank")}
        store.add(Record(self._config(context.preset), result, known.seconds, known.device, known.versions))

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        (record,) = self.records(store, preset)
        densities, size = record.result["density"], record.result["dimension"]
        dense = sum(density > 0.3 for density in densities)
        lowest = min(densities)
        count = len(densities)
        return [
            Judgement(
                "digits-density/first",
                "The leading eigenvector is dense: β₁ > 0.5.",
                to_verdict(densities[0] > 0.5),
                f"β₁ = {densities[0]:.3f}.",
                paper="β₁ > 0.5",
            ),
            Judgement(
                "digits-density/several",
                "Several eigenvectors have β > 0.3.",
                to_verdict(dense >= _SEVERAL),
                f"{dense} of the {count} leading ones.",
                paper="several > 0.3",
                threshold=f"several: from {_SEVERAL}",
            ),
            Judgement(
                "digits-density/all",
                f"All {count} leading eigenvectors have β ≫ 1/d.",
                to_verdict(lowest * size > _FAR_ABOVE),
                f"The smallest is {lowest:.3f}, {lowest * size:.3g} times 1/d.",
                paper=f"1/d < 5e-4, here {1 / size:.2g}",
                threshold=f"≫: above {_FAR_ABOVE} times",
                margin=count_decades(1 / size, lowest),
            ),
        ]

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        (record,) = self.records(store, preset)
        densities = record.result["density"]
        series = Series("βₖ", list(range(1, len(densities) + 1)), densities, method="density")
        lines = {"1/d": 1 / record.result["dimension"], "0.5": 0.5}
        caption = (
            "βₖ = ‖vₖ‖₁²/d of the leading EGOP eigenvectors; 1/d is that of a coordinate axis, 1 the largest possible."
        )
        panel = Panel("Density", "k", "βₖ", [series], horizontal=lines)
        return [Picture("digits-density", caption, [panel])]

    def _config(self, preset: Preset) -> dict[str, Any]:
        return DigitsSpectrumExperiment().configs(preset)[0] | {"experiment": self.id, "version": self.version}


def _find_record(store: Store, preset: Preset) -> Record | None:
    """Return the run of the spectrum experiment if it is finished: from this store, or from its own file."""
    spectrum = DigitsSpectrumExperiment()
    wanted = spectrum.configs(preset)[0]
    beside = store.path.with_name(f"{spectrum.id}{store.path.suffix}")
    return store.get(wanted) or (Store(beside).get(wanted) if beside.exists() else None)
