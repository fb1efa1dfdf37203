"""The EGOP spectrum of the digits network: how fast it decays, and what the sampling distribution changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

import egop
from egop_lab.data.digits import digits
from egop_lab.experiments.base import Alternative, Experiment, Judgement, count_decades, to_verdict
from egop_lab.models.small import cross_entropy, digits_network, xavier_
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training.context import Context
from egop_lab.training.records import Record
from egop_lab.training.spectra import decay, subsample

INITIALIZATION = "initialisation"
NORMAL = "N(0, 1²)"

# Below this share of the largest, eigenvalues are rounding of float32 gradients.
_FLOOR = 1e-12
_LEADING = 100
_MUCH = 10.0  # times less than the dimension
_STRONG = 1e-3  # of λ₁ after a quarter of the directions
_SEVERAL = 3
_FAR_ABOVE = 10  # times 1/d


class DigitsSpectrumExperiment(Experiment):
    """One EGOP matrix over all parameters, biases included, for several sampling distributions."""

    id: ClassVar[str] = "digits-spectrum"

    def configs(self) -> list[dict[str, Any]]:
        """Return the configurations: one per sampling distribution, the standard normal one first."""
        settings = self.settings
        names = [NORMAL] + [name for scale in settings["scales"] if (name := f"N(0, {scale:g}²)") != NORMAL]
        samples = settings["samples per dimension"]
        return [self.config(rho=name, samples_per_dimension=samples, seed=0) for name in [*names, INITIALIZATION]]

    def run(self, context: Context) -> None:
        self.do_missing(self.configs(), lambda config: measure(config, context.device), context.device)

    def judge(self) -> list[Judgement]:
        records = self._load_results()
        return [
            _judge_exponential(records[NORMAL]),
            _judge_decay(records),
            _judge_comparable(records),
            _judge_shelf(records),
        ]

    def pictures(self) -> list[Picture]:
        records = self._load_results()
        whole = [_series(name, record.result, record.result["index"]) for name, record in records.items()]
        leading = [_series(name, record.result, range(1, _LEADING + 1)) for name, record in records.items()]
        return [
            Picture(
                "digits-spectrum",
                "λₖ/λ₁ of the EGOP matrix over all parameters, full-batch gradients at standard normal points.",
                [
                    Panel("All eigenvalues", "k", "λₖ/λ₁", whole[:1]),
                    Panel("The leading ones", "k", "λₖ/λ₁", leading[:1], yscale="linear"),
                ],
            ),
            Picture(
                "digits-spectrum-rho",
                "The same for other sampling distributions ρ: normal ones and the network's initialization.",
                [Panel("All eigenvalues", "k", "λₖ/λ₁", whole), Panel("The leading ones", "k", "λₖ/λ₁", leading)],
            ),
        ]

    def _load_results(self) -> dict[str, Record]:
        records = [self.store.get(config) for config in self.configs()]
        return {record.config["rho"]: record for record in records if record is not None}


def measure(config: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Estimate the EGOP matrix; return the leading eigenvalues and densities, and evenly spaced ones of the rest."""
    train = tuple(tensor.to(device) for tensor in digits().train.batch)
    network = digits_network().to(device)
    name = config["rho"]
    rho = (
        egop.Initialization(init_fn=xavier_)
        if name == INITIALIZATION
        else egop.Gaussian(float(name.removeprefix("N(0, ").removesuffix("²)")))
    )
    size = sum(parameter.numel() for parameter in network.parameters())
    basis = egop.estimate(
        egop.Objective(network, cross_entropy, [train]),
        rho=rho,
        partition={"all": ["*"]},
        structure=egop.Full(),
        samples=math.ceil(config["samples_per_dimension"] * size),
        generator=torch.Generator().manual_seed(config["seed"]),
        progress=False,
    )
    spectrum = basis.spectrum["all"]
    return {
        **subsample(spectrum.eigenvalues.tolist()),
        "density": spectrum.density[:_LEADING].tolist(),
        "stable rank": spectrum.stable_rank,
        "samples": spectrum.samples,
    }


