"""How many gradients a basis needs: the digits network with bases from d/16 to 4 d gradients, and random ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

import egop
from egop_lab.experiments.base import Experiment, Judgement, Table, to_verdict
from egop_lab.experiments.controls import draw_rotation, sweep_digits
from egop_lab.experiments.curves import median
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.training import batched
from egop_lab.training.batched import ORIGINAL, RANDOM
from egop_lab.training.context import Context, make_record
from egop_lab.training.digits import DigitsProblem, estimate, network
from egop_lab.training.tuning import TUNING

_BLOCK = "0.weight"  # the first layer, whose leading directions are compared
_MOST, _ALIGNED, _HALF = 0.9, 0.9, 0.5


class SampleSizeExperiment(Experiment):
    """Adam and Adagrad at the rates that the paper's rule chooses in ``digits``.

    Original coordinates are those of the runs there.
    """

    id: ClassVar[str] = "sample-size"

    def run(self, context: Context) -> None:
        settings = self.settings
        reference: torch.Tensor | None = None
        for kind, share in {**_shares(settings), RANDOM: 0.0}.items():
            bases = functools.partial(_find_bases, share, settings["trials"])
            sweep_digits(
                self,
                context,
                {name: [rate] for name, rate in settings["rates"].items()},
                range(settings["trials"]),
                settings["epochs"],
                kind,
                functools.partial(_stack, bases),
            )
            if left := self.store.missing(self._alignment_configs(kind)):
                if reference is None:
                    reference = _leading(estimate(TUNING, settings["reference"]), settings["directions"])
                for config in left:
                    own = _leading(bases()[config["seed"]], settings["directions"])
                    overlap = float((reference.mT @ own).square().sum() / settings["directions"])
                    self.store.add(make_record(config, {"alignment": overlap}, 0.0))

    def _alignment_configs(self, kind: str) -> list[dict[str, Any]]:
        settings = self.settings
        entries = {"kind": "alignment", "coordinates": kind, "directions": settings["directions"]}
        return [self.config(**entries, reference=settings["reference"], seed=s) for s in range(settings["trials"])]

    def _finals(self, optimizer: str) -> dict[str, float]:
        """Return the median final loss by kind of coordinates, original ones included."""
        settings = self.settings
        runs = self.beside(DigitsExperiment).fresh_runs(optimizer, ORIGINAL)
        rate, seeds = settings["rates"][optimizer], range(settings["trials"])
        finals = {
            ORIGINAL: median(
                [r.result["loss"][-1] for r in runs if r.config["lr"] == rate and r.config["seed"] in seeds]
            )
        }
        for kind in (*_shares(settings), RANDOM):
            own = self.records(optimizer=optimizer, coordinates=kind)
            if len(own) < settings["trials"]:
                raise LookupError(f"{kind} has runs left")
            finals[kind] = median([run.result["final"] for run in own])
        return finals

    def _gains(self) -> dict[str, dict[str, float]]:
        """Return for each optimizer the decades below original coordinates."""
        gains = {}
        for optimizer in self.settings["rates"]:
            finals = self._finals(optimizer)
            gains[optimizer] = {kind: math.log10(finals[ORIGINAL] / end) for kind, end in finals.items()}
        return gains

    def _alignments(self) -> dict[str, float]:
        kinds = (*_shares(self.settings), RANDOM)
        found = {kind: self.records(kind="alignment", coordinates=kind) for kind in kinds}
        return {kind: median([run.result["alignment"] for run in runs]) for kind, runs in found.items()}

    def judge(self) -> list[Judgement]:
        shares = _shares(self.settings)
        (at,) = (kind for kind, share in shares.items() if share == 1)
        *_, last = shares
        judged = []
        for optimizer, gains in self._gains().items():
            enough = next(kind for kind in shares if gains[kind] >= _MOST * gains[last])
            judged.append(
                Judgement(
                    f"sample-size/{optimizer}-suffices",
                    f"M ≈ d gradients suffice for EGOP {optimizer}.",
                    to_verdict(gains[last] > 0 and gains[at] >= _MOST * gains[last]),
                    f"Decades below original coordinates: {at}: {gains[at]:.2f}; {last}: {gains[last]:.2f}. The first "
                    f"with {_MOST:.0%} of the latter: {enough}.",
                    threshold=f"{_MOST:.0%} of the gain of {last}",
                )
            )
            judged.append(
                Judgement(
                    f"sample-size/{optimizer}-random",
                    f"Control: a random rotation gives {optimizer} less than half of EGOP's gain.",
                    to_verdict(gains[at] > 0 and gains[RANDOM] < _HALF * gains[at]),
                    f"Decades below original coordinates: random rotation {gains[RANDOM]:.2f}; {at}: {gains[at]:.2f}.",
                    "control",
                )
            )
        aligned = self._alignments()
        words = "Control: the leading directions of d gradients are those of many more."
        finding = f"Alignment: {at}: {aligned[at]:.3f}; random: {aligned[RANDOM]:.3f}."
        rule = f"an alignment of {_ALIGNED:g}"
        verdict = to_verdict(aligned[at] >= _ALIGNED)
        return [*judged, Judgement("sample-size/aligned", words, verdict, finding, "control", threshold=rule)]

    def tables(self) -> list[Table]:
        finals = {name: self._finals(name) for name in self.settings["rates"]}
        gains, aligned = self._gains(), self._alignments()
        rows = [
            (kind, f"{aligned[kind]:.3f}" if kind in aligned else "",
             *(cell for name in finals for cell in (f"{finals[name][kind]:.3g}", f"{gains[name][kind]:.2f}")))
            for kind in next(iter(finals.values()))
        ]  # fmt: skip
        header = ("basis", "alignment", *(f"{name}: {what}" for name in finals for what in ("final loss", "gain")))
        return [Table("Medians over trials; gains in decades below original coordinates", header, tuple(rows))]

    def pictures(self) -> list[Picture]:
        shares, aligned = _shares(self.settings), self._alignments()
        places = list(shares.values())
        lines = [
            Series(name, places, [gains[kind] for kind in shares], method=name, egop=True)
            for name, gains in self._gains().items()
        ]
        ends = {f"random, {name}": gains[RANDOM] for name, gains in self._gains().items()}
        leading = Series("leading directions", places, [aligned[kind] for kind in shares], method="EGOP", egop=True)
        panels = [
            Panel("Gain", "M/d", "decades below original", lines, "log", "linear", horizontal=ends),
            Panel("Alignment", "M/d", "‖UᵀV‖²/k", [leading], "log", "linear", horizontal={"random": aligned[RANDOM]}),
        ]
        caption = "Gain over original coordinates, and alignment of the leading directions, by the number of gradients."
        return [Picture(self.id, caption, panels)]


def _shares(settings: Mapping[str, Any]) -> dict[str, float]:
    return {f"M = {share:g} d": share for share in settings["gradients per dimension"]}


@functools.lru_cache(maxsize=1)
def _find_bases(share: float, trials: int) -> list[egop.Basis]:
    """Estimate a basis for each trial from a share of d gradients; draw random ones if it is 0."""
    if share:
        return [estimate(seed, share) for seed in range(trials)]
    starts = [dict(network(seed).named_parameters()) for seed in range(trials)]
    weights = [{name: value.detach() for name, value in own.items() if value.dim() > 1} for own in starts]
    return [draw_rotation(own, seed) for seed, own in enumerate(weights)]


def _stack(bases: Callable[[], list[egop.Basis]], problem: DigitsProblem) -> batched.Basis:
    return batched.Basis.stack([basis.to(problem.device) for basis in bases()])


def _leading(basis: egop.Basis, count: int) -> torch.Tensor:
    return basis[_BLOCK].tensors["basis"][:, :count]
