"""Trajectories: the paper's opening picture, Adagrad in the plane in both coordinate systems."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from egop_lab.experiments.base import Experiment, Judgement, count_decades, to_verdict
from egop_lab.experiments.convex import LOG_SUM_EXP, ConvexTrials
from egop_lab.experiments.curves import check_same_in_both, curve_series, median, quartiles_by_rate, rate_series
from egop_lab.experiments.tuned_experiment import single_threaded
from egop_lab.plots.picture import Mark, Panel, Picture, Series
from egop_lab.training import batched
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.records import Record

_PARTS = ("first", "second")
_ALIGNED = 10.0  # degrees
_APART = 0.1  # of the distance from the start to the minimum


class Plane(ConvexTrials):
    """Log-sum-exp in two dimensions; the paper starts far out, here the starts are on a circle."""

    def __init__(self, seeds: Sequence[int], *, n: int, decay: float, samples: int, radius: float) -> None:
        super().__init__(seeds, objective=LOG_SUM_EXP, n=n, d=2, decay=decay, samples=samples)
        self.sizes = {"n": n, "decay": decay, "samples": samples, "radius": radius}
        self.minimum = torch.linalg.lstsq(self.data, self.targets[..., None]).solution[..., 0]
        self.first = radius * self.first / self.first.norm(dim=-1, keepdim=True)

    def evaluate(self, point: batched.Point) -> dict[str, Tensor]:
        places = {f"{name} coordinate": point["theta"][..., index] for index, name in enumerate(_PARTS)}
        return {"loss": super().evaluate(point)["loss"], **places}

    def hessian(self, trial: int) -> Tensor:
        """Return the Hessian at the minimum, where all residuals are zero."""
        return 2 / len(self.targets[trial]) * self.data[trial].mT @ self.data[trial]

    def level_set(self, trial: int, height: float, points: int) -> Tensor:
        """Find the points at a given loss above the minimum, (points, 2), by bisection along rays."""
        angles = torch.linspace(0, 2 * math.pi, points, dtype=torch.float64)
        rays = torch.stack([angles.cos(), angles.sin()], dim=-1)
        low, high = torch.zeros_like(angles), torch.full_like(angles, 1e4)
        plane = self.single_trial(self.seeds[trial])
        for _ in range(80):
            middle = (low + high) / 2
            inside = super(Plane, plane).evaluate({"theta": (self.minimum[trial] + middle[:, None] * rays)[None]})
            below = inside["loss"][0] < height
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return self.minimum[trial] + low[:, None] * rays


def tilt(hessian: Tensor, basis: Tensor) -> float:
    """Return the angle in degrees between the direction of largest curvature and the nearest axis, 0 to 45."""
    leading = torch.linalg.eigh(hessian).eigenvectors[:, -1]
    return math.degrees(math.acos(min(1.0, float((basis.mT @ leading).abs().max()))))


class TrajectoriesExperiment(Experiment):
    """Adagrad from equivalent starts; SGD as a control, whose path must be the same in both."""

    id: ClassVar[str] = "trajectories"

    def run(self, context: Context) -> None:
        with single_threaded(context) as context:
            settings = self.settings
            sizes = settings["problem"]
            for optimizer, rates, every in (  # at each step if the path is drawn
                ("Adagrad", [settings["learning rate"]], 1),
                ("SGD", [settings["SGD rate"]], 10),
                ("Adagrad", settings["rates"], settings["steps"]),
            ):
                self.sweep(
                    context,
                    lambda seeds: Plane(seeds, **sizes),
                    lambda problem, kind: problem.basis(kind),
                    rates={optimizer: rates},
                    seeds=self._seeds(),
                    coordinates=[ORIGINAL, EGOP],
                    steps=settings["steps"],
                    record_every=every,
                    extra={**sizes, "record every": every},
                )
            self.do_missing(
                self._geometry_configs(), lambda config: _measure_geometry(Plane([config["seed"]], **sizes))
            )

    def judge(self) -> list[Judgement]:
        seeds, rate = self._seeds(), self.settings["SGD rate"]
        apart = [self._path_distance(seed) for seed in seeds]
        tilts = [self._geometry(seed).result["tilt"] for seed in seeds]
        original, turned = (median([pair[kind] for pair in tilts]) for kind in (ORIGINAL, EGOP))
        one, other = (self._runs("SGD", kind, rate) for kind in (ORIGINAL, EGOP))
        return [
            Judgement(
                f"{self.id}/differ",
                "From equivalent starts Adagrad takes different ways in the two coordinates.",
                to_verdict(median(apart) > _APART),
                f"Largest distance of the two ways, relative to the distance from start to minimum: median "
                f"{median(apart):.2g}, smallest {min(apart):.2g} of {len(apart)} instances.",
                threshold=f"differ: by {_APART:g} of that distance",
            ),
            Judgement(
                f"{self.id}/aligned",
                "In EGOP coordinates the main directions lie along the axes.",
                to_verdict(turned < min(original, _ALIGNED)),
                f"Median angle of the steepest direction to the nearest axis: EGOP {turned:.2g}°, original "
                f"{original:.2g}°.",
                threshold=f"within {_ALIGNED:g}°",
                margin=count_decades(turned, original),
            ),
            self._judge_solved(),
            check_same_in_both(f"{self.id}/SGD-same", "SGD", one, other, "loss", 1e-6),
        ]

    def pictures(self) -> list[Picture]:
        settings = self.settings
        seed, rate = settings["shown seed"], settings["learning rate"]
        planes = [
            self._draw_plane(seed, ORIGINAL, "The loss in original coordinates", "coordinate"),
            self._draw_plane(seed, EGOP, "The same loss in EGOP coordinates", "eigenvector"),
        ]
        losses, sweeps = [], []
        for kind in (ORIGINAL, EGOP):
            losses.append(curve_series(self._runs("Adagrad", kind, rate), "loss", "Adagrad", kind))
            tried = [run for each in settings["rates"] for run in self._runs("Adagrad", kind, each, True)]
            sweeps.append(rate_series(tried, _final, "Adagrad", kind, rate))
        return [
            Picture(
                self.id,
                f"Adagrad with learning rate {rate:g} on a log-sum-exp objective in the plane: one instance in two "
                "coordinate systems, with level sets and the way taken in each; the loss above its minimum by step, "
                "and after the last step by learning rate, medians and quartiles over "
                f"{len(self._seeds())} instances.",
                [
                    *planes,
                    Panel("Loss", "step", "loss above minimum", losses),
                    Panel("Final loss", "learning rate", "loss above minimum", sweeps, xscale="log"),
                ],
            )
        ]

    def _judge_solved(self) -> Judgement:
        rates = [rate for rate in self.settings["rates"] if 30 <= rate <= 90]
        runs = [run for rate in rates for run in self._runs("Adagrad", ORIGINAL, rate, True)]
        medians = {rate: middle for rate, (_, middle, _) in quartiles_by_rate(runs, _final).items()}
        words = (
            "With learning rates from 30 to 90 Adagrad ends less than 1e-10 above the minimum in original coordinates."
        )
        finding = f"Median final loss above the minimum: {min(medians.values()):.2g} to {max(medians.values()):.2g}."
        holds = to_verdict(max(medians.values()) < 1e-10)
        return Judgement(f"{self.id}/solved", words, holds, finding, paper="< 1e-10")

    def _seeds(self) -> list[int]:
        settings = self.settings
        return [*range(settings["trials"]), settings["shown seed"]]

    def _runs(self, optimizer: str, kind: str, rate: float, is_sweep: bool = False) -> list[Record]:
        settings = self.settings
        every = settings["steps"] if is_sweep else 10 if optimizer == "SGD" else 1
        wanted = {"optimizer": optimizer, "coordinates": kind, "lr": rate, "steps": settings["steps"]}
        return self.records(**wanted, **settings["problem"], **{"record every": every})

    def _geometry_configs(self) -> list[dict[str, Any]]:
        sizes = self.settings["problem"]
        return [self.config(part="geometry", **sizes, seed=seed) for seed in self._seeds()]

    def _geometry(self, seed: int) -> Record:
        record = self.store.get(self._geometry_configs()[self._seeds().index(seed)])
        if record is None:
            raise LookupError(f"{self.id}: seed {seed} is missing")
        return record

    def _path(self, seed: int, kind: str) -> Tensor:
        """Return the path taken in some coordinates, in original coordinates, (steps + 1, 2)."""
        runs = self._runs("Adagrad", kind, self.settings["learning rate"])
        run = next(run for run in runs if run.config["seed"] == seed)
        return torch.tensor([run.result[f"{name} coordinate"] for name in _PARTS], dtype=torch.float64).mT

    def _path_distance(self, seed: int) -> float:
        original, turned = (self._path(seed, kind) for kind in (ORIGINAL, EGOP))
        least = torch.tensor(self._geometry(seed).result["minimum"], dtype=torch.float64)
        return float((original - turned).norm(dim=-1).max() / (original[0] - least).norm())

    def _draw_plane(self, seed: int, kind: str, title: str, axis: str) -> Panel:
        """Draw the level sets as one line with gaps, and the path that Adagrad takes in these coordinates."""
        geometry = self._geometry(seed).result
        basis = geometry["basis"] if kind == EGOP else [[1, 0], [0, 1]]
        turn, least = (torch.tensor(value, dtype=torch.float64) for value in (basis, geometry["minimum"]))
        gap = torch.full((1, 2), math.nan, dtype=torch.float64)
        sets = [smooth(torch.tensor(ring, dtype=torch.float64), least) for ring in geometry["level sets"]]
        rings = torch.cat([part for ring in sets for part in (ring, gap)]) @ turn
        path = self._path(seed, kind) @ turn
        start = self._path(seed, ORIGINAL)[0] @ turn
        label = "Adagrad" if kind == ORIGINAL else "Adagrad, EGOP"
        lines = [
            Series("level sets", rings[:, 0].tolist(), rings[:, 1].tolist(), faint=True),
            Series(label, path[:, 0].tolist(), path[:, 1].tolist(), method="Adagrad", egop=kind == EGOP),
        ]
        marks = [Mark(name, *point.tolist()) for name, point in (("start", start), ("minimum", least @ turn))]
        across, up = (f"{part} {axis}" for part in _PARTS)
        return Panel(title, across, up, lines, yscale="linear", aspect="equal", marks=marks)


def _measure_geometry(plane: Plane) -> dict[str, Any]:
    bases = plane.basis(EGOP)
    assert bases is not None
    basis, hessian = bases.blocks[0][1][0], plane.hessian(0)
    first = plane.evaluate({"theta": plane.start()["theta"][:1, None]})["loss"].item()
    return {
        "basis": basis.tolist(),
        "minimum": plane.minimum[0].tolist(),
        "tilt": {ORIGINAL: tilt(hessian, torch.eye(2, dtype=torch.float64)), EGOP: tilt(hessian, basis)},
        "level sets": [plane.level_set(0, first * 4.0**-power, 73).tolist() for power in range(6)],
    }


def smooth(ring: Tensor, center: Tensor, times: int = 10) -> Tensor:
    """Interpolate a closed line, given by points at even angles around a center, with more points.

    One over the squared radius of an ellipse has two frequencies only, so that is what is interpolated.
    """
    offsets = ring[:-1] - center  # the last point is the first
    waves = torch.fft.rfft(offsets.square().sum(-1).reciprocal())
    count = times * len(offsets)
    radii = (torch.fft.irfft(waves, n=count) * times).clamp_min(1e-12).rsqrt()
    angles = torch.atan2(offsets[0, 1], offsets[0, 0]) + torch.arange(count + 1, dtype=torch.float64) * (
        2 * math.pi / count
    )
    rays = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return center + torch.cat([radii, radii[:1]])[:, None] * rays


def _final(result: Any) -> float:
    return max(float(result["loss"][-1]), 1e-32)