def _series(name: str, result: Mapping[str, Any], index: Sequence[int]) -> Series:
    ratios = decay(result, index)
    return Series(name, list(index)[: len(ratios)], ratios, method=name)


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the share of the variance of y that a straight line in x explains: R²."""
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def _judge_exponential(record: Record) -> Judgement:
    even = record.result["even"]
    pairs = [(k, ratio) for k, ratio in zip(even, decay(record.result, even), strict=True) if ratio > _FLOOR]
    index, ratios = zip(*pairs, strict=True)
    line = r_squared(index, np.log10(ratios).tolist())
    power = r_squared(np.log10(index).tolist(), np.log10(ratios).tolist())
    finding = (
        f"log λₖ against k: a line explains {line:.1%} of the variance; against log k, that is a "
        f"power law, {power:.1%}; {-np.log10(ratios[-1]):.1f} decades over {index[-1]} of {even[-1]} eigenvalues."
    )
    words = "The eigenvalues decay roughly exponentially."
    threshold = "90 % of the variance, and more than a power law"
    return Judgement(
        "digits-spectrum/exponential", words, to_verdict(line >= 0.9 and line > power), finding, threshold=threshold
    )


def _judge_decay(records: Mapping[str, Record]) -> Judgement:
    """Judge by the paper's own measure of decay: strong if the stable rank is much smaller than the dimension."""
    ranks, ratios = {}, {}
    for name, record in records.items():
        quarter = next(k for k in record.result["index"] if 4 * k >= record.result["dimension"])
        ranks[name], ratios[name] = record.result["stable rank"], decay(record.result, [quarter])[0]
    dimension = next(iter(records.values())).result["dimension"]
    shown = "; ".join(f"{name}: {rank:.3g}" for name, rank in ranks.items())
    holds = to_verdict(_MUCH * max(ranks.values()) <= dimension)
    ends = "; ".join(f"{name}: {ratio:.1e}" for name, ratio in ratios.items())
    strongly = Alternative(
        f"λₖ/λ₁ below {_STRONG:g} at k = d/4", to_verdict(max(ratios.values()) < _STRONG), f"{ends}."
    )
    return Judgement(
        "digits-spectrum/robust",
        "The spectrum decays under every sampling distribution.",
        holds,
        f"Stable ranks: {shown}; d = {dimension}.",
        paper="decay: sr ≪ d",
        threshold=f"≪: by {_MUCH:g} times",
        alternatives=() if strongly.verdict == holds else (strongly,),
    )


def _judge_comparable(records: Mapping[str, Record]) -> Judgement:
    normal, initial = (records[name].result for name in (NORMAL, INITIALIZATION))
    pairs = zip(decay(normal, normal["even"]), decay(initial, normal["even"]), strict=True)
    gaps = [abs(np.log10(a / b)) for a, b in pairs if min(a, b) > _FLOOR]
    gap = float(np.median(gaps))
    return Judgement(
        "digits-spectrum/initialisation",
        "The initialization has a spectrum very comparable to that of the standard normal distribution.",
        to_verdict(gap < 0.5),
        f"λₖ/λ₁ differ by a factor of {10**gap:.2g} in the median over k; "
        f"stable ranks {initial['stable rank']:.3g} and {normal['stable rank']:.3g}.",
        threshold="very comparable: within half a decade",
    )


def _judge_shelf(records: Mapping[str, Record]) -> Judgement:
    """Find where a shelf ends: the eigenvalue falls by far more than it usually does. λ₁ alone is not a shelf."""
    ends, drops, typical = {}, {}, []
    for name, record in records.items():
        ratios = decay(record.result, range(1, _LEADING + 2))
        steps = {k: ratios[k - 1] / max(ratios[k], _FLOOR) for k in range(2, _LEADING + 1)}
        ends[name] = max(steps, key=lambda k: steps[k])
        drops[name] = steps[ends[name]]
        typical.append(float(np.median(list(steps.values()))))
    same = len(set(ends.values())) == 1
    shown = "; ".join(f"{name}: after k = {ends[name]}, by a factor of {drops[name]:.2f}" for name in records)
    return Judgement(
        "digits-spectrum/shelf",
        "The leading eigenvalues form shelves, the same under every sampling distribution.",
        to_verdict(same and min(drops.values()) > 1.2),
        f"The largest drop among k = 2…{_LEADING}: {shown}; the median drop is {max(typical):.3f} at most.",
        threshold="everywhere at one k, by more than 1.2",
    )


class DigitsDensityExperiment(Experiment):
    """β_k = ‖v_k‖₁²/d of the 100 leading eigenvectors, for standard normal points."""

    id: ClassVar[str] = "digits-density"

    def run(self, context: Context) -> None:
        """Take the densities from the finished run of the spectrum, if it is in the file beside this one."""
        config, spectrum = self._config(), self.beside(DigitsSpectrumExperiment)
        if config not in self.store and (known := spectrum.store.get(spectrum.configs()[0])) is not None:
            self.store.add(replace(known, config=config, result=_keep(known.result)))
        self.do_missing([config], lambda config: _keep(measure(config, context.device)), context.device)

    def judge(self) -> list[Judgement]:
        (record,) = self.records()
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

    def pictures(self) -> list[Picture]:
        (record,) = self.records()
        densities = record.result["density"]
        series = Series("βₖ", list(range(1, len(densities) + 1)), densities, method="density")
        lines = {"1/d": 1 / record.result["dimension"], "0.5": 0.5}
        caption = (
            "βₖ = ‖vₖ‖₁²/d of the leading EGOP eigenvectors; 1/d is that of a coordinate axis, 1 the largest possible."
        )
        panel = Panel("Density", "k", "βₖ", [series], horizontal=lines)
        return [Picture("digits-density", caption, [panel])]

    def _config(self) -> dict[str, Any]:
        return self.beside(DigitsSpectrumExperiment).configs()[0] | {"experiment": self.id, "version": self.version}


def _keep(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("density", "dimension", "samples", "stable rank")}
